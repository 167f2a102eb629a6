// aclnnSparseFlashAttention: its argument rules. Source: aclnnSparseFlashAttention, parameters, status codes and
// constraints; GE operator SparseFlashAttention, tiling.
#include "operators/sparse_flash_attention.h"

#include "aclnn/rules.h"
#include "control/misuse.h"

#include <bit>
#include <limits>
#include <string_view>

using namespace ascend_emulator;
using namespace ascend_emulator::sparse_flash_attention;

namespace {

constexpr std::string_view launch_name = "aclnnSparseFlashAttention";
constexpr std::int32_t invalid = ACLNN_ERR_PARAM_INVALID;
constexpr std::int32_t tiling = ACLNN_ERR_INNER_TILING_ERROR;
constexpr std::int64_t unlimited = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t latent_width = 512;
constexpr std::int64_t rope_width = 64;
constexpr std::int64_t largest_sparse_block = 128;
constexpr std::int64_t page_unit = 16;
constexpr std::int64_t largest_page = 1024;

// The attributes as they come.
struct Attributes {
    std::int64_t sparse_block_size;
    std::string_view layout_query;
    std::string_view layout_kv;
    std::int64_t sparse_mode;
    std::int64_t pre_tokens;
    std::int64_t next_tokens;
    std::int64_t attention_mode;
    bool statistics;

    bool query_tnd() const { return layout_query == "TND"; }
    bool paged() const { return layout_kv == "PA_BSND"; }
    bool kv_tnd() const { return layout_kv == "TND"; }
};

void check_given(const Arguments& arguments, const Attributes& attributes) {
    arguments.require_given({query, key, value, sparse_indices, attention_out, softmax_max, softmax_sum});
    arguments.require_given({query_rope, key_rope});
    if (attributes.paged()) {
        arguments.require_given({block_table});
    }
    if (attributes.query_tnd()) {
        arguments.require_given({actual_seq_lengths_query});
    }
    if (attributes.paged() || attributes.kv_tnd()) {
        arguments.require_given({actual_seq_lengths_kv});
    }
    require(
        attributes.paged() || !arguments.given(block_table), tiling,
        text("blockTable must be absent unless layoutKv is PA_BSND, got layoutKv ", attributes.layout_kv)
    );
}

void check_types(const Arguments& arguments) {
    arguments.require_type(query, {ACL_FLOAT16, ACL_BF16});
    for (const std::size_t index : {key, value, query_rope, key_rope, attention_out}) {
        arguments.require_type(index, {arguments[query].type});
    }
    for (const std::size_t index : {sparse_indices, block_table, actual_seq_lengths_query, actual_seq_lengths_kv}) {
        arguments.require_type(index, {ACL_INT32});
    }
    arguments.require_type(softmax_max, {ACL_FLOAT});
    arguments.require_type(softmax_sum, {ACL_FLOAT});
}

void check_attributes(const Attributes& attributes) {
    require(
        attributes.query_tnd() || attributes.layout_query == "BSND", invalid,
        text("layoutQuery must be BSND or TND, got ", attributes.layout_query)
    );
    require(
        attributes.paged() || attributes.kv_tnd() || attributes.layout_kv == "BSND", invalid,
        text("layoutKv must be BSND, TND or PA_BSND, got ", attributes.layout_kv)
    );
    require(
        attributes.paged() || attributes.kv_tnd() == attributes.query_tnd(), tiling,
        text("layoutKv must be layoutQuery or PA_BSND, got ", attributes.layout_kv, " and ", attributes.layout_query)
    );
    require_one_of("sparseMode", attributes.sparse_mode, {0, 3}, invalid);
    require_one_of("preTokens", attributes.pre_tokens, {unlimited}, invalid);
    require_one_of("nextTokens", attributes.next_tokens, {unlimited}, invalid);
    require_one_of("attentionMode", attributes.attention_mode, {2}, invalid);
    require(
        !attributes.statistics || !attributes.paged(), invalid,
        "returnSoftmaxLse must be false with layoutKv PA_BSND, got true"
    );
    const std::int64_t size = attributes.sparse_block_size;
    if (settings().product == Product::Ascend950) {
        require_one_of("sparseBlockSize", size, {1}, invalid);
    }
    require(
        1 <= size && size <= largest_sparse_block && std::has_single_bit(std::uint64_t(size)), invalid,
        text("sparseBlockSize must be a power of two from 1 to ", largest_sparse_block, ", got ", size)
    );
}

void check_page(const Arguments& arguments, const Attributes& attributes) {
    if (!attributes.paged()) {
        return;
    }
    const std::int64_t size = arguments[key].shape[1];
    require(
        size % page_unit == 0 && page_unit <= size && size <= largest_page, tiling,
        text("the block size of key must be a multiple of 16 up to 1024, got ", size)
    );
    require(
        size % attributes.sparse_block_size == 0, tiling,
        text(
            "the block size of key must be divisible by sparseBlockSize ", attributes.sparse_block_size, ", got ", size
        )
    );
}

void require_width(const Arguments& arguments, std::size_t index, std::int64_t width) {
    const std::int64_t got = arguments[index].shape.back();
    require(
        settings().relax_head_dim || got == width, tiling,
        text("the last dimension of ", arguments.name(index), " must be ", width, ", got ", got)
    );
}

// The dimensions but for the last one.
Shape outer(const Shape& shape) {
    return shape.head(shape.rank() - 1);
}

void require_like(const Arguments& arguments, std::size_t index, std::size_t model) {
    require(
        outer(arguments[index].shape) == outer(arguments[model].shape), tiling,
        text(
            arguments.name(index), " must have the shape of ", arguments.name(model), " but for the width, ",
            arguments[model].shape.to_string(), ", got ", arguments[index].shape.to_string()
        )
    );
}

void check_heads(const Arguments& arguments) {
    for (const std::size_t index : {key, value, key_rope}) {
        const std::int64_t heads = arguments[index].shape.back(2);
        require(heads == 1, tiling, text(arguments.name(index), " must have 1 head, got ", heads));
    }
    const std::int64_t heads = arguments[query].shape.back(2);
    require(
        (1 <= heads && heads <= 64) || heads == 128, tiling, text("query must have 1 to 64 or 128 heads, got ", heads)
    );
}

void check_shapes(const Arguments& arguments, const Attributes& attributes) {
    const std::size_t query_rank = attributes.query_tnd() ? 3 : 4;
    const std::size_t kv_rank = attributes.kv_tnd() ? 3 : 4;
    for (const std::size_t index : {query, query_rope, sparse_indices, attention_out}) {
        arguments.require_rank(index, query_rank, tiling);
    }
    for (const std::size_t index : {key, value, key_rope}) {
        arguments.require_rank(index, kv_rank, tiling);
    }
    arguments.require_rank(block_table, 2, tiling);
    arguments.require_rank(actual_seq_lengths_query, 1, tiling);
    arguments.require_rank(actual_seq_lengths_kv, 1, tiling);
    for (std::size_t index = 0; index <= attention_out; ++index) {
        arguments.require_filled(index);
    }
    require_like(arguments, query_rope, query);
    require_like(arguments, value, key);
    require_like(arguments, key_rope, key);
    for (const std::size_t index : {query, key, value}) {
        require_width(arguments, index, latent_width);
    }
    for (const std::size_t index : {query_rope, key_rope}) {
        require_width(arguments, index, rope_width);
    }
    require(
        arguments[query].shape.back() == arguments[key].shape.back()
            && arguments[query_rope].shape.back() == arguments[key_rope].shape.back(),
        tiling, "queries must be as wide as keys"
    );
    check_heads(arguments);

    const Shape& queries = arguments[query].shape;
    Shape lists = queries;
    lists[query_rank - 2] = 1;
    lists[query_rank - 1] = arguments[sparse_indices].shape.back();
    arguments.require_shape(sparse_indices, lists, tiling);
    Shape attention = queries;
    attention[query_rank - 1] = arguments[value].shape.back();
    arguments.require_shape(attention_out, attention, tiling);
    if (attributes.statistics) {
        const Shape statistics =
            attributes.query_tnd() ? Shape{1, queries[0], queries[1]} : Shape{queries[0], 1, queries[1], queries[2]};
        arguments.require_shape(softmax_max, statistics, tiling);
        arguments.require_shape(softmax_sum, statistics, tiling);
    }
}

void check_batches(const Arguments& arguments, const Attributes& attributes) {
    const std::int64_t batches =
        attributes.query_tnd() ? arguments[actual_seq_lengths_query].shape[0] : arguments[query].shape[0];
    for (const std::size_t index : {actual_seq_lengths_query, actual_seq_lengths_kv}) {
        if (arguments.given(index) && arguments[index].shape[0] != 1) {
            arguments.require_shape(index, {batches}, tiling);
        }
    }
    if (attributes.layout_kv == "BSND") {
        const std::int64_t got = arguments[key].shape[0];
        require(got == batches, tiling, text("key must have the ", batches, " batches of query, got ", got));
    }
    if (attributes.paged()) {
        const std::int64_t got = arguments[block_table].shape[0];
        require(
            got == batches, tiling, text("blockTable must have a row for each of ", batches, " batches, got ", got)
        );
    }
}

std::string_view required_text(const char* given, std::string_view name) {
    require(given != nullptr, ACLNN_ERR_PARAM_NULLPTR, text(name, " must be given, got a null pointer"));
    return given;
}

} // namespace

aclnnStatus aclnnSparseFlashAttentionGetWorkspaceSize(
    const aclTensor* queryInput, const aclTensor* keyInput, const aclTensor* valueInput, const aclTensor* sparseIndices,
    const aclTensor* blockTable, const aclTensor* actualSeqLengthsQuery, const aclTensor* actualSeqLengthsKv,
    const aclTensor* queryRope, const aclTensor* keyRope, double scaleValue, std::int64_t sparseBlockSize,
    char* layoutQuery, char* layoutKv, std::int64_t sparseMode, std::int64_t preTokens, std::int64_t nextTokens,
    std::int64_t attentionMode, bool returnSoftmaxLse, const aclTensor* attentionOutOut, const aclTensor* softmaxMaxOut,
    const aclTensor* softmaxSumOut, std::uint64_t* workspaceSize, aclOpExecutor** executor
) {
    return guarded<"aclnnSparseFlashAttentionGetWorkspaceSize">([&] {
        constexpr auto output = Argument::Role::Output;
        Arguments arguments{
            launch_name,
            {
                {"query", queryInput},
                {"key", keyInput},
                {"value", valueInput},
                {"sparseIndices", sparseIndices},
                {"blockTable", blockTable},
                {"actualSeqLengthsQuery", actualSeqLengthsQuery},
                {"actualSeqLengthsKv", actualSeqLengthsKv},
                {"queryRope", queryRope},
                {"keyRope", keyRope},
                {"attentionOut", attentionOutOut, output},
                {"softmaxMaxOut", softmaxMaxOut, output},
                {"softmaxSumOut", softmaxSumOut, output},
            },
        };
        require_results(workspaceSize, executor);
        const Attributes attributes{
            .sparse_block_size = sparseBlockSize,
            .layout_query = required_text(layoutQuery, "layoutQuery"),
            .layout_kv = required_text(layoutKv, "layoutKv"),
            .sparse_mode = sparseMode,
            .pre_tokens = preTokens,
            .next_tokens = nextTokens,
            .attention_mode = attentionMode,
            .statistics = returnSoftmaxLse,
        };
        check_given(arguments, attributes);
        check_types(arguments);
        arguments.require_plain();
        check_attributes(attributes);
        check_shapes(arguments, attributes);
        check_page(arguments, attributes);
        check_batches(arguments, attributes);
        const Configuration call{
            .scale_value = float(scaleValue),
            .sparse_block_size = sparseBlockSize,
            .query_tnd = attributes.query_tnd(),
            .kv_layout = attributes.paged()    ? KvLayout::PA_BSND
                         : attributes.kv_tnd() ? KvLayout::TND
                                               : KvLayout::BSND,
            .causal = sparseMode == 3,
            .statistics = returnSoftmaxLse,
        };
        const auto workspace = std::uint64_t(arguments[query].shape.elements()) * sizeof(float);
        create_executor(
            launch_name, std::move(arguments).take(), workspace,
            [call](const std::vector<Operand>& operands) { run(operands, call); }, workspaceSize, executor
        );
    });
}

aclnnStatus
aclnnSparseFlashAttention(void* workspace, std::uint64_t workspaceSize, aclOpExecutor* executor, aclrtStream stream) {
    return guarded<"aclnnSparseFlashAttention">(
        [&] { launch(launch_name, workspace, workspaceSize, executor, stream); },
        [&] { drop_executor(launch_name, executor); }
    );
}
