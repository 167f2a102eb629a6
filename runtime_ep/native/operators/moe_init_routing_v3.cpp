// MoeInitRoutingV3: an absent expert range goes as the whole one, and "no limit" as the number of assignments.
#include "operators/operator.h"

#include <algorithm>

namespace operators {
namespace {

enum : std::size_t { X, EXPERT_IDX, SCALE, OFFSET };
enum : std::size_t { EXPANDED_X, EXPANDED_ROW_IDX, EXPERT_TOKENS_COUNT_OR_CUMSUM, EXPANDED_SCALE };

constexpr Input INPUTS[] = {{"x"}, {"expert_idx"}, {"scale"}, {"offset"}};
constexpr Output OUTPUTS[] = {
    {"expanded_x"},
    {"expanded_row_idx"},
    {"expert_tokens_count_or_cumsum"},
    {"expanded_scale"},
};

constexpr std::int64_t UNQUANTISED = -1;
constexpr std::int64_t STATIC_INT8 = 0;
constexpr std::int64_t DYNAMIC_INT8 = 1;
constexpr std::int64_t MXFP8_E5M2 = 2;
constexpr std::int64_t MXFP8_E4M3FN = 3;
constexpr std::int64_t KEY_VALUE_COUNTS = 2;

class MoeInitRoutingV3 final : public Launcher {
  public:
    explicit MoeInitRoutingV3(const ort::Attributes& attributes)
        : active_num_(attributes.integer("active_num", -1)),
          expert_capacity_(attributes.integer("expert_capacity", -1)),
          expert_num_(attributes.integer("expert_num", -1)),
          drop_pad_(attributes.integer("drop_pad_mode", 0) == 1),
          drop_pad_mode_(attributes.integer("drop_pad_mode", 0)),
          counts_type_(attributes.integer("expert_tokens_num_type", 0)),
          counts_(attributes.integer("expert_tokens_num_flag", 0) != 0),
          quant_mode_(attributes.integer("quant_mode", UNQUANTISED)),
          range_(attributes.integers("active_expert_range")),
          row_idx_type_(attributes.integer("row_idx_type", 0)) {
        if (range_.empty()) {
            range_ = {0, expert_num_};
        }
    }

    void infer(Inputs in, Outputs out) const override {
        const Tensor& x = in[X];
        const std::int64_t assignments = assignment_count(in);
        const std::int64_t width = x.shape[1];
        const std::int64_t rows = drop_pad_         ? expert_num_ * expert_capacity_
                                  : active_num_ > 0 ? std::min(active_num_, assignments)
                                                    : assignments;
        const Shape expanded = drop_pad_ ? Shape{expert_num_, expert_capacity_, width} : Shape{rows, width};
        out[EXPANDED_X] = {true, nullptr, expanded_type(x.type), expanded};
        out[EXPANDED_ROW_IDX] = {true, nullptr, ACL_INT32, {assignments}};

        const std::int64_t active = range_.size() == 2 ? range_[1] - range_[0] : 0;
        const Shape counts = !counts_                           ? Shape{0}
                             : counts_type_ == KEY_VALUE_COUNTS ? Shape{expert_num_, 2}
                                                                : Shape{active};
        out[EXPERT_TOKENS_COUNT_OR_CUMSUM] = {counts_, nullptr, ACL_INT64, counts};

        const bool blocks = quant_mode_ == MXFP8_E5M2 || quant_mode_ == MXFP8_E4M3FN;
        const bool scales = blocks || quant_mode_ == DYNAMIC_INT8 || (quant_mode_ == UNQUANTISED && in[SCALE].present);
        const Shape scale_shape = blocks ? Shape{rows, (width + 63) / 64 * 2} : scales ? Shape{rows} : Shape{0};
        out[EXPANDED_SCALE] = {scales, nullptr, blocks ? ACL_FLOAT8_E8M0 : ACL_FLOAT, scale_shape};
    }

    Plan plan(Inputs in, Outputs out, Arguments& args) const override {
        const auto produced = [&](const Tensor& tensor) {
            return tensor.present ? args.nd(tensor) : args.empty(tensor.type);
        };
        // Devices differ in whether they take 0 for "no limit"; the number of assignments limits nothing on all.
        const std::int64_t active_num = active_num_ > 0 ? active_num_ : assignment_count(in);
        Plan plan;
        planned(
            cann::functions().aclnnMoeInitRoutingV3GetWorkspaceSize(
                args.nd(in[X]), args.nd(in[EXPERT_IDX]), args.nd(in[SCALE]), args.nd(in[OFFSET]), active_num,
                expert_capacity_, expert_num_, drop_pad_mode_, counts_type_, counts_, quant_mode_,
                args.integers(range_), row_idx_type_, args.nd(out[EXPANDED_X]), args.nd(out[EXPANDED_ROW_IDX]),
                produced(out[EXPERT_TOKENS_COUNT_OR_CUMSUM]), produced(out[EXPANDED_SCALE]), &plan.workspace,
                &plan.executor
            ),
            "aclnnMoeInitRoutingV3"
        );
        return plan;
    }

  private:
    static std::int64_t assignment_count(Inputs in) { return in[EXPERT_IDX].shape[0] * in[EXPERT_IDX].shape[1]; }

    aclDataType expanded_type(aclDataType x) const {
        switch (quant_mode_) {
        case STATIC_INT8:
        case DYNAMIC_INT8:
            return ACL_INT8;
        case MXFP8_E5M2:
            return ACL_FLOAT8_E5M2;
        case MXFP8_E4M3FN:
            return ACL_FLOAT8_E4M3FN;
        default:
            return x;
        }
    }

    std::int64_t active_num_;
    std::int64_t expert_capacity_;
    std::int64_t expert_num_;
    bool drop_pad_;
    std::int64_t drop_pad_mode_;
    std::int64_t counts_type_;
    bool counts_;
    std::int64_t quant_mode_;
    std::vector<std::int64_t> range_;
    std::int64_t row_idx_type_;
};

} // namespace

extern const Operator MOE_INIT_ROUTING_V3;
const Operator MOE_INIT_ROUTING_V3{
    "MoeInitRoutingV3",
    "aclnnMoeInitRoutingV3",
    INPUTS,
    OUTPUTS,
    [](const ort::Attributes& attributes) -> std::unique_ptr<Launcher> {
        return std::make_unique<MoeInitRoutingV3>(attributes);
    },
    &cann::Functions::aclnnMoeInitRoutingV3,
};

} // namespace operators
