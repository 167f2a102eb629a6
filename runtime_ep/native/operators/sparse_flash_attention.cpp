// SparseFlashAttention: the statistics must not be null even where none are asked for.
#include "operators/operator.h"

#include <limits>

namespace operators {
namespace {

enum : std::size_t {
    QUERY,
    KEY,
    VALUE,
    SPARSE_INDICES,
    BLOCK_TABLE,
    ACTUAL_SEQ_LENGTHS_QUERY,
    ACTUAL_SEQ_LENGTHS_KV,
    QUERY_ROPE,
    KEY_ROPE,
};
enum : std::size_t { ATTENTION_OUT, SOFTMAX_MAX, SOFTMAX_SUM };

constexpr Input INPUTS[] = {
    {"query"},
    {"key"},
    {"value"},
    {"sparse_indices"},
    {"block_table"},
    {"actual_seq_lengths_query"},
    {"actual_seq_lengths_kv"},
    {"query_rope"},
    {"key_rope"},
};
constexpr Output OUTPUTS[] = {{"attention_out"}, {"softmax_max"}, {"softmax_sum"}};

constexpr std::int64_t UNLIMITED = std::numeric_limits<std::int64_t>::max();

class SparseFlashAttention final : public Launcher {
  public:
    explicit SparseFlashAttention(const ort::Attributes& attributes)
        : scale_value_(attributes.real("scale_value", 0.0F)),
          sparse_block_size_(attributes.integer("sparse_block_size", 1)),
          layout_query_(attributes.string("layout_query", "BSND")),
          layout_kv_(attributes.string("layout_kv", "BSND")),
          sparse_mode_(attributes.integer("sparse_mode", 3)),
          pre_tokens_(attributes.integer("pre_tokens", UNLIMITED)),
          next_tokens_(attributes.integer("next_tokens", UNLIMITED)),
          attention_mode_(attributes.integer("attention_mode", 2)),
          return_softmax_lse_(attributes.integer("return_softmax_lse", 0) != 0) {}

    void infer(Inputs in, Outputs out) const override {
        const Tensor& query = in[QUERY];
        const int rank = query.shape.rank();
        Shape attention;
        for (int axis = 0; axis + 1 < rank; ++axis) {
            attention.push(query.shape[axis]);
        }
        attention.push(in[VALUE].shape[-1]);
        out[ATTENTION_OUT] = {true, nullptr, query.type, attention};
        Shape statistics{0};
        if (return_softmax_lse_) { // (B, N2, S1, N1 / N2) or (N2, T1, N1 / N2)
            const std::int64_t kv_heads = in[KEY].shape[-2];
            statistics = Shape{};
            if (rank == 4) {
                statistics.push(query.shape[0]);
            }
            statistics.push(kv_heads);
            statistics.push(query.shape[-3]);
            statistics.push(kv_heads == 0 ? 0 : query.shape[-2] / kv_heads);
        }
        out[SOFTMAX_MAX] = {return_softmax_lse_, nullptr, ACL_FLOAT, statistics};
        out[SOFTMAX_SUM] = {return_softmax_lse_, nullptr, ACL_FLOAT, statistics};
    }

    Plan plan(Inputs in, Outputs out, Arguments& args) const override {
        const auto statistic = [&](const Tensor& tensor) {
            return tensor.present ? args.nd(tensor) : args.empty(ACL_FLOAT);
        };
        Plan plan;
        planned(
            cann::functions().aclnnSparseFlashAttentionGetWorkspaceSize(
                args.nd(in[QUERY]), args.nd(in[KEY]), args.nd(in[VALUE]), args.nd(in[SPARSE_INDICES]),
                args.nd(in[BLOCK_TABLE]), args.nd(in[ACTUAL_SEQ_LENGTHS_QUERY]), args.nd(in[ACTUAL_SEQ_LENGTHS_KV]),
                args.nd(in[QUERY_ROPE]), args.nd(in[KEY_ROPE]), scale_value_, sparse_block_size_,
                const_cast<char*>(layout_query_.c_str()), const_cast<char*>(layout_kv_.c_str()), sparse_mode_,
                pre_tokens_, next_tokens_, attention_mode_, return_softmax_lse_, args.nd(out[ATTENTION_OUT]),
                statistic(out[SOFTMAX_MAX]), statistic(out[SOFTMAX_SUM]), &plan.workspace, &plan.executor
            ),
            "aclnnSparseFlashAttention"
        );
        return plan;
    }

  private:
    double scale_value_;
    std::int64_t sparse_block_size_;
    std::string layout_query_;
    std::string layout_kv_;
    std::int64_t sparse_mode_;
    std::int64_t pre_tokens_;
    std::int64_t next_tokens_;
    std::int64_t attention_mode_;
    bool return_softmax_lse_;
};

} // namespace

extern const Operator SPARSE_FLASH_ATTENTION;
const Operator SPARSE_FLASH_ATTENTION{
    "SparseFlashAttention",
    "aclnnSparseFlashAttention",
    INPUTS,
    OUTPUTS,
    [](const ort::Attributes& attributes) -> std::unique_ptr<Launcher> {
        return std::make_unique<SparseFlashAttention>(attributes);
    },
    &cann::Functions::aclnnSparseFlashAttention,
};

} // namespace operators
