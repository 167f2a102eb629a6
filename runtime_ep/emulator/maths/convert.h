// Element types: every one is widened to float32 exactly, and narrowed half to even.
#pragma once

#include "acl_abi.h"

#include <bit>
#include <cstddef>
#include <cstdint>

namespace ascend_emulator {

inline float from_bfloat16(std::uint16_t bits) {
    return std::bit_cast<float>(std::uint32_t{bits} << 16);
}

inline std::uint16_t to_bfloat16(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t rounded = bits + 0x7FFF + ((bits >> 16) & 1);
    const bool nan = (bits & 0x7FFFFFFF) > 0x7F800000;
    return static_cast<std::uint16_t>((nan ? bits | 0x400000 : rounded) >> 16);
}

inline float from_float16(std::uint16_t bits) {
    const std::uint32_t sign = std::uint32_t{bits & 0x8000u} << 16;
    const std::uint32_t magnitude = std::uint32_t{bits & 0x7FFFu} << 13;
    // The exponent moves by 112; multiplying does that for subnormal numbers too.
    const float scaled = std::bit_cast<float>(magnitude) * 0x1p112f;
    const std::uint32_t special = magnitude | 0x7F800000;
    const bool finite = magnitude < 0x0F800000;
    return std::bit_cast<float>((finite ? std::bit_cast<std::uint32_t>(scaled) : special) | sign);
}

inline std::uint16_t to_float16(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t sign = (bits >> 16) & 0x8000;
    const std::uint32_t magnitude = bits & 0x7FFFFFFF;
    // Adding 0.5 leaves the multiples of 2^-24, the smallest float16 number, in the low bits.
    const std::uint32_t small = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3F000000;
    const std::uint32_t normal = (magnitude + 0xC8000FFF + ((magnitude >> 13) & 1)) >> 13;
    const std::uint32_t special = magnitude > 0x7F800000 ? 0x7E00 : 0x7C00;
    const std::uint32_t finite = magnitude < 0x38800000 ? small : normal;
    return static_cast<std::uint16_t>(sign | (magnitude >= 0x47800000 ? special : finite));
}

// The value after a trip through `type`, float32 meaning as it is.
float rounded(float value, aclDataType type);
void round_all(float* values, std::int64_t count, aclDataType type);

// `count` elements of FLOAT, FLOAT16, BF16 or INT8 as float32.
void widen(const std::byte* source, aclDataType type, std::int64_t count, float* target);

// `count` float32 numbers as FLOAT, FLOAT16 or BF16.
void narrow(const float* source, std::int64_t count, aclDataType type, std::byte* target);

} // namespace ascend_emulator
