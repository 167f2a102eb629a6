#include "ep/placeholders.h"

#include <string>
#include <vector>

namespace ep {
namespace {

const operators::Operator& known(const ort::OrtCustomOp* self) {
    return static_cast<const Placeholder*>(self)->known();
}

// The attributes that launchers read while they infer shapes, as far as the node has them.
ort::Attributes attributes_of(ort::OrtShapeInferContext* context) {
    static constexpr const char* NAMES[] = {
        "cache_mode",
        "return_softmax_lse",
        "expert_num",
        "active_num",
        "expert_capacity",
        "drop_pad_mode",
        "expert_tokens_num_type",
        "expert_tokens_num_flag",
        "quant_mode",
        "active_expert_range",
        "input_layout",
    };
    ort::Attributes attributes;
    for (const char* name : NAMES) {
        const ort::OrtOpAttr* attribute = nullptr;
        if (ort::OrtStatus* status = ort::api().ShapeInferContext_GetAttribute(context, name, &attribute)) {
            ort::api().ReleaseStatus(status); // the node does not have it
        } else if (attribute != nullptr) {
            if (auto value = ort::read_attribute(attribute)) {
                attributes.set(name, *std::move(value));
            }
        }
    }
    return attributes;
}

// Type and shape of each input; false if some dimension is not a number.
bool read_inputs(ort::OrtShapeInferContext* context, std::vector<operators::Tensor>& inputs) {
    std::size_t count = 0;
    ort::check(ort::api().ShapeInferContext_GetInputCount(context, &count));
    bool all_known = true;
    for (std::size_t index = 0; index < std::min(count, inputs.size()); ++index) {
        ort::OrtTensorTypeAndShapeInfo* info = nullptr;
        if (ort::OrtStatus* status = ort::api().ShapeInferContext_GetInputTypeShape(context, index, &info)) {
            ort::api().ReleaseStatus(status); // absent
            continue;
        }
        ort::ONNXTensorElementDataType type = ort::ONNX_UNDEFINED;
        std::size_t rank = 0;
        ort::check(ort::api().GetTensorElementType(info, &type));
        ort::check(ort::api().GetDimensionsCount(info, &rank));
        operators::Tensor& tensor = inputs[index];
        tensor.type = operators::acl_type(type);
        tensor.present = tensor.type != ACL_DT_UNDEFINED;
        if (rank <= operators::Shape::MAX_RANK) {
            ort::check(ort::api().GetDimensions(info, tensor.shape.resize(static_cast<int>(rank)), rank));
        }
        for (int axis = 0; axis < tensor.shape.rank(); ++axis) {
            all_known = all_known && tensor.shape[axis] >= 0;
        }
    }
    return all_known;
}

ort::OrtStatus* infer_outputs(const ort::OrtCustomOp* self, ort::OrtShapeInferContext* context) {
    return ort::guarded([&] {
        const operators::Operator& op = known(self);
        std::vector<operators::Tensor> inputs(op.inputs.size());
        std::vector<operators::Tensor> outputs(op.outputs.size());
        const bool all_known = read_inputs(context, inputs);
        op.make(attributes_of(context))->infer(inputs, outputs);
        for (std::size_t index = 0; index < outputs.size(); ++index) {
            ort::OrtTensorTypeAndShapeInfo* info = nullptr;
            ort::check(ort::api().CreateTensorTypeAndShapeInfo(&info));
            ort::check(ort::api().SetTensorElementType(info, operators::onnx_type(outputs[index].type)));
            if (all_known) {
                const operators::Shape& shape = outputs[index].shape;
                ort::check(ort::api().SetDimensions(info, shape.data(), static_cast<std::size_t>(shape.rank())));
            }
            // Outputs that the node does not have are refused, and nothing is lost by that.
            if (ort::OrtStatus* status = ort::api().ShapeInferContext_SetOutputTypeShape(context, index, info)) {
                ort::api().ReleaseStatus(status);
            }
            ort::api().ReleaseTensorTypeAndShapeInfo(info);
        }
    });
}

// The first input and output of every operator are there in every call; the judge knows about the others.
ort::OrtCustomOpInputOutputCharacteristic characteristic(const ort::OrtCustomOp*, std::size_t index) {
    return index == 0 ? ort::ORT_CUSTOM_OP_REQUIRED : ort::ORT_CUSTOM_OP_OPTIONAL;
}

ort::OrtStatus* create_kernel(const ort::OrtCustomOp* self, const ort::OrtApi*, const ort::OrtKernelInfo*, void**) {
    const std::string sentence = std::string(known(self).name)
                                 + " runs only on the NPU here, and the provider did not claim the node; attach the "
                                   "function bodies, or ask `ascend-onnx check` why";
    return ort::failed(ort::ORT_NOT_IMPLEMENTED, sentence.c_str());
}

} // namespace

Placeholder::Placeholder(const operators::Operator& known) : OrtCustomOp{}, known_(known) {
    version = ort::runtime.version;
    CreateKernelV2 = create_kernel;
    KernelComputeV2 = [](void*, ort::OrtKernelContext*) -> ort::OrtStatus* {
        return nullptr;
    };
    KernelDestroy = [](void*) {
    };
    GetName = [](const ort::OrtCustomOp* self) {
        return ep::known(self).name.data();
    };
    GetExecutionProviderType = [](const ort::OrtCustomOp*) -> const char* {
        return nullptr;
    };
    GetInputType = [](const ort::OrtCustomOp*, std::size_t) {
        return ort::ONNX_UNDEFINED;
    };
    GetInputTypeCount = [](const ort::OrtCustomOp* self) {
        return ep::known(self).inputs.size();
    };
    GetOutputType = [](const ort::OrtCustomOp*, std::size_t) {
        return ort::ONNX_UNDEFINED;
    };
    GetOutputTypeCount = [](const ort::OrtCustomOp* self) {
        return ep::known(self).outputs.size();
    };
    GetInputCharacteristic = characteristic;
    GetOutputCharacteristic = characteristic;
    GetInputMemoryType = [](const ort::OrtCustomOp*, std::size_t) {
        return ort::ORT_MEM_DEFAULT;
    };
    GetVariadicInputMinArity = [](const ort::OrtCustomOp*) {
        return 1;
    };
    GetVariadicInputHomogeneity = [](const ort::OrtCustomOp*) {
        return 0;
    };
    GetVariadicOutputMinArity = [](const ort::OrtCustomOp*) {
        return 1;
    };
    GetVariadicOutputHomogeneity = [](const ort::OrtCustomOp*) {
        return 0;
    };
    InferOutputShapeFn = infer_outputs;
    GetStartVersion = [](const ort::OrtCustomOp*) {
        return 1;
    };
    GetEndVersion = [](const ort::OrtCustomOp*) {
        return 1;
    };
}

Placeholders::Placeholders() {
    ort::check(ort::api().CreateCustomOpDomain(std::string(operators::DOMAIN).c_str(), &domain_));
    for (const operators::Operator* known : operators::all_operators()) {
        ort::check(ort::api().CustomOpDomain_Add(domain_, &operators_.emplace_back(*known)));
    }
}

Placeholders::~Placeholders() {
    ort::api().ReleaseCustomOpDomain(domain_);
}

} // namespace ep
