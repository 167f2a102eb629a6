// RingAttentionUpdateV2: the layouts go as strings, the prefix sums as a tensor.
#include "operators/operator.h"

namespace operators {
namespace {

enum : std::size_t {
    PREV_ATTN_OUT,
    PREV_SOFTMAX_MAX,
    PREV_SOFTMAX_SUM,
    CUR_ATTN_OUT,
    CUR_SOFTMAX_MAX,
    CUR_SOFTMAX_SUM,
    ACTUAL_SEQ_QLEN,
};
enum : std::size_t { ATTN_OUT, SOFTMAX_MAX, SOFTMAX_SUM };

constexpr Input INPUTS[] = {
    {"prev_attn_out"},   {"prev_softmax_max"}, {"prev_softmax_sum"}, {"cur_attn_out"},
    {"cur_softmax_max"}, {"cur_softmax_sum"},  {"actual_seq_qlen"},
};
constexpr Output OUTPUTS[] = {{"attn_out"}, {"softmax_max"}, {"softmax_sum"}};

class RingAttentionUpdateV2 final : public Launcher {
  public:
    explicit RingAttentionUpdateV2(const ort::Attributes& attributes)
        : input_layout_(attributes.string("input_layout", "SBH")),
          input_softmax_layout_(attributes.string("input_softmax_layout", "")) {}

    void infer(Inputs in, Outputs out) const override {
        out[ATTN_OUT] = {true, nullptr, in[PREV_ATTN_OUT].type, in[PREV_ATTN_OUT].shape};
        out[SOFTMAX_MAX] = {true, nullptr, ACL_FLOAT, in[PREV_SOFTMAX_MAX].shape};
        out[SOFTMAX_SUM] = {true, nullptr, ACL_FLOAT, in[PREV_SOFTMAX_MAX].shape};
    }

    Plan plan(Inputs in, Outputs out, Arguments& args) const override {
        Plan plan;
        planned(
            cann::functions().aclnnRingAttentionUpdateV2GetWorkspaceSize(
                args.nd(in[PREV_ATTN_OUT]), args.nd(in[PREV_SOFTMAX_MAX]), args.nd(in[PREV_SOFTMAX_SUM]),
                args.nd(in[CUR_ATTN_OUT]), args.nd(in[CUR_SOFTMAX_MAX]), args.nd(in[CUR_SOFTMAX_SUM]),
                args.nd(in[ACTUAL_SEQ_QLEN]), const_cast<char*>(input_layout_.c_str()),
                const_cast<char*>(input_softmax_layout_.c_str()), args.nd(out[ATTN_OUT]), args.nd(out[SOFTMAX_MAX]),
                args.nd(out[SOFTMAX_SUM]), &plan.workspace, &plan.executor
            ),
            "aclnnRingAttentionUpdateV2"
        );
        return plan;
    }

  private:
    std::string input_layout_;
    std::string input_softmax_layout_;
};

} // namespace

extern const Operator RING_ATTENTION_UPDATE_V2;
const Operator RING_ATTENTION_UPDATE_V2{
    "RingAttentionUpdateV2",
    "aclnnRingAttentionUpdateV2",
    INPUTS,
    OUTPUTS,
    [](const ort::Attributes& attributes) -> std::unique_ptr<Launcher> {
        return std::make_unique<RingAttentionUpdateV2>(attributes);
    },
    &cann::Functions::aclnnRingAttentionUpdateV2,
};

} // namespace operators
