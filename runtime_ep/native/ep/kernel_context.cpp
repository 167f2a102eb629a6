#include "ep/kernel_context.h"

#include <algorithm>
#include <string>

namespace ep {

const ort::OrtValue* input_value(ort::OrtKernelContext* context, std::size_t index) {
    const ort::OrtValue* value = nullptr;
    ort::check(ort::api().KernelContext_GetInput(context, index, &value));
    return value;
}

operators::Shape shape_of(const ort::OrtValue* value) {
    ort::ONNXTensorElementDataType ignored = ort::ONNX_UNDEFINED;
    return shape_of(value, ignored);
}

operators::Shape shape_of(const ort::OrtValue* value, ort::ONNXTensorElementDataType& type) {
    const std::int64_t* dims = nullptr; // the value's own
    std::size_t rank = 0;
    ort::check(ort::api().GetTensorElementTypeAndShapeDataReference(value, &type, &dims, &rank));
    if (rank > operators::Shape::MAX_RANK) {
        throw ort::Failure(
            ort::ORT_NOT_IMPLEMENTED, "a tensor of rank " + std::to_string(rank) + " has too many dimensions"
        );
    }
    operators::Shape shape;
    std::copy_n(dims, rank, shape.resize(static_cast<int>(rank)));
    return shape;
}

Stream* stream_of(ort::OrtKernelContext* context) {
    void* handle = nullptr;
    ort::check(ort::api().KernelContext_GetGPUComputeStream(context, &handle));
    return handle == nullptr ? nullptr : Device::stream(handle);
}

} // namespace ep
