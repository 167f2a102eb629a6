// Every kernel once on random numbers, on several streams at once: for the sanitizers. Results are compared with those
// of another stream only; whether they are right is a question for the vectors.
#include "device.h"

#include <limits>
#include <thread>
#include <vector>

using namespace ascend_emulator::tests;

namespace {

constexpr std::int64_t unlimited = std::numeric_limits<std::int64_t>::max();

// What a call leaves in its outputs.
using Results = std::vector<std::vector<std::uint8_t>>;

template<typename... Outputs>
Results results(const Outputs&... outputs) {
    return {outputs.template read<std::uint8_t>()...};
}

Results moe_init_routing(const Stream& stream, std::mt19937& random) {
    const Tensor x({9, 100}, ACL_BF16);
    const Tensor experts({9, 3}, ACL_INT32);
    const Tensor smooth({6, 100}, ACL_FLOAT);
    const Tensor expanded({27, 100}, ACL_INT8);
    const Tensor row_idx({27}, ACL_INT32);
    const Tensor counts({6}, ACL_INT64);
    const Tensor scales({27}, ACL_FLOAT);
    x.fill_randomly(random);
    smooth.fill_randomly(random);
    std::vector<std::int32_t> ids(27);
    for (auto& id : ids) {
        id = std::int32_t(random() % 8);
    }
    experts.fill(ids);
    const std::int64_t range[] = {1, 7};
    aclIntArray* active = aclCreateIntArray(range, 2);
    run(stream, aclnnMoeInitRoutingV3, [&](std::uint64_t* size, aclOpExecutor** executor) {
        return aclnnMoeInitRoutingV3GetWorkspaceSize(
            x.handle(), experts.handle(), smooth.handle(), nullptr, -1, -1, 8, 0, 1, true, 1, active, 0,
            expanded.handle(), row_idx.handle(), counts.handle(), scales.handle(), size, executor
        );
    });
    CHECK(aclDestroyIntArray(active) == ACL_SUCCESS);
    return {expanded.read<std::uint8_t>()};
}

// Of tokens without width only the routing is left; their tensors have no memory.
Results moe_init_routing_of_no_width(const Stream& stream, std::mt19937&) {
    const auto without_memory = [](std::int64_t rows) {
        const std::int64_t dims[] = {rows, 0};
        return aclCreateTensor(dims, 2, ACL_BF16, nullptr, 0, ACL_FORMAT_ND, dims, 2, nullptr);
    };
    aclTensor* x = without_memory(3);
    aclTensor* expanded = without_memory(6);
    const Tensor experts({3, 2}, ACL_INT32);
    const Tensor row_idx({6}, ACL_INT32);
    const Tensor counts({4}, ACL_INT64);
    const Tensor scales({6}, ACL_FLOAT);
    experts.fill<std::int32_t>({3, 0, 2, 1, 0, 3});
    const std::int64_t range[] = {0, 4};
    aclIntArray* active = aclCreateIntArray(range, 2);
    run(stream, aclnnMoeInitRoutingV3, [&](std::uint64_t* size, aclOpExecutor** executor) {
        return aclnnMoeInitRoutingV3GetWorkspaceSize(
            x, experts.handle(), nullptr, nullptr, -1, -1, 4, 0, 1, true, -1, active, 0, expanded, row_idx.handle(),
            counts.handle(), scales.handle(), size, executor
        );
    });
    CHECK(aclDestroyIntArray(active) == ACL_SUCCESS);
    CHECK(aclDestroyTensor(x) == ACL_SUCCESS && aclDestroyTensor(expanded) == ACL_SUCCESS);
    CHECK((counts.read<std::int64_t>() == std::vector<std::int64_t>{2, 1, 1, 2}));
    const auto rows = row_idx.read<std::int32_t>();
    return {{rows.begin(), rows.end()}};
}

Results sparse_flash_attention(const Stream& stream, std::mt19937& random) {
    const Tensor query({3, 4, 512}, ACL_FLOAT16);
    const Tensor query_rope({3, 4, 64}, ACL_FLOAT16);
    const Tensor key({5, 16, 1, 512}, ACL_FLOAT16);
    const Tensor key_rope({5, 16, 1, 64}, ACL_FLOAT16);
    const Tensor indices({3, 1, 8}, ACL_INT32);
    const Tensor table({2, 2}, ACL_INT32);
    const Tensor query_lengths({2}, ACL_INT32);
    const Tensor kv_lengths({2}, ACL_INT32);
    const Tensor out({3, 4, 512}, ACL_FLOAT16);
    const Tensor holder({0}, ACL_FLOAT);
    for (const Tensor* tensor : {&query, &query_rope, &key, &key_rope}) {
        tensor->fill_randomly(random);
    }
    indices.fill<std::int32_t>({0, 3, 1, -1, 9, 9, 9, 9, 9, 0, 2, 4, 5, 6, 7, 8, 0, 1, 2, 3, 4, 5, 6, -1});
    table.fill<std::int32_t>({4, 0, 2, 1});
    query_lengths.fill<std::int32_t>({1, 3});
    kv_lengths.fill<std::int32_t>({19, 31});
    char query_layout[] = "TND";
    char kv_layout[] = "PA_BSND";
    run(stream, aclnnSparseFlashAttention, [&](std::uint64_t* size, aclOpExecutor** executor) {
        return aclnnSparseFlashAttentionGetWorkspaceSize(
            query.handle(), key.handle(), key.handle(), indices.handle(), table.handle(), query_lengths.handle(),
            kv_lengths.handle(), query_rope.handle(), key_rope.handle(), 0.04, 2, query_layout, kv_layout, 3, unlimited,
            unlimited, 2, false, out.handle(), holder.handle(), holder.handle(), size, executor
        );
    });
    const auto halves = out.read<std::uint16_t>();
    return {{std::uint8_t(halves.front()), std::uint8_t(halves.back())}};
}

Results mla_prolog(const Stream& stream, std::mt19937& random) {
    const Tensor x({6, 64}, ACL_INT8);
    const Tensor weight_dq({64, 1536}, ACL_INT8, {48, 4, 16, 32});
    const Tensor weight_uq_qr({1536, 384}, ACL_INT8, {12, 96, 16, 32});
    const Tensor weight_uk({2, 128, 512}, ACL_BF16);
    const Tensor weight_dkv_kr({64, 576}, ACL_INT8, {18, 4, 16, 32});
    const Tensor gamma_cq({1536}, ACL_BF16);
    const Tensor gamma_ckv({512}, ACL_BF16);
    const Tensor sin({6, 64}, ACL_BF16);
    const Tensor cos({6, 64}, ACL_BF16);
    const Tensor index({6}, ACL_INT64);
    const Tensor kv_cache({2, 16, 1, 512}, ACL_INT8);
    const Tensor kr_cache({2, 16, 1, 64}, ACL_BF16);
    const Tensor scale_x({6, 1}, ACL_FLOAT);
    const Tensor scale_dq({1, 1536}, ACL_FLOAT);
    const Tensor scale_uq_qr({1, 384}, ACL_FLOAT);
    const Tensor scale_dkv_kr({1, 576}, ACL_FLOAT);
    const Tensor scale_ckv({1, 512}, ACL_FLOAT);
    const Tensor smooth({1, 1536}, ACL_FLOAT);
    const Tensor query({6, 2, 512}, ACL_INT8);
    const Tensor query_rope({6, 2, 64}, ACL_BF16);
    const Tensor query_scale({6, 2, 1}, ACL_FLOAT);
    for (const Tensor* tensor :
         {&x, &weight_dq, &weight_uq_qr, &weight_uk, &weight_dkv_kr, &gamma_cq, &gamma_ckv, &sin, &cos, &kv_cache,
          &kr_cache, &scale_x, &scale_dq, &scale_uq_qr, &scale_dkv_kr, &scale_ckv, &smooth}) {
        tensor->fill_randomly(random);
    }
    index.fill<std::int64_t>({31, 0, -1, 17, 5, 16});
    char mode[] = "PA_NZ";
    run(stream, aclnnMlaPrologV2WeightNz, [&](std::uint64_t* size, aclOpExecutor** executor) {
        return aclnnMlaPrologV2WeightNzGetWorkspaceSize(
            x.handle(), weight_dq.handle(), weight_uq_qr.handle(), weight_uk.handle(), weight_dkv_kr.handle(),
            gamma_cq.handle(), gamma_ckv.handle(), sin.handle(), cos.handle(), index.handle(), kv_cache.handle(),
            kr_cache.handle(), scale_x.handle(), scale_dq.handle(), scale_uq_qr.handle(), scale_dkv_kr.handle(),
            scale_ckv.handle(), nullptr, smooth.handle(), 1e-5, 1e-5, mode, query.handle(), query_rope.handle(),
            query_scale.handle(), size, executor
        );
    });
    return results(query, kv_cache);
}

Results mla_preprocess(const Stream& stream, std::mt19937& random) {
    const Tensor x({3, 64}, ACL_BF16);
    const Tensor gamma_0({64}, ACL_BF16);
    const Tensor gamma_1({1536}, ACL_BF16);
    const Tensor gamma_2({512}, ACL_BF16);
    const Tensor one({1}, ACL_BF16);
    const Tensor offset({1}, ACL_INT8);
    const Tensor none({0}, ACL_BF16);
    const Tensor wdqkv({2112, 64}, ACL_INT8, {2, 132, 16, 32});
    const Tensor wuq({384, 1536}, ACL_INT8, {48, 24, 16, 32});
    const Tensor descale_0({2112}, ACL_FLOAT);
    const Tensor descale_1({384}, ACL_FLOAT);
    const Tensor bias_0({2112}, ACL_INT32);
    const Tensor bias_1({384}, ACL_INT32);
    const Tensor cos({3, 64}, ACL_BF16);
    const Tensor sin({3, 64}, ACL_BF16);
    const Tensor wuk({2, 128, 512}, ACL_BF16);
    const Tensor kv_cache({2, 16, 128, 32}, ACL_INT8);
    const Tensor kr_cache({2, 4, 128, 16}, ACL_BF16);
    const Tensor slots({3}, ACL_INT32);
    const Tensor head_scales({2}, ACL_BF16);
    const Tensor q_out({3, 2, 512}, ACL_INT8);
    const Tensor q_rope_out({3, 2, 64}, ACL_BF16);
    for (const Tensor* tensor :
         {&x, &gamma_0, &gamma_1, &gamma_2, &one, &offset, &wdqkv, &wuq, &descale_0, &descale_1, &cos, &sin, &wuk,
          &kv_cache, &kr_cache, &head_scales}) {
        tensor->fill_randomly(random);
    }
    bias_0.fill(std::vector<std::int32_t>(2112, -3));
    bias_1.fill(std::vector<std::int32_t>(384, 5));
    slots.fill<std::int32_t>({255, -1, 3});
    run(stream, aclnnMlaPreprocess, [&](std::uint64_t* size, aclOpExecutor** executor) {
        return aclnnMlaPreprocessGetWorkspaceSize(
            x.handle(), gamma_0.handle(), none.handle(), one.handle(), offset.handle(), wdqkv.handle(),
            descale_0.handle(), bias_0.handle(), gamma_1.handle(), none.handle(), one.handle(), offset.handle(),
            wuq.handle(), descale_1.handle(), bias_1.handle(), gamma_2.handle(), cos.handle(), sin.handle(),
            wuk.handle(), kv_cache.handle(), kr_cache.handle(), slots.handle(), one.handle(), head_scales.handle(),
            1536, 64, 64, 1e-6, 2, 2, true, true, true, 2, 0, true, 1, q_out.handle(), kv_cache.handle(),
            q_rope_out.handle(), kr_cache.handle(), size, executor
        );
    });
    return results(q_out, kv_cache);
}

using Call = Results (*)(const Stream&, std::mt19937&);

// The same call on one stream after the other, and on four at once.
void check_alike(Call call) {
    const auto once = [&] {
        const Stream stream;
        std::mt19937 random(11);
        return call(stream, random);
    };
    const Results expected = once();
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 4; ++thread) {
        threads.emplace_back([&] {
            CHECK(aclrtSetDevice(0) == ACL_SUCCESS);
            CHECK(once() == expected);
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
    for (const Call call :
         {moe_init_routing, moe_init_routing_of_no_width, sparse_flash_attention, mla_prolog, mla_preprocess}) {
        check_alike(call);
    }
}
