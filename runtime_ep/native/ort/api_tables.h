// The tables of functions that the runtime offers a provider, with the slots that this provider calls.
#pragma once

#include "ort/abi.h"

namespace ort {

struct OrtApi {
    OrtStatus* (*CreateStatus)(OrtErrorCode code, const char* msg); // 0
    OrtErrorCode (*GetErrorCode)(const OrtStatus* status);          // 1
    const char* (*GetErrorMessage)(const OrtStatus* status);        // 2
    void* slots_3[23];
    OrtStatus* (*CreateCustomOpDomain)(const char* domain, OrtCustomOpDomain** out);              // 26
    OrtStatus* (*CustomOpDomain_Add)(OrtCustomOpDomain* custom_op_domain, const OrtCustomOp* op); // 27
    void* slots_28[23];
    OrtStatus* (*GetTensorMutableData)(OrtValue* value, void** out); // 51
    void* slots_52[3];
    OrtStatus* (*CastTypeInfoToTensorInfo)(const OrtTypeInfo* type_info, const OrtTensorTypeAndShapeInfo** out); // 55
    OrtStatus* (*GetOnnxTypeFromTypeInfo)(const OrtTypeInfo* type_info, ONNXType* out);                          // 56
    OrtStatus* (*CreateTensorTypeAndShapeInfo)(OrtTensorTypeAndShapeInfo** out);                                 // 57
    OrtStatus* (*SetTensorElementType)(OrtTensorTypeAndShapeInfo* info, ONNXTensorElementDataType type);         // 58
    OrtStatus* (*SetDimensions)(
        OrtTensorTypeAndShapeInfo* info, const std::int64_t* dim_values, std::size_t dim_count
    );                                                                                                         // 59
    OrtStatus* (*GetTensorElementType)(const OrtTensorTypeAndShapeInfo* info, ONNXTensorElementDataType* out); // 60
    OrtStatus* (*GetDimensionsCount)(const OrtTensorTypeAndShapeInfo* info, std::size_t* out);                 // 61
    OrtStatus* (*GetDimensions)(
        const OrtTensorTypeAndShapeInfo* info, std::int64_t* dim_values, std::size_t dim_values_length
    ); // 62
    OrtStatus* (*GetSymbolicDimensions)(
        const OrtTensorTypeAndShapeInfo* info, const char* dim_params[], std::size_t dim_params_length
    ); // 63
    void* slots_64[26];
    OrtStatus* (*KernelContext_GetInput)(
        const OrtKernelContext* context, std::size_t index, const OrtValue** out
    ); // 90
    OrtStatus* (*KernelContext_GetOutput)(
        OrtKernelContext* context, std::size_t index, const std::int64_t* dim_values, std::size_t dim_count,
        OrtValue** out
    ); // 91
    void* slots_92[1];
    void (*ReleaseStatus)(OrtStatus* input);         // 93
    void (*ReleaseMemoryInfo)(OrtMemoryInfo* input); // 94
    void* slots_95[4];
    void (*ReleaseTensorTypeAndShapeInfo)(OrtTensorTypeAndShapeInfo* input); // 99
    void* slots_100[1];
    void (*ReleaseCustomOpDomain)(OrtCustomOpDomain* input); // 101
    void* slots_102[91];
    OrtStatus* (*KernelContext_GetGPUComputeStream)(const OrtKernelContext* context, void** out); // 193
    void* slots_194[53];
    OrtStatus* (*Logger_LogMessage)(
        const OrtLogger* logger, OrtLoggingLevel log_severity_level, const char* message, const char* file_path,
        int line_number, const char* func_name
    ); // 247
    void* slots_248[19];
    OrtStatus* (*ShapeInferContext_GetInputCount)(const OrtShapeInferContext* context, std::size_t* out); // 267
    OrtStatus* (*ShapeInferContext_GetInputTypeShape)(
        const OrtShapeInferContext* context, std::size_t index, OrtTensorTypeAndShapeInfo** info
    ); // 268
    OrtStatus* (*ShapeInferContext_GetAttribute)(
        const OrtShapeInferContext* context, const char* attr_name, const OrtOpAttr** attr
    ); // 269
    OrtStatus* (*ShapeInferContext_SetOutputTypeShape)(
        const OrtShapeInferContext* context, std::size_t index, const OrtTensorTypeAndShapeInfo* info
    ); // 270
    void* slots_271[1];
    OrtStatus* (*ReadOpAttr)(
        const OrtOpAttr* op_attr, OrtOpAttrType type, void* data, std::size_t len, std::size_t* out
    ); // 272
    void* slots_273[16];
    OrtStatus* (*GetValueInfoName)(const OrtValueInfo* value_info, const char** name);                 // 289
    OrtStatus* (*GetValueInfoTypeInfo)(const OrtValueInfo* value_info, const OrtTypeInfo** type_info); // 290
    void* slots_291[4];
    void (*CreateKeyValuePairs)(OrtKeyValuePairs** out);                                 // 295
    void (*AddKeyValuePair)(OrtKeyValuePairs* kvps, const char* key, const char* value); // 296
    const char* (*GetKeyValue)(const OrtKeyValuePairs* kvps, const char* key);           // 297
    void (*GetKeyValuePairs)(
        const OrtKeyValuePairs* kvps, const char* const** keys, const char* const** values, std::size_t* num_entries
    ); // 298
    void* slots_299[1];
    void (*ReleaseKeyValuePairs)(OrtKeyValuePairs* input); // 300
    void* slots_301[16];
    const OrtEpApi* (*GetEpApi)();                                                    // 317
    OrtStatus* (*GetTensorSizeInBytes)(const OrtValue* ort_value, std::size_t* size); // 318
    void* slots_319[1];
    OrtStatus* (*CreateMemoryInfo_V2)(
        const char* name, OrtMemoryInfoDeviceType device_type, std::uint32_t vendor_id, std::int32_t device_id,
        OrtDeviceMemoryType mem_type, std::size_t alignment, OrtAllocatorType allocator_type, OrtMemoryInfo** out
    );                                                                           // 320
    OrtDeviceMemoryType (*MemoryInfoGetDeviceMemType)(const OrtMemoryInfo* ptr); // 321
    void* slots_322[2];
    OrtStatus* (*ValueInfo_GetValueNumConsumers)(const OrtValueInfo* value_info, std::size_t* num_consumers); // 324
    void* slots_325[1];
    OrtStatus* (*ValueInfo_GetInitializerValue)(
        const OrtValueInfo* value_info, const OrtValue** initializer_value
    ); // 326
    void* slots_327[3];
    OrtStatus* (*ValueInfo_IsGraphOutput)(const OrtValueInfo* value_info, bool* is_graph_output);                 // 330
    OrtStatus* (*ValueInfo_IsConstantInitializer)(const OrtValueInfo* value_info, bool* is_constant_initializer); // 331
    void* slots_332[10];
    OrtStatus* (*Graph_GetNumInitializers)(const OrtGraph* graph, std::size_t* num_initializers); // 342
    OrtStatus* (*Graph_GetInitializers)(
        const OrtGraph* graph, const OrtValueInfo** initializers, std::size_t num_initializers
    );                                                                                                 // 343
    OrtStatus* (*Graph_GetNumNodes)(const OrtGraph* graph, std::size_t* num_nodes);                    // 344
    OrtStatus* (*Graph_GetNodes)(const OrtGraph* graph, const OrtNode** nodes, std::size_t num_nodes); // 345
    void* slots_346[3];
    OrtStatus* (*Node_GetName)(const OrtNode* node, const char** node_name);             // 349
    OrtStatus* (*Node_GetOperatorType)(const OrtNode* node, const char** operator_type); // 350
    OrtStatus* (*Node_GetDomain)(const OrtNode* node, const char** domain_name);         // 351
    void* slots_352[1];
    OrtStatus* (*Node_GetNumInputs)(const OrtNode* node, std::size_t* num_inputs);                             // 353
    OrtStatus* (*Node_GetInputs)(const OrtNode* node, const OrtValueInfo** inputs, std::size_t num_inputs);    // 354
    OrtStatus* (*Node_GetNumOutputs)(const OrtNode* node, std::size_t* num_outputs);                           // 355
    OrtStatus* (*Node_GetOutputs)(const OrtNode* node, const OrtValueInfo** outputs, std::size_t num_outputs); // 356
    void* slots_357[2];
    OrtStatus* (*Node_GetNumAttributes)(const OrtNode* node, std::size_t* num_attributes); // 359
    OrtStatus* (*Node_GetAttributes)(
        const OrtNode* node, const OrtOpAttr** attributes, std::size_t num_attributes
    ); // 360
    OrtStatus* (*Node_GetAttributeByName)(
        const OrtNode* node, const char* attribute_name, const OrtOpAttr** attribute
    ); // 361
    void* slots_362[1];
    OrtStatus* (*OpAttr_GetType)(const OrtOpAttr* attribute, OrtOpAttrType* type); // 363
    OrtStatus* (*OpAttr_GetName)(const OrtOpAttr* attribute, const char** name);   // 364
    void* slots_365[13];
    OrtStatus* (*GetTensorData)(const OrtValue* value, const void** out);                                   // 378
    OrtStatus* (*GetSessionOptionsConfigEntries)(const OrtSessionOptions* options, OrtKeyValuePairs** out); // 379
    void* slots_380[10];
    bool (*TensorTypeAndShape_HasShape)(const OrtTensorTypeAndShapeInfo* info); // 390
    void* slots_391[23];
    OrtStatus* (*GetTensorElementTypeAndShapeDataReference)(
        const OrtValue* value, ONNXTensorElementDataType* elem_type, const std::int64_t** shape_data,
        std::size_t* shape_data_count
    ); // 414
};

struct OrtEpApi {
    OrtStatus* (*CreateEpDevice)(
        OrtEpFactory* ep_factory, const OrtHardwareDevice* hardware_device, const OrtKeyValuePairs* ep_metadata,
        const OrtKeyValuePairs* ep_options, OrtEpDevice** ep_device
    );                                           // 0
    void (*ReleaseEpDevice)(OrtEpDevice* input); // 1
    OrtStatus* (*EpGraphSupportInfo_AddNodesToFuse)(
        OrtEpGraphSupportInfo* graph_support_info, const OrtNode* const* nodes, std::size_t num_nodes,
        const OrtNodeFusionOptions* node_fusion_options
    ); // 2
    void* slots_3[2];
    OrtStatus* (*EpDevice_AddAllocatorInfo)(OrtEpDevice* ep_device, const OrtMemoryInfo* allocator_memory_info); // 5
    const OrtMemoryDevice* (*MemoryInfo_GetMemoryDevice)(const OrtMemoryInfo* memory_info);                      // 6
    const OrtMemoryDevice* (*Value_GetMemoryDevice)(const OrtValue* value);                                      // 7
    bool (*MemoryDevice_AreEqual)(const OrtMemoryDevice* a, const OrtMemoryDevice* b);                           // 8
    OrtMemoryInfoDeviceType (*MemoryDevice_GetDeviceType)(const OrtMemoryDevice* memory_device);                 // 9
    OrtDeviceMemoryType (*MemoryDevice_GetMemoryType)(const OrtMemoryDevice* memory_device);                     // 10
    std::uint32_t (*MemoryDevice_GetVendorId)(const OrtMemoryDevice* memory_device);                             // 11
    std::uint32_t (*MemoryDevice_GetDeviceId)(const OrtMemoryDevice* memory_device);                             // 12
    const OrtSyncStreamImpl* (*SyncStream_GetImpl)(const OrtSyncStream* stream);                                 // 13
    void* slots_14[2];
    OrtStatus* (*CreateHardwareDevice)(
        OrtHardwareDeviceType type, std::uint32_t vendor_id, std::uint32_t device_id, const char* vendor_name,
        const OrtKeyValuePairs* metadata, OrtHardwareDevice** hardware_device
    );                                                                       // 16
    void (*ReleaseHardwareDevice)(OrtHardwareDevice* input);                 // 17
    OrtStatus* (*CreateKernelRegistry)(OrtKernelRegistry** kernel_registry); // 18
    void (*ReleaseKernelRegistry)(OrtKernelRegistry* input);                 // 19
    OrtStatus* (*KernelRegistry_AddKernel)(
        OrtKernelRegistry* kernel_registry, const OrtKernelDef* kernel_def, OrtKernelCreateFunc kernel_create_func,
        void* kernel_create_func_state
    );                                                                                                            // 20
    OrtStatus* (*CreateKernelDefBuilder)(OrtKernelDefBuilder** kernel_def_builder_out);                           // 21
    void (*ReleaseKernelDefBuilder)(OrtKernelDefBuilder* input);                                                  // 22
    OrtStatus* (*KernelDefBuilder_SetOperatorType)(OrtKernelDefBuilder* kernel_def_builder, const char* op_type); // 23
    OrtStatus* (*KernelDefBuilder_SetDomain)(OrtKernelDefBuilder* kernel_def_builder, const char* domain);        // 24
    OrtStatus* (*KernelDefBuilder_SetSinceVersion)(
        OrtKernelDefBuilder* kernel_def_builder, int since_version_start, int since_version_end
    ); // 25
    OrtStatus* (*KernelDefBuilder_SetExecutionProvider)(
        OrtKernelDefBuilder* kernel_def_builder, const char* ep_name
    ); // 26
    OrtStatus* (*KernelDefBuilder_SetInputMemType)(
        OrtKernelDefBuilder* kernel_def_builder, std::size_t input_index, OrtMemType mem_type
    ); // 27
    OrtStatus* (*KernelDefBuilder_SetOutputMemType)(
        OrtKernelDefBuilder* kernel_def_builder, std::size_t output_index, OrtMemType mem_type
    ); // 28
    OrtStatus* (*KernelDefBuilder_AddTypeConstraint)(
        OrtKernelDefBuilder* kernel_def_builder, const char* arg_name, const OrtDataType* const* types,
        std::size_t num_types
    ); // 29
    void* slots_30[2];
    OrtStatus* (*KernelDefBuilder_Build)(OrtKernelDefBuilder* kernel_def_builder, OrtKernelDef** kernel_def_out); // 32
    void (*ReleaseKernelDef)(OrtKernelDef* input);                                                                // 33
    void* slots_34[6];
    OrtStatus* (*GetTensorDataType)(ONNXTensorElementDataType elem_type, const OrtDataType** out); // 40
};

} // namespace ort
