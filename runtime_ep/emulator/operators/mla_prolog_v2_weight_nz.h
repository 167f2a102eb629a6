// MlaPrologV2WeightNz: what stands in front of latent attention, from tokens to queries and cache rows.
#pragma once

#include "aclnn/handles.h"
#include "maths/weight.h"

namespace ascend_emulator::mla_prolog {

enum : std::size_t {
    token_x,
    weight_dq,
    weight_uq_qr,
    weight_uk,
    weight_dkv_kr,
    rmsnorm_gamma_cq,
    rmsnorm_gamma_ckv,
    rope_sin,
    rope_cos,
    cache_index,
    kv_cache,
    kr_cache,
    dequant_scale_x,
    dequant_scale_w_dq,
    dequant_scale_w_uq_qr,
    dequant_scale_w_dkv_kr,
    quant_scale_ckv,
    quant_scale_ckr,
    smooth_scales_cq,
    query,
    query_rope,
    dequant_scale_q_nope,
};

struct Configuration {
    float epsilon_cq;
    float epsilon_ckv;
    bool nz_cache; // blocks are stored as (H / c0, BlockSize, c0)
};

// (k, n) of a weight whose view is that matrix, or its storage (n / w0, k / 16, 16, w0).
struct Dimensions {
    std::int64_t k;
    std::int64_t n;
};
Dimensions dimensions(const Description& weight);

void run(const std::vector<Operand>& operands, const Configuration& call);

} // namespace ascend_emulator::mla_prolog
