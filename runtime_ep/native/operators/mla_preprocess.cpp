// MlaPreprocess: the device wants all 24 inputs and 4 outputs, empty tensors where there is nothing; caches in place.
#include "operators/operator.h"

namespace operators {
namespace {

enum : std::size_t {
    INPUT,
    GAMMA_0,
    BETA_0,
    QUANT_SCALE_0,
    QUANT_OFFSET_0,
    WDQKV,
    DESCALE_0,
    BIAS_0,
    GAMMA_1,
    BETA_1,
    QUANT_SCALE_1,
    QUANT_OFFSET_1,
    WUQ,
    DESCALE_1,
    BIAS_1,
    GAMMA_2,
    COS,
    SIN,
    WUK,
    KV_CACHE,
    KV_CACHE_ROPE,
    SLOT_MAPPING,
    CTKV_SCALE,
    Q_NOPE_SCALE,
};
enum : std::size_t { Q_OUT, KV_CACHE_OUT, Q_ROPE_OUT, KR_CACHE_OUT };

constexpr Input INPUTS[] = {
    {"input"},
    {"gamma_0"},
    {"beta_0"},
    {"quant_scale_0"},
    {"quant_offset_0"},
    {"wdqkv", true},
    {"descale_0"},
    {"bias_0"},
    {"gamma_1"},
    {"beta_1"},
    {"quant_scale_1"},
    {"quant_offset_1"},
    {"wuq", true},
    {"descale_1"},
    {"bias_1"},
    {"gamma_2"},
    {"cos"},
    {"sin"},
    {"wuk"},
    {"kv_cache"},
    {"kv_cache_rope"},
    {"slot_mapping"},
    {"ctkv_scale"},
    {"q_nope_scale"},
};
constexpr Output OUTPUTS[] = {
    {"q_out"},
    {"kv_cache_out", KV_CACHE},
    {"q_rope_out"},
    {"kr_cache_out", KV_CACHE_ROPE},
};

class MlaPreprocess final : public Launcher {
  public:
    explicit MlaPreprocess(const ort::Attributes& attributes)
        : wdq_dim_(attributes.integer("wdq_dim", 1536)),
          q_rope_dim_(attributes.integer("q_rope_dim", 64)),
          k_rope_dim_(attributes.integer("k_rope_dim", 64)),
          epsilon_(attributes.real("epsilon", 1e-6F)),
          q_rotary_coeff_(attributes.integer("q_rotary_coeff", 2)),
          k_rotary_coeff_(attributes.integer("k_rotary_coeff", 2)),
          transpose_wdq_(attributes.integer("transpose_wdq", 1) != 0),
          transpose_wuq_(attributes.integer("transpose_wuq", 1) != 0),
          transpose_wuk_(attributes.integer("transpose_wuk", 1) != 0),
          cache_mode_(attributes.integer("cache_mode", 0)),
          quant_mode_(attributes.integer("quant_mode", 0)),
          do_rms_norm_(attributes.integer("do_rms_norm", 1) != 0),
          wdkv_split_count_(attributes.integer("wdkv_split_count", 1)) {}

    void infer(Inputs in, Outputs out) const override {
        const Shape& wuk = in[WUK].shape;
        const std::int64_t tokens = in[INPUT].shape[0];
        const std::int64_t rank = wuk.rank() == 4 ? wuk[1] * wuk[3] : wuk[2];
        const std::int64_t rope = in[COS].shape[1];
        const bool split = cache_mode_ != 0;
        out[Q_OUT] = {true, nullptr, in[KV_CACHE].type, {tokens, wuk[0], split ? rank : rank + rope}};
        out[KV_CACHE_OUT] = {true, nullptr, in[KV_CACHE].type, in[KV_CACHE].shape};
        out[Q_ROPE_OUT] = {split, nullptr, in[INPUT].type, split ? Shape{tokens, wuk[0], rope} : Shape{0}};
        out[KR_CACHE_OUT] = {split, nullptr, in[INPUT].type, split ? in[KV_CACHE_ROPE].shape : Shape{0}};
    }

    Plan plan(Inputs in, Outputs out, Arguments& args) const override {
        const aclDataType float_type = in[INPUT].type;
        const aclDataType descale_type = float_type == ACL_FLOAT16 ? ACL_INT64 : ACL_FLOAT;
        const aclFormat cache_format = cache_mode_ >= 2 ? ACL_FORMAT_FRACTAL_NZ : ACL_FORMAT_ND;
        const auto given = [&](const Tensor& tensor, aclDataType type) {
            return tensor.present && tensor.shape.elements() > 0 ? args.nd(tensor) : args.empty(type);
        };
        const auto cache = [&](const Tensor& tensor) {
            return tensor.present ? args.with_format(tensor, cache_format) : args.empty(float_type);
        };
        Plan plan;
        planned(
            cann::functions().aclnnMlaPreprocessGetWorkspaceSize(
                args.nd(in[INPUT]), given(in[GAMMA_0], float_type), given(in[BETA_0], float_type),
                given(in[QUANT_SCALE_0], float_type), given(in[QUANT_OFFSET_0], ACL_INT8), args.nz(in[WDQKV]),
                given(in[DESCALE_0], descale_type), given(in[BIAS_0], ACL_INT32), given(in[GAMMA_1], float_type),
                given(in[BETA_1], float_type), given(in[QUANT_SCALE_1], float_type),
                given(in[QUANT_OFFSET_1], ACL_INT8), args.nz(in[WUQ]), given(in[DESCALE_1], descale_type),
                given(in[BIAS_1], ACL_INT32), given(in[GAMMA_2], float_type), given(in[COS], float_type),
                given(in[SIN], float_type), args.heads(in[WUK]), cache(out[KV_CACHE_OUT]), cache(out[KR_CACHE_OUT]),
                args.nd(in[SLOT_MAPPING]), given(in[CTKV_SCALE], float_type), given(in[Q_NOPE_SCALE], float_type),
                wdq_dim_, q_rope_dim_, k_rope_dim_, epsilon_, q_rotary_coeff_, k_rotary_coeff_, transpose_wdq_,
                transpose_wuq_, transpose_wuk_, cache_mode_, quant_mode_, do_rms_norm_, wdkv_split_count_,
                args.nd(out[Q_OUT]), cache(out[KV_CACHE_OUT]), given(out[Q_ROPE_OUT], float_type),
                cache(out[KR_CACHE_OUT]), &plan.workspace, &plan.executor
            ),
            "aclnnMlaPreprocess"
        );
        return plan;
    }

  private:
    std::int64_t wdq_dim_;
    std::int64_t q_rope_dim_;
    std::int64_t k_rope_dim_;
    double epsilon_;
    std::int64_t q_rotary_coeff_;
    std::int64_t k_rotary_coeff_;
    bool transpose_wdq_;
    bool transpose_wuq_;
    bool transpose_wuk_;
    std::int64_t cache_mode_;
    std::int64_t quant_mode_;
    bool do_rms_norm_;
    std::int64_t wdkv_split_count_;
};

} // namespace

extern const Operator MLA_PREPROCESS;
const Operator MLA_PREPROCESS{
    "MlaPreprocess",
    "aclnnMlaPreprocess",
    INPUTS,
    OUTPUTS,
    [](const ort::Attributes& attributes) -> std::unique_ptr<Launcher> {
        return std::make_unique<MlaPreprocess>(attributes);
    },
    &cann::Functions::aclnnMlaPreprocess,
};

} // namespace operators
