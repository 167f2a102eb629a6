#include "maths/quantise.h"

namespace ascend_emulator {
namespace {

constexpr std::int64_t lanes = 16;

// In lanes, because the compiler may not reorder a maximum either.
float largest_magnitude(const float* row, std::int64_t width) {
    float largest[lanes] = {};
    const std::int64_t whole = width / lanes * lanes;
    for (std::int64_t i = 0; i < whole; i += lanes) {
        for (std::int64_t lane = 0; lane < lanes; ++lane) {
            const float magnitude = std::fabs(row[i + lane]);
            largest[lane] = largest[lane] < magnitude ? magnitude : largest[lane];
        }
    }
    float result = *std::max_element(largest, largest + lanes);
    for (std::int64_t i = whole; i < width; ++i) {
        result = std::max(result, std::fabs(row[i]));
    }
    return result;
}

} // namespace

float quantise_row(const float* row, std::int64_t width, std::int8_t* target) {
    const float scale = largest_magnitude(row, width) / 127.0f;
    if (scale == 0.0f) {
        std::fill_n(target, width, std::int8_t{0});
        return 0.0f;
    }
    for (std::int64_t i = 0; i < width; ++i) {
        target[i] = to_int8(row[i] / scale);
    }
    return scale;
}

std::uint8_t to_float8(float value, const Float8& type) {
    const std::uint8_t sign = std::signbit(value) ? 0x80 : 0;
    if (std::isnan(value)) {
        return sign | 0x7F;
    }
    const float magnitude = std::min(std::fabs(value), type.largest);
    // The exponent of the number, or that of the subnormal numbers.
    const int exponent = magnitude == 0.0f ? 1 - type.bias : std::max(std::ilogb(magnitude), 1 - type.bias);
    const auto steps = static_cast<int>(std::rint(std::ldexp(magnitude, type.fraction_bits - exponent)));
    // Normal numbers have 2^fraction_bits steps too many, which is one in the exponent; so does a carry.
    const int bits = ((exponent + type.bias - 1) << type.fraction_bits) + steps;
    return static_cast<std::uint8_t>(sign | bits);
}

} // namespace ascend_emulator
