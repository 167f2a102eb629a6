#include "maths/convert.h"
#include "maths/parallel.h"
#include "maths/quantise.h"
#include "operators/moe_init_routing_v3.h"

#include <algorithm>
#include <cstring>

namespace ascend_emulator::moe_init_routing {
namespace {

constexpr std::int64_t block = 32;
constexpr std::uint8_t not_finite = 0xFF;

// The routed assignments in the order of their experts, and where each expert's begin.
struct Routing {
    std::vector<std::int64_t> order;
    std::vector<std::int64_t> begins; // one more than there are active experts
};

// A stable sort by counting: within an expert, assignments keep their order.
Routing route(const Operand& ids, const Configuration& call) {
    const auto* expert = ids.as<const std::int32_t>();
    const std::int64_t assignments = ids.shape().elements();
    const auto active = [&](std::int64_t i) {
        return call.first_expert <= expert[i] && expert[i] < call.last_expert;
    };
    Routing routing;
    routing.begins.assign(std::size_t(call.last_expert - call.first_expert + 1), 0);
    for (std::int64_t i = 0; i < assignments; ++i) {
        if (active(i)) {
            ++routing.begins[std::size_t(expert[i] - call.first_expert + 1)];
        }
    }
    for (std::size_t e = 1; e < routing.begins.size(); ++e) {
        routing.begins[e] += routing.begins[e - 1];
    }
    routing.order.resize(std::size_t(routing.begins.back()));
    std::vector<std::int64_t> next = routing.begins;
    for (std::int64_t i = 0; i < assignments; ++i) {
        if (active(i)) {
            routing.order[std::size_t(next[std::size_t(expert[i] - call.first_expert)]++)] = i;
        }
    }
    return routing;
}

// Which assignment each row of expanded_x holds, -1 for none, and its expert.
struct Rows {
    std::vector<std::int64_t> assignment;
    std::vector<std::int64_t> expert;
};

Rows rows_of(const Routing& routing, const Configuration& call, std::int64_t count) {
    Rows rows{
        std::vector<std::int64_t>(static_cast<std::size_t>(count), -1),
        std::vector<std::int64_t>(static_cast<std::size_t>(count), 0)
    };
    for (std::size_t e = 0; e + 1 < routing.begins.size(); ++e) {
        for (std::int64_t i = routing.begins[e]; i < routing.begins[e + 1]; ++i) {
            const std::int64_t slot = i - routing.begins[e];
            const std::int64_t row = call.drop_pad ? std::int64_t(e) * call.expert_capacity + slot : i;
            if (row < count && (!call.drop_pad || slot < call.expert_capacity)) {
                rows.assignment[std::size_t(row)] = routing.order[std::size_t(i)];
                rows.expert[std::size_t(row)] = std::int64_t(e);
            }
        }
    }
    return rows;
}

void write_row_idx(const Operand& target, const Routing& routing, const Rows& rows, const Configuration& call) {
    auto* row_idx = target.as<std::int32_t>();
    std::fill_n(row_idx, target.shape().elements(), -1);
    if (call.scatter) {
        std::copy(routing.order.begin(), routing.order.end(), row_idx);
    } else if (call.drop_pad) {
        for (std::size_t row = 0; row < rows.assignment.size(); ++row) {
            if (rows.assignment[row] >= 0) {
                row_idx[rows.assignment[row]] = std::int32_t(row);
            }
        }
    } else {
        for (std::size_t i = 0; i < routing.order.size(); ++i) {
            row_idx[routing.order[i]] = std::int32_t(i);
        }
    }
}

void write_counts(const Operand& target, const Routing& routing, const Configuration& call) {
    if (!call.counts) {
        return;
    }
    auto* counts = target.as<std::int64_t>();
    if (call.count_type == key_value) {
        std::fill_n(counts, target.shape().elements(), 0);
    }
    for (std::size_t e = 0; e + 1 < routing.begins.size(); ++e) {
        const std::int64_t tokens = routing.begins[e + 1] - routing.begins[e];
        if (call.count_type == cumulative) {
            counts[e] = routing.begins[e + 1];
        } else if (call.count_type == count) {
            counts[e] = tokens;
        } else if (tokens > 0) {
            *counts++ = call.first_expert + std::int64_t(e);
            *counts++ = tokens;
        }
    }
}

// One row in the MXFP8 type of the mode: blocks of 32 share an exponent, the floor of that of their largest element.
void write_mxfp8(const float* row, std::int64_t width, const Float8& type, std::uint8_t* target, std::uint8_t* scales) {
    for (std::int64_t first = 0; first < width; first += block) {
        const std::int64_t last = std::min(width, first + block);
        std::uint32_t largest = 0;
        for (std::int64_t i = first; i < last; ++i) {
            largest = std::max(largest, std::bit_cast<std::uint32_t>(row[i]) & 0x7FFFFFFF);
        }
        const int biased = int(largest >> 23);
        const bool finite = biased != 0xFF;
        const int shared = std::max(biased - type.largest_exponent, 0);
        scales[first / block] = finite ? std::uint8_t(shared) : not_finite;
        for (std::int64_t i = first; i < last; ++i) {
            target[i] = finite ? to_float8(std::ldexp(row[i], 127 - shared), type) : 0;
        }
    }
}

// Copies tokens into rows, quantising as the call says. Rows without a token stay as they are.
class Expander {
  public:
    Expander(const std::vector<Operand>& operands, const Configuration& call)
        : operands_(operands),
          call_(call),
          width_(operands[x].shape()[1]),
          experts_(operands[expert_idx].shape()[1]) {}

    void expand(std::int64_t row, std::int64_t assignment, std::int64_t expert, float* buffer) const {
        const Operand& tokens = operands_[x];
        const std::int64_t token = assignment / experts_;
        const auto token_bytes = width_ * std::int64_t(element_size(tokens.type()));
        const std::byte* source = tokens.data + token * token_bytes;
        auto* bytes = operands_[expanded_x].data;
        if (call_.quant_mode == unquantised) {
            std::copy_n(source, token_bytes, bytes + row * token_bytes); // of tokens of no width there is no memory
            if (operands_[scale].data != nullptr) {
                operands_[expanded_scale].as<float>()[row] = operands_[scale].as<float>()[token];
            }
            return;
        }
        widen(source, tokens.type(), width_, buffer);
        auto* target = operands_[expanded_x].as<std::int8_t>() + row * width_;
        switch (call_.quant_mode) {
        case static_int8: {
            const float factor = operands_[scale].as<float>()[0];
            const float added = operands_[offset].as<float>()[0];
            for (std::int64_t i = 0; i < width_; ++i) {
                target[i] = to_int8(buffer[i] * factor + added);
            }
            break;
        }
        case dynamic_int8:
            smooth(expert, buffer);
            operands_[expanded_scale].as<float>()[row] = quantise_row(buffer, width_, target);
            break;
        default:
            write_mxfp8(
                buffer, width_, call_.quant_mode == mxfp8_e5m2 ? float8_e5m2 : float8_e4m3fn,
                reinterpret_cast<std::uint8_t*>(target),
                operands_[expanded_scale].as<std::uint8_t>() + row * scale_columns(width_)
            );
        }
    }

  private:
    // Multiplies by the row of `scale` that is the expert's, or the only one.
    void smooth(std::int64_t expert, float* buffer) const {
        const Operand& scales = operands_[scale];
        if (scales.data == nullptr) {
            return;
        }
        const float* factors = scales.as<float>() + (scales.shape()[0] == 1 ? 0 : expert * width_);
        for (std::int64_t i = 0; i < width_; ++i) {
            buffer[i] *= factors[i];
        }
    }

    const std::vector<Operand>& operands_;
    const Configuration& call_;
    const std::int64_t width_;
    const std::int64_t experts_;
};

} // namespace

void run(const std::vector<Operand>& operands, const Configuration& call) {
    const Routing routing = route(operands[expert_idx], call);
    const Shape& expanded = operands[expanded_x].shape();
    const std::int64_t width = operands[x].shape()[1];
    const std::int64_t count = call.drop_pad ? expanded[0] * expanded[1] : expanded[0];
    const Rows rows = rows_of(routing, call, count);
    write_row_idx(operands[expanded_row_idx], routing, rows, call);
    write_counts(operands[expert_tokens_count_or_cumsum], routing, call);
    for (const std::size_t output : {expanded_x, expanded_scale}) {
        const Operand& operand = operands[output];
        if (operand.data != nullptr) {
            std::memset(operand.data, 0, operand.description.bytes());
        }
    }
    const Expander expander(operands, call);
    parallel_for(count, 16, [&](std::int64_t first, std::int64_t last) {
        std::vector<float> buffer(static_cast<std::size_t>(width));
        for (std::int64_t row = first; row < last; ++row) {
            if (rows.assignment[std::size_t(row)] >= 0) {
                expander.expand(row, rows.assignment[std::size_t(row)], rows.expert[std::size_t(row)], buffer.data());
            }
        }
    });
}

} // namespace ascend_emulator::moe_init_routing
