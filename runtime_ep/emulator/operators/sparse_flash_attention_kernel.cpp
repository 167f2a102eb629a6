#include "control/entry_point.h"
#include "control/misuse.h"
#include "maths/convert.h"
#include "maths/matrix.h"
#include "maths/parallel.h"
#include "operators/sparse_flash_attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace ascend_emulator::sparse_flash_attention {
namespace {

[[noreturn]] void out_of_range(const std::string& sentence) {
    throw Failure{ACL_ERROR_RT_AICORE_EXCEPTION, sentence};
}

// One query token: where it is, and which keys it may see.
struct Token {
    std::int64_t row;       // of query
    std::int64_t batch;     // of keys
    std::int64_t first_key; // row of key with the batch's first token, unless keys are paged
    std::int64_t limit;     // tokens of the batch before this one's end of sight
};

// Tokens per batch, and where a batch begins.
class Lengths {
  public:
    // `given` has one length per batch, or one for all; with `prefix_sums` their running sums. Absent: `size` each.
    Lengths(const Operand& given, std::int64_t size, bool prefix_sums, std::int64_t total)
        : lengths_(given.as<const std::int32_t>()),
          count_(lengths_ == nullptr ? 0 : given.shape()[0]),
          size_(size),
          prefix_sums_(prefix_sums),
          total_(total) {}

    std::int64_t length(std::int64_t batch) const {
        const std::int64_t length = prefix_sums_ ? bound(batch) - bound(batch - 1) : given(batch);
        const std::int64_t most = prefix_sums_ ? total_ : size_;
        if (length < 0 || length > most || (prefix_sums_ && bound(batch) > total_)) {
            out_of_range(text("the length of batch ", batch, " must be from 0 to ", most, ", got ", length));
        }
        return length;
    }

    std::int64_t first(std::int64_t batch) const { return prefix_sums_ ? bound(batch - 1) : batch * size_; }

  private:
    std::int64_t given(std::int64_t batch) const {
        return lengths_ == nullptr ? size_ : lengths_[count_ == 1 ? 0 : batch];
    }
    std::int64_t bound(std::int64_t batch) const { return batch < 0 ? 0 : given(batch); }

    const std::int32_t* lengths_;
    std::int64_t count_;
    std::int64_t size_;
    bool prefix_sums_;
    std::int64_t total_;
};

std::vector<Token> tokens_of(const std::vector<Operand>& operands, const Configuration& call) {
    const Shape& queries = operands[query].shape();
    const Shape& keys = operands[key].shape();
    const std::int64_t batches = call.query_tnd ? operands[actual_seq_lengths_query].shape()[0] : queries[0];
    const bool paged = call.kv_layout == KvLayout::PA_BSND;
    const bool kv_tnd = call.kv_layout == KvLayout::TND;
    const std::int64_t capacity = paged ? operands[block_table].shape()[1] * keys[1] : kv_tnd ? keys[0] : keys[1];
    const Lengths of_query(operands[actual_seq_lengths_query], queries[1], call.query_tnd, queries[0]);
    const Lengths of_kv(operands[actual_seq_lengths_kv], capacity, kv_tnd, keys[0]);

    std::vector<Token> tokens;
    for (std::int64_t batch = 0; batch < batches; ++batch) {
        const std::int64_t length = of_query.length(batch);
        const std::int64_t kv_length = of_kv.length(batch);
        for (std::int64_t i = 0; i < length; ++i) {
            const std::int64_t limit = call.causal ? kv_length - length + i + 1 : kv_length;
            tokens.push_back({of_query.first(batch) + i, batch, of_kv.first(batch), limit});
        }
    }
    return tokens;
}

// Attends for one token after the other; one object per thread, because it keeps its buffers.
class Attention {
  public:
    Attention(const std::vector<Operand>& operands, const Configuration& call)
        : operands_(operands),
          call_(call),
          heads_(operands[query].shape().back(2)),
          width_(operands[query].shape().back()),
          rope_(operands[query_rope].shape().back()),
          value_width_(operands[value].shape().back()),
          type_(operands[query].type()),
          queries_(std::size_t(heads_ * (width_ + rope_))),
          out_(std::size_t(heads_ * value_width_)) {}

    void attend(const Token& token) {
        select(token);
        const auto count = std::int64_t(selected_.size());
        if (count == 0) {
            return;
        }
        gather_keys();
        gather_queries(token.row);
        scores_.resize(std::size_t(heads_ * count));
        const std::int64_t joined = width_ + rope_;
        multiply(
            heads_, count, joined, {queries_.data(), joined}, {keys_.data(), joined}, Right::Transposed, scores_.data(),
            count
        );
        for (std::int64_t head = 0; head < heads_; ++head) {
            softmax(token.row, head, scores_.data() + head * count, count);
        }
        multiply(
            heads_, value_width_, count, {scores_.data(), count}, {values_.data(), value_width_}, Right::AsIs,
            out_.data(), value_width_
        );
        for (std::int64_t head = 0; head < heads_; ++head) {
            float* row = out_.data() + head * value_width_;
            for (std::int64_t i = 0; i < value_width_; ++i) {
                row[i] /= sums_[std::size_t(head)];
            }
        }
        const std::int64_t size = heads_ * value_width_;
        narrow(out_.data(), size, type_, at(operands_[attention_out], token.row * size));
    }

  private:
    static std::byte* at(const Operand& operand, std::int64_t element) {
        return operand.data + element * std::int64_t(element_size(operand.type()));
    }

    // The rows of key that the token attends to.
    void select(const Token& token) {
        selected_.clear();
        const std::int64_t listed = operands_[sparse_indices].shape().back();
        const auto* list = operands_[sparse_indices].as<const std::int32_t>() + token.row * listed;
        for (std::int64_t entry = 0; entry < listed && list[entry] != -1; ++entry) {
            if (list[entry] < 0) {
                out_of_range(text("sparseIndices must not be negative but for -1, got ", list[entry]));
            }
            const std::int64_t first = list[entry] * call_.sparse_block_size;
            const std::int64_t last = std::min(first + call_.sparse_block_size, token.limit);
            for (std::int64_t position = first; position < last; ++position) {
                selected_.push_back(row_of_key(token, position));
            }
        }
    }

    std::int64_t row_of_key(const Token& token, std::int64_t position) const {
        if (call_.kv_layout != KvLayout::PA_BSND) {
            return token.first_key + position;
        }
        const std::int64_t page_size = operands_[key].shape()[1];
        const std::int64_t pages = operands_[block_table].shape()[1];
        const auto* table = operands_[block_table].as<const std::int32_t>() + token.batch * pages;
        const std::int64_t page = table[position / page_size];
        if (page < 0 || page >= operands_[key].shape()[0]) {
            out_of_range(text("blockTable must name pages below ", operands_[key].shape()[0], ", got ", page));
        }
        return page * page_size + position % page_size;
    }

    void gather_keys() {
        const std::int64_t joined = width_ + rope_;
        keys_.resize(selected_.size() * std::size_t(joined));
        values_.resize(selected_.size() * std::size_t(value_width_));
        for (std::size_t i = 0; i < selected_.size(); ++i) {
            float* joined_row = keys_.data() + i * std::size_t(joined);
            widen(at(operands_[key], selected_[i] * width_), type_, width_, joined_row);
            widen(at(operands_[key_rope], selected_[i] * rope_), type_, rope_, joined_row + width_);
            float* value_row = values_.data() + i * std::size_t(value_width_);
            widen(at(operands_[value], selected_[i] * value_width_), type_, value_width_, value_row);
        }
    }

    void gather_queries(std::int64_t row) {
        for (std::int64_t head = 0; head < heads_; ++head) {
            float* joined_row = queries_.data() + head * (width_ + rope_);
            widen(at(operands_[query], (row * heads_ + head) * width_), type_, width_, joined_row);
            widen(at(operands_[query_rope], (row * heads_ + head) * rope_), type_, rope_, joined_row + width_);
        }
        sums_.resize(std::size_t(heads_));
    }

    // Turns the scores of a head into exp(score - max), and keeps their sum.
    void softmax(std::int64_t row, std::int64_t head, float* scores, std::int64_t count) {
        float largest = -INFINITY;
        for (std::int64_t j = 0; j < count; ++j) {
            scores[j] *= call_.scale_value;
            largest = std::max(largest, scores[j]);
        }
        float sum = 0;
        for (std::int64_t j = 0; j < count; ++j) {
            scores[j] = std::exp(scores[j] - largest);
            sum += scores[j];
        }
        sums_[std::size_t(head)] = sum;
        if (call_.statistics) {
            operands_[softmax_max].as<float>()[statistic(row, head)] = largest;
            operands_[softmax_sum].as<float>()[statistic(row, head)] = sum;
        }
    }

    // Statistics are (B, 1, S1, N1) or (1, T1, N1): with one key head that is the order of the queries.
    std::int64_t statistic(std::int64_t row, std::int64_t head) const { return row * heads_ + head; }

    const std::vector<Operand>& operands_;
    const Configuration& call_;
    const std::int64_t heads_;
    const std::int64_t width_;
    const std::int64_t rope_;
    const std::int64_t value_width_;
    const aclDataType type_;
    std::vector<std::int64_t> selected_;
    std::vector<float> keys_;
    std::vector<float> values_;
    std::vector<float> queries_;
    std::vector<float> scores_;
    std::vector<float> sums_;
    std::vector<float> out_;
};

} // namespace

void run(const std::vector<Operand>& operands, const Configuration& call) {
    for (const std::size_t output : {attention_out, softmax_max, softmax_sum}) {
        const Operand& operand = operands[output];
        if (operand.data != nullptr) {
            std::memset(operand.data, 0, operand.description.bytes());
        }
    }
    const std::vector<Token> tokens = tokens_of(operands, call);
    parallel_for(std::int64_t(tokens.size()), 1, [&](std::int64_t first, std::int64_t last) {
        Attention attention(operands, call);
        for (std::int64_t token = first; token < last; ++token) {
            attention.attend(tokens[std::size_t(token)]);
        }
    });
}

} // namespace ascend_emulator::sparse_flash_attention
