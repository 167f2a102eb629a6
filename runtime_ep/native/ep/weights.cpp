#include "ep/weights.h"

#include "cann/fractal_nz.h"
#include "ep/kernel_context.h"

#include <vector>

namespace ep {

namespace {

// The matrix in FRACTAL_NZ order.
std::vector<std::byte> packed_matrix(const void* matrix, const operators::Tensor& tensor) {
    const std::size_t element_size = operators::size_of(tensor.type);
    const std::int64_t rows = tensor.shape[0];
    const std::int64_t columns = tensor.shape[1];
    if (!cann::has_whole_fractals(rows, columns, element_size)) {
        throw ort::Failure(
            ort::ORT_INVALID_ARGUMENT, "a weight must consist of whole fractals of 16 rows by "
                                           + std::to_string(cann::fractal_width(element_size)) + " columns, got "
                                           + operators::describe(tensor.type, tensor.shape)
        );
    }
    std::vector<std::byte> packed(tensor.bytes());
    cann::pack_nz(matrix, packed.data(), rows, columns, element_size);
    return packed;
}

} // namespace

bool needs_packing(const operators::Input& input, const operators::Tensor& tensor) {
    return input.nz && tensor.shape.rank() == 2;
}

std::shared_ptr<const Weight> Weights::upload(const ort::ValueFacts& value, const operators::Input& input) {
    const std::string key = value.name + (input.nz ? " packed" : "");
    if (auto shared = uploaded_[key].lock()) {
        return shared;
    }
    const ort::OrtValue* constant = nullptr;
    ort::check(ort::api().ValueInfo_GetInitializerValue(value.info, &constant));
    if (constant == nullptr) {
        throw ort::Failure(ort::ORT_INVALID_GRAPH, "the constant " + value.name + " has no value");
    }
    auto weight = std::make_shared<Weight>();
    ort::ONNXTensorElementDataType type = ort::ONNX_UNDEFINED;
    operators::Tensor& tensor = weight->tensor;
    tensor.present = true;
    tensor.shape = shape_of(constant, type);
    tensor.type = operators::acl_type(type);
    const void* data = nullptr;
    ort::check(ort::api().GetTensorData(constant, &data));

    const std::size_t bytes = tensor.bytes();
    std::vector<std::byte> packed;
    if (needs_packing(input, tensor)) {
        packed = packed_matrix(data, tensor);
        data = packed.data();
        tensor.packed = true;
    }
    device_.make_current();
    weight->memory = cann::allocate_device(bytes);
    if (bytes > 0) {
        cann::check(
            cann::functions().aclrtMemcpy(weight->memory.get(), bytes, data, bytes, ACL_MEMCPY_HOST_TO_DEVICE),
            "aclrtMemcpy"
        );
    }
    tensor.data = weight->memory.get();
    uploaded_[key] = weight;
    return weight;
}

void pack_on_stream(Stream& stream, operators::Tensor& tensor, void* packed) {
    std::vector<std::byte> matrix(tensor.bytes());
    stream.download(matrix.data(), tensor.data, matrix.size());
    const std::vector<std::byte> fractals = packed_matrix(matrix.data(), tensor);
    stream.upload(packed, fractals.data(), fractals.size());
    tensor.data = packed;
    tensor.packed = true;
}

} // namespace ep
