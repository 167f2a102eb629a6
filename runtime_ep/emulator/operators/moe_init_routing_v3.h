// MoeInitRoutingV3: tokens copied once per chosen expert and put in the order of their experts.
#pragma once

#include "aclnn/handles.h"

namespace ascend_emulator::moe_init_routing {

enum : std::size_t {
    x,
    expert_idx,
    scale,
    offset,
    expanded_x,
    expanded_row_idx,
    expert_tokens_count_or_cumsum,
    expanded_scale,
};

enum QuantMode : std::int64_t { unquantised = -1, static_int8 = 0, dynamic_int8 = 1, mxfp8_e5m2 = 2, mxfp8_e4m3fn = 3 };
enum CountType : std::int64_t { cumulative = 0, count = 1, key_value = 2 };

struct Configuration {
    std::int64_t active_num;
    std::int64_t expert_capacity;
    std::int64_t expert_num;
    bool drop_pad;
    std::int64_t count_type;
    bool counts;
    std::int64_t quant_mode;
    std::int64_t first_expert; // of the active range
    std::int64_t last_expert;  // the one behind it
    bool scatter;              // row_idx_type 1: the assignment of each row

    bool mxfp8() const { return quant_mode == mxfp8_e5m2 || quant_mode == mxfp8_e4m3fn; }
};

// Columns of E8M0 scales: one per block of 32, rounded up to even.
inline std::int64_t scale_columns(std::int64_t width) {
    return (width + 63) / 64 * 2;
}

void run(const std::vector<Operand>& operands, const Configuration& configuration);

} // namespace ascend_emulator::moe_init_routing
