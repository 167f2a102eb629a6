#include "ep/memcpy_kernels.h"

#include "ep/data_transfer.h"
#include "ep/kernel_context.h"

#include <array>
#include <memory>

namespace ep {
namespace {

constexpr std::array<ort::ONNXTensorElementDataType, 13> CARRIED_TYPES{
    ort::ONNX_FLOAT, ort::ONNX_FLOAT16, ort::ONNX_BFLOAT16, ort::ONNX_DOUBLE, ort::ONNX_INT8,
    ort::ONNX_UINT8, ort::ONNX_INT16,   ort::ONNX_INT32,    ort::ONNX_INT64,  ort::ONNX_UINT32,
    ort::ONNX_BOOL,  ort::ONNX_UINT64,  ort::ONNX_UINT16,
};
// Types that older runtimes may not know.
constexpr std::array<ort::ONNXTensorElementDataType, 3> FLOAT8_TYPES{
    ort::ONNX_FLOAT8E4M3FN,
    ort::ONNX_FLOAT8E5M2,
    ort::ONNX_FLOAT8E8M0,
};

class MemcpyKernel final : public ort::OrtKernelImpl {
  public:
    MemcpyKernel() : OrtKernelImpl{} {
        ort_version_supported = ort::runtime.version;
        Compute = compute;
        Release = release;
    }

  private:
    static ort::OrtStatus* compute(ort::OrtKernelImpl*, ort::OrtKernelContext* context) noexcept {
        return ort::guarded([&] {
            const ort::OrtValue* source = input_value(context, 0);
            const operators::Shape shape = shape_of(source);
            ort::OrtValue* target = nullptr;
            ort::check(
                ort::api().KernelContext_GetOutput(
                    context, 0, shape.data(), static_cast<std::size_t>(shape.rank()), &target
                )
            );
            copy_value(source, target, stream_of(context));
        });
    }

    static void release(ort::OrtKernelImpl* self) noexcept { delete static_cast<MemcpyKernel*>(self); }
};

ort::OrtStatus* create_kernel(void*, const ort::OrtKernelInfo*, ort::OrtKernelImpl** kernel) {
    return ort::guarded([&] { *kernel = new MemcpyKernel; });
}

std::vector<const ort::OrtDataType*> carried_types() {
    std::vector<const ort::OrtDataType*> types;
    for (const auto type : CARRIED_TYPES) {
        const ort::OrtDataType* found = nullptr;
        ort::check(ort::ep_api().GetTensorDataType(type, &found));
        types.push_back(found);
    }
    for (const auto type : FLOAT8_TYPES) {
        const ort::OrtDataType* found = nullptr;
        if (ort::OrtStatus* status = ort::ep_api().GetTensorDataType(type, &found)) {
            ort::api().ReleaseStatus(status);
        } else if (found != nullptr) {
            types.push_back(found);
        }
    }
    return types;
}

template<typename Handle, void (*ort::OrtEpApi::*release)(Handle*)>
using Released = std::unique_ptr<Handle, decltype([](Handle* handle) { (ort::ep_api().*release)(handle); })>;

void add_kernel(ort::OrtKernelRegistry* registry, const char* operator_type, bool from_host) {
    const ort::OrtEpApi& api = ort::ep_api();
    ort::OrtKernelDefBuilder* created = nullptr;
    ort::check(api.CreateKernelDefBuilder(&created));
    const Released<ort::OrtKernelDefBuilder, &ort::OrtEpApi::ReleaseKernelDefBuilder> builder(created);
    ort::check(api.KernelDefBuilder_SetOperatorType(builder.get(), operator_type));
    ort::check(api.KernelDefBuilder_SetDomain(builder.get(), ""));
    ort::check(api.KernelDefBuilder_SetSinceVersion(builder.get(), 1, 1));
    ort::check(api.KernelDefBuilder_SetExecutionProvider(builder.get(), PROVIDER_NAME));
    const std::vector<const ort::OrtDataType*> types = carried_types();
    ort::check(api.KernelDefBuilder_AddTypeConstraint(builder.get(), "T", types.data(), types.size()));
    if (from_host) {
        ort::check(api.KernelDefBuilder_SetInputMemType(builder.get(), 0, ort::ORT_MEM_CPU_INPUT));
    } else {
        ort::check(api.KernelDefBuilder_SetOutputMemType(builder.get(), 0, ort::ORT_MEM_CPU_OUTPUT));
    }
    ort::OrtKernelDef* built = nullptr;
    ort::check(api.KernelDefBuilder_Build(builder.get(), &built));
    const Released<ort::OrtKernelDef, &ort::OrtEpApi::ReleaseKernelDef> definition(built);
    ort::check(api.KernelRegistry_AddKernel(registry, definition.get(), create_kernel, nullptr));
}

const ort::OrtKernelRegistry* create_registry() {
    ort::OrtKernelRegistry* registry = nullptr;
    ort::check(ort::ep_api().CreateKernelRegistry(&registry));
    add_kernel(registry, "MemcpyFromHost", true);
    add_kernel(registry, "MemcpyToHost", false);
    return registry;
}

} // namespace

const ort::OrtKernelRegistry* memcpy_kernels() {
    static const ort::OrtKernelRegistry* registry = create_registry();
    return registry;
}

} // namespace ep
