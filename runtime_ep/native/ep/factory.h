// What the registration of the library makes: it finds CANN, offers its devices, and makes what sessions need.
#pragma once

#include "ep/device.h"
#include "ort/abi.h"

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

namespace ep {

class Placeholders;

class Factory final : public ort::OrtEpFactory {
  public:
    // With `device_only` the operators are also known to the runtime where a model has no bodies for them.
    explicit Factory(bool device_only);
    ~Factory();
    Factory(const Factory&) = delete;
    Factory& operator=(const Factory&) = delete;

  private:
    std::size_t offer_devices(ort::OrtEpDevice** offered, std::size_t most);

    static const char* get_name(const ort::OrtEpFactory* self) noexcept;
    static const char* get_vendor(const ort::OrtEpFactory* self) noexcept;
    static std::uint32_t get_vendor_id(const ort::OrtEpFactory* self) noexcept;
    static const char* get_version(const ort::OrtEpFactory* self) noexcept;
    static ort::OrtStatus* get_supported_devices(
        ort::OrtEpFactory* self, const ort::OrtHardwareDevice* const* hardware, std::size_t hardware_count,
        ort::OrtEpDevice** offered, std::size_t most, std::size_t* count
    ) noexcept;
    static ort::OrtStatus* create_ep(
        ort::OrtEpFactory* self, const ort::OrtHardwareDevice* const* hardware,
        const ort::OrtKeyValuePairs* const* metadata, std::size_t count, const ort::OrtSessionOptions* options,
        const ort::OrtLogger* logger, ort::OrtEp** provider
    ) noexcept;
    static void release_ep(ort::OrtEpFactory* self, ort::OrtEp* provider) noexcept;
    static ort::OrtStatus* create_allocator(
        ort::OrtEpFactory* self, const ort::OrtMemoryInfo* info, const ort::OrtKeyValuePairs* options,
        ort::OrtAllocator** allocator
    ) noexcept;
    static void release_allocator(ort::OrtEpFactory* self, ort::OrtAllocator* allocator) noexcept;
    static ort::OrtStatus* create_data_transfer(ort::OrtEpFactory* self, ort::OrtDataTransferImpl** transfer) noexcept;
    static bool is_stream_aware(const ort::OrtEpFactory* self) noexcept;
    static ort::OrtStatus* create_stream(
        ort::OrtEpFactory* self, const ort::OrtMemoryDevice* memory, const ort::OrtKeyValuePairs* options,
        ort::OrtSyncStreamImpl** stream
    ) noexcept;
    static ort::OrtStatus* get_domain_count(ort::OrtEpFactory* self, std::size_t* count) noexcept;
    static ort::OrtStatus*
    get_domains(ort::OrtEpFactory* self, ort::OrtCustomOpDomain** domains, std::size_t count) noexcept;

    std::vector<ort::OrtHardwareDevice*> hardware_;
    std::unique_ptr<Placeholders> placeholders_;
};

} // namespace ep
