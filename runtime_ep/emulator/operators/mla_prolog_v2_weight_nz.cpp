// aclnnMlaPrologV2WeightNz: its argument rules. Source: aclnnMlaPrologV2WeightNz, Parameters, Return Value, Shape
// constraints and scenario tables.
#include "operators/mla_prolog_v2_weight_nz.h"

#include "aclnn/rules.h"
#include "control/misuse.h"

#include <algorithm>
#include <string_view>

using namespace ascend_emulator;
using namespace ascend_emulator::mla_prolog;

namespace {

constexpr std::string_view launch_name = "aclnnMlaPrologV2WeightNz";
constexpr std::int32_t invalid = ACLNN_ERR_PARAM_INVALID;
constexpr std::int32_t tiling = ACLNN_ERR_INNER_TILING_ERROR;
constexpr std::size_t packed[] = {weight_dq, weight_uq_qr, weight_dkv_kr};
constexpr std::int64_t most_tokens = 1048576;
constexpr std::int64_t most_batches = 65536;
constexpr std::int64_t low_rank = 1536;
constexpr std::int64_t latent = 512;
constexpr std::int64_t nope = 128;
constexpr std::int64_t rope = 64;

// Which inputs are int8 in a scenario, and which scales it needs; all other scales must be absent.
struct Scenario {
    std::vector<std::size_t> int8;
    std::vector<std::size_t> scales;
};

const std::vector<Scenario>& scenarios() {
    static const std::vector<std::size_t> full = {
        dequant_scale_x, dequant_scale_w_dq, dequant_scale_w_uq_qr, dequant_scale_w_dkv_kr
    };
    static const std::vector<std::size_t> full_kv = {
        dequant_scale_x, dequant_scale_w_dq, dequant_scale_w_uq_qr, dequant_scale_w_dkv_kr, quant_scale_ckv
    };
    static const std::vector<Scenario> all = {
        {{}, {}},
        {{weight_uq_qr}, {dequant_scale_w_uq_qr}},
        {{weight_uq_qr, kv_cache, kr_cache}, {dequant_scale_w_uq_qr, quant_scale_ckv, quant_scale_ckr}},
        {{token_x, weight_dq, weight_uq_qr, weight_dkv_kr}, full},
        {{token_x, weight_dq, weight_uq_qr, weight_dkv_kr, kv_cache}, full_kv},
    };
    return all;
}

bool contains(const std::vector<std::size_t>& indices, std::size_t index) {
    return std::find(indices.begin(), indices.end(), index) != indices.end();
}

bool full_int8(const Arguments& arguments) {
    return arguments[token_x].type == ACL_INT8 && arguments[kv_cache].type == ACL_INT8;
}

void check_types(const Arguments& arguments) {
    for (const std::size_t index : {token_x, weight_dq, weight_uq_qr, weight_dkv_kr, kv_cache, kr_cache}) {
        arguments.require_type(index, {ACL_BF16, ACL_INT8});
    }
    for (const std::size_t index : {weight_uk, rmsnorm_gamma_cq, rmsnorm_gamma_ckv, rope_sin, rope_cos, query_rope}) {
        arguments.require_type(index, {ACL_BF16});
    }
    arguments.require_type(cache_index, {ACL_INT64});
    for (std::size_t index = dequant_scale_x; index <= smooth_scales_cq; ++index) {
        arguments.require_type(index, {ACL_FLOAT});
    }
    arguments.require_type(query, {full_int8(arguments) ? ACL_INT8 : ACL_BF16});
    arguments.require_type(dequant_scale_q_nope, {ACL_FLOAT});
}

void check_scenario(const Arguments& arguments) {
    std::vector<std::size_t> int8;
    for (const std::size_t index : {token_x, weight_dq, weight_uq_qr, weight_dkv_kr, kv_cache, kr_cache}) {
        if (arguments[index].type == ACL_INT8) {
            int8.push_back(index);
        }
    }
    const auto& all = scenarios();
    const auto found = std::find_if(all.begin(), all.end(), [&](const Scenario& s) { return s.int8 == int8; });
    if (found == all.end()) {
        std::string names;
        for (const std::size_t index : int8) {
            names += text(names.empty() ? "" : ", ", arguments.name(index));
        }
        fail(invalid, text("no quantisation scenario has exactly these INT8 inputs: ", names));
    }
    for (std::size_t index = dequant_scale_x; index <= quant_scale_ckr; ++index) {
        const bool needed = contains(found->scales, index);
        require(
            arguments.given(index) == needed, invalid,
            text(arguments.name(index), needed ? " must be given in this scenario" : " must be absent in this scenario")
        );
    }
    require(
        !int8.empty() || !arguments.given(smooth_scales_cq), invalid,
        "smoothScalesCqOptional must be absent where nothing is quantised"
    );
}

void check_ranks(const Arguments& arguments) {
    const std::size_t rank = arguments[token_x].shape.rank();
    require(
        rank == 2 || rank == 3, invalid,
        text("tokenX must be (T, He) or (B, S, He), got ", arguments[token_x].shape.to_string())
    );
    for (const std::size_t index : {rope_sin, rope_cos}) {
        arguments.require_rank(index, rank);
    }
    arguments.require_rank(cache_index, rank - 1);
    arguments.require_rank(kv_cache, 4);
    arguments.require_rank(kr_cache, 4);
    arguments.require_rank(weight_uk, 3);
    arguments.require_rank(rmsnorm_gamma_cq, 1);
    arguments.require_rank(rmsnorm_gamma_ckv, 1);
    for (const std::size_t index : packed) {
        const std::size_t got = arguments[index].shape.rank();
        require(got == 2 || got == 4, invalid, text(arguments.name(index), " must have 2 or 4 dimensions, got ", got));
    }
}

void check_storage(const Arguments& arguments) {
    for (const std::size_t index : packed) {
        arguments.require_format(index, {ACL_FORMAT_FRACTAL_NZ});
        arguments.require_filled(index);
        const auto [k, n] = dimensions(arguments[index]);
        const std::int64_t width = fractal_width(arguments[index].type);
        const Shape expected{n / width, k / 16, 16, width};
        require(
            k % 16 == 0 && n % width == 0 && arguments[index].storage == expected, invalid,
            text(
                arguments.name(index), " must be stored as fractals ", expected.to_string(), ", got ",
                arguments[index].storage.to_string()
            )
        );
    }
    for (const std::size_t index : {weight_uk, rmsnorm_gamma_cq, rmsnorm_gamma_ckv}) {
        arguments.require_filled(index);
    }
}

void require_size(
    const Arguments& arguments, std::size_t index, std::size_t axis, std::string_view letter, std::int64_t expected,
    bool relaxed
) {
    const bool is_packed = std::find(std::begin(packed), std::end(packed), index) != std::end(packed);
    const Dimensions of_weight = is_packed ? dimensions(arguments[index]) : Dimensions{};
    const std::int64_t got = is_packed ? (axis == 0 ? of_weight.k : of_weight.n) : arguments[index].shape[axis];
    require(
        relaxed || got == expected, tiling,
        text(letter, " (axis ", axis, " of ", arguments.name(index), ") must be ", expected, ", got ", got)
    );
}

// Sizes that the device knows only some of.
void check_sizes(const Arguments& arguments) {
    const Shape& tokens = arguments[token_x].shape;
    const bool batched = tokens.rank() == 3;
    require(
        tokens[0] <= (batched ? most_batches : most_tokens), tiling,
        text(batched ? "B" : "T", " must be at most ", batched ? most_batches : most_tokens, ", got ", tokens[0])
    );
    if (!settings().relax_hidden) {
        const auto sizes = {1024L, 2048L, 3072L, 4096L, 5120L, 6144L, 7168L, 7680L, 8192L};
        const bool known = std::find(sizes.begin(), sizes.end(), tokens.back()) != sizes.end();
        require(known, tiling, text("He must be 1024, 2048, ..., 7168, 7680 or 8192, got ", tokens.back()));
    }
    const std::int64_t heads = arguments[weight_uk].shape[0];
    require_one_of("N (axis 0 of weightUk)", heads, {1, 2, 4, 8, 16, 32, 64, 128}, tiling);
    const bool relax_rank = settings().relax_rank;
    const bool relax_head = settings().relax_head_dim;
    require_size(arguments, rmsnorm_gamma_cq, 0, "Hcq", low_rank, relax_rank);
    require_size(arguments, rmsnorm_gamma_ckv, 0, "Hckv", latent, relax_rank);
    require_size(arguments, weight_uk, 1, "D", nope, relax_head);
    require_size(arguments, rope_cos, tokens.rank() - 1, "Dr", rope, relax_head);

    const std::int64_t rank = arguments[rmsnorm_gamma_cq].shape[0];
    const std::int64_t width = arguments[rmsnorm_gamma_ckv].shape[0];
    const std::int64_t lanes = arguments[rope_cos].shape.back();
    require_size(arguments, weight_dq, 1, "Hcq", rank, false);
    require_size(arguments, weight_uq_qr, 0, "Hcq", rank, false);
    require_size(arguments, weight_uk, 2, "Hckv", width, false);
    require_size(arguments, kv_cache, 3, "Hckv", width, false);
    require_size(arguments, kr_cache, 3, "Dr", lanes, false);
    require_size(arguments, weight_uq_qr, 1, "N * (D + Dr)", heads * (arguments[weight_uk].shape[1] + lanes), false);
    require_size(arguments, weight_dkv_kr, 1, "Hckv + Dr", width + lanes, false);
    for (const std::size_t index : {kv_cache, kr_cache}) {
        require_size(arguments, index, 2, "Nkv", 1, false);
        const std::int64_t block = arguments[index].shape[1];
        require(
            block % 16 == 0 && 16 <= block && block <= 1024, tiling,
            text("BlockSize of ", arguments.name(index), " must be a multiple of 16 from 16 to 1024, got ", block)
        );
    }
}

// Sizes that must agree, whatever they are.
void check_agreement(const Arguments& arguments) {
    const Shape& tokens = arguments[token_x].shape;
    for (const std::size_t index : {weight_dq, weight_dkv_kr}) {
        const std::int64_t got = dimensions(arguments[index]).k;
        require(
            got == tokens.back(), invalid,
            text(arguments.name(index), " must have He rows, ", tokens.back(), ", got ", got)
        );
    }
    const Shape leading = tokens.head(tokens.rank() - 1);
    arguments.require_shape(cache_index, leading);
    arguments.require_shape(rope_sin, arguments[rope_cos].shape);
    require(
        arguments[rope_cos].shape.head(leading.rank()) == leading, invalid,
        text(
            "ropeCos must have the tokens of tokenX, ", leading.to_string(), ", got ",
            arguments[rope_cos].shape.to_string()
        )
    );
    require(
        arguments[kv_cache].shape.head(2) == arguments[kr_cache].shape.head(2), invalid,
        text(
            "kvCacheRef and krCacheRef must have the same blocks, got ", arguments[kv_cache].shape.to_string(), " and ",
            arguments[kr_cache].shape.to_string()
        )
    );
    arguments.require_shape(dequant_scale_x, {leading.elements(), 1});
    arguments.require_shape(dequant_scale_w_dq, {1, dimensions(arguments[weight_dq]).n});
    arguments.require_shape(dequant_scale_w_uq_qr, {1, dimensions(arguments[weight_uq_qr]).n});
    arguments.require_shape(dequant_scale_w_dkv_kr, {1, dimensions(arguments[weight_dkv_kr]).n});
    arguments.require_shape(quant_scale_ckv, {1, arguments[kv_cache].shape[3]});
    arguments.require_shape(quant_scale_ckr, {1, arguments[kr_cache].shape[3]});
    arguments.require_shape(smooth_scales_cq, {1, arguments[rmsnorm_gamma_cq].shape[0]});
}

void check_outputs(const Arguments& arguments) {
    const Shape& tokens = arguments[token_x].shape;
    const std::int64_t heads = arguments[weight_uk].shape[0];
    const Shape leading = tokens.head(tokens.rank() - 1);
    const bool batched = leading.rank() == 2;
    const auto shape = [&](std::int64_t width) {
        return batched ? Shape{leading[0], leading[1], heads, width} : Shape{leading[0], heads, width};
    };
    arguments.require_shape(query, shape(arguments[weight_uk].shape[2]));
    arguments.require_shape(query_rope, shape(arguments[rope_cos].shape.back()));
    if (full_int8(arguments)) {
        arguments.require_given({dequant_scale_q_nope});
        arguments.require_shape(dequant_scale_q_nope, {leading.elements(), heads, 1});
    }
}

void check(const Arguments& arguments, std::string_view cache_mode) {
    require_product("MlaPrologV2", {Product::A2, Product::A3});
    for (std::size_t index = token_x; index <= kr_cache; ++index) {
        arguments.require_given({index});
    }
    arguments.require_given({query, query_rope});
    check_types(arguments);
    check_scenario(arguments);
    require(
        cache_mode == "PA_BSND" || cache_mode == "PA_NZ", invalid,
        text("cacheModeOptional must be PA_BSND or PA_NZ, got ", cache_mode)
    );
    check_ranks(arguments);
    check_storage(arguments);
    arguments.require_plain({weight_dq, weight_uq_qr, weight_dkv_kr});
    check_agreement(arguments);
    check_sizes(arguments);
    check_outputs(arguments);
}

std::uint64_t workspace_size(const Arguments& arguments) {
    const Shape& tokens = arguments[token_x].shape;
    const std::int64_t count = tokens.head(tokens.rank() - 1).elements();
    const std::int64_t row = arguments[rmsnorm_gamma_cq].shape[0] + dimensions(arguments[weight_uq_qr]).n;
    return std::uint64_t(count * row) * sizeof(float);
}

} // namespace

aclnnStatus aclnnMlaPrologV2WeightNzGetWorkspaceSize(
    const aclTensor* tokenX, const aclTensor* weightDq, const aclTensor* weightUqQr, const aclTensor* weightUk,
    const aclTensor* weightDkvKr, const aclTensor* rmsnormGammaCq, const aclTensor* rmsnormGammaCkv,
    const aclTensor* ropeSin, const aclTensor* ropeCos, const aclTensor* cacheIndex, aclTensor* kvCacheRef,
    aclTensor* krCacheRef, const aclTensor* dequantScaleXOptional, const aclTensor* dequantScaleWDqOptional,
    const aclTensor* dequantScaleWUqQrOptional, const aclTensor* dequantScaleWDkvKrOptional,
    const aclTensor* quantScaleCkvOptional, const aclTensor* quantScaleCkrOptional,
    const aclTensor* smoothScalesCqOptional, double rmsnormEpsilonCq, double rmsnormEpsilonCkv, char* cacheModeOptional,
    const aclTensor* queryOut, const aclTensor* queryRopeOut, const aclTensor* dequantScaleQNopeOutOptional,
    std::uint64_t* workspaceSize, aclOpExecutor** executor
) {
    return guarded<"aclnnMlaPrologV2WeightNzGetWorkspaceSize">([&] {
        constexpr auto output = Argument::Role::Output;
        Arguments arguments{
            launch_name,
            {
                {"tokenX", tokenX},
                {"weightDq", weightDq},
                {"weightUqQr", weightUqQr},
                {"weightUk", weightUk},
                {"weightDkvKr", weightDkvKr},
                {"rmsnormGammaCq", rmsnormGammaCq},
                {"rmsnormGammaCkv", rmsnormGammaCkv},
                {"ropeSin", ropeSin},
                {"ropeCos", ropeCos},
                {"cacheIndex", cacheIndex},
                {"kvCacheRef", kvCacheRef},
                {"krCacheRef", krCacheRef},
                {"dequantScaleXOptional", dequantScaleXOptional},
                {"dequantScaleWDqOptional", dequantScaleWDqOptional},
                {"dequantScaleWUqQrOptional", dequantScaleWUqQrOptional},
                {"dequantScaleWDkvKrOptional", dequantScaleWDkvKrOptional},
                {"quantScaleCkvOptional", quantScaleCkvOptional},
                {"quantScaleCkrOptional", quantScaleCkrOptional},
                {"smoothScalesCqOptional", smoothScalesCqOptional},
                {"queryOut", queryOut, output},
                {"queryRopeOut", queryRopeOut, output},
                {"dequantScaleQNopeOutOptional", dequantScaleQNopeOutOptional, output},
            },
        };
        require_results(workspaceSize, executor);
        require(cacheModeOptional != nullptr, ACLNN_ERR_PARAM_NULLPTR, "cacheModeOptional must be given, got null");
        const std::string_view cache_mode = cacheModeOptional;
        check(arguments, cache_mode);
        const Configuration call{float(rmsnormEpsilonCq), float(rmsnormEpsilonCkv), cache_mode == "PA_NZ"};
        const std::uint64_t workspace = workspace_size(arguments);
        create_executor(
            launch_name, std::move(arguments).take(), workspace,
            [call](const std::vector<Operand>& operands) { run(operands, call); }, workspaceSize, executor
        );
    });
}

aclnnStatus
aclnnMlaPrologV2WeightNz(void* workspace, std::uint64_t workspaceSize, aclOpExecutor* executor, aclrtStream stream) {
    return guarded<"aclnnMlaPrologV2WeightNz">(
        [&] { launch(launch_name, workspace, workspaceSize, executor, stream); },
        [&] { drop_executor(launch_name, executor); }
    );
}
