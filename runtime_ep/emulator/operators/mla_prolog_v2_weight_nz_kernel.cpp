#include "maths/convert.h"
#include "maths/paged_cache.h"
#include "maths/parallel.h"
#include "maths/quantise.h"
#include "maths/rows.h"
#include "operators/mla_prolog_v2_weight_nz.h"

#include <algorithm>

namespace ascend_emulator::mla_prolog {
namespace {

constexpr std::int64_t tokens_per_piece = 4;
constexpr aclDataType stored = ACL_BF16;

Weight packed_weight(const Operand& operand) {
    const auto [k, n] = dimensions(operand.description);
    return {operand.data, operand.type(), Weight::Storage::FractalsOfKN, k, n};
}

void multiply_by(float* row, const float* factors, std::int64_t width) {
    for (std::int64_t i = 0; i < width; ++i) {
        row[i] *= factors[i];
    }
}

// The steps of the operator, each on all tokens; matrices have a row per token.
class Prolog {
  public:
    Prolog(const std::vector<Operand>& operands, const Configuration& call)
        : operands_(operands),
          call_(call),
          hidden_(operands[token_x].shape().back()),
          tokens_(operands[token_x].shape().elements() / hidden_),
          heads_(operands[weight_uk].shape()[0]),
          nope_(operands[weight_uk].shape()[1]),
          latent_(operands[weight_uk].shape()[2]),
          rope_(operands[rope_cos].shape().back()),
          rank_(operands[rmsnorm_gamma_cq].shape()[0]),
          x_(floats(operands[token_x])),
          cos_(floats(operands[rope_cos])),
          sin_(floats(operands[rope_sin])) {}

    void run() {
        const std::vector<float> up = up_projection(low_rank_query());
        write_queries(up);
        write_caches();
    }

  private:
    bool quantised_query() const {
        return operands_[token_x].type() == ACL_INT8 && operands_[kv_cache].type() == ACL_INT8;
    }

    template<typename Body>
    void for_each_token(Body body) const {
        parallel_for(tokens_, tokens_per_piece, [&](std::int64_t first, std::int64_t last) {
            for (std::int64_t token = first; token < last; ++token) {
                body(token);
            }
        });
    }

    // x times a weight: rounded, or if int8 exact and then scaled by token and column.
    std::vector<float> down_projection(std::size_t weight, std::size_t weight_scale) const {
        const Weight matrix = packed_weight(operands_[weight]);
        std::vector<float> product(std::size_t(tokens_ * matrix.n()));
        if (matrix.int8()) {
            scaled_product(x_, operands_[dequant_scale_x].as<float>(), matrix, weight_scale, product);
        } else {
            project(x_.data(), tokens_, matrix, product.data());
            round_all(product.data(), std::int64_t(product.size()), stored);
        }
        return product;
    }

    void scaled_product(
        const std::vector<float>& x, const float* token_scales, const Weight& matrix, std::size_t weight_scale,
        std::vector<float>& product
    ) const {
        std::vector<std::int32_t> sums(product.size());
        project_exactly(x.data(), tokens_, matrix, sums.data());
        const float* column_scales = operands_[weight_scale].as<float>();
        for_each_token([&](std::int64_t token) {
            for (std::int64_t i = token * matrix.n(), column = 0; column < matrix.n(); ++i, ++column) {
                product[std::size_t(i)] = float(sums[std::size_t(i)]) * token_scales[token] * column_scales[column];
            }
        });
    }

    // c^Q, normalised: (T, Hcq).
    std::vector<float> low_rank_query() const {
        std::vector<float> c_q = down_projection(weight_dq, dequant_scale_w_dq);
        const std::vector<float> gamma = floats(operands_[rmsnorm_gamma_cq]);
        for_each_token([&](std::int64_t token) {
            rms_norm(c_q.data() + token * rank_, rank_, gamma.data(), call_.epsilon_cq);
        });
        return c_q;
    }

    // c^Q times W^UQ | W^QR: (T, N * (D + Dr)), rounded where nothing is quantised.
    std::vector<float> up_projection(std::vector<float> c_q) const {
        const Weight matrix = packed_weight(operands_[weight_uq_qr]);
        std::vector<float> product(std::size_t(tokens_ * matrix.n()));
        if (!matrix.int8()) {
            round_all(c_q.data(), std::int64_t(c_q.size()), stored);
            project(c_q.data(), tokens_, matrix, product.data());
            round_all(product.data(), std::int64_t(product.size()), stored);
            return product;
        }
        std::vector<float> scales(static_cast<std::size_t>(tokens_));
        for_each_token([&](std::int64_t token) {
            float* row = c_q.data() + token * rank_;
            if (const float* smooth = operands_[smooth_scales_cq].as<float>()) {
                multiply_by(row, smooth, rank_);
            }
            std::vector<std::int8_t> integers(static_cast<std::size_t>(rank_));
            scales[std::size_t(token)] = quantise_row(row, rank_, integers.data());
            std::copy(integers.begin(), integers.end(), row);
        });
        scaled_product(c_q, scales.data(), matrix, dequant_scale_w_uq_qr, product);
        return product;
    }

    // Absorbs W^UK into the queries without position, and rotates the others.
    void write_queries(const std::vector<float>& up) const {
        const std::int64_t head_width = nope_ + rope_;
        const Operand& absorb = operands_[weight_uk];
        std::vector<float> nope(std::size_t(tokens_ * nope_));
        std::vector<float> absorbed(std::size_t(tokens_ * latent_));
        for (std::int64_t head = 0; head < heads_; ++head) {
            for (std::int64_t token = 0; token < tokens_; ++token) {
                const float* row = up.data() + (token * heads_ + head) * head_width;
                std::copy_n(row, nope_, nope.data() + token * nope_);
            }
            round_all(nope.data(), std::int64_t(nope.size()), stored);
            const auto head_bytes = nope_ * latent_ * std::int64_t(element_size(absorb.type()));
            const Weight matrix(
                absorb.data + head * head_bytes, absorb.type(), Weight::Storage::RowsOfKN, nope_, latent_
            );
            project(nope.data(), tokens_, matrix, absorbed.data());
            for_each_token([&](std::int64_t token) {
                const std::int64_t row = token * heads_ + head;
                const float scale = write_query(row, absorbed.data() + token * latent_);
                write_query_rope(row, token, up.data() + row * head_width + nope_, scale);
            });
        }
    }

    // Returns the scale of the row where queries are quantised.
    float write_query(std::int64_t row, float* values) const {
        const Operand& target = operands_[query];
        if (!quantised_query()) {
            narrow(values, latent_, stored, target.data + row * latent_ * 2);
            return 1.0f;
        }
        round_all(values, latent_, stored);
        const float scale = quantise_row(values, latent_, target.as<std::int8_t>() + row * latent_);
        operands_[dequant_scale_q_nope].as<float>()[row] = scale;
        return scale;
    }

    // Quantised queries have their scale taken out of the rotary part too, so that one factor serves a whole score.
    void write_query_rope(std::int64_t row, std::int64_t token, const float* lanes, float scale) const {
        std::vector<float> rotated = rotated_lanes(token, lanes);
        if (quantised_query()) {
            const float factor = operands_[quant_scale_ckv].as<float>()[0];
            round_all(rotated.data(), rope_, stored);
            for (float& lane : rotated) {
                lane = lane * factor / scale;
            }
        }
        narrow(rotated.data(), rope_, stored, operands_[query_rope].data + row * rope_ * 2);
    }

    std::vector<float> rotated_lanes(std::int64_t token, const float* lanes) const {
        std::vector<float> halves(static_cast<std::size_t>(rope_));
        std::vector<float> rotated(static_cast<std::size_t>(rope_));
        deinterleave(lanes, rope_, halves.data());
        rotate(halves.data(), rope_, cos_.data() + token * rope_, sin_.data() + token * rope_, rotated.data());
        return rotated;
    }

    void write_caches() const {
        std::vector<float> kv = down_projection(weight_dkv_kr, dequant_scale_w_dkv_kr);
        const std::vector<float> gamma = floats(operands_[rmsnorm_gamma_ckv]);
        const auto layout = call_.nz_cache ? PagedCache::Layout::Fractals : PagedCache::Layout::Rows;
        const std::int64_t block_size = operands_[kv_cache].shape()[1];
        const PagedCache latents(operands_[kv_cache], layout, block_size, latent_);
        const PagedCache ropes(operands_[kr_cache], layout, block_size, rope_);
        const std::vector<float> latent_scales = scales_of_latents();
        const auto* slots = operands_[cache_index].as<const std::int64_t>();
        // In the order of the tokens, so that the last one wins where two have the same slot.
        for (std::int64_t token = 0; token < tokens_; ++token) {
            float* row = kv.data() + token * (latent_ + rope_);
            rms_norm(row, latent_, gamma.data(), call_.epsilon_ckv);
            write_row(latents, slots[token], row, latent_, latent_scales.data());
            const std::vector<float> rotated = rotated_lanes(token, row + latent_);
            write_row(ropes, slots[token], rotated.data(), rope_, operands_[quant_scale_ckr].as<float>());
        }
    }

    // One factor for each lane; with int8 tokens the device reads the first one only.
    std::vector<float> scales_of_latents() const {
        std::vector<float> scales = floats(operands_[quant_scale_ckv]);
        if (quantised_query()) {
            std::fill(scales.begin(), scales.end(), scales.front());
        }
        return scales;
    }

    static void
    write_row(const PagedCache& cache, std::int64_t slot, const float* row, std::int64_t width, const float* scales) {
        std::vector<std::byte> bytes(std::size_t(width) * element_size(cache.type()));
        if (cache.type() == ACL_INT8) {
            auto* integers = reinterpret_cast<std::int8_t*>(bytes.data());
            for (std::int64_t i = 0; i < width; ++i) {
                integers[i] = to_int8(row[i] * scales[i]);
            }
        } else {
            narrow(row, width, cache.type(), bytes.data());
        }
        cache.write(slot, bytes.data(), "cacheIndex");
    }

    const std::vector<Operand>& operands_;
    const Configuration& call_;
    const std::int64_t hidden_;
    const std::int64_t tokens_;
    const std::int64_t heads_;
    const std::int64_t nope_;
    const std::int64_t latent_;
    const std::int64_t rope_;
    const std::int64_t rank_;
    const std::vector<float> x_;
    const std::vector<float> cos_;
    const std::vector<float> sin_;
};

} // namespace

Dimensions dimensions(const Description& weight) {
    const Shape& shape = weight.shape;
    if (shape.rank() == 2) {
        return {shape[0], shape[1]};
    }
    return {shape[1] * shape[2], shape[0] * shape[3]};
}

void run(const std::vector<Operand>& operands, const Configuration& call) {
    if (operands[token_x].shape().elements() > 0) {
        Prolog(operands, call).run();
    }
}

} // namespace ascend_emulator::mla_prolog
