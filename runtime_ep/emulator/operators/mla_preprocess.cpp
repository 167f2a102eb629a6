// aclnnMlaPreprocess: its argument rules. Source: aclnnMlaPreprocess, parameter table, status codes and constraints;
// GE operator MlaPreprocess, tiling.
#include "operators/mla_preprocess.h"

#include "aclnn/rules.h"
#include "control/misuse.h"

#include <algorithm>
#include <string_view>

using namespace ascend_emulator;
using namespace ascend_emulator::mla_preprocess;

namespace {

constexpr std::string_view launch_name = "aclnnMlaPreprocess";
constexpr std::int32_t invalid = ACLNN_ERR_PARAM_INVALID;
constexpr std::int32_t tiling = ACLNN_ERR_INNER_TILING_ERROR;
constexpr std::size_t weights[] = {wdqkv, wuq};
constexpr std::int64_t block_count = 192;
constexpr std::int64_t block_size = 128;

// The attributes as they come. Those not among them are read by no kernel.
struct Attributes {
    std::int64_t cache_mode;
    std::int64_t quant_mode;
    bool do_rms_norm;

    bool fractal_cache() const { return cache_mode == int8_nz || cache_mode == nz; }
};

bool int8_weights(const Arguments& arguments) {
    return arguments[wdqkv].type == ACL_INT8;
}

// All inputs must be given; which of them may be empty depends on the mode.
void check_given(const Arguments& arguments, const Attributes& attributes) {
    for (std::size_t index = input; index <= q_nope_scale; ++index) {
        if (index != kv_cache_rope || attributes.cache_mode != joined) {
            arguments.require_given({index});
        }
    }
    arguments.require_given({q_out, kv_cache_out});
    if (attributes.cache_mode != joined) {
        arguments.require_given({q_rope_out, kr_cache_out});
    }
}

void require_content(const Arguments& arguments, std::initializer_list<std::size_t> indices, std::string_view reason) {
    for (const std::size_t index : indices) {
        require(
            arguments.filled(index), ACLNN_ERR_PARAM_NULLPTR,
            text(arguments.name(index), " must be given with ", reason, ", got an empty tensor")
        );
    }
}

void check_content(const Arguments& arguments, const Attributes& attributes) {
    require_content(arguments, {gamma_1, gamma_2, wdqkv, wuq, wuk}, "every mode");
    if (int8_weights(arguments)) {
        require_content(
            arguments, {quant_scale_0, quant_scale_1, quant_offset_0, quant_offset_1, descale_0, descale_1},
            "INT8 weights"
        );
        if (attributes.do_rms_norm) {
            require_content(arguments, {gamma_0}, "doRmsNorm");
        }
    }
    if (attributes.cache_mode == int8_nz) {
        require_content(arguments, {ctkv_scale, q_nope_scale}, "cacheMode 2");
    }
}

// The type of an input, unless it is empty and stands for none.
void require_type_if_filled(const Arguments& arguments, std::size_t index, aclDataType type) {
    if (arguments.filled(index)) {
        arguments.require_type(index, {type});
    }
}

void check_types(const Arguments& arguments, const Attributes& attributes) {
    arguments.require_type(input, {ACL_FLOAT16, ACL_BF16});
    const aclDataType type = arguments[input].type;
    for (const std::size_t index :
         {gamma_0, beta_0, quant_scale_0, gamma_1, beta_1, quant_scale_1, gamma_2, cos, sin, wuk, ctkv_scale,
          q_nope_scale}) {
        require_type_if_filled(arguments, index, type);
    }
    for (const std::size_t index : weights) {
        arguments.require_type(index, {ACL_INT8, ACL_FLOAT16, ACL_BF16});
        arguments.require_type(index, {arguments[wdqkv].type});
        require(
            int8_weights(arguments) || (arguments[index].type == ACL_BF16 && type == ACL_BF16), tiling,
            text(arguments.name(index), " must be INT8, or BFLOAT16 as input is")
        );
    }
    for (const std::size_t index : {quant_offset_0, quant_offset_1}) {
        require_type_if_filled(arguments, index, ACL_INT8);
    }
    for (const std::size_t index : {bias_0, bias_1}) {
        require_type_if_filled(arguments, index, ACL_INT32);
    }
    for (const std::size_t index : {descale_0, descale_1}) {
        require_type_if_filled(arguments, index, type == ACL_FLOAT16 ? ACL_INT64 : ACL_FLOAT);
    }
    arguments.require_type(slot_mapping, {ACL_INT32});
    for (const std::size_t index : {kv_cache, kv_cache_out, q_out}) {
        arguments.require_type(index, {attributes.cache_mode == int8_nz ? ACL_INT8 : type});
    }
    if (attributes.cache_mode != joined) {
        for (const std::size_t index : {kv_cache_rope, kr_cache_out, q_rope_out}) {
            arguments.require_type(index, {type});
        }
    }
}

bool is_weight(std::size_t index) {
    return index == wdqkv || index == wuq || index == wuk;
}

bool is_cache(std::size_t index) {
    return index == kv_cache || index == kv_cache_rope || index == kv_cache_out || index == kr_cache_out;
}

// A cache may leave room between its blocks.
void require_contiguous_blocks(const Arguments& arguments, std::size_t index) {
    if (!arguments.given(index)) {
        return;
    }
    Description block = arguments[index];
    block.strides[0] = block.shape.strides()[0];
    const auto got = arguments[index].strides.to_string();
    require(
        block.contiguous() && (arguments[index].contiguous() || arguments[index].strides[0] >= block.strides[0]),
        invalid, text(arguments.name(index), " may have gaps between blocks only, got the strides ", got)
    );
}

void check_storage(const Arguments& arguments) {
    for (std::size_t index = input; index < arguments.size(); ++index) {
        if (is_cache(index)) {
            arguments.require_format(index, {ACL_FORMAT_ND, ACL_FORMAT_FRACTAL_NZ});
            require_contiguous_blocks(arguments, index);
        } else if (!is_weight(index)) {
            arguments.require_format(index, {ACL_FORMAT_ND});
            arguments.require_contiguous(index);
        }
    }
    for (const std::size_t index : weights) {
        arguments.require_format(index, {ACL_FORMAT_FRACTAL_NZ});
        const auto [n, k] = dimensions(arguments[index]);
        const std::int64_t width = fractal_width(arguments[index].type);
        const Shape& got = arguments[index].storage;
        const bool fractals = got == Shape{k / width, n, width} || got == Shape{k / width, n / 16, 16, width};
        require(
            k % width == 0 && n % 16 == 0 && fractals, invalid,
            text(
                arguments.name(index), " must be stored as fractals ", Shape{k / width, n / 16, 16, width}.to_string(),
                ", got ", got.to_string()
            )
        );
    }
    arguments.require_format(wuk, {ACL_FORMAT_ND, ACL_FORMAT_FRACTAL_NZ});
    const bool packed = arguments[wuk].format == ACL_FORMAT_FRACTAL_NZ;
    const Shape absorb = absorbed_dimensions(arguments[wuk]);
    const std::int64_t width = fractal_width(arguments[wuk].type);
    const Shape fractals{absorb[0], absorb[2] / width, absorb[1], width};
    require(
        packed ? absorb[2] % width == 0 && arguments[wuk].storage == fractals : arguments[wuk].shape.rank() == 3,
        invalid,
        text(
            "wuk must be (N, D, 512), or stored as ", fractals.to_string(), ", got ", arguments[wuk].storage.to_string()
        )
    );
}

void check_ranks(const Arguments& arguments, const Attributes& attributes) {
    for (const std::size_t index : {input, cos, sin}) {
        arguments.require_rank(index, 2);
    }
    arguments.require_rank(slot_mapping, 1);
    for (const std::size_t index : weights) {
        const std::size_t got = arguments[index].shape.rank();
        require(2 <= got && got <= 4, invalid, text(arguments.name(index), " must have 2 to 4 dimensions, got ", got));
    }
    const std::size_t got = arguments[wuk].shape.rank();
    require(got == 3 || got == 4, invalid, text("wuk must have 3 or 4 dimensions, got ", got));
    arguments.require_rank(kv_cache, 4);
    if (attributes.cache_mode != joined) {
        arguments.require_rank(kv_cache_rope, 4);
    }
}

void require_multiple(
    std::string_view what, std::int64_t got, std::int64_t unit, std::int64_t first, std::int64_t last, bool relaxed
) {
    require(
        relaxed || (got % unit == 0 && first <= got && got <= last), tiling,
        text(what, " must be a multiple of ", unit, " from ", first, " to ", last, ", got ", got)
    );
}

// A vector of `size` elements, which may come as a matrix of one row; empty where it is not used.
void require_vector(const Arguments& arguments, std::size_t index, std::int64_t size) {
    if (arguments.filled(index)) {
        const std::int64_t got = arguments[index].shape.elements();
        require(got == size, tiling, text(arguments.name(index), " must have ", size, " elements, got ", got));
    }
}

void check_sizes(const Arguments& arguments) {
    const std::int64_t tokens = arguments[input].shape[0];
    const std::int64_t hidden = arguments[input].shape[1];
    const std::int64_t low_rank = arguments[gamma_1].shape.elements();
    const std::int64_t latent = arguments[gamma_2].shape.elements();
    const std::int64_t rope = arguments[cos].shape[1];
    const Shape absorb = absorbed_dimensions(arguments[wuk]);
    const Settings& relaxed = settings();
    require_multiple("tokenNum", tokens, 1, 0, 256, false);
    require_multiple("hiddenSize", hidden, 256, 2048, 10240, relaxed.relax_hidden);
    require_multiple("qLoraDim", low_rank, 32, 32, 4096, relaxed.relax_rank);
    require_multiple("headNum", absorb[0], 1, 1, 128, false);
    require_multiple("qNoRopeDim", absorb[1], 16, 16, 256, relaxed.relax_head_dim);
    require(relaxed.relax_rank || latent == 512, tiling, text("gamma2 must have 512 elements, got ", latent));
    require(relaxed.relax_head_dim || rope == 64, tiling, text("the last dimension of cos must be 64, got ", rope));

    const std::int64_t down = latent + rope + low_rank;
    const std::int64_t up = absorb[0] * (absorb[1] + rope);
    const Dimensions of_down = dimensions(arguments[wdqkv]);
    const Dimensions of_up = dimensions(arguments[wuq]);
    require(
        of_down.n == down && of_down.k == hidden, tiling,
        text("wdqkv must be (", down, ", ", hidden, "), got (", of_down.n, ", ", of_down.k, ")")
    );
    require(
        of_up.n == up && of_up.k == low_rank, tiling,
        text("wuq must be (", up, ", ", low_rank, "), got (", of_up.n, ", ", of_up.k, ")")
    );
    require(absorb[2] == latent, tiling, text("wuk must be (N, D, ", latent, "), got ", absorb.to_string()));
    arguments.require_shape(cos, {tokens, rope}, tiling);
    arguments.require_shape(sin, {tokens, rope}, tiling);
    arguments.require_shape(slot_mapping, {tokens}, tiling);
    for (const std::size_t index : {gamma_0, beta_0}) {
        require_vector(arguments, index, hidden);
    }
    for (const std::size_t index : {quant_scale_0, quant_offset_0, quant_scale_1, quant_offset_1, ctkv_scale}) {
        require_vector(arguments, index, 1);
    }
    for (const std::size_t index : {descale_0, bias_0}) {
        require_vector(arguments, index, down);
    }
    for (const std::size_t index : {descale_1, bias_1}) {
        require_vector(arguments, index, up);
    }
    require_vector(arguments, beta_1, low_rank);
    require_vector(arguments, q_nope_scale, absorb[0]);
}

// A cache (BlockNum, BlockSize, 1, width), or in fractals (BlockNum, width / c0, BlockSize, c0), and its output.
void check_cache(
    const Arguments& arguments, const Attributes& attributes, std::size_t index, std::size_t output, std::int64_t width
) {
    const Shape& got = arguments[index].shape;
    const std::int64_t c0 = fractal_width(arguments[index].type);
    const Shape expected =
        attributes.fractal_cache() ? Shape{got[0], width / c0, block_size, c0} : Shape{got[0], block_size, 1, width};
    arguments.require_shape(index, expected, tiling);
    require(
        settings().relax_hidden || got[0] == block_count, tiling,
        text("blockNum of ", arguments.name(index), " must be ", block_count, ", got ", got[0])
    );
    arguments.require_shape(output, expected, tiling);
}

void check_outputs(const Arguments& arguments, const Attributes& attributes) {
    const std::int64_t tokens = arguments[input].shape[0];
    const std::int64_t latent = arguments[gamma_2].shape.elements();
    const std::int64_t rope = arguments[cos].shape[1];
    const std::int64_t heads = absorbed_dimensions(arguments[wuk])[0];
    const bool is_joined = attributes.cache_mode == joined;
    check_cache(arguments, attributes, kv_cache, kv_cache_out, is_joined ? latent + rope : latent);
    arguments.require_shape(q_out, {tokens, heads, is_joined ? latent + rope : latent}, tiling);
    if (!is_joined) {
        check_cache(arguments, attributes, kv_cache_rope, kr_cache_out, rope);
        require(
            arguments[kv_cache].shape[0] == arguments[kv_cache_rope].shape[0], tiling,
            "kvCache and kvCacheRope must have as many blocks as each other"
        );
        arguments.require_shape(q_rope_out, {tokens, heads, rope}, tiling);
    }
}

void check(const Arguments& arguments, const Attributes& attributes) {
    check_given(arguments, attributes);
    check_types(arguments, attributes);
    check_content(arguments, attributes);
    check_ranks(arguments, attributes);
    check_storage(arguments);
    check_sizes(arguments);
    check_outputs(arguments, attributes);
}

std::uint64_t workspace_size(const Arguments& arguments) {
    const std::int64_t row = dimensions(arguments[wdqkv]).n + dimensions(arguments[wuq]).n;
    return std::uint64_t(arguments[input].shape[0] * row) * sizeof(float);
}

} // namespace

aclnnStatus aclnnMlaPreprocessGetWorkspaceSize(
    const aclTensor* inputTensor, const aclTensor* gamma0, const aclTensor* beta0, const aclTensor* quantScale0,
    const aclTensor* quantOffset0, const aclTensor* wdqkvTensor, const aclTensor* deScale0, const aclTensor* bias0,
    const aclTensor* gamma1, const aclTensor* beta1, const aclTensor* quantScale1, const aclTensor* quantOffset1,
    const aclTensor* wuqTensor, const aclTensor* deScale1, const aclTensor* bias1, const aclTensor* gamma2,
    const aclTensor* cosTensor, const aclTensor* sinTensor, const aclTensor* wukTensor, const aclTensor* kvCache,
    const aclTensor* kvCacheRope, const aclTensor* slotMapping, const aclTensor* ctkvScale, const aclTensor* qNopeScale,
    std::int64_t wdqDim, std::int64_t qRopeDim, std::int64_t kRopeDim, double, std::int64_t qRotaryCoeff,
    std::int64_t kRotaryCoeff, bool transposeWdq, bool transposeWuq, bool transposeWuk, std::int64_t cacheMode,
    std::int64_t quantMode, bool doRmsNorm, std::int64_t wdkvSplitCount, const aclTensor* qOut,
    const aclTensor* kvCacheOut, const aclTensor* qRopeOut, const aclTensor* krCacheOut, std::uint64_t* workspaceSize,
    aclOpExecutor** executor
) {
    return guarded<"aclnnMlaPreprocessGetWorkspaceSize">([&] {
        constexpr auto output = Argument::Role::Output;
        Arguments arguments{
            launch_name,
            {
                {"input", inputTensor},
                {"gamma0", gamma0},
                {"beta0", beta0},
                {"quantScale0", quantScale0},
                {"quantOffset0", quantOffset0},
                {"wdqkv", wdqkvTensor},
                {"deScale0", deScale0},
                {"bias0", bias0},
                {"gamma1", gamma1},
                {"beta1", beta1},
                {"quantScale1", quantScale1},
                {"quantOffset1", quantOffset1},
                {"wuq", wuqTensor},
                {"deScale1", deScale1},
                {"bias1", bias1},
                {"gamma2", gamma2},
                {"cos", cosTensor},
                {"sin", sinTensor},
                {"wuk", wukTensor},
                {"kvCache", kvCache},
                {"kvCacheRope", kvCacheRope},
                {"slotMapping", slotMapping},
                {"ctkvScale", ctkvScale},
                {"qNopeScale", qNopeScale},
                {"qOut", qOut, output},
                {"kvCacheOut", kvCacheOut, output},
                {"qRopeOut", qRopeOut, output},
                {"krCacheOut", krCacheOut, output},
            },
        };
        require_results(workspaceSize, executor);
        require_product("MlaPreprocess", {Product::A2, Product::A3});
        require_one_of("wdqDim", wdqDim, {1536}, invalid);
        require_one_of("qRopeDim", qRopeDim, {64}, invalid);
        require_one_of("kRopeDim", kRopeDim, {64}, invalid);
        require_one_of("qRotaryCoeff", qRotaryCoeff, {2}, invalid);
        require_one_of("kRotaryCoeff", kRotaryCoeff, {2}, invalid);
        require(transposeWdq && transposeWuq && transposeWuk, invalid, "the transpose flags must be true");
        require_one_of("cacheMode", cacheMode, {0, 1, 2, 3}, invalid);
        require_one_of("quantMode", quantMode, {0}, invalid);
        require_one_of("wdkvSplitCount", wdkvSplitCount, {1}, invalid);
        check(arguments, {cacheMode, quantMode, doRmsNorm});
        const Configuration call{cacheMode, doRmsNorm};
        const std::uint64_t workspace = workspace_size(arguments);
        create_executor(
            launch_name, std::move(arguments).take(), workspace,
            [call](const std::vector<Operand>& operands) { run(operands, call); }, workspaceSize, executor
        );
    });
}

aclnnStatus
aclnnMlaPreprocess(void* workspace, std::uint64_t workspaceSize, aclOpExecutor* executor, aclrtStream stream) {
    return guarded<"aclnnMlaPreprocess">(
        [&] { launch(launch_name, workspace, workspaceSize, executor, stream); },
        [&] { drop_executor(launch_name, executor); }
    );
}
