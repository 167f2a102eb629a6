#include "maths/rows.h"

#include "maths/convert.h"

#include <cmath>
#include <numeric>

namespace ascend_emulator {
namespace {

constexpr std::int64_t lanes = 16;

// In lanes, because the compiler may not reorder a sum.
float mean_square(const float* row, std::int64_t width) {
    float sums[lanes] = {};
    const std::int64_t whole = width / lanes * lanes;
    for (std::int64_t i = 0; i < whole; i += lanes) {
        for (std::int64_t lane = 0; lane < lanes; ++lane) {
            sums[lane] += row[i + lane] * row[i + lane];
        }
    }
    float sum = std::accumulate(sums, sums + lanes, 0.0f);
    for (std::int64_t i = whole; i < width; ++i) {
        sum += row[i] * row[i];
    }
    return sum / float(width);
}

} // namespace

std::vector<float> floats(const Operand& operand) {
    std::vector<float> values(static_cast<std::size_t>(operand.data == nullptr ? 0 : operand.shape().elements()));
    if (!values.empty()) {
        widen(operand.data, operand.type(), std::int64_t(values.size()), values.data());
    }
    return values;
}

void rms_norm(float* row, std::int64_t width, const float* gamma, float epsilon) {
    const float root = std::sqrt(mean_square(row, width) + epsilon);
    for (std::int64_t i = 0; i < width; ++i) {
        row[i] = row[i] / root * gamma[i];
    }
}

void deinterleave(const float* lanes, std::int64_t width, float* target) {
    const std::int64_t half = width / 2;
    for (std::int64_t i = 0; i < half; ++i) {
        target[i] = lanes[2 * i];
        target[half + i] = lanes[2 * i + 1];
    }
}

void rotate(const float* lanes, std::int64_t width, const float* cos, const float* sin, float* target) {
    const std::int64_t half = width / 2;
    for (std::int64_t i = 0; i < half; ++i) {
        target[i] = lanes[i] * cos[i] - lanes[half + i] * sin[i];
        target[half + i] = lanes[half + i] * cos[half + i] + lanes[i] * sin[half + i];
    }
}

} // namespace ascend_emulator
