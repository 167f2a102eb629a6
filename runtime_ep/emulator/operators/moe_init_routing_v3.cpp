// aclnnMoeInitRoutingV3: its argument rules. Source: aclnnMoeInitRoutingV3, parameters, status codes and differences
// between products; GE operator MoeInitRoutingV3, tiling.
#include "operators/moe_init_routing_v3.h"

#include "aclnn/rules.h"
#include "control/misuse.h"

#include <algorithm>
#include <string_view>

using namespace ascend_emulator;
using namespace ascend_emulator::moe_init_routing;

namespace {

constexpr std::string_view launch_name = "aclnnMoeInitRoutingV3";
constexpr std::int32_t tiling = ACLNN_ERR_INNER_TILING_ERROR;
constexpr std::int64_t most_experts = 10240;
constexpr std::int64_t most_experts_by_key = 5120;

bool on_950() {
    return settings().product == Product::Ascend950;
}

void check_types(const Arguments& arguments, std::int64_t quant_mode) {
    arguments.require_type(expert_idx, {ACL_INT32});
    arguments.require_type(scale, {ACL_FLOAT});
    arguments.require_type(offset, {ACL_FLOAT});
    arguments.require_type(expanded_row_idx, {ACL_INT32});
    arguments.require_type(expert_tokens_count_or_cumsum, {ACL_INT64});
    switch (quant_mode) {
    case static_int8:
    case dynamic_int8:
        arguments.require_type(x, {ACL_FLOAT16, ACL_BF16, ACL_FLOAT});
        arguments.require_type(expanded_x, {ACL_INT8});
        break;
    case mxfp8_e5m2:
    case mxfp8_e4m3fn:
        arguments.require_type(x, {ACL_FLOAT16, ACL_BF16});
        arguments.require_type(expanded_x, {quant_mode == mxfp8_e5m2 ? ACL_FLOAT8_E5M2 : ACL_FLOAT8_E4M3FN});
        arguments.require_type(expanded_scale, {ACL_FLOAT8_E8M0});
        return;
    default:
        arguments.require_type(x, {ACL_FLOAT16, ACL_BF16, ACL_FLOAT, ACL_INT8});
        arguments.require_type(expanded_x, {arguments[x].type});
    }
    arguments.require_type(expanded_scale, {ACL_FLOAT});
}

void check_attributes(const Configuration& call, std::int64_t drop_pad_mode, std::int64_t row_idx_type) {
    if (on_950()) {
        require_one_of("quantMode", call.quant_mode, {-1, 1, 2, 3}, tiling);
        require_one_of("dropPadMode", drop_pad_mode, {0}, tiling);
        require_one_of("expertTokensNumType", call.count_type, {1, 2}, tiling);
        require_one_of("expertTokensNumFlag", call.counts, {1}, tiling);
    } else {
        require_one_of("quantMode", call.quant_mode, {-1, 0, 1}, tiling);
        require_one_of("dropPadMode", drop_pad_mode, {0, 1}, tiling);
        require_one_of("expertTokensNumType", call.count_type, {0, 1, 2}, tiling);
    }
    require_one_of("rowIdxType", row_idx_type, {0, 1}, tiling);
    const std::int64_t most = call.count_type == key_value ? most_experts_by_key : most_experts;
    require(
        0 <= call.expert_num && call.expert_num <= most, tiling,
        text("expertNum must be from 0 to ", most, ", got ", call.expert_num)
    );
    require(call.active_num >= -1, tiling, text("activeNum must be at least -1, got ", call.active_num));
}

void check_range(const Configuration& call) {
    const auto got = Shape{call.first_expert, call.last_expert}.to_string();
    require(
        0 <= call.first_expert && call.first_expert <= call.last_expert && call.last_expert <= call.expert_num, tiling,
        text("activeExpertRangeOptional must lie within 0 and expertNum ", call.expert_num, ", got ", got)
    );
    require(
        !call.drop_pad || (call.first_expert == 0 && call.last_expert == call.expert_num), tiling,
        text("activeExpertRangeOptional must be all experts with dropPadMode 1, got ", got)
    );
}

void check_drop_pad(const Configuration& call, std::int64_t tokens) {
    if (!call.drop_pad) {
        return;
    }
    require(
        0 < call.expert_capacity && call.expert_capacity <= tokens, tiling,
        text("expertCapacity must be from 1 to ", tokens, " with dropPadMode 1, got ", call.expert_capacity)
    );
    require(!call.scatter, tiling, "rowIdxType must be 0 with dropPadMode 1, got 1");
    require(
        !call.counts || call.count_type == count, tiling,
        text("expertTokensNumType must be 1 with dropPadMode 1, got ", call.count_type)
    );
}

void check_scales(const Arguments& arguments, const Configuration& call) {
    const Shape& tokens = arguments[x].shape;
    const bool is_static = call.quant_mode == static_int8;
    require(!is_static || arguments.given(scale), tiling, "scaleOptional must be given with quantMode 0");
    require(
        !call.mxfp8() || !arguments.given(scale), tiling,
        text("scaleOptional must be absent with quantMode ", call.quant_mode)
    );
    require(
        is_static == arguments.given(offset), tiling,
        is_static ? "offsetOptional must be given with quantMode 0"
                  : text("offsetOptional must be absent with quantMode ", call.quant_mode)
    );
    arguments.require_shape(offset, {1}, tiling);
    if (!arguments.given(scale)) {
        return;
    }
    switch (call.quant_mode) {
    case static_int8:
        arguments.require_shape(scale, {1}, tiling);
        break;
    case dynamic_int8: {
        arguments.require_rank(scale, 2, tiling);
        const bool shared = arguments[scale].shape[0] == 1;
        arguments.require_shape(scale, {shared ? 1 : call.last_expert - call.first_expert, tokens[1]}, tiling);
        break;
    }
    default:
        arguments.require_shape(scale, {tokens[0]}, tiling);
    }
}

void check_outputs(const Arguments& arguments, const Configuration& call) {
    const std::int64_t width = arguments[x].shape[1];
    const std::int64_t assignments = arguments[expert_idx].shape.elements();
    std::int64_t rows = call.active_num > 0 ? std::min(call.active_num, assignments) : assignments;
    if (call.drop_pad) {
        rows = call.expert_num * call.expert_capacity;
        arguments.require_shape(expanded_x, {call.expert_num, call.expert_capacity, width}, tiling);
    } else {
        arguments.require_shape(expanded_x, {rows, width}, tiling);
    }
    arguments.require_shape(expanded_row_idx, {assignments}, tiling);
    if (call.counts) {
        const Shape by_key{call.expert_num, 2};
        const Shape by_expert{call.last_expert - call.first_expert};
        arguments.require_shape(
            expert_tokens_count_or_cumsum, call.count_type == key_value ? by_key : by_expert, tiling
        );
    }
    if (call.mxfp8()) {
        arguments.require_shape(expanded_scale, {rows, scale_columns(width)}, tiling);
    } else if (call.quant_mode == dynamic_int8 || (call.quant_mode == unquantised && arguments.given(scale))) {
        arguments.require_shape(expanded_scale, {rows}, tiling);
    }
}

void check(
    const Arguments& arguments, const Configuration& call, std::int64_t drop_pad_mode, std::int64_t row_idx_type
) {
    check_types(arguments, call.quant_mode);
    arguments.require_plain();
    check_attributes(call, drop_pad_mode, row_idx_type);
    arguments.require_rank(x, 2, tiling);
    arguments.require_rank(expert_idx, 2, tiling);
    const std::int64_t tokens = arguments[x].shape[0];
    require(
        arguments[expert_idx].shape[0] == tokens, tiling,
        text("expertIdx must have as many rows as x, ", tokens, ", got ", arguments[expert_idx].shape[0])
    );
    const std::int64_t assignments = arguments[expert_idx].shape.elements();
    require(
        !on_950() || call.active_num == assignments, tiling,
        text("activeNum must be NUM_ROWS * K = ", assignments, " on this product, got ", call.active_num)
    );
    check_range(call);
    check_drop_pad(call, tokens);
    check_scales(arguments, call);
    check_outputs(arguments, call);
}

} // namespace

aclnnStatus aclnnMoeInitRoutingV3GetWorkspaceSize(
    const aclTensor* xInput, const aclTensor* expertIdx, const aclTensor* scaleOptional,
    const aclTensor* offsetOptional, std::int64_t activeNum, std::int64_t expertCapacity, std::int64_t expertNum,
    std::int64_t dropPadMode, std::int64_t expertTokensNumType, bool expertTokensNumFlag, std::int64_t quantMode,
    const aclIntArray* activeExpertRangeOptional, std::int64_t rowIdxType, const aclTensor* expandedXOut,
    const aclTensor* expandedRowIdxOut, const aclTensor* expertTokensCountOrCumsumOut,
    const aclTensor* expandedScaleOut, std::uint64_t* workspaceSize, aclOpExecutor** executor
) {
    return guarded<"aclnnMoeInitRoutingV3GetWorkspaceSize">([&] {
        constexpr auto output = Argument::Role::Output;
        Arguments arguments{
            launch_name,
            {
                {"x", xInput},
                {"expertIdx", expertIdx},
                {"scaleOptional", scaleOptional},
                {"offsetOptional", offsetOptional},
                {"expandedXOut", expandedXOut, output},
                {"expandedRowIdxOut", expandedRowIdxOut, output},
                {"expertTokensCountOrCumsumOut", expertTokensCountOrCumsumOut, output},
                {"expandedScaleOut", expandedScaleOut, output},
            },
        };
        require_results(workspaceSize, executor);
        arguments.require_given({x, expert_idx, expanded_x, expanded_row_idx});
        arguments.require_given({expert_tokens_count_or_cumsum, expanded_scale});
        // Some releases follow the pointer without a look, and take no array of another length.
        require(
            activeExpertRangeOptional != nullptr, ACLNN_ERR_PARAM_NULLPTR,
            "activeExpertRangeOptional must be given, got a null pointer"
        );
        const auto& range = int_arrays().get(activeExpertRangeOptional, launch_name).values;
        require(range.size() == 2, tiling, text("activeExpertRangeOptional must have 2 elements, got ", range.size()));
        const Configuration call{
            .active_num = activeNum,
            .expert_capacity = expertCapacity,
            .expert_num = expertNum,
            .drop_pad = dropPadMode == 1,
            .count_type = expertTokensNumType,
            .counts = expertTokensNumFlag,
            .quant_mode = quantMode,
            .first_expert = range[0],
            .last_expert = range[1],
            .scatter = rowIdxType == 1,
        };
        check(arguments, call, dropPadMode, rowIdxType);
        const auto assignments = std::uint64_t(arguments[expert_idx].shape.elements());
        create_executor(
            launch_name, std::move(arguments).take(), (2 * assignments + 64) * sizeof(std::int32_t),
            [call](const std::vector<Operand>& operands) { run(operands, call); }, workspaceSize, executor
        );
    });
}

aclnnStatus
aclnnMoeInitRoutingV3(void* workspace, std::uint64_t workspaceSize, aclOpExecutor* executor, aclrtStream stream) {
    return guarded<"aclnnMoeInitRoutingV3">(
        [&] { launch(launch_name, workspace, workspaceSize, executor, stream); },
        [&] { drop_executor(launch_name, executor); }
    );
}
