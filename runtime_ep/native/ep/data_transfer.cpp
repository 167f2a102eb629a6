#include "ep/data_transfer.h"

#include "ep/device.h"
#include "ort/runtime.h"

namespace ep {
namespace {

struct Place {
    bool on_device;
    int device;
};

Place place_of(const ort::OrtMemoryDevice* memory) {
    const ort::OrtEpApi& api = ort::ep_api();
    const bool on_device = api.MemoryDevice_GetDeviceType(memory) == ort::ORT_MEMORY_NPU
                           && api.MemoryDevice_GetVendorId(memory) == VENDOR_ID
                           && api.MemoryDevice_GetMemoryType(memory) == ort::ORT_MEMORY_DEFAULT;
    return {on_device, on_device ? static_cast<int>(api.MemoryDevice_GetDeviceId(memory)) : 0};
}

bool is_host(const ort::OrtMemoryDevice* memory) {
    return ort::ep_api().MemoryDevice_GetDeviceType(memory) == ort::ORT_MEMORY_CPU;
}

void copy_at_once(void* to, const void* from, std::size_t bytes, aclrtMemcpyKind kind) {
    cann::check(cann::functions().aclrtMemcpy(to, bytes, from, bytes, kind), "aclrtMemcpy");
}

} // namespace

DataTransfer::DataTransfer() : OrtDataTransferImpl{} {
    ort_version_supported = ort::runtime.version;
    Release = release;
    CanCopy = can_copy;
    CopyTensors = copy_tensors;
}

void DataTransfer::release(ort::OrtDataTransferImpl* self) noexcept {
    delete static_cast<DataTransfer*>(self);
}

bool DataTransfer::can_copy(
    const ort::OrtDataTransferImpl*, const ort::OrtMemoryDevice* source, const ort::OrtMemoryDevice* target
) noexcept {
    const Place from = place_of(source);
    const Place to = place_of(target);
    return (from.on_device && (to.on_device || is_host(target))) || (to.on_device && is_host(source));
}

ort::OrtStatus* DataTransfer::copy_tensors(
    ort::OrtDataTransferImpl*, const ort::OrtValue** sources, ort::OrtValue** targets, ort::OrtSyncStream** streams,
    std::size_t count
) noexcept {
    return ort::guarded([&] {
        for (std::size_t i = 0; i < count; ++i) {
            copy_value(sources[i], targets[i], streams == nullptr ? nullptr : Stream::of(streams[i]));
        }
    });
}

void copy_value(const ort::OrtValue* source, ort::OrtValue* target, Stream* stream) {
    const void* from = nullptr;
    void* to = nullptr;
    std::size_t bytes = 0;
    ort::check(ort::api().GetTensorData(source, &from));
    ort::check(ort::api().GetTensorMutableData(target, &to));
    ort::check(ort::api().GetTensorSizeInBytes(source, &bytes));
    if (bytes == 0 || from == to) {
        return;
    }
    if (from == nullptr || to == nullptr) {
        throw ort::Failure(
            ort::ORT_FAIL, "the NPU has no memory left for a tensor of " + std::to_string(bytes)
                               + " bytes; free device values, or use smaller caches or batches"
        );
    }
    const Place source_place = place_of(ort::ep_api().Value_GetMemoryDevice(source));
    const Place target_place = place_of(ort::ep_api().Value_GetMemoryDevice(target));
    Device& device = Device::get(source_place.on_device ? source_place.device : target_place.device);
    device.make_current();
    if (!target_place.on_device) {
        if (stream != nullptr) {
            stream->download(to, from, bytes);
        } else {
            copy_at_once(to, from, bytes, ACL_MEMCPY_DEVICE_TO_HOST);
        }
    } else if (!source_place.on_device) {
        if (stream != nullptr) {
            stream->upload(to, from, bytes);
        } else {
            copy_at_once(to, from, bytes, ACL_MEMCPY_HOST_TO_DEVICE);
        }
    } else if (stream != nullptr && source_place.device == target_place.device) {
        stream->copy(to, from, bytes);
    } else {
        device.synchronise();
        copy_at_once(to, from, bytes, ACL_MEMCPY_DEVICE_TO_DEVICE);
    }
}

} // namespace ep
