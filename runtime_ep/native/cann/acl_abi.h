// The slice of CANN's C ABI that the provider calls and the emulator implements: acl runtime, aclnn base, and the five
// aclnn operators, each declared as `aclnnXGetWorkspaceSize` and `aclnnX`.
//
// The provider loads these functions at run time and uses the declarations for their types only
// (`decltype(&aclrtMalloc)`); no library of CANN is linked. Values are those of CANN 8 and later.
#pragma once

#include <cstddef>
#include <cstdint>

#pragma GCC visibility push(default)
extern "C" {

// --- Status codes ----------------------------------------------------------------------------------------------------

using aclError = std::int32_t;
using aclnnStatus = std::int32_t;

inline constexpr aclError ACL_SUCCESS = 0;
inline constexpr aclError ACL_ERROR_INVALID_PARAM = 100000;
inline constexpr aclError ACL_ERROR_UNINITIALIZE = 100001;
inline constexpr aclError ACL_ERROR_REPEAT_INITIALIZE = 100002;
inline constexpr aclError ACL_ERROR_RT_PARAM_INVALID = 107000;
inline constexpr aclError ACL_ERROR_RT_INVALID_DEVICEID = 107001;
inline constexpr aclError ACL_ERROR_RT_CONTEXT_NULL = 107002;
inline constexpr aclError ACL_ERROR_RT_MEMORY_ALLOCATION = 207001;
inline constexpr aclError ACL_ERROR_RT_AICORE_EXCEPTION = 507015;
inline constexpr aclError ACL_ERROR_RT_STREAM_SYNC_TIMEOUT = 507046;

inline constexpr aclnnStatus ACLNN_ERR_PARAM_NULLPTR = 161001;
inline constexpr aclnnStatus ACLNN_ERR_PARAM_INVALID = 161002;
inline constexpr aclnnStatus ACLNN_ERR_RUNTIME_ERROR = 361001;
inline constexpr aclnnStatus ACLNN_ERR_INNER = 561000;
inline constexpr aclnnStatus ACLNN_ERR_INNER_INFERSHAPE_ERROR = 561001;
inline constexpr aclnnStatus ACLNN_ERR_INNER_TILING_ERROR = 561002;
inline constexpr aclnnStatus ACLNN_ERR_INNER_FIND_KERNEL_ERROR = 561003;
inline constexpr aclnnStatus ACLNN_ERR_INNER_CREATE_EXECUTOR = 561101;
inline constexpr aclnnStatus ACLNN_ERR_INNER_NOT_TRANS_EXECUTOR = 561102;
inline constexpr aclnnStatus ACLNN_ERR_INNER_NULLPTR = 561103;
inline constexpr aclnnStatus ACLNN_ERR_INNER_OPP_PATH_NOT_FOUND = 561107;
inline constexpr aclnnStatus ACLNN_ERR_INNER_OPP_KERNEL_PKG_NOT_FOUND = 561112;

// --- Types -----------------------------------------------------------------------------------------------------------

using aclrtStream = void*;
using aclrtEvent = void*;
struct aclTensor;
struct aclTensorList;
struct aclIntArray;
struct aclOpExecutor;

enum aclDataType : std::int32_t {
    ACL_DT_UNDEFINED = -1,
    ACL_FLOAT = 0,
    ACL_FLOAT16 = 1,
    ACL_INT8 = 2,
    ACL_INT32 = 3,
    ACL_UINT8 = 4,
    ACL_INT16 = 6,
    ACL_UINT16 = 7,
    ACL_UINT32 = 8,
    ACL_INT64 = 9,
    ACL_UINT64 = 10,
    ACL_DOUBLE = 11,
    ACL_BOOL = 12,
    ACL_STRING = 13,
    ACL_COMPLEX64 = 16,
    ACL_COMPLEX128 = 17,
    ACL_BF16 = 27,
    ACL_INT4 = 29,
    ACL_UINT1 = 30,
    ACL_COMPLEX32 = 33,
    ACL_HIFLOAT8 = 34,
    ACL_FLOAT8_E5M2 = 35,
    ACL_FLOAT8_E4M3FN = 36,
    ACL_FLOAT8_E8M0 = 37,
    ACL_FLOAT6_E3M2 = 38,
    ACL_FLOAT6_E2M3 = 39,
    ACL_FLOAT4_E2M1 = 40,
    ACL_FLOAT4_E1M2 = 41,
};

enum aclFormat : std::int32_t {
    ACL_FORMAT_UNDEFINED = -1,
    ACL_FORMAT_NCHW = 0,
    ACL_FORMAT_NHWC = 1,
    ACL_FORMAT_ND = 2,
    ACL_FORMAT_NC1HWC0 = 3,
    ACL_FORMAT_FRACTAL_Z = 4,
    ACL_FORMAT_NC1HWC0_C04 = 12,
    ACL_FORMAT_HWCN = 16,
    ACL_FORMAT_NDHWC = 27,
    ACL_FORMAT_FRACTAL_NZ = 29,
    ACL_FORMAT_NCDHW = 30,
    ACL_FORMAT_NDC1HWC0 = 32,
    ACL_FRACTAL_Z_3D = 33,
    ACL_FORMAT_NC = 35,
    ACL_FORMAT_NCL = 47,
    ACL_FORMAT_FRACTAL_NZ_C0_16 = 50,
    ACL_FORMAT_FRACTAL_NZ_C0_32 = 51,
    ACL_FORMAT_FRACTAL_NZ_C0_2 = 52,
    ACL_FORMAT_FRACTAL_NZ_C0_4 = 53,
    ACL_FORMAT_FRACTAL_NZ_C0_8 = 54,
};

enum aclrtMemMallocPolicy : std::int32_t {
    ACL_MEM_MALLOC_HUGE_FIRST = 0,
    ACL_MEM_MALLOC_HUGE_ONLY = 1,
    ACL_MEM_MALLOC_NORMAL_ONLY = 2,
    ACL_MEM_MALLOC_HUGE_FIRST_P2P = 3,
    ACL_MEM_MALLOC_HUGE_ONLY_P2P = 4,
    ACL_MEM_MALLOC_NORMAL_ONLY_P2P = 5,
    ACL_MEM_MALLOC_HUGE1G_ONLY = 6,
    ACL_MEM_MALLOC_HUGE1G_ONLY_P2P = 7,
    ACL_MEM_TYPE_LOW_BAND_WIDTH = 0x0100,
    ACL_MEM_TYPE_HIGH_BAND_WIDTH = 0x1000,
};

enum aclrtMemcpyKind : std::int32_t {
    ACL_MEMCPY_HOST_TO_HOST = 0,
    ACL_MEMCPY_HOST_TO_DEVICE = 1,
    ACL_MEMCPY_DEVICE_TO_HOST = 2,
    ACL_MEMCPY_DEVICE_TO_DEVICE = 3,
    ACL_MEMCPY_DEFAULT = 4,
    ACL_MEMCPY_HOST_TO_BUF_TO_DEVICE = 5,
    ACL_MEMCPY_INNER_DEVICE_TO_DEVICE = 6,
    ACL_MEMCPY_INTER_DEVICE_TO_DEVICE = 7,
};

enum aclrtMemAttr : std::int32_t {
    ACL_DDR_MEM = 0,
    ACL_HBM_MEM = 1,
};

enum aclrtEventRecordedStatus : std::int32_t {
    ACL_EVENT_RECORDED_STATUS_NOT_READY = 0,
    ACL_EVENT_RECORDED_STATUS_COMPLETE = 1,
};

// --- acl runtime (libascendcl) ---------------------------------------------------------------------------------------

aclError aclInit(const char* configPath);
aclError aclFinalize();
const char* aclGetRecentErrMsg(); // of this thread, cleared by reading it; null when there is none
std::size_t aclDataTypeSize(aclDataType dataType);

aclError aclrtGetDeviceCount(std::uint32_t* count);
aclError aclrtSetDevice(std::int32_t deviceId); // of this thread
aclError aclrtGetDevice(std::int32_t* deviceId);
aclError aclrtResetDevice(std::int32_t deviceId);
aclError aclrtSynchronizeDevice();
const char* aclrtGetSocName();
aclError aclrtGetMemInfo(aclrtMemAttr attribute, std::size_t* free, std::size_t* total);

aclError aclrtCreateStream(aclrtStream* stream);
aclError aclrtCreateStreamWithConfig(aclrtStream* stream, std::uint32_t priority, std::uint32_t flag);
aclError aclrtDestroyStream(aclrtStream stream);
aclError aclrtSynchronizeStream(aclrtStream stream);
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, std::int32_t milliseconds);

aclError aclrtCreateEvent(aclrtEvent* event);
aclError aclrtCreateEventWithFlag(aclrtEvent* event, std::uint32_t flag);
aclError aclrtDestroyEvent(aclrtEvent event);
aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream);
aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event);
aclError aclrtSynchronizeEvent(aclrtEvent event);
aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus* status);

aclError aclrtMalloc(void** device, std::size_t size, aclrtMemMallocPolicy policy);
aclError aclrtFree(void* device);
aclError aclrtMallocHost(void** host, std::size_t size);
aclError aclrtFreeHost(void* host);
aclError aclrtMemset(void* device, std::size_t capacity, std::int32_t value, std::size_t count);
aclError
aclrtMemsetAsync(void* device, std::size_t capacity, std::int32_t value, std::size_t count, aclrtStream stream);
aclError aclrtMemcpy(void* dst, std::size_t capacity, const void* src, std::size_t count, aclrtMemcpyKind kind);
aclError aclrtMemcpyAsync(
    void* dst, std::size_t capacity, const void* src, std::size_t count, aclrtMemcpyKind kind, aclrtStream stream
);

// --- aclnn base (libnnopbase) ----------------------------------------------------------------------------------------

// Dimensions and strides are in elements, and so is `offset`. Null strides mean contiguous.
aclTensor* aclCreateTensor(
    const std::int64_t* viewDims, std::uint64_t viewDimsNum, aclDataType dataType, const std::int64_t* strides,
    std::int64_t offset, aclFormat format, const std::int64_t* storageDims, std::uint64_t storageDimsNum,
    void* deviceAddress
);
aclnnStatus aclDestroyTensor(const aclTensor* tensor);
aclIntArray* aclCreateIntArray(const std::int64_t* values, std::uint64_t size);
aclnnStatus aclDestroyIntArray(const aclIntArray* array);

// The second phase frees an executor, unless it was set repeatable: then aclDestroyAclOpExecutor does.
aclnnStatus aclSetAclOpExecutorRepeatable(aclOpExecutor* executor);
aclnnStatus aclDestroyAclOpExecutor(aclOpExecutor* executor);
// `index` counts the inputs, the outputs, or both, in the order of the operator's arguments; absent ones count too.
aclnnStatus aclSetInputTensorAddr(aclOpExecutor* executor, std::size_t index, aclTensor* tensor, void* deviceAddress);
aclnnStatus aclSetOutputTensorAddr(aclOpExecutor* executor, std::size_t index, aclTensor* tensor, void* deviceAddress);
aclnnStatus aclSetTensorAddr(aclOpExecutor* executor, std::size_t index, aclTensor* tensor, void* deviceAddress);
aclnnStatus aclSetRawTensorAddr(aclTensor* tensor, void* deviceAddress);

// --- aclnn operators (libopapi, libopapi_transformer) ----------------------------------------------------------------

aclnnStatus aclnnMlaPrologV2WeightNzGetWorkspaceSize(
    const aclTensor* tokenX, const aclTensor* weightDq, const aclTensor* weightUqQr, const aclTensor* weightUk,
    const aclTensor* weightDkvKr, const aclTensor* rmsnormGammaCq, const aclTensor* rmsnormGammaCkv,
    const aclTensor* ropeSin, const aclTensor* ropeCos, const aclTensor* cacheIndex, aclTensor* kvCacheRef,
    aclTensor* krCacheRef, const aclTensor* dequantScaleXOptional, const aclTensor* dequantScaleWDqOptional,
    const aclTensor* dequantScaleWUqQrOptional, const aclTensor* dequantScaleWDkvKrOptional,
    const aclTensor* quantScaleCkvOptional, const aclTensor* quantScaleCkrOptional,
    const aclTensor* smoothScalesCqOptional, double rmsnormEpsilonCq, double rmsnormEpsilonCkv, char* cacheModeOptional,
    const aclTensor* queryOut, const aclTensor* queryRopeOut, const aclTensor* dequantScaleQNopeOutOptional,
    std::uint64_t* workspaceSize, aclOpExecutor** executor
);
aclnnStatus
aclnnMlaPrologV2WeightNz(void* workspace, std::uint64_t workspaceSize, aclOpExecutor* executor, aclrtStream stream);

aclnnStatus aclnnMlaPreprocessGetWorkspaceSize(
    const aclTensor* input, const aclTensor* gamma0, const aclTensor* beta0, const aclTensor* quantScale0,
    const aclTensor* quantOffset0, const aclTensor* wdqkv, const aclTensor* deScale0, const aclTensor* bias0,
    const aclTensor* gamma1, const aclTensor* beta1, const aclTensor* quantScale1, const aclTensor* quantOffset1,
    const aclTensor* wuq, const aclTensor* deScale1, const aclTensor* bias1, const aclTensor* gamma2,
    const aclTensor* cos, const aclTensor* sin, const aclTensor* wuk, const aclTensor* kvCache,
    const aclTensor* kvCacheRope, const aclTensor* slotMapping, const aclTensor* ctkvScale, const aclTensor* qNopeScale,
    std::int64_t wdqDim, std::int64_t qRopeDim, std::int64_t kRopeDim, double epsilon, std::int64_t qRotaryCoeff,
    std::int64_t kRotaryCoeff, bool transposeWdq, bool transposeWuq, bool transposeWuk, std::int64_t cacheMode,
    std::int64_t quantMode, bool doRmsNorm, std::int64_t wdkvSplitCount, const aclTensor* qOut,
    const aclTensor* kvCacheOut, const aclTensor* qRopeOut, const aclTensor* krCacheOut, std::uint64_t* workspaceSize,
    aclOpExecutor** executor
);
aclnnStatus
aclnnMlaPreprocess(void* workspace, std::uint64_t workspaceSize, aclOpExecutor* executor, aclrtStream stream);

aclnnStatus aclnnSparseFlashAttentionGetWorkspaceSize(
    const aclTensor* query, const aclTensor* key, const aclTensor* value, const aclTensor* sparseIndices,
    const aclTensor* blockTable, const aclTensor* actualSeqLengthsQuery, const aclTensor* actualSeqLengthsKv,
    const aclTensor* queryRope, const aclTensor* keyRope, double scaleValue, std::int64_t sparseBlockSize,
    char* layoutQuery, char* layoutKv, std::int64_t sparseMode, std::int64_t preTokens, std::int64_t nextTokens,
    std::int64_t attentionMode, bool returnSoftmaxLse, const aclTensor* attentionOutOut, const aclTensor* softmaxMaxOut,
    const aclTensor* softmaxSumOut, std::uint64_t* workspaceSize, aclOpExecutor** executor
);
aclnnStatus
aclnnSparseFlashAttention(void* workspace, std::uint64_t workspaceSize, aclOpExecutor* executor, aclrtStream stream);

aclnnStatus aclnnMoeInitRoutingV3GetWorkspaceSize(
    const aclTensor* x, const aclTensor* expertIdx, const aclTensor* scaleOptional, const aclTensor* offsetOptional,
    std::int64_t activeNum, std::int64_t expertCapacity, std::int64_t expertNum, std::int64_t dropPadMode,
    std::int64_t expertTokensNumType, bool expertTokensNumFlag, std::int64_t quantMode,
    const aclIntArray* activeExpertRangeOptional, std::int64_t rowIdxType, const aclTensor* expandedXOut,
    const aclTensor* expandedRowIdxOut, const aclTensor* expertTokensCountOrCumsumOut,
    const aclTensor* expandedScaleOut, std::uint64_t* workspaceSize, aclOpExecutor** executor
);
aclnnStatus
aclnnMoeInitRoutingV3(void* workspace, std::uint64_t workspaceSize, aclOpExecutor* executor, aclrtStream stream);

aclnnStatus aclnnRingAttentionUpdateV2GetWorkspaceSize(
    const aclTensor* prevAttnOut, const aclTensor* prevSoftmaxMax, const aclTensor* prevSoftmaxSum,
    const aclTensor* curAttnOut, const aclTensor* curSoftmaxMax, const aclTensor* curSoftmaxSum,
    const aclTensor* actualSeqQlenOptional, char* inputLayoutOptional, char* inputSoftmaxLayoutOptional,
    const aclTensor* attnOutOut, const aclTensor* softmaxMaxOut, const aclTensor* softmaxSumOut,
    std::uint64_t* workspaceSize, aclOpExecutor** executor
);
aclnnStatus
aclnnRingAttentionUpdateV2(void* workspace, std::uint64_t workspaceSize, aclOpExecutor* executor, aclrtStream stream);

} // extern "C"
#pragma GCC visibility pop
