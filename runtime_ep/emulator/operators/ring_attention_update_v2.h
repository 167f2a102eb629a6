// RingAttentionUpdateV2: two attentions over disjoint keys become one.
#pragma once

#include "aclnn/handles.h"

namespace ascend_emulator::ring_attention_update {

enum : std::size_t {
    prev_attn_out,
    prev_softmax_max,
    prev_softmax_sum,
    cur_attn_out,
    cur_softmax_max,
    cur_softmax_sum,
    actual_seq_qlen,
    attn_out,
    softmax_max,
    softmax_sum,
};

struct Layout {
    bool tnd;         // attentions are (T, N, D) rather than (S, B, H)
    bool softmax_tnd; // with tnd, statistics are stored as declared rather than batch by batch as [N, S_b, 8]
};

void run(const std::vector<Operand>& operands, Layout layout);

} // namespace ascend_emulator::ring_attention_update
