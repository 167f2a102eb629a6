// Device memory: an address space of its own. The addresses that are handed out have no access rights, so a host that
// follows one faults; kernels and copies reach the same pages under a second mapping, through leases.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string_view>

namespace ascend_emulator {

class DeviceMemory;

// The right to use a range of device memory until the lease ends; memory on lease cannot be freed.
class Lease {
  public:
    Lease() = default;
    Lease(Lease&& other) noexcept;
    Lease& operator=(Lease&& other) noexcept;
    ~Lease();

    // Where kernels find the range; null for an empty one.
    std::byte* data() const { return data_; }

  private:
    friend class DeviceMemory;
    Lease(std::size_t allocation, std::byte* data) : allocation_(allocation), data_(data) {}

    std::size_t allocation_ = 0;
    std::byte* data_ = nullptr;
};

class DeviceMemory {
  public:
    static DeviceMemory& instance();

    // The address of `size` new bytes, aligned to 512; null when there is no room. Contents are arbitrary.
    void* allocate(std::size_t size);
    void release(void* address);

    // Whether an address lies in the device's address space.
    bool contains(const void* address) const;

    // The range must lie within one live allocation; `what` says in a misuse message what it is for. A range of no
    // bytes has any address.
    Lease lease(const void* address, std::size_t size, std::string_view what);

    std::int64_t live_allocations() const;
    std::int64_t live_bytes() const;
    std::size_t capacity() const { return capacity_; }

  private:
    friend class Lease;

    struct Allocation {
        std::size_t size;
        std::size_t reserved;
        std::size_t leases = 0;
    };

    DeviceMemory();
    void give_back(std::size_t allocation);
    void discard(std::size_t offset, std::size_t size);

    const std::size_t capacity_;
    std::byte* visible_ = nullptr;    // what the host is given, without access rights
    std::byte* accessible_ = nullptr; // the same pages, for kernels
    int file_ = -1;

    mutable std::mutex mutex_;
    std::map<std::size_t, Allocation> allocations_; // by offset
    std::map<std::size_t, std::size_t> free_;       // offset to size, no two adjacent
    std::size_t live_bytes_ = 0;
};

} // namespace ascend_emulator
