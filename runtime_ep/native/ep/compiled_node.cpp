#include "ep/compiled_node.h"

#include "cann/fractal_nz.h"
#include "ep/kernel_context.h"

#include <array>
#include <cstddef>

namespace ep {
namespace {

constexpr std::size_t MOST_INPUTS = 24;
constexpr std::size_t MOST_OUTPUTS = 5;

int position(const std::vector<std::optional<ort::ValueFacts>>& values, const std::string& name) {
    for (std::size_t index = 0; index < values.size(); ++index) {
        if (values[index] && values[index]->name == name) {
            return static_cast<int>(index);
        }
    }
    return -1;
}

bool is_constant(const ort::ValueFacts& value) {
    bool constant = false;
    ort::check(ort::api().ValueInfo_IsConstantInitializer(value.info, &constant));
    return constant;
}

} // namespace

std::string describe(const ort::NodeFacts& node) {
    return node.op_type + " node '" + node.name + "'";
}

// The tensors of one launch. They live on the stack of the thread that launches.
struct CompiledNode::Launch {
    std::array<operators::Tensor, MOST_INPUTS> inputs;
    std::array<operators::Tensor, MOST_OUTPUTS> outputs;
};

CompiledNode::CompiledNode(const ort::NodeFacts& node, const ort::NodeFacts& fused, Weights& weights)
    : OrtNodeComputeInfo{},
      operator_(*operators::find_operator(node.op_type)),
      description_(describe(node)),
      launcher_(operator_.make(node.attributes)),
      inputs_(operator_.inputs.size()),
      outputs_(operator_.outputs.size(), -1) {
    ort_version_supported = ort::runtime.version;
    CreateState = create_state;
    Compute = compute;
    ReleaseState = release_state;
    for (std::size_t index = 0; index < node.inputs.size(); ++index) {
        const auto& value = node.inputs[index];
        if (!value) {
            continue;
        }
        inputs_[index].fused = position(fused.inputs, value->name);
        if (inputs_[index].fused < 0) {
            if (!is_constant(*value)) {
                throw ort::Failure(ort::ORT_INVALID_GRAPH, description_ + ": its input " + value->name + " is gone");
            }
            inputs_[index].weight = weights.upload(*value, operator_.inputs[index]);
        }
    }
    for (std::size_t index = 0; index < node.outputs.size(); ++index) {
        if (node.outputs[index]) {
            outputs_[index] = position(fused.outputs, node.outputs[index]->name);
        }
    }
}

operators::Tensor CompiledNode::read_input(ort::OrtKernelContext* context, std::size_t index) const {
    const Source& source = inputs_[index];
    if (source.weight != nullptr) {
        return source.weight->tensor;
    }
    operators::Tensor tensor;
    if (source.fused < 0) {
        return tensor;
    }
    const ort::OrtValue* value = input_value(context, static_cast<std::size_t>(source.fused));
    ort::ONNXTensorElementDataType type = ort::ONNX_UNDEFINED;
    const void* data = nullptr;
    tensor.shape = shape_of(value, type);
    ort::check(ort::api().GetTensorData(value, &data));
    tensor.present = true;
    tensor.type = operators::acl_type(type);
    tensor.data = const_cast<void*>(data);
    if (data != nullptr) {
        const ort::OrtMemoryDevice* where = ort::ep_api().Value_GetMemoryDevice(value);
        if (ort::ep_api().MemoryDevice_GetDeviceType(where) != ort::ORT_MEMORY_NPU) {
            throw ort::Failure(
                ort::ORT_FAIL, description_ + ": the runtime left its input "
                                   + std::string(operator_.inputs[index].name) + " on the host"
            );
        }
    } else if (tensor.bytes() > 0) {
        throw ort::Failure(
            ort::ORT_FAIL, description_ + ": the NPU had no memory left for its input "
                               + std::string(operator_.inputs[index].name) + ", "
                               + operators::describe(tensor.type, tensor.shape)
        );
    }
    return tensor;
}

void CompiledNode::allocate_outputs(ort::OrtKernelContext* context, Launch& launch) const {
    for (std::size_t index = 0; index < outputs_.size(); ++index) {
        if (outputs_[index] < 0) {
            continue;
        }
        operators::Tensor& tensor = launch.outputs[index];
        ort::OrtValue* value = nullptr;
        ort::check(
            ort::api().KernelContext_GetOutput(
                context, static_cast<std::size_t>(outputs_[index]), tensor.shape.data(),
                static_cast<std::size_t>(tensor.shape.rank()), &value
            )
        );
        ort::check(ort::api().GetTensorMutableData(value, &tensor.data));
        if (tensor.data == nullptr && tensor.bytes() > 0) {
            throw ort::Failure(
                ort::ORT_FAIL, description_ + ": the NPU has no memory left for its output "
                                   + std::string(operator_.outputs[index].name) + ", "
                                   + operators::describe(tensor.type, tensor.shape)
                                   + "; free device values, or use smaller caches or batches"
            );
        }
    }
}

// Outputs that nobody reads need memory all the same, and matrices that are no constants are packed anew every time.
void CompiledNode::use_scratch(Stream& stream, Launch& launch) const {
    std::size_t total = 0;
    const auto place = [&](const operators::Tensor& tensor) {
        const std::size_t offset = total;
        total += cann::padded(tensor.bytes());
        return offset;
    };
    std::array<std::size_t, MOST_INPUTS> input_offsets{};
    std::array<std::size_t, MOST_OUTPUTS> output_offsets{};
    const auto to_pack = [&](std::size_t index) {
        const operators::Tensor& tensor = launch.inputs[index];
        return tensor.present && !tensor.packed && needs_packing(operator_.inputs[index], tensor);
    };
    const auto unread = [&](std::size_t index) {
        return launch.outputs[index].present && outputs_[index] < 0;
    };
    for (std::size_t index = 0; index < inputs_.size(); ++index) {
        if (to_pack(index)) {
            input_offsets[index] = place(launch.inputs[index]);
        }
    }
    for (std::size_t index = 0; index < outputs_.size(); ++index) {
        if (unread(index)) {
            output_offsets[index] = place(launch.outputs[index]);
        }
    }
    if (total == 0) {
        return;
    }
    auto* scratch = static_cast<std::byte*>(stream.scratch(total));
    for (std::size_t index = 0; index < inputs_.size(); ++index) {
        if (to_pack(index)) {
            void* const packed = scratch + input_offsets[index];
            pack_on_stream(stream, launch.inputs[index], packed);
        }
    }
    for (std::size_t index = 0; index < outputs_.size(); ++index) {
        if (unread(index)) {
            launch.outputs[index].data = scratch + output_offsets[index];
        }
    }
}

// One buffer bound to both the input and the output needs no copy; that is how caches stay in place.
void CompiledNode::update_in_place(Stream& stream, Launch& launch) const {
    for (std::size_t index = 0; index < outputs_.size(); ++index) {
        const int updated = operator_.outputs[index].updates;
        if (updated >= 0 && launch.outputs[index].present) {
            const operators::Tensor& input = launch.inputs[static_cast<std::size_t>(updated)];
            stream.copy(launch.outputs[index].data, input.data, input.bytes());
        }
    }
}

void CompiledNode::run_phases(Stream& stream, Launch& launch) const {
    operators::Arguments arguments;
    const operators::Plan plan = launcher_->plan(
        std::span(launch.inputs).first(inputs_.size()), std::span(launch.outputs).first(outputs_.size()), arguments
    );
    cann::ExecutorHandle executor(plan.executor);
    void* workspace = stream.workspace(plan.workspace);
    // The second phase takes the executor, even if it fails.
    const aclnnStatus status =
        (cann::functions().*(operator_.launch))(workspace, plan.workspace, executor.release(), stream.handle());
    cann::check(status, operator_.aclnn);
    stream.launched(description_);
}

void CompiledNode::launch(ort::OrtKernelContext* context) const {
    Stream* stream = stream_of(context);
    if (stream == nullptr) {
        throw ort::Failure(ort::ORT_FAIL, description_ + ": the runtime gave it no stream of the NPU");
    }
    stream->device().make_current();
    Launch launch;
    for (std::size_t index = 0; index < inputs_.size(); ++index) {
        launch.inputs[index] = read_input(context, index);
    }
    try {
        launcher_->infer(
            std::span(launch.inputs).first(inputs_.size()), std::span(launch.outputs).first(outputs_.size())
        );
        allocate_outputs(context, launch);
        use_scratch(*stream, launch);
        update_in_place(*stream, launch);
        run_phases(*stream, launch);
    } catch (const cann::Error& error) {
        throw cann::Error(error, description_ + ": ", given(launch));
    }
}

std::string CompiledNode::given(const Launch& launch) const {
    std::string text;
    for (std::size_t index = 0; index < inputs_.size(); ++index) {
        const operators::Tensor& tensor = launch.inputs[index];
        if (tensor.present) {
            text += text.empty() ? "; given " : ", ";
            text += std::string(operator_.inputs[index].name) + " " + operators::describe(tensor.type, tensor.shape);
        }
    }
    return text;
}

ort::OrtStatus*
CompiledNode::create_state(ort::OrtNodeComputeInfo*, ort::OrtNodeComputeContext*, void** state) noexcept {
    *state = nullptr; // what a run needs is on its stack and its stream
    return nullptr;
}

ort::OrtStatus* CompiledNode::compute(ort::OrtNodeComputeInfo* self, void*, ort::OrtKernelContext* context) noexcept {
    return ort::guarded([&] { static_cast<const CompiledNode*>(self)->launch(context); });
}

void CompiledNode::release_state(ort::OrtNodeComputeInfo*, void*) noexcept {}

} // namespace ep
