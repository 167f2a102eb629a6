// MlaPrologV2WeightNz: both caches are updated in place, three weights go in FRACTAL_NZ.
#include "operators/operator.h"

namespace operators {
namespace {

enum : std::size_t {
    TOKEN_X,
    WEIGHT_DQ,
    WEIGHT_UQ_QR,
    WEIGHT_UK,
    WEIGHT_DKV_KR,
    RMSNORM_GAMMA_CQ,
    RMSNORM_GAMMA_CKV,
    ROPE_SIN,
    ROPE_COS,
    CACHE_INDEX,
    KV_CACHE,
    KR_CACHE,
    DEQUANT_SCALE_X,
    DEQUANT_SCALE_W_DQ,
    DEQUANT_SCALE_W_UQ_QR,
    DEQUANT_SCALE_W_DKV_KR,
    QUANT_SCALE_CKV,
    QUANT_SCALE_CKR,
    SMOOTH_SCALES_CQ,
};
enum : std::size_t { QUERY, QUERY_ROPE, KV_CACHE_OUT, KR_CACHE_OUT, DEQUANT_SCALE_Q_NOPE };

constexpr Input INPUTS[] = {
    {"token_x"},
    {"weight_dq", true},
    {"weight_uq_qr", true},
    {"weight_uk"},
    {"weight_dkv_kr", true},
    {"rmsnorm_gamma_cq"},
    {"rmsnorm_gamma_ckv"},
    {"rope_sin"},
    {"rope_cos"},
    {"cache_index"},
    {"kv_cache"},
    {"kr_cache"},
    {"dequant_scale_x"},
    {"dequant_scale_w_dq"},
    {"dequant_scale_w_uq_qr"},
    {"dequant_scale_w_dkv_kr"},
    {"quant_scale_ckv"},
    {"quant_scale_ckr"},
    {"smooth_scales_cq"},
};
constexpr Output OUTPUTS[] = {
    {"query"}, {"query_rope"}, {"kv_cache_out", KV_CACHE}, {"kr_cache_out", KR_CACHE}, {"dequant_scale_q_nope"},
};

class MlaPrologV2WeightNz final : public Launcher {
  public:
    explicit MlaPrologV2WeightNz(const ort::Attributes& attributes)
        : epsilon_cq_(attributes.real("rmsnorm_epsilon_cq", 1e-5F)),
          epsilon_ckv_(attributes.real("rmsnorm_epsilon_ckv", 1e-5F)),
          cache_mode_(attributes.string("cache_mode", "PA_BSND")) {}

    void infer(Inputs in, Outputs out) const override {
        const Tensor& tokens = in[TOKEN_X];
        const bool int8_query = tokens.type == ACL_INT8 && in[KV_CACHE].type == ACL_INT8;
        const aclDataType float_type = in[WEIGHT_UK].type;
        Shape query;
        std::int64_t count = 1;
        for (int axis = 0; axis + 1 < tokens.shape.rank(); ++axis) {
            query.push(tokens.shape[axis]);
            count *= tokens.shape[axis];
        }
        const std::int64_t heads = in[WEIGHT_UK].shape[0];
        query.push(heads);
        Shape rope = query;
        query.push(in[WEIGHT_UK].shape[2]);
        rope.push(in[ROPE_SIN].shape[-1]);

        out[QUERY] = {true, nullptr, int8_query ? ACL_INT8 : float_type, query};
        out[QUERY_ROPE] = {true, nullptr, float_type, rope};
        out[KV_CACHE_OUT] = {true, nullptr, in[KV_CACHE].type, in[KV_CACHE].shape};
        out[KR_CACHE_OUT] = {true, nullptr, in[KR_CACHE].type, in[KR_CACHE].shape};
        out[DEQUANT_SCALE_Q_NOPE] = {int8_query, nullptr, ACL_FLOAT, int8_query ? Shape{count, heads, 1} : Shape{0}};
    }

    Plan plan(Inputs in, Outputs out, Arguments& args) const override {
        Plan plan;
        planned(
            cann::functions().aclnnMlaPrologV2WeightNzGetWorkspaceSize(
                args.nd(in[TOKEN_X]), args.nz(in[WEIGHT_DQ]), args.nz(in[WEIGHT_UQ_QR]), args.nd(in[WEIGHT_UK]),
                args.nz(in[WEIGHT_DKV_KR]), args.nd(in[RMSNORM_GAMMA_CQ]), args.nd(in[RMSNORM_GAMMA_CKV]),
                args.nd(in[ROPE_SIN]), args.nd(in[ROPE_COS]), args.nd(in[CACHE_INDEX]), args.nd(out[KV_CACHE_OUT]),
                args.nd(out[KR_CACHE_OUT]), args.nd(in[DEQUANT_SCALE_X]), args.nd(in[DEQUANT_SCALE_W_DQ]),
                args.nd(in[DEQUANT_SCALE_W_UQ_QR]), args.nd(in[DEQUANT_SCALE_W_DKV_KR]), args.nd(in[QUANT_SCALE_CKV]),
                args.nd(in[QUANT_SCALE_CKR]), args.nd(in[SMOOTH_SCALES_CQ]), epsilon_cq_, epsilon_ckv_,
                const_cast<char*>(cache_mode_.c_str()), args.nd(out[QUERY]), args.nd(out[QUERY_ROPE]),
                args.nd(out[DEQUANT_SCALE_Q_NOPE]), &plan.workspace, &plan.executor
            ),
            "aclnnMlaPrologV2WeightNz"
        );
        return plan;
    }

  private:
    double epsilon_cq_;
    double epsilon_ckv_;
    std::string cache_mode_;
};

} // namespace

extern const Operator MLA_PROLOG_V2_WEIGHT_NZ;
const Operator MLA_PROLOG_V2_WEIGHT_NZ{
    "MlaPrologV2WeightNz",
    "aclnnMlaPrologV2WeightNz",
    INPUTS,
    OUTPUTS,
    [](const ort::Attributes& attributes) -> std::unique_ptr<Launcher> {
        return std::make_unique<MlaPrologV2WeightNz>(attributes);
    },
    &cann::Functions::aclnnMlaPrologV2WeightNz,
};

} // namespace operators
