#include "ep/kernel_context.h"

#include <string>

namespace ep {
namespace {

// A tensor's type and shape, which the runtime makes anew for everybody who asks.
class TypeAndShape {
  public:
    explicit TypeAndShape(const ort::OrtValue* value) { ort::check(ort::api().GetTensorTypeAndShape(value, &info_)); }
    TypeAndShape(const TypeAndShape&) = delete;
    TypeAndShape& operator=(const TypeAndShape&) = delete;
    ~TypeAndShape() { ort::api().ReleaseTensorTypeAndShapeInfo(info_); }

    operators::Shape shape() const {
        std::size_t rank = 0;
        ort::check(ort::api().GetDimensionsCount(info_, &rank));
        if (rank > operators::Shape::MAX_RANK) {
            throw ort::Failure(
                ort::ORT_NOT_IMPLEMENTED, "a tensor of rank " + std::to_string(rank) + " has too many dimensions"
            );
        }
        operators::Shape shape;
        ort::check(ort::api().GetDimensions(info_, shape.resize(static_cast<int>(rank)), rank));
        return shape;
    }

    ort::ONNXTensorElementDataType type() const {
        ort::ONNXTensorElementDataType type = ort::ONNX_UNDEFINED;
        ort::check(ort::api().GetTensorElementType(info_, &type));
        return type;
    }

  private:
    ort::OrtTensorTypeAndShapeInfo* info_ = nullptr;
};

} // namespace

const ort::OrtValue* input_value(ort::OrtKernelContext* context, std::size_t index) {
    const ort::OrtValue* value = nullptr;
    ort::check(ort::api().KernelContext_GetInput(context, index, &value));
    return value;
}

operators::Shape shape_of(const ort::OrtValue* value) {
    return TypeAndShape(value).shape();
}

operators::Shape shape_of(const ort::OrtValue* value, ort::ONNXTensorElementDataType& type) {
    const TypeAndShape info(value);
    type = info.type();
    return info.shape();
}

Stream* stream_of(ort::OrtKernelContext* context) {
    void* handle = nullptr;
    ort::check(ort::api().KernelContext_GetGPUComputeStream(context, &handle));
    return handle == nullptr ? nullptr : Device::stream(handle);
}

} // namespace ep
