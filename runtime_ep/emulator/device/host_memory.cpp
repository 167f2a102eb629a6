#include "device/host_memory.h"

#include "control/misuse.h"

namespace ascend_emulator {

HostMemory& HostMemory::instance() {
    static auto& memory = *new HostMemory;
    return memory;
}

void* HostMemory::allocate(std::size_t size) {
    auto bytes = std::make_unique_for_overwrite<std::byte[]>(size);
    void* address = bytes.get();
    const std::lock_guard lock(mutex_);
    live_.emplace(address, std::move(bytes));
    return address;
}

void HostMemory::release(void* address) {
    const std::lock_guard lock(mutex_);
    if (live_.erase(address) == 0) {
        misuse(text("aclrtFreeHost was given ", address, ", which is no live host memory: freed before, or not its"));
    }
}

std::int64_t HostMemory::live() const {
    const std::lock_guard lock(mutex_);
    return static_cast<std::int64_t>(live_.size());
}

} // namespace ascend_emulator
