// Compares the declared ABI with ONNX Runtime's own headers; compiled only if ORT_INCLUDE_DIR names them.
#include "ort/api_tables.h"

#include <cstddef>

#include <onnxruntime_c_api.h>

static_assert(ORT_API_VERSION >= ort::API_VERSION, "the headers are older than the declared slice of the ABI");

#define SLOT(type, member, slot)                                                                                       \
    static_assert(offsetof(::type, member) == offsetof(ort::type, member), #type "::" #member " has moved");
#include "ort/slots.inc"
#undef SLOT

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
