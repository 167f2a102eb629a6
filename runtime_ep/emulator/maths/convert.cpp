#include "maths/convert.h"

#include "control/misuse.h"

#include <algorithm>

namespace ascend_emulator {
namespace {

template<typename Element, typename Function>
void map_to_float(const std::byte* source, std::int64_t count, float* target, Function function) {
    const auto* elements = reinterpret_cast<const Element*>(source);
    for (std::int64_t i = 0; i < count; ++i) {
        target[i] = function(elements[i]);
    }
}

template<typename Function>
void map_to_bits(const float* source, std::int64_t count, std::byte* target, Function function) {
    auto* elements = reinterpret_cast<std::uint16_t*>(target);
    for (std::int64_t i = 0; i < count; ++i) {
        elements[i] = function(source[i]);
    }
}

[[noreturn]] void unsupported(aclDataType type) {
    misuse(text("no maths in the type ", static_cast<int>(type)));
}

} // namespace

float rounded(float value, aclDataType type) {
    switch (type) {
    case ACL_FLOAT:
        return value;
    case ACL_BF16:
        return from_bfloat16(to_bfloat16(value));
    case ACL_FLOAT16:
        return from_float16(to_float16(value));
    default:
        unsupported(type);
    }
}

void round_all(float* values, std::int64_t count, aclDataType type) {
    if (type == ACL_BF16) {
        for (std::int64_t i = 0; i < count; ++i) {
            values[i] = from_bfloat16(to_bfloat16(values[i]));
        }
    } else if (type == ACL_FLOAT16) {
        for (std::int64_t i = 0; i < count; ++i) {
            values[i] = from_float16(to_float16(values[i]));
        }
    } else if (type != ACL_FLOAT) {
        unsupported(type);
    }
}

void widen(const std::byte* source, aclDataType type, std::int64_t count, float* target) {
    switch (type) {
    case ACL_FLOAT:
        std::copy_n(reinterpret_cast<const float*>(source), count, target);
        break;
    case ACL_BF16:
        map_to_float<std::uint16_t>(source, count, target, from_bfloat16);
        break;
    case ACL_FLOAT16:
        map_to_float<std::uint16_t>(source, count, target, from_float16);
        break;
    case ACL_INT8:
        map_to_float<std::int8_t>(source, count, target, [](std::int8_t value) { return float(value); });
        break;
    default:
        unsupported(type);
    }
}

void narrow(const float* source, std::int64_t count, aclDataType type, std::byte* target) {
    switch (type) {
    case ACL_FLOAT:
        std::copy_n(source, count, reinterpret_cast<float*>(target));
        break;
    case ACL_BF16:
        map_to_bits(source, count, target, to_bfloat16);
        break;
    case ACL_FLOAT16:
        map_to_bits(source, count, target, to_float16);
        break;
    default:
        unsupported(type);
    }
}

} // namespace ascend_emulator
