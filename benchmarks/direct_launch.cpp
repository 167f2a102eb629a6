// The cost of a two-phase call without ONNX Runtime: what the provider's claimed nodes are compared with.
//
// Usage: direct_launch EMULATOR LAUNCHES REPEATS; prints the microseconds of one launch, the best of the repeats.
#include "cann/objects.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

using Dims = std::vector<std::int64_t>;

struct Operand {
    cann::DeviceMemory memory = cann::allocate_device(4096);
    Dims dims;

    cann::TensorHandle tensor() const {
        return cann::TensorHandle(
            cann::functions().aclCreateTensor(
                dims.data(), dims.size(), ACL_FLOAT, nullptr, 0, ACL_FORMAT_ND, dims.data(), dims.size(), memory.get()
            )
        );
    }
};

void launch(const std::array<Operand, 9>& operands, aclrtStream stream) {
    std::array<cann::TensorHandle, 9> t;
    for (std::size_t i = 0; i < operands.size(); ++i) {
        t[i] = operands[i].tensor();
    }
    char layout[] = "SBH";
    char none[] = "";
    std::uint64_t workspace = 0;
    aclOpExecutor* executor = nullptr;
    cann::check(
        cann::functions().aclnnRingAttentionUpdateV2GetWorkspaceSize(
            t[0].get(), t[1].get(), t[2].get(), t[3].get(), t[4].get(), t[5].get(), nullptr, layout, none, t[6].get(),
            t[7].get(), t[8].get(), &workspace, &executor
        ),
        "aclnnRingAttentionUpdateV2GetWorkspaceSize"
    );
    static const cann::DeviceMemory memory = cann::allocate_device(workspace); // the same at every launch
    cann::check(
        cann::functions().aclnnRingAttentionUpdateV2(memory.get(), workspace, executor, stream),
        "aclnnRingAttentionUpdateV2"
    );
}

} // namespace

int main(int count, char** arguments) {
    if (count != 4 || !cann::load(arguments[1]).usable) {
        std::fprintf(stderr, "usage: direct_launch EMULATOR LAUNCHES REPEATS\n");
        return 2;
    }
    const int launches = std::atoi(arguments[2]);
    cann::check(cann::functions().aclrtSetDevice(0), "aclrtSetDevice");
    const cann::StreamHandle stream = cann::create_stream();
    std::array<Operand, 9> operands;
    for (std::size_t i = 0; i < operands.size(); ++i) {
        operands[i].dims = i % 3 == 0 ? Dims{2, 1, 64} : Dims{1, 1, 2, 8};
    }
    double best = 1e30;
    for (int repeat = 0; repeat < std::atoi(arguments[3]); ++repeat) {
        const auto started = std::chrono::steady_clock::now();
        for (int i = 0; i < launches; ++i) {
            launch(operands, stream.get());
        }
        cann::check(cann::functions().aclrtSynchronizeStream(stream.get()), "aclrtSynchronizeStream");
        const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - started;
        best = std::min(best, took.count() / launches);
    }
    std::printf("%.3f\n", best);
    return 0;
}
