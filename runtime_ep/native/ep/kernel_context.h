// What a computation asks the runtime for: its inputs, outputs and stream.
#pragma once

#include "ep/stream.h"
#include "operators/tensor.h"
#include "ort/runtime.h"

#include <cstddef>

namespace ep {

const ort::OrtValue* input_value(ort::OrtKernelContext* context, std::size_t index);

operators::Shape shape_of(const ort::OrtValue* value);
// The element type too.
operators::Shape shape_of(const ort::OrtValue* value, ort::ONNXTensorElementDataType& type);

// The stream of the run; null where the runtime has none.
Stream* stream_of(ort::OrtKernelContext* context);

} // namespace ep
