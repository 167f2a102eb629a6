// SparseFlashAttention: attention of every query token to the keys that its list selects, in the latent space of MLA.
#pragma once

#include "aclnn/handles.h"

namespace ascend_emulator::sparse_flash_attention {

enum : std::size_t {
    query,
    key,
    value,
    sparse_indices,
    block_table,
    actual_seq_lengths_query,
    actual_seq_lengths_kv,
    query_rope,
    key_rope,
    attention_out,
    softmax_max,
    softmax_sum,
};

enum class KvLayout { BSND, TND, PA_BSND };

struct Configuration {
    float scale_value;
    std::int64_t sparse_block_size;
    bool query_tnd;
    KvLayout kv_layout;
    bool causal; // from the right bottom
    bool statistics;
};

void run(const std::vector<Operand>& operands, const Configuration& call);

} // namespace ascend_emulator::sparse_flash_attention
