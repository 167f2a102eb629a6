#include "control/entry_point.h"
#include "maths/convert.h"
#include "maths/paged_cache.h"
#include "maths/parallel.h"
#include "maths/quantise.h"
#include "maths/rows.h"
#include "operators/mla_preprocess.h"

#include <algorithm>

namespace ascend_emulator::mla_preprocess {
namespace {

constexpr std::int64_t tokens_per_piece = 4;

// The kernels know no other, whatever the attribute says.
constexpr float epsilon = 1e-6f;

// The operands of one of the two norms and projections.
struct Stage {
    std::size_t gamma;
    std::size_t beta;
    std::size_t quant_scale;
    std::size_t quant_offset;
    std::size_t weight;
    std::size_t descale;
    std::size_t bias;
};
constexpr Stage down_stage{gamma_0, beta_0, quant_scale_0, quant_offset_0, wdqkv, descale_0, bias_0};
constexpr Stage up_stage{gamma_1, beta_1, quant_scale_1, quant_offset_1, wuq, descale_1, bias_1};

Weight matrix_of(const Operand& operand) {
    const auto [n, k] = dimensions(operand.description);
    const bool packed = operand.description.format == ACL_FORMAT_FRACTAL_NZ;
    const auto storage = packed ? Weight::Storage::FractalsOfNK : Weight::Storage::RowsOfNK;
    return {operand.data, operand.type(), storage, k, n};
}

// float32, or the low halves of int64.
std::vector<float> descales(const Operand& operand) {
    if (operand.type() != ACL_INT64) {
        return floats(operand);
    }
    const auto* bits = operand.as<const std::int64_t>();
    std::vector<float> values(static_cast<std::size_t>(operand.shape().elements()));
    std::transform(bits, bits + values.size(), values.begin(), [](std::int64_t low_half) {
        return std::bit_cast<float>(static_cast<std::uint32_t>(low_half));
    });
    return values;
}

// The steps of the operator, each on all tokens; matrices have a row per token.
class Preprocess {
  public:
    Preprocess(const std::vector<Operand>& operands, const Configuration& call)
        : operands_(operands),
          call_(call),
          type_(operands[input].type()),
          tokens_(operands[input].shape()[0]),
          absorb_(absorbed_dimensions(operands[wuk].description)),
          rope_(operands[cos].shape()[1]),
          cos_(floats(operands[cos])),
          sin_(floats(operands[sin])) {}

    void run() {
        const std::vector<float> down = down_projection();
        write_caches(down);
        write_queries(up_projection(down));
    }

  private:
    std::int64_t heads() const { return absorb_[0]; }
    std::int64_t nope() const { return absorb_[1]; }
    std::int64_t latent() const { return absorb_[2]; }
    std::int64_t down_width() const { return dimensions(operands_[wdqkv].description).n; }

    template<typename Body>
    void for_each_token(Body body) const {
        parallel_for(tokens_, tokens_per_piece, [&](std::int64_t first, std::int64_t last) {
            for (std::int64_t token = first; token < last; ++token) {
                body(token);
            }
        });
    }

    // [ckv | k_rope | q_lora]
    std::vector<float> down_projection() const {
        std::vector<float> x = floats(operands_[input]);
        if (matrix_of(operands_[wdqkv]).int8()) {
            if (call_.do_rms_norm) {
                normalise(x, down_stage);
            }
            quantise(x, down_stage);
        }
        return projection(x, down_stage);
    }

    // (T, N * (D + Dr)), from the columns of `down` behind latent and rotary key.
    std::vector<float> up_projection(const std::vector<float>& down) const {
        const std::int64_t before = latent() + rope_;
        const std::int64_t width = down_width() - before;
        std::vector<float> x(std::size_t(tokens_ * width));
        for (std::int64_t token = 0; token < tokens_; ++token) {
            std::copy_n(down.data() + token * down_width() + before, width, x.data() + token * width);
        }
        normalise(x, up_stage);
        if (matrix_of(operands_[wuq]).int8()) {
            quantise(x, up_stage);
        } else {
            round_all(x.data(), std::int64_t(x.size()), type_);
        }
        return projection(x, up_stage);
    }

    // RmsNorm; floating weights have no beta, which is then empty.
    void normalise(std::vector<float>& x, const Stage& stage) const {
        const std::vector<float> gamma = floats(operands_[stage.gamma]);
        const std::vector<float> beta = floats(operands_[stage.beta]);
        const auto width = std::int64_t(gamma.size());
        for_each_token([&](std::int64_t token) {
            float* row = x.data() + token * width;
            rms_norm(row, width, gamma.data(), epsilon);
            for (std::size_t i = 0; i < beta.size(); ++i) {
                row[i] += beta[i];
            }
        });
    }

    // Leaves integers of [-128, 127].
    void quantise(std::vector<float>& x, const Stage& stage) const {
        const float factor = 1.0f / floats(operands_[stage.quant_scale]).front();
        const Operand& offset = operands_[stage.quant_offset];
        const float added = offset.data == nullptr ? 0.0f : float(*offset.as<const std::int8_t>());
        for (float& value : x) {
            value = to_int8(value * factor + added);
        }
    }

    // x times the transposed weight, dequantised by column where it is int8, and rounded.
    std::vector<float> projection(const std::vector<float>& x, const Stage& stage) const {
        const Weight matrix = matrix_of(operands_[stage.weight]);
        std::vector<float> product(std::size_t(tokens_ * matrix.n()));
        if (matrix.int8()) {
            std::vector<std::int32_t> sums(product.size());
            project_exactly(x.data(), tokens_, matrix, sums.data());
            const std::vector<float> scales = descales(operands_[stage.descale]);
            const auto* bias = operands_[stage.bias].as<const std::int32_t>();
            for_each_token([&](std::int64_t token) {
                for (std::int64_t i = token * matrix.n(), column = 0; column < matrix.n(); ++i, ++column) {
                    const std::int32_t sum = sums[std::size_t(i)] + (bias == nullptr ? 0 : bias[column]);
                    product[std::size_t(i)] = float(sum) * scales[std::size_t(column)];
                }
            });
        } else {
            project(x.data(), tokens_, matrix, product.data());
        }
        round_all(product.data(), std::int64_t(product.size()), type_);
        return product;
    }

    // In the order of the tokens, so that the last one wins where two have the same slot.
    void write_caches(const std::vector<float>& down) const {
        const std::vector<float> gamma = floats(operands_[gamma_2]);
        const auto* slots = operands_[slot_mapping].as<const std::int32_t>();
        std::vector<float> row(std::size_t(latent() + rope_));
        for (std::int64_t token = 0; token < tokens_; ++token) {
            std::copy_n(down.data() + token * down_width(), row.size(), row.data());
            rms_norm(row.data(), latent(), gamma.data(), epsilon);
            rotate(
                down.data() + token * down_width() + latent(), rope_, cos_.data() + token * rope_,
                sin_.data() + token * rope_, row.data() + latent()
            );
            if (call_.cache_mode == joined) {
                write_row(kv_cache_out, slots[token], row.data(), latent() + rope_);
            } else {
                write_row(kv_cache_out, slots[token], row.data(), latent());
                write_row(kr_cache_out, slots[token], row.data() + latent(), rope_);
            }
        }
    }

    void write_row(std::size_t index, std::int64_t slot, float* row, std::int64_t width) const {
        const Operand& cache = operands_[index];
        const auto layout = call_.fractal_cache() ? PagedCache::Layout::Fractals : PagedCache::Layout::Rows;
        const PagedCache paged(cache, layout, cache.shape()[call_.fractal_cache() ? 2 : 1], width);
        std::vector<std::byte> bytes(std::size_t(width) * element_size(cache.type()));
        if (cache.type() == ACL_INT8) {
            const float factor = 1.0f / floats(operands_[ctkv_scale]).front();
            round_all(row, width, type_);
            auto* integers = reinterpret_cast<std::int8_t*>(bytes.data());
            std::transform(row, row + width, integers, [&](float value) { return to_int8(value * factor); });
        } else {
            narrow(row, width, cache.type(), bytes.data());
        }
        paged.write(slot, bytes.data(), "slotMapping");
    }

    // Absorbs W^UK into the queries without position, and rotates the others.
    void write_queries(const std::vector<float>& up) const {
        const std::int64_t head_width = nope() + rope_;
        std::vector<float> without_position(std::size_t(tokens_ * nope()));
        std::vector<float> absorbed(std::size_t(tokens_ * latent()));
        for (std::int64_t head = 0; head < heads(); ++head) {
            for (std::int64_t token = 0; token < tokens_; ++token) {
                const float* row = up.data() + (token * heads() + head) * head_width;
                std::copy_n(row, nope(), without_position.data() + token * nope());
            }
            project(without_position.data(), tokens_, absorbing_matrix(head), absorbed.data());
            for_each_token([&](std::int64_t token) {
                const std::int64_t row = token * heads() + head;
                write_query(row, head, absorbed.data() + token * latent());
                write_query_rope(row, token, up.data() + row * head_width + nope());
            });
        }
    }

    Weight absorbing_matrix(std::int64_t head) const {
        const Operand& operand = operands_[wuk];
        const bool packed = operand.description.format == ACL_FORMAT_FRACTAL_NZ;
        const auto storage = packed ? Weight::Storage::FractalsOfKN : Weight::Storage::RowsOfKN;
        const auto head_bytes = nope() * latent() * std::int64_t(element_size(operand.type()));
        return {operand.data + head * head_bytes, operand.type(), storage, nope(), latent()};
    }

    void write_query(std::int64_t row, std::int64_t head, float* values) const {
        const Operand& target = operands_[q_out];
        const std::int64_t stride = target.shape()[2];
        if (target.type() != ACL_INT8) {
            narrow(values, latent(), type_, target.data + row * stride * std::int64_t(element_size(type_)));
            return;
        }
        const float factor = floats(operands_[q_nope_scale])[std::size_t(head)];
        round_all(values, latent(), type_);
        std::transform(values, values + latent(), target.as<std::int8_t>() + row * stride, [&](float value) {
            return to_int8(value * factor);
        });
    }

    void write_query_rope(std::int64_t row, std::int64_t token, const float* lanes) const {
        std::vector<float> rotated(static_cast<std::size_t>(rope_));
        rotate(lanes, rope_, cos_.data() + token * rope_, sin_.data() + token * rope_, rotated.data());
        const auto size = std::int64_t(element_size(type_));
        std::byte* target = call_.cache_mode == joined
                                ? operands_[q_out].data + (row * (latent() + rope_) + latent()) * size
                                : operands_[q_rope_out].data + row * rope_ * size;
        narrow(rotated.data(), rope_, type_, target);
    }

    const std::vector<Operand>& operands_;
    const Configuration& call_;
    const aclDataType type_;
    const std::int64_t tokens_;
    const Shape absorb_;
    const std::int64_t rope_;
    const std::vector<float> cos_;
    const std::vector<float> sin_;
};

void require_in_place(const std::vector<Operand>& operands, std::size_t cache, std::size_t output) {
    if (operands[cache].data != operands[output].data) {
        throw Failure{ACL_ERROR_RT_AICORE_EXCEPTION, "the caches are changed in place: give them as outputs too"};
    }
}

} // namespace

Dimensions dimensions(const Description& weight) {
    const Shape& shape = weight.shape;
    switch (shape.rank()) {
    case 2:
        return {shape[0], shape[1]};
    case 3:
        return {shape[1], shape[0] * shape[2]};
    default:
        return {shape[1] * shape[2], shape[0] * shape[3]};
    }
}

Shape absorbed_dimensions(const Description& weight) {
    const Shape& shape = weight.shape;
    return shape.rank() == 3 ? shape : Shape{shape[0], shape[2], shape[1] * shape[3]};
}

void run(const std::vector<Operand>& operands, const Configuration& call) {
    require_in_place(operands, kv_cache, kv_cache_out);
    if (call.cache_mode != joined) {
        require_in_place(operands, kv_cache_rope, kr_cache_out);
    }
    if (operands[input].shape()[0] > 0) {
        Preprocess(operands, call).run();
    }
}

} // namespace ascend_emulator::mla_preprocess
