// Compares the declared ABI with ONNX Runtime's own headers; compiled only if ORT_INCLUDE_DIR names them.
#include "ort/api_tables.h"

#include <cstddef>
#include <type_traits>

#include <onnxruntime_c_api.h>

// Their functions want their status to be used, which is no part of a type.
#pragma GCC diagnostic ignored "-Wignored-attributes"

// What of the slice came last, OrtEp::GetWeightlessSupport, came with 29.
static_assert(ORT_API_VERSION >= 29, "the headers are older than the newest member of the declared slice of the ABI");

// Whether two types are passed alike: pointers as pointers, numbers and enumerations of one size and signedness.
template<typename Theirs, typename Ours>
constexpr bool same_form = [] {
    if constexpr (std::is_enum_v<Theirs> && std::is_enum_v<Ours>) {
        return sizeof(Theirs) == sizeof(Ours);
    } else if constexpr (std::is_pointer_v<Theirs> && std::is_pointer_v<Ours>) {
        return std::is_const_v<std::remove_pointer_t<Theirs>> == std::is_const_v<std::remove_pointer_t<Ours>>;
    } else {
        return std::is_same_v<Theirs, Ours>;
    }
}();
template<typename Theirs, typename... TheirArguments, typename Ours, typename... OurArguments>
constexpr bool same_form<Theirs (*)(TheirArguments...), Ours (*)(OurArguments...)> = [] {
    if constexpr (sizeof...(TheirArguments) == sizeof...(OurArguments)) {
        return same_form<Theirs, Ours> && (same_form<TheirArguments, OurArguments> && ...);
    } else {
        return false;
    }
}();
template<typename Theirs, typename... TheirArguments, typename Ours>
constexpr bool same_form<Theirs (*)(TheirArguments...) noexcept, Ours> = same_form<Theirs (*)(TheirArguments...), Ours>;

#define SLOT(type, member, slot)                                                                                       \
    static_assert(offsetof(::type, member) == offsetof(ort::type, member), #type "::" #member " has moved");           \
    static_assert(                                                                                                     \
        same_form<decltype(::type::member), decltype(ort::type::member)>, #type "::" #member " has another signature"  \
    );
#include "ort/slots.inc"
#undef SLOT

// The runtime reads these up to the last member that the provider's version has.
#define FILLED_IN(type)                                                                                                \
    static_assert(                                                                                                     \
        ORT_API_VERSION > ort::API_VERSION ? sizeof(::type) >= sizeof(ort::type)                                       \
                                           : sizeof(::type) == sizeof(ort::type),                                      \
        #type " has other members"                                                                                     \
    );
FILLED_IN(OrtEpFactory)
FILLED_IN(OrtEp)
FILLED_IN(OrtNodeComputeInfo)
FILLED_IN(OrtNodeFusionOptions)
FILLED_IN(OrtAllocator)
FILLED_IN(OrtDataTransferImpl)
FILLED_IN(OrtSyncStreamImpl)
FILLED_IN(OrtSyncNotificationImpl)
FILLED_IN(OrtKernelImpl)
FILLED_IN(OrtCustomOp)
#undef FILLED_IN

#define SAME(theirs, ours) static_assert(static_cast<int>(::theirs) == static_cast<int>(ort::ours), #theirs);
SAME(ORT_FAIL, ORT_FAIL)
SAME(ORT_INVALID_ARGUMENT, ORT_INVALID_ARGUMENT)
SAME(ORT_RUNTIME_EXCEPTION, ORT_RUNTIME_EXCEPTION)
SAME(ORT_NOT_IMPLEMENTED, ORT_NOT_IMPLEMENTED)
SAME(ORT_LOGGING_LEVEL_WARNING, ORT_LOGGING_LEVEL_WARNING)
SAME(ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, ONNX_FLOAT)
SAME(ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8, ONNX_INT8)
SAME(ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32, ONNX_INT32)
SAME(ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64, ONNX_INT64)
SAME(ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16, ONNX_FLOAT16)
SAME(ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16, ONNX_BFLOAT16)
SAME(ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E4M3FN, ONNX_FLOAT8E4M3FN)
SAME(ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E5M2, ONNX_FLOAT8E5M2)
SAME(OrtHardwareDeviceType_NPU, ORT_DEVICE_NPU)
SAME(OrtMemoryInfoDeviceType_NPU, ORT_MEMORY_NPU)
SAME(OrtMemTypeCPUInput, ORT_MEM_CPU_INPUT)
SAME(OrtMemTypeCPUOutput, ORT_MEM_CPU_OUTPUT)
SAME(OrtDeviceAllocator, ORT_ALLOCATOR_DEVICE)
SAME(ORT_OP_ATTR_INT, ORT_ATTRIBUTE_INT)
SAME(ORT_OP_ATTR_INTS, ORT_ATTRIBUTE_INTS)
SAME(ORT_OP_ATTR_FLOAT, ORT_ATTRIBUTE_FLOAT)
SAME(ORT_OP_ATTR_STRING, ORT_ATTRIBUTE_STRING)
#undef SAME
