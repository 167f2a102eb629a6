// Quantisation: float32 to int8 and to the 8-bit floating types, half to even and saturating.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace ascend_emulator {

// `value` rounded to an integer of [-128, 127]; NaN becomes 0.
inline std::int8_t to_int8(float value) {
    const float clamped = std::min(std::max(value, -128.0f), 127.0f);
    return static_cast<std::int8_t>(value == value ? std::rint(clamped) : 0.0f);
}

// Quantises a row symmetrically by its largest magnitude. The scale is `max|row| / 127`; a row of zeros gives zeros and
// the scale 0.
float quantise_row(const float* row, std::int64_t width, std::int8_t* target);

// An 8-bit floating type: one sign bit, then exponent and fraction.
struct Float8 {
    int fraction_bits;
    int bias;
    float largest;
    int largest_exponent; // of the largest number, unbiased
};

inline constexpr Float8 float8_e5m2{2, 15, 57344.0f, 15};
inline constexpr Float8 float8_e4m3fn{3, 7, 448.0f, 8};

std::uint8_t to_float8(float value, const Float8& type);

} // namespace ascend_emulator
