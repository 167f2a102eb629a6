// What the MLA operators do to one row in float32: normalise, rotate, quantise.
#pragma once

#include "aclnn/handles.h"

#include <cstdint>
#include <vector>

namespace ascend_emulator {

// The elements of a tensor in float32.
std::vector<float> floats(const Operand& operand);

// row / sqrt(mean(row^2) + epsilon) * gamma
void rms_norm(float* row, std::int64_t width, const float* gamma, float epsilon);

// Puts the even lanes before the odd ones.
void deinterleave(const float* lanes, std::int64_t width, float* target);

// RoPE of lanes in half order: target = lanes * cos + (-second half, first half) * sin. `target` may not be `lanes`.
void rotate(const float* lanes, std::int64_t width, const float* cos, const float* sin, float* target);

} // namespace ascend_emulator
