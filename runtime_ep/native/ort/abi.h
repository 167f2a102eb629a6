// The slice of ONNX Runtime's C ABI that a plugin execution provider needs, as of API version 30.
//
// Tables of functions only ever grow at their end, so a slot keeps its place in every later release; what lies between
// the slots used here is padding. The structs behind the tables are filled in by the provider: the runtime reads a
// member only if `ort_version_supported` says that the provider knew it, and null means "not implemented".
#pragma once

#include <cstddef>
#include <cstdint>

namespace ort {

inline constexpr std::uint32_t API_VERSION = 30;

enum OrtErrorCode : int {
    ORT_OK = 0,
    ORT_FAIL = 1,
    ORT_INVALID_ARGUMENT = 2,
    ORT_RUNTIME_EXCEPTION = 6,
    ORT_NOT_IMPLEMENTED = 9,
    ORT_INVALID_GRAPH = 10,
};

enum OrtLoggingLevel : int {
    ORT_LOGGING_LEVEL_VERBOSE = 0,
    ORT_LOGGING_LEVEL_INFO = 1,
    ORT_LOGGING_LEVEL_WARNING = 2,
    ORT_LOGGING_LEVEL_ERROR = 3,
};

enum ONNXType : int { ONNX_TYPE_UNKNOWN = 0, ONNX_TYPE_TENSOR = 1 };

enum ONNXTensorElementDataType : int {
    ONNX_UNDEFINED = 0,
    ONNX_FLOAT = 1,
    ONNX_UINT8 = 2,
    ONNX_INT8 = 3,
    ONNX_UINT16 = 4,
    ONNX_INT16 = 5,
    ONNX_INT32 = 6,
    ONNX_INT64 = 7,
    ONNX_STRING = 8,
    ONNX_BOOL = 9,
    ONNX_FLOAT16 = 10,
    ONNX_DOUBLE = 11,
    ONNX_UINT32 = 12,
    ONNX_UINT64 = 13,
    ONNX_BFLOAT16 = 16,
    ONNX_FLOAT8E4M3FN = 17,
    ONNX_FLOAT8E4M3FNUZ = 18,
    ONNX_FLOAT8E5M2 = 19,
    ONNX_FLOAT8E5M2FNUZ = 20,
    ONNX_UINT4 = 21,
    ONNX_INT4 = 22,
    ONNX_FLOAT4E2M1 = 23,
    ONNX_UINT2 = 24,
    ONNX_INT2 = 25,
    ONNX_FLOAT8E8M0 = 26, // onnxruntime 1.32; the numbers from 24 on are not those of ONNX
};

enum OrtHardwareDeviceType : int { ORT_DEVICE_CPU = 0, ORT_DEVICE_GPU = 1, ORT_DEVICE_NPU = 2 };
enum OrtMemoryInfoDeviceType : int { ORT_MEMORY_CPU = 0, ORT_MEMORY_GPU = 1, ORT_MEMORY_FPGA = 2, ORT_MEMORY_NPU = 3 };
enum OrtDeviceMemoryType : int { ORT_MEMORY_DEFAULT = 0, ORT_MEMORY_HOST_ACCESSIBLE = 5 };
enum OrtMemType : int { ORT_MEM_CPU_INPUT = -2, ORT_MEM_CPU_OUTPUT = -1, ORT_MEM_DEFAULT = 0 };
enum OrtAllocatorType : int { ORT_ALLOCATOR_INVALID = -1, ORT_ALLOCATOR_DEVICE = 0, ORT_ALLOCATOR_ARENA = 1 };

enum OrtOpAttrType : int {
    ORT_ATTRIBUTE_UNDEFINED = 0,
    ORT_ATTRIBUTE_INT = 1,
    ORT_ATTRIBUTE_INTS = 2,
    ORT_ATTRIBUTE_FLOAT = 3,
    ORT_ATTRIBUTE_FLOATS = 4,
    ORT_ATTRIBUTE_STRING = 5,
    ORT_ATTRIBUTE_STRINGS = 6,
};

enum OrtCustomOpInputOutputCharacteristic : int { ORT_CUSTOM_OP_REQUIRED = 0, ORT_CUSTOM_OP_OPTIONAL = 1 };

// Named in signatures of members that the provider leaves null.
enum OrtCompiledModelCompatibility : int {};
enum OrtEpDataLayout : int {};
enum OrtGraphCaptureNodeAssignmentPolicy : int {};

struct OrtStatus;
struct OrtLogger;
struct OrtHardwareDevice;
struct OrtEpDevice;
struct OrtKeyValuePairs;
struct OrtSessionOptions;
struct OrtRunOptions;
struct OrtMemoryInfo;
struct OrtMemoryDevice;
struct OrtValue;
struct OrtTypeInfo;
struct OrtTensorTypeAndShapeInfo;
struct OrtValueInfo;
struct OrtGraph;
struct OrtNode;
struct OrtOpAttr;
struct OrtEpGraphSupportInfo;
struct OrtKernelContext;
struct OrtKernelInfo;
struct OrtKernelRegistry;
struct OrtKernelDef;
struct OrtKernelDefBuilder;
struct OrtDataType;
struct OrtSyncStream;
struct OrtCustomOpDomain;
struct OrtShapeInferContext;
struct OrtNodeComputeContext;
struct OrtSharedPrePackedWeightCache;
struct OrtDeviceEpIncompatibilityDetails;
struct OrtExternalResourceImporterImpl;
struct OrtGraphicsInteropConfig;
struct OrtEpProfilerImpl;
struct OrtResourceCount;
struct OrtWeightlessSupport;
struct OrtApi;
struct OrtEpApi;
struct OrtEp;
struct OrtEpFactory;
struct OrtKernelImpl;
struct OrtAllocator;
struct OrtDataTransferImpl;
struct OrtNodeComputeInfo;
struct OrtSyncStreamImpl;
struct OrtSyncNotificationImpl;
struct OrtCustomOp;

struct OrtApiBase {
    const OrtApi* (*GetApi)(std::uint32_t version);
    const char* (*GetVersionString)();
};

using OrtKernelCreateFunc = OrtStatus* (*)(void* state, const OrtKernelInfo* info, OrtKernelImpl** kernel);

// The bool sits behind the number, in the same 8 bytes.
struct OrtNodeFusionOptions {
    std::uint32_t ort_version_supported;
    bool drop_constant_initializers;
};

struct OrtEpFactory {
    std::uint32_t ort_version_supported = 0;
    const char* (*GetName)(const OrtEpFactory* this_ptr) = nullptr;
    const char* (*GetVendor)(const OrtEpFactory* this_ptr) = nullptr;
    OrtStatus* (*GetSupportedDevices)(
        OrtEpFactory* this_ptr, const OrtHardwareDevice* const* devices, std::size_t num_devices,
        OrtEpDevice** ep_devices, std::size_t max_ep_devices, std::size_t* num_ep_devices
    ) = nullptr;
    OrtStatus* (*CreateEp)(
        OrtEpFactory* this_ptr, const OrtHardwareDevice* const* devices,
        const OrtKeyValuePairs* const* ep_metadata_pairs, std::size_t num_devices,
        const OrtSessionOptions* session_options, const OrtLogger* logger, OrtEp** ep
    ) = nullptr;
    void (*ReleaseEp)(OrtEpFactory* this_ptr, OrtEp* ep) = nullptr;
    std::uint32_t (*GetVendorId)(const OrtEpFactory* this_ptr) = nullptr;
    const char* (*GetVersion)(const OrtEpFactory* this_ptr) = nullptr;
    OrtStatus* (*ValidateCompiledModelCompatibilityInfo)(
        OrtEpFactory* this_ptr, const OrtHardwareDevice* const* devices, std::size_t num_devices,
        const char* compatibility_info, OrtCompiledModelCompatibility* model_compatibility
    ) = nullptr;
    OrtStatus* (*CreateAllocator)(
        OrtEpFactory* this_ptr, const OrtMemoryInfo* memory_info, const OrtKeyValuePairs* allocator_options,
        OrtAllocator** allocator
    ) = nullptr;
    void (*ReleaseAllocator)(OrtEpFactory* this_ptr, OrtAllocator* allocator) = nullptr;
    OrtStatus* (*CreateDataTransfer)(OrtEpFactory* this_ptr, OrtDataTransferImpl** data_transfer) = nullptr;
    bool (*IsStreamAware)(const OrtEpFactory* this_ptr) = nullptr;
    OrtStatus* (*CreateSyncStreamForDevice)(
        OrtEpFactory* this_ptr, const OrtMemoryDevice* memory_device, const OrtKeyValuePairs* stream_options,
        OrtSyncStreamImpl** stream
    ) = nullptr;
    OrtStatus* (*GetHardwareDeviceIncompatibilityDetails)(
        OrtEpFactory* this_ptr, const OrtHardwareDevice* hw, OrtDeviceEpIncompatibilityDetails* details
    ) = nullptr;
    OrtStatus* (*CreateExternalResourceImporterForDevice)(
        OrtEpFactory* this_ptr, const OrtEpDevice* ep_device, OrtExternalResourceImporterImpl** out_importer
    ) = nullptr;
    OrtStatus* (*GetNumCustomOpDomains)(OrtEpFactory* this_ptr, std::size_t* num_domains) = nullptr;
    OrtStatus* (*GetCustomOpDomains)(OrtEpFactory* this_ptr, OrtCustomOpDomain** domains, std::size_t num_domains) =
        nullptr;
    OrtStatus* (*InitGraphicsInterop)(
        OrtEpFactory* this_ptr, const OrtEpDevice* ep_device, const OrtGraphicsInteropConfig* config
    ) = nullptr;
    OrtStatus* (*DeinitGraphicsInterop)(OrtEpFactory* this_ptr, const OrtEpDevice* ep_device) = nullptr;
    OrtStatus* (*SelectBestModelCandidate)(
        OrtEpFactory* this_ptr, const OrtHardwareDevice* device, const OrtKeyValuePairs* const* candidates,
        std::size_t num_candidates, const OrtSessionOptions* session_options, std::size_t* selected_index
    ) = nullptr;
};

struct OrtEp {
    std::uint32_t ort_version_supported = 0;
    const char* (*GetName)(const OrtEp* this_ptr) = nullptr;
    OrtStatus* (*GetCapability)(OrtEp* this_ptr, const OrtGraph* graph, OrtEpGraphSupportInfo* graph_support_info) =
        nullptr;
    OrtStatus* (*Compile)(
        OrtEp* this_ptr, const OrtGraph** graphs, const OrtNode** fused_nodes, std::size_t count,
        OrtNodeComputeInfo** node_compute_infos, OrtNode** ep_context_nodes
    ) = nullptr;
    void (*ReleaseNodeComputeInfos)(
        OrtEp* this_ptr, OrtNodeComputeInfo** node_compute_infos, std::size_t num_node_compute_infos
    ) = nullptr;
    OrtStatus* (*GetPreferredDataLayout)(OrtEp* this_ptr, OrtEpDataLayout* preferred_data_layout) = nullptr;
    OrtStatus* (*ShouldConvertDataLayoutForOp)(
        OrtEp* this_ptr, const char* domain, const char* op_type, OrtEpDataLayout target_data_layout,
        int* should_convert
    ) = nullptr;
    OrtStatus* (*SetDynamicOptions)(
        OrtEp* this_ptr, const char* const* option_keys, const char* const* option_values, std::size_t num_options
    ) = nullptr;
    OrtStatus* (*OnRunStart)(OrtEp* this_ptr, const OrtRunOptions* run_options) = nullptr;
    OrtStatus* (*OnRunEnd)(OrtEp* this_ptr, const OrtRunOptions* run_options, bool sync_stream) = nullptr;
    OrtStatus* (*CreateAllocator)(OrtEp* this_ptr, const OrtMemoryInfo* memory_info, OrtAllocator** allocator) =
        nullptr;
    OrtStatus* (*CreateSyncStreamForDevice)(
        OrtEp* this_ptr, const OrtMemoryDevice* memory_device, OrtSyncStreamImpl** stream
    ) = nullptr;
    const char* (*GetCompiledModelCompatibilityInfo)(OrtEp* this_ptr, const OrtGraph* graph) = nullptr;
    OrtStatus* (*GetKernelRegistry)(OrtEp* this_ptr, const OrtKernelRegistry** kernel_registry) = nullptr;
    OrtStatus* (*IsConcurrentRunSupported)(OrtEp* this_ptr, bool* is_supported) = nullptr;
    OrtStatus* (*Sync)(OrtEp* this_ptr) = nullptr;
    OrtStatus* (*CreateProfiler)(OrtEp* this_ptr, OrtEpProfilerImpl** profiler) = nullptr;
    bool (*IsGraphCaptureEnabled)(const OrtEp* this_ptr) = nullptr;
    bool (*IsGraphCaptured)(const OrtEp* this_ptr, int graph_annotation_id) = nullptr;
    OrtStatus* (*ReplayGraph)(OrtEp* this_ptr, int graph_annotation_id) = nullptr;
    OrtGraphCaptureNodeAssignmentPolicy (*GetGraphCaptureNodeAssignmentPolicy)(const OrtEp* this_ptr) = nullptr;
    OrtStatus* (*GetAvailableResource)(const OrtEp* this_ptr, OrtResourceCount* available) = nullptr;
    OrtStatus* (*OnSessionInitializationEnd)(OrtEp* this_ptr) = nullptr;
    OrtStatus* (*GetDefaultMemoryDevice)(const OrtEp* this_ptr, const OrtMemoryDevice** device) = nullptr;
    OrtStatus* (*ReleaseCapturedGraph)(OrtEp* this_ptr, int graph_annotation_id) = nullptr;
    OrtStatus* (*GetWeightlessSupport)(const OrtEp* this_ptr, OrtWeightlessSupport* support) = nullptr;
};

struct OrtNodeComputeInfo {
    std::uint32_t ort_version_supported = 0;
    OrtStatus* (*CreateState)(
        OrtNodeComputeInfo* this_ptr, OrtNodeComputeContext* compute_context, void** compute_state
    ) = nullptr;
    OrtStatus* (*Compute)(OrtNodeComputeInfo* this_ptr, void* compute_state, OrtKernelContext* kernel_context) =
        nullptr;
    void (*ReleaseState)(OrtNodeComputeInfo* this_ptr, void* compute_state) = nullptr;
};

struct OrtAllocator {
    std::uint32_t version = 0;
    void* (*Alloc)(OrtAllocator* this_, std::size_t size) = nullptr;
    void (*Free)(OrtAllocator* this_, void* p) = nullptr;
    const OrtMemoryInfo* (*Info)(const OrtAllocator* this_) = nullptr;
    void* (*Reserve)(OrtAllocator* this_, std::size_t size) = nullptr;
    OrtStatus* (*GetStats)(const OrtAllocator* this_, OrtKeyValuePairs** out) = nullptr;
    void* (*AllocOnStream)(OrtAllocator* this_, std::size_t size, OrtSyncStream* stream) = nullptr;
    OrtStatus* (*Shrink)(OrtAllocator* this_) = nullptr;
};

struct OrtDataTransferImpl {
    std::uint32_t ort_version_supported = 0;
    void (*Release)(OrtDataTransferImpl* this_ptr) = nullptr;
    bool (*CanCopy)(
        const OrtDataTransferImpl* this_ptr, const OrtMemoryDevice* src_memory_device,
        const OrtMemoryDevice* dst_memory_device
    ) = nullptr;
    OrtStatus* (*CopyTensors)(
        OrtDataTransferImpl* this_ptr, const OrtValue** src_tensors, OrtValue** dst_tensors, OrtSyncStream** streams,
        std::size_t num_tensors
    ) = nullptr;
};

struct OrtSyncStreamImpl {
    std::uint32_t ort_version_supported = 0;
    void (*Release)(OrtSyncStreamImpl* this_ptr) = nullptr;
    void* (*GetHandle)(OrtSyncStreamImpl* this_ptr) = nullptr;
    OrtStatus* (*CreateNotification)(OrtSyncStreamImpl* this_ptr, OrtSyncNotificationImpl** notification) = nullptr;
    OrtStatus* (*Flush)(OrtSyncStreamImpl* this_ptr) = nullptr;
    OrtStatus* (*OnSessionRunEnd)(OrtSyncStreamImpl* this_ptr) = nullptr;
};

struct OrtSyncNotificationImpl {
    std::uint32_t ort_version_supported = 0;
    void (*Release)(OrtSyncNotificationImpl* this_ptr) = nullptr;
    OrtStatus* (*Activate)(OrtSyncNotificationImpl* this_ptr) = nullptr;
    OrtStatus* (*WaitOnDevice)(OrtSyncNotificationImpl* this_ptr, OrtSyncStream* consumer_stream) = nullptr;
    OrtStatus* (*WaitOnHost)(OrtSyncNotificationImpl* this_ptr) = nullptr;
};

struct OrtKernelImpl {
    std::uint32_t ort_version_supported = 0;
    std::uint32_t flags = 0;
    OrtStatus* (*Compute)(OrtKernelImpl* this_ptr, OrtKernelContext* context) = nullptr;
    void (*Release)(OrtKernelImpl* this_ptr) = nullptr;
    OrtStatus* (*PrePackWeight)(
        OrtKernelImpl* this_ptr, const OrtValue* tensor, int input_index, OrtAllocator* allocator,
        OrtSharedPrePackedWeightCache* prepacked_weight_cache, bool* is_packed
    ) = nullptr;
    OrtStatus* (*SetSharedPrePackedWeight)(
        OrtKernelImpl* this_ptr, const void* const* buffer_data_ptrs, const std::size_t* buffer_data_sizes,
        std::size_t num_buffers, int input_index
    ) = nullptr;
};

struct OrtCustomOp {
    std::uint32_t version = 0;
    void* (*CreateKernel)(const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info) = nullptr;
    const char* (*GetName)(const OrtCustomOp* op) = nullptr;
    const char* (*GetExecutionProviderType)(const OrtCustomOp* op) = nullptr;
    ONNXTensorElementDataType (*GetInputType)(const OrtCustomOp* op, std::size_t index) = nullptr;
    std::size_t (*GetInputTypeCount)(const OrtCustomOp* op) = nullptr;
    ONNXTensorElementDataType (*GetOutputType)(const OrtCustomOp* op, std::size_t index) = nullptr;
    std::size_t (*GetOutputTypeCount)(const OrtCustomOp* op) = nullptr;
    void (*KernelCompute)(void* op_kernel, OrtKernelContext* context) = nullptr;
    void (*KernelDestroy)(void* op_kernel) = nullptr;
    OrtCustomOpInputOutputCharacteristic (*GetInputCharacteristic)(const OrtCustomOp* op, std::size_t index) = nullptr;
    OrtCustomOpInputOutputCharacteristic (*GetOutputCharacteristic)(const OrtCustomOp* op, std::size_t index) = nullptr;
    OrtMemType (*GetInputMemoryType)(const OrtCustomOp* op, std::size_t index) = nullptr;
    int (*GetVariadicInputMinArity)(const OrtCustomOp* op) = nullptr;
    int (*GetVariadicInputHomogeneity)(const OrtCustomOp* op) = nullptr;
    int (*GetVariadicOutputMinArity)(const OrtCustomOp* op) = nullptr;
    int (*GetVariadicOutputHomogeneity)(const OrtCustomOp* op) = nullptr;
    OrtStatus* (*CreateKernelV2)(const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info, void** kernel) =
        nullptr;
    OrtStatus* (*KernelComputeV2)(void* op_kernel, OrtKernelContext* context) = nullptr;
    OrtStatus* (*InferOutputShapeFn)(const OrtCustomOp* op, OrtShapeInferContext*) = nullptr;
    int (*GetStartVersion)(const OrtCustomOp* op) = nullptr;
    int (*GetEndVersion)(const OrtCustomOp* op) = nullptr;
    std::size_t (*GetMayInplace)(int** input_index, int** output_index) = nullptr;
    void (*ReleaseMayInplace)(int* input_index, int* output_index) = nullptr;
    std::size_t (*GetAliasMap)(int** input_index, int** output_index) = nullptr;
    void (*ReleaseAliasMap)(int* input_index, int* output_index) = nullptr;
};

} // namespace ort
