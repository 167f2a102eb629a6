#include "aclnn/strided.h"
#include "control/entry_point.h"
#include "control/misuse.h"
#include "maths/convert.h"
#include "maths/parallel.h"
#include "operators/ring_attention_update_v2.h"

#include <algorithm>
#include <cmath>

namespace ascend_emulator::ring_attention_update {
namespace {

constexpr std::int64_t lanes = 8;

// Where the statistics of each token and head lie, in rows of 8 lanes; rows are numbered as the attention stores them.
std::vector<std::int64_t> rows_by_batch_and_head(std::int64_t length, std::int64_t batches, std::int64_t heads) {
    std::vector<std::int64_t> rows;
    rows.reserve(std::size_t(length * batches * heads));
    for (std::int64_t s = 0; s < length; ++s) {
        for (std::int64_t b = 0; b < batches; ++b) {
            for (std::int64_t n = 0; n < heads; ++n) {
                rows.push_back((b * heads + n) * length + s);
            }
        }
    }
    return rows;
}

std::vector<std::int64_t> rows_as_declared(std::int64_t count) {
    std::vector<std::int64_t> rows(static_cast<std::size_t>(count));
    for (std::int64_t row = 0; row < count; ++row) {
        rows[std::size_t(row)] = row;
    }
    return rows;
}

// One batch after the other is stored as [N, S_b]; `bounds` are prefix sums from 0 to T.
std::vector<std::int64_t>
rows_by_ragged_batch(const std::int64_t* bounds, std::int64_t count, std::int64_t tokens, std::int64_t heads) {
    if (count < 1 || bounds[0] != 0 || bounds[count - 1] != tokens || !std::is_sorted(bounds, bounds + count)) {
        throw Failure{
            ACL_ERROR_RT_AICORE_EXCEPTION,
            text("actualSeqQlenOptional must be prefix sums from 0 to T = ", tokens, ", in ascending order")
        };
    }
    std::vector<std::int64_t> rows;
    rows.reserve(std::size_t(tokens * heads));
    for (std::int64_t b = 0; b + 1 < count; ++b) {
        const std::int64_t length = bounds[b + 1] - bounds[b];
        for (std::int64_t s = 0; s < length; ++s) {
            for (std::int64_t n = 0; n < heads; ++n) {
                rows.push_back(bounds[b] * heads + n * length + s);
            }
        }
    }
    return rows;
}

std::vector<std::int64_t> statistic_rows(const std::vector<Operand>& operands, Layout layout) {
    const Shape& attention = operands[prev_attn_out].shape();
    const std::int64_t heads = operands[prev_softmax_max].shape()[1];
    if (!layout.tnd) {
        return rows_by_batch_and_head(attention[0], attention[1], heads);
    }
    if (layout.softmax_tnd || heads == 1) {
        return rows_as_declared(attention[0] * heads);
    }
    const ContiguousInput bounds(operands[actual_seq_qlen]);
    return rows_by_ragged_batch(bounds.as<std::int64_t>(), operands[actual_seq_qlen].shape()[0], attention[0], heads);
}

} // namespace

void run(const std::vector<Operand>& operands, Layout layout) {
    const ContiguousInput prev(operands[prev_attn_out]);
    const ContiguousInput prev_max(operands[prev_softmax_max]);
    const ContiguousInput prev_sum(operands[prev_softmax_sum]);
    const ContiguousInput cur(operands[cur_attn_out]);
    const ContiguousInput cur_max(operands[cur_softmax_max]);
    const ContiguousInput cur_sum(operands[cur_softmax_sum]);
    ContiguousOutput out(operands[attn_out]);
    ContiguousOutput out_max(operands[softmax_max]);
    ContiguousOutput out_sum(operands[softmax_sum]);

    const std::vector<std::int64_t> rows = statistic_rows(operands, layout);
    const std::int64_t count = std::int64_t(rows.size());
    const std::int64_t width = operands[prev_attn_out].shape().elements() / count;
    const aclDataType type = operands[prev_attn_out].type();
    const auto row_bytes = width * std::int64_t(element_size(type));

    parallel_for(count, 16, [&](std::int64_t first, std::int64_t last) {
        std::vector<float> one(static_cast<std::size_t>(width));
        std::vector<float> other(static_cast<std::size_t>(width));
        for (std::int64_t row = first; row < last; ++row) {
            float one_weight = 0;
            float other_weight = 0;
            for (std::int64_t lane = lanes; lane-- > 0;) {
                const std::int64_t at = rows[std::size_t(row)] * lanes + lane;
                const float p = prev_max.as<float>()[at];
                const float c = cur_max.as<float>()[at];
                // std::max would drop a NaN on one side.
                const float largest = p >= c ? p : c > p ? c : p + c;
                const float one_sum = prev_sum.as<float>()[at] * std::exp(p - largest);
                const float other_sum = cur_sum.as<float>()[at] * std::exp(c - largest);
                const float sum = one_sum + other_sum;
                out_max.as<float>()[at] = largest;
                out_sum.as<float>()[at] = sum;
                one_weight = one_sum / sum;
                other_weight = other_sum / sum;
            }
            // The weights left over are those of the first lane.
            widen(prev.data() + row * row_bytes, type, width, one.data());
            widen(cur.data() + row * row_bytes, type, width, other.data());
            for (std::int64_t i = 0; i < width; ++i) {
                one[std::size_t(i)] = one[std::size_t(i)] * one_weight + other[std::size_t(i)] * other_weight;
            }
            narrow(one.data(), width, type, out.data() + row * row_bytes);
        }
    });
    out.store();
    out_max.store();
    out_sum.store();
}

} // namespace ascend_emulator::ring_attention_update
