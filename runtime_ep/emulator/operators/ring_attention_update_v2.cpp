// aclnnRingAttentionUpdateV2: its argument rules. Source: aclnnRingAttentionUpdateV2, Parameters, Return Value and
// Constraints; GE operator RingAttentionUpdate, tiling.
#include "operators/ring_attention_update_v2.h"

#include "aclnn/rules.h"
#include "control/misuse.h"

#include <string_view>

using namespace ascend_emulator;
using namespace ascend_emulator::ring_attention_update;

namespace {

constexpr std::string_view launch_name = "aclnnRingAttentionUpdateV2";
constexpr std::int64_t lanes = 8;
constexpr std::int64_t most_heads = 256;
constexpr std::int64_t largest_head = 768;
constexpr std::int64_t head_unit = 64;

constexpr std::size_t attentions[] = {prev_attn_out, cur_attn_out, attn_out};
constexpr std::size_t statistics[] = {prev_softmax_max, prev_softmax_sum, cur_softmax_max,
                                      cur_softmax_sum,  softmax_max,      softmax_sum};

void check_types(const Arguments& arguments) {
    for (const std::size_t index : attentions) {
        arguments.require_type(index, {ACL_FLOAT16, ACL_FLOAT, ACL_BF16});
    }
    for (const std::size_t index : statistics) {
        arguments.require_type(index, {ACL_FLOAT});
    }
    arguments.require_type(actual_seq_qlen, {ACL_INT64});
    for (const std::size_t index : {cur_attn_out, attn_out}) {
        arguments.require_type(index, {arguments[prev_attn_out].type});
    }
}

void check_shapes(const Arguments& arguments, bool tnd) {
    for (const std::size_t index : attentions) {
        arguments.require_rank(index, 3);
        arguments.require_filled(index);
        arguments.require_shape(index, arguments[prev_attn_out].shape);
    }
    const Shape& attention = arguments[prev_attn_out].shape;
    arguments.require_rank(prev_softmax_max, tnd ? 3 : 4);
    arguments.require_filled(prev_softmax_max);
    const std::int64_t heads = arguments[prev_softmax_max].shape[1];
    const Shape expected =
        tnd ? Shape{attention[0], attention[1], lanes} : Shape{attention[1], heads, attention[0], lanes};
    for (const std::size_t index : statistics) {
        arguments.require_shape(index, expected);
    }
    arguments.require_rank(actual_seq_qlen, 1);
}

void check_heads(const Arguments& arguments, bool tnd) {
    const Shape& attention = arguments[prev_attn_out].shape;
    if (!tnd) {
        const std::int64_t heads = arguments[prev_softmax_max].shape[1];
        const auto sentence = text("H of prevAttnOut must be a multiple of the heads ", heads, ", got ", attention[2]);
        require(attention[2] % heads == 0, ACLNN_ERR_INNER_TILING_ERROR, sentence);
        return;
    }
    if (settings().product == Product::Ascend950) {
        return;
    }
    require(
        attention[1] <= most_heads, ACLNN_ERR_INNER_TILING_ERROR,
        text("N of prevAttnOut must be at most ", most_heads, " with inputLayout TND, got ", attention[1])
    );
    require(
        settings().relax_head_dim || (attention[2] % head_unit == 0 && attention[2] <= largest_head),
        ACLNN_ERR_INNER_TILING_ERROR,
        text("D of prevAttnOut must be a multiple of 64 up to 768 with inputLayout TND, got ", attention[2])
    );
}

void check(const Arguments& arguments, std::string_view layout, std::string_view softmax_layout) {
    arguments.require_given({prev_attn_out, prev_softmax_max, prev_softmax_sum, cur_attn_out, cur_softmax_max});
    arguments.require_given({cur_softmax_sum, attn_out, softmax_max, softmax_sum});
    check_types(arguments);
    require(
        layout == "SBH" || layout == "TND", ACLNN_ERR_PARAM_INVALID,
        text("inputLayoutOptional must be SBH or TND, got ", layout)
    );
    require(
        softmax_layout.empty() || softmax_layout == "SBH" || softmax_layout == "TND", ACLNN_ERR_INNER_TILING_ERROR,
        text("inputSoftmaxLayoutOptional must be empty, SBH or TND, got ", softmax_layout)
    );
    const bool tnd = layout == "TND";
    if (tnd) {
        arguments.require_given({actual_seq_qlen});
    }
    if (arguments.given(actual_seq_qlen) && arguments[actual_seq_qlen].format != ACL_FORMAT_ND) {
        fail(ACLNN_ERR_INNER_TILING_ERROR, "actualSeqQlenOptional must have the format ND");
    }
    check_shapes(arguments, tnd);
    check_heads(arguments, tnd);
}

} // namespace

aclnnStatus aclnnRingAttentionUpdateV2GetWorkspaceSize(
    const aclTensor* prevAttnOut, const aclTensor* prevSoftmaxMax, const aclTensor* prevSoftmaxSum,
    const aclTensor* curAttnOut, const aclTensor* curSoftmaxMax, const aclTensor* curSoftmaxSum,
    const aclTensor* actualSeqQlenOptional, char* inputLayoutOptional, char* inputSoftmaxLayoutOptional,
    const aclTensor* attnOutOut, const aclTensor* softmaxMaxOut, const aclTensor* softmaxSumOut,
    std::uint64_t* workspaceSize, aclOpExecutor** executor
) {
    return guarded<"aclnnRingAttentionUpdateV2GetWorkspaceSize">([&] {
        constexpr auto output = Argument::Role::Output;
        Arguments arguments{
            launch_name,
            {
                {"prevAttnOut", prevAttnOut},
                {"prevSoftmaxMax", prevSoftmaxMax},
                {"prevSoftmaxSum", prevSoftmaxSum},
                {"curAttnOut", curAttnOut},
                {"curSoftmaxMax", curSoftmaxMax},
                {"curSoftmaxSum", curSoftmaxSum},
                {"actualSeqQlenOptional", actualSeqQlenOptional},
                {"attnOutOut", attnOutOut, output},
                {"softmaxMaxOut", softmaxMaxOut, output},
                {"softmaxSumOut", softmaxSumOut, output},
            },
        };
        require_results(workspaceSize, executor);
        const std::string_view layout = inputLayoutOptional == nullptr ? "SBH" : inputLayoutOptional;
        const std::string_view softmax_layout = inputSoftmaxLayoutOptional == nullptr ? "" : inputSoftmaxLayoutOptional;
        check(arguments, layout, softmax_layout);
        const Layout of_call{layout == "TND", softmax_layout == "TND"};
        const auto workspace = std::uint64_t(arguments[prev_softmax_max].shape.elements()) * sizeof(float);
        create_executor(
            launch_name, std::move(arguments).take(), workspace,
            [of_call](const std::vector<Operand>& operands) { run(operands, of_call); }, workspaceSize, executor
        );
    });
}

aclnnStatus
aclnnRingAttentionUpdateV2(void* workspace, std::uint64_t workspaceSize, aclOpExecutor* executor, aclrtStream stream) {
    return guarded<"aclnnRingAttentionUpdateV2">(
        [&] { launch(launch_name, workspace, workspaceSize, executor, stream); },
        [&] { drop_executor(launch_name, executor); }
    );
}
