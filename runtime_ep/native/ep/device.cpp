#include "ep/device.h"

#include "ep/stream.h"

#include <map>
#include <unordered_map>
#include <unordered_set>

namespace ep {
namespace {

std::shared_mutex& handles_mutex() {
    static auto& mutex = *new std::shared_mutex;
    return mutex;
}

std::unordered_map<aclrtStream, Stream*>& handles() {
    static auto& streams = *new std::unordered_map<aclrtStream, Stream*>;
    return streams;
}

// The addresses of all streams, as the runtime knows them.
std::unordered_set<const void*>& live_streams() {
    static auto& streams = *new std::unordered_set<const void*>;
    return streams;
}

const void* address_of(const Stream& stream) {
    return static_cast<const ort::OrtSyncStreamImpl*>(&stream);
}

} // namespace

Device& Device::get(int id) {
    static auto& mutex = *new std::mutex;
    static auto& devices = *new std::map<int, Device*>;
    const std::lock_guard lock(mutex);
    Device*& device = devices[id];
    if (device == nullptr) {
        device = new Device(id);
    }
    return *device;
}

Device::Device(int id) : id_(id) {
    ort::check(
        ort::api().CreateMemoryInfo_V2(
            "AscendNPU", ort::ORT_MEMORY_NPU, VENDOR_ID, id, ort::ORT_MEMORY_DEFAULT, cann::ALIGNMENT,
            ort::ORT_ALLOCATOR_DEVICE, &memory_info_
        )
    );
}

void Device::make_current() const {
    // Others in the process may have switched this thread to another device in the meantime.
    std::int32_t current = -1;
    if (cann::functions().aclrtGetDevice(&current) != ACL_SUCCESS || current != id_) {
        cann::check(cann::functions().aclrtSetDevice(id_), "aclrtSetDevice");
    }
}

void Device::synchronise() const {
    make_current();
    cann::check(cann::functions().aclrtSynchronizeDevice(), "aclrtSynchronizeDevice");
}

void Device::settle() noexcept {
    try {
        make_current();
    } catch (const cann::Error&) {
        return; // nothing can be waited for on this thread; freeing is still tried
    }
    const std::shared_lock lock(mutex_);
    for (Stream* stream : streams_) {
        stream->settle();
    }
}

bool Device::finished(std::uint64_t moment, std::uint64_t except) const {
    const std::shared_lock lock(mutex_);
    for (Stream* stream : streams_) {
        if (stream->id() != except && !stream->finished(moment)) {
            return false;
        }
    }
    return true;
}

void Device::add(Stream& stream) {
    const std::lock_guard lock(mutex_);
    streams_.push_back(&stream);
    const std::lock_guard handles_lock(handles_mutex());
    handles().emplace(stream.handle(), &stream);
    live_streams().insert(address_of(stream));
}

void Device::remove(Stream& stream) {
    const std::lock_guard lock(mutex_);
    std::erase(streams_, &stream);
    const std::lock_guard handles_lock(handles_mutex());
    handles().erase(stream.handle());
    live_streams().erase(address_of(stream));
}

Stream* Device::stream(aclrtStream handle) {
    const std::shared_lock lock(handles_mutex());
    const auto found = handles().find(handle);
    return found == handles().end() ? nullptr : found->second;
}

bool Device::has_stream(const void* stream) {
    const std::shared_lock lock(handles_mutex());
    return live_streams().contains(stream);
}

} // namespace ep
