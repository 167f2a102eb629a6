// Streams, events, memory and executors, from several threads at once.
#include "device.h"

#include <thread>
#include <vector>

using namespace ascend_emulator::tests;

namespace {

void check_copies_keep_their_order() {
    const Stream stream;
    constexpr std::size_t size = 1 << 16;
    const Memory first(size);
    const Memory second(size);
    std::vector<std::uint8_t> source(size, 3);
    std::vector<std::uint8_t> target(size, 0);
    void* const from = first.address();
    void* const to = second.address();
    CHECK(aclrtMemcpyAsync(from, size, source.data(), size, ACL_MEMCPY_HOST_TO_DEVICE, stream.handle()) == ACL_SUCCESS);
    CHECK(aclrtMemcpyAsync(to, size, from, size, ACL_MEMCPY_DEVICE_TO_DEVICE, stream.handle()) == ACL_SUCCESS);
    CHECK(aclrtMemsetAsync(to, size, 9, size / 2, stream.handle()) == ACL_SUCCESS);
    CHECK(aclrtMemcpyAsync(target.data(), size, to, size, ACL_MEMCPY_DEVICE_TO_HOST, stream.handle()) == ACL_SUCCESS);
    stream.synchronise();
    CHECK(target.front() == 9 && target[size / 2] == 3 && target.back() == 3);
}

void check_events_order_streams() {
    const Stream first;
    const Stream second;
    aclrtEvent event = nullptr;
    CHECK(aclrtCreateEvent(&event) == ACL_SUCCESS);
    const Memory memory(1 << 20);
    std::vector<std::uint8_t> target(1 << 20, 0);
    for (int round = 1; round < 20; ++round) {
        CHECK(aclrtMemsetAsync(memory.address(), 1 << 20, round, 1 << 20, first.handle()) == ACL_SUCCESS);
        CHECK(aclrtRecordEvent(event, first.handle()) == ACL_SUCCESS);
        CHECK(aclrtStreamWaitEvent(second.handle(), event) == ACL_SUCCESS);
        CHECK(
            aclrtMemcpyAsync(
                target.data(), target.size(), memory.address(), target.size(), ACL_MEMCPY_DEVICE_TO_HOST,
                second.handle()
            )
            == ACL_SUCCESS
        );
        second.synchronise();
        CHECK(target.front() == round && target.back() == round);
    }
    CHECK(aclrtSynchronizeEvent(event) == ACL_SUCCESS);
    CHECK(aclrtDestroyEvent(event) == ACL_SUCCESS);
}

// Two attentions of one token and one head, (1, 1, 64).
struct Merge {
    Merge() {
        for (const Tensor* attention : {&prev, &cur}) {
            attention->fill(std::vector<float>(64, attention == &prev ? 1.0f : 3.0f));
        }
        for (const Tensor* statistic : {&prev_max, &prev_sum, &cur_max, &cur_sum}) {
            statistic->fill(std::vector<float>(8, 1.0f));
        }
    }

    aclnnStatus first_phase(std::uint64_t* size, aclOpExecutor** executor) const {
        char layout[] = "SBH";
        return aclnnRingAttentionUpdateV2GetWorkspaceSize(
            prev.handle(), prev_max.handle(), prev_sum.handle(), cur.handle(), cur_max.handle(), cur_sum.handle(),
            nullptr, layout, nullptr, out.handle(), out_max.handle(), out_sum.handle(), size, executor
        );
    }

    Tensor prev{{1, 1, 64}, ACL_FLOAT};
    Tensor prev_max{{1, 1, 1, 8}, ACL_FLOAT};
    Tensor prev_sum{{1, 1, 1, 8}, ACL_FLOAT};
    Tensor cur{{1, 1, 64}, ACL_FLOAT};
    Tensor cur_max{{1, 1, 1, 8}, ACL_FLOAT};
    Tensor cur_sum{{1, 1, 1, 8}, ACL_FLOAT};
    Tensor out{{1, 1, 64}, ACL_FLOAT};
    Tensor out_max{{1, 1, 1, 8}, ACL_FLOAT};
    Tensor out_sum{{1, 1, 1, 8}, ACL_FLOAT};
};

void check_repeatable_executor() {
    const Stream stream;
    const Merge merge;
    const Tensor other({1, 1, 64}, ACL_FLOAT);
    std::uint64_t size = 0;
    aclOpExecutor* executor = nullptr;
    CHECK(merge.first_phase(&size, &executor) == ACL_SUCCESS);
    CHECK(aclSetAclOpExecutorRepeatable(executor) == ACL_SUCCESS);
    const Memory workspace(size);
    for (const Tensor* target : {&merge.out, &other}) {
        CHECK(aclSetOutputTensorAddr(executor, 0, merge.out.handle(), target->memory().address()) == ACL_SUCCESS);
        CHECK(aclnnRingAttentionUpdateV2(workspace.address(), size, executor, stream.handle()) == ACL_SUCCESS);
        stream.synchronise();
        CHECK(target->read<float>() == std::vector<float>(64, 2.0f));
    }
    CHECK(aclDestroyAclOpExecutor(executor) == ACL_SUCCESS);
}

void check_injected_faults() {
    const Stream stream;
    const Merge merge;
    std::uint64_t size = 0;
    aclOpExecutor* executor = nullptr;
    ascend_emulator_fail("aclnnRingAttentionUpdateV2GetWorkspaceSize", 1, 561002);
    CHECK(merge.first_phase(&size, &executor) == 561002);
    CHECK(std::string(aclGetRecentErrMsg()).find("injected") != std::string::npos);
    CHECK(aclGetRecentErrMsg() == nullptr);

    ascend_emulator_fail("aclnnRingAttentionUpdateV2", 1, 361001);
    CHECK(merge.first_phase(&size, &executor) == ACL_SUCCESS);
    const Memory workspace(size);
    CHECK(aclnnRingAttentionUpdateV2(workspace.address(), size, executor, stream.handle()) == 361001);
    CHECK(ascend_emulator_live("executors") == 0);

    ascend_emulator_fail("kernel", 1, ACL_ERROR_RT_AICORE_EXCEPTION);
    CHECK(merge.first_phase(&size, &executor) == ACL_SUCCESS);
    CHECK(aclnnRingAttentionUpdateV2(workspace.address(), size, executor, stream.handle()) == ACL_SUCCESS);
    CHECK(aclrtSynchronizeStream(stream.handle()) == ACL_ERROR_RT_AICORE_EXCEPTION);
    CHECK(aclrtSynchronizeStream(stream.handle()) == ACL_SUCCESS);
    ascend_emulator_reset_faults();
}

void check_threads() {
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 4; ++thread) {
        threads.emplace_back([] {
            void* memory = nullptr;
            CHECK(aclrtMalloc(&memory, 16, ACL_MEM_MALLOC_HUGE_FIRST) == ACL_ERROR_RT_CONTEXT_NULL);
            CHECK(aclrtSetDevice(0) == ACL_SUCCESS);
            for (int round = 0; round < 10; ++round) {
                const Stream stream;
                const Merge merge;
                run(stream, aclnnRingAttentionUpdateV2,
                    [&](std::uint64_t* size, aclOpExecutor** executor) { return merge.first_phase(size, executor); });
                CHECK(merge.out.read<float>() == std::vector<float>(64, 2.0f));
                CHECK(merge.out_sum.read<float>() == std::vector<float>(8, 2.0f));
            }
            CHECK(aclrtResetDevice(0) == ACL_SUCCESS);
        });
    }
    for (auto& thread : threads) {
        thread.join();
    }
}

} // namespace

int main() {
    const Process process;
    CHECK(aclrtSetDevice(0) == ACL_SUCCESS);
    check_copies_keep_their_order();
    check_events_order_streams();
    check_repeatable_executor();
    check_injected_faults();
    check_threads();
}
