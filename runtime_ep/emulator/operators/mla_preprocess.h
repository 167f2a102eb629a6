// MlaPreprocess: what stands in front of latent attention at decoding, with static int8 activations.
#pragma once

#include "aclnn/handles.h"
#include "maths/weight.h"

namespace ascend_emulator::mla_preprocess {

enum : std::size_t {
    input,
    gamma_0,
    beta_0,
    quant_scale_0,
    quant_offset_0,
    wdqkv,
    descale_0,
    bias_0,
    gamma_1,
    beta_1,
    quant_scale_1,
    quant_offset_1,
    wuq,
    descale_1,
    bias_1,
    gamma_2,
    cos,
    sin,
    wuk,
    kv_cache,
    kv_cache_rope,
    slot_mapping,
    ctkv_scale,
    q_nope_scale,
    q_out,
    kv_cache_out,
    q_rope_out,
    kr_cache_out,
};

enum CacheMode : std::int64_t { joined = 0, split = 1, int8_nz = 2, nz = 3 };

struct Configuration {
    std::int64_t cache_mode;
    bool do_rms_norm;

    bool fractal_cache() const { return cache_mode == int8_nz || cache_mode == nz; }
};

// (n, k) of a weight whose view is that matrix, or its storage (k / w0, n, w0) or (k / w0, n / 16, 16, w0).
struct Dimensions {
    std::int64_t n;
    std::int64_t k;
};
Dimensions dimensions(const Description& weight);

// (N, D, Hckv) of wuk, whose view is that, or its storage (N, Hckv / w0, D, w0).
Shape absorbed_dimensions(const Description& wuk);

void run(const std::vector<Operand>& operands, const Configuration& call);

} // namespace ascend_emulator::mla_preprocess
