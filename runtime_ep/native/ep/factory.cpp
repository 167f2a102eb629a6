#include "ep/factory.h"

#include "cann/library.h"
#include "ep/allocator.h"
#include "ep/data_transfer.h"
#include "ep/placeholders.h"
#include "ep/provider.h"

#include <algorithm>
#include <cstdlib>

namespace ep {
namespace {

Factory& from(ort::OrtEpFactory* self) {
    return *static_cast<Factory*>(self);
}

constexpr const char* VENDOR = "Huawei";
constexpr const char* DEVICE_ID = "device_id";

} // namespace

Factory::Factory(bool device_only) : OrtEpFactory{} {
    ort_version_supported = ort::runtime.version;
    GetName = get_name;
    GetVendor = get_vendor;
    GetVendorId = get_vendor_id;
    GetVersion = get_version;
    GetSupportedDevices = get_supported_devices;
    CreateEp = create_ep;
    ReleaseEp = release_ep;
    CreateAllocator = create_allocator;
    ReleaseAllocator = release_allocator;
    CreateDataTransfer = create_data_transfer;
    IsStreamAware = is_stream_aware;
    CreateSyncStreamForDevice = create_stream;
    if (device_only) {
        placeholders_ = std::make_unique<Placeholders>();
        GetNumCustomOpDomains = get_domain_count;
        GetCustomOpDomains = get_domains;
    }
}

Factory::~Factory() {
    for (ort::OrtHardwareDevice* hardware : hardware_) {
        ort::ep_api().ReleaseHardwareDevice(hardware);
    }
}

// The runtime does not find NPUs by itself, so that the provider brings the hardware devices along.
std::size_t Factory::offer_devices(ort::OrtEpDevice** offered, std::size_t most) {
    const cann::Report& cann = cann::report();
    if (!cann.usable) {
        return 0;
    }
    const std::size_t count = std::min(most, static_cast<std::size_t>(cann.devices));
    for (std::size_t id = 0; id < count; ++id) {
        ort::KeyValuePairs metadata;
        metadata.add(DEVICE_ID, std::to_string(id));
        metadata.add("product", cann.product);
        metadata.add("soc", cann.soc);
        ort::OrtHardwareDevice* hardware = nullptr;
        ort::check(
            ort::ep_api().CreateHardwareDevice(
                ort::ORT_DEVICE_NPU, VENDOR_ID, static_cast<std::uint32_t>(id), VENDOR, metadata.get(), &hardware
            )
        );
        hardware_.push_back(hardware);
        ort::check(ort::ep_api().CreateEpDevice(this, hardware, metadata.get(), nullptr, &offered[id]));
        const Device& device = Device::get(static_cast<int>(id));
        ort::check(ort::ep_api().EpDevice_AddAllocatorInfo(offered[id], device.memory_info()));
    }
    return count;
}

const char* Factory::get_name(const ort::OrtEpFactory*) noexcept {
    return PROVIDER_NAME;
}

const char* Factory::get_vendor(const ort::OrtEpFactory*) noexcept {
    return VENDOR;
}

std::uint32_t Factory::get_vendor_id(const ort::OrtEpFactory*) noexcept {
    return VENDOR_ID;
}

const char* Factory::get_version(const ort::OrtEpFactory*) noexcept {
    return ASCEND_EP_VERSION;
}

ort::OrtStatus* Factory::get_supported_devices(
    ort::OrtEpFactory* self, const ort::OrtHardwareDevice* const*, std::size_t, ort::OrtEpDevice** offered,
    std::size_t most, std::size_t* count
) noexcept {
    *count = 0;
    return ort::guarded([&] { *count = from(self).offer_devices(offered, most); });
}

ort::OrtStatus* Factory::create_ep(
    ort::OrtEpFactory*, const ort::OrtHardwareDevice* const*, const ort::OrtKeyValuePairs* const* metadata,
    std::size_t count, const ort::OrtSessionOptions* options, const ort::OrtLogger* logger, ort::OrtEp** provider
) noexcept {
    *provider = nullptr;
    return ort::guarded([&] {
        if (count != 1) {
            throw ort::Failure(
                ort::ORT_INVALID_ARGUMENT, "a session runs on one NPU, got " + std::to_string(count) + " devices"
            );
        }
        const char* id = ort::api().GetKeyValue(metadata[0], DEVICE_ID);
        Device& device = Device::get(id == nullptr ? 0 : std::atoi(id));
        device.make_current();
        *provider = new Provider(device, Options::of(options), logger);
    });
}

void Factory::release_ep(ort::OrtEpFactory*, ort::OrtEp* provider) noexcept {
    delete static_cast<Provider*>(provider);
}

// For values that users make; sessions have allocators of their own.
ort::OrtStatus* Factory::create_allocator(
    ort::OrtEpFactory*, const ort::OrtMemoryInfo* info, const ort::OrtKeyValuePairs*, ort::OrtAllocator** allocator
) noexcept {
    return ort::guarded([&] {
        const ort::OrtMemoryDevice* memory = ort::ep_api().MemoryInfo_GetMemoryDevice(info);
        const auto id = static_cast<int>(ort::ep_api().MemoryDevice_GetDeviceId(memory));
        *allocator = new Allocator(Device::get(id), false);
    });
}

// The factory may be gone by then.
void Factory::release_allocator(ort::OrtEpFactory*, ort::OrtAllocator* allocator) noexcept {
    delete static_cast<Allocator*>(allocator);
}

ort::OrtStatus* Factory::create_data_transfer(ort::OrtEpFactory*, ort::OrtDataTransferImpl** transfer) noexcept {
    return ort::guarded([&] { *transfer = new DataTransfer; });
}

bool Factory::is_stream_aware(const ort::OrtEpFactory*) noexcept {
    return true;
}

ort::OrtStatus* Factory::create_stream(
    ort::OrtEpFactory*, const ort::OrtMemoryDevice* memory, const ort::OrtKeyValuePairs*,
    ort::OrtSyncStreamImpl** stream
) noexcept {
    return ort::guarded([&] {
        *stream = new Stream(Device::get(static_cast<int>(ort::ep_api().MemoryDevice_GetDeviceId(memory))));
    });
}

ort::OrtStatus* Factory::get_domain_count(ort::OrtEpFactory*, std::size_t* count) noexcept {
    *count = 1;
    return nullptr;
}

ort::OrtStatus*
Factory::get_domains(ort::OrtEpFactory* self, ort::OrtCustomOpDomain** domains, std::size_t count) noexcept {
    return ort::guarded([&] {
        if (count > 0) {
            domains[0] = from(self).placeholders_->domain();
        }
    });
}

} // namespace ep
