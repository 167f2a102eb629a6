// Pinned host memory, as aclrtMallocHost gives it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>

namespace ascend_emulator {

class HostMemory {
  public:
    static HostMemory& instance();

    void* allocate(std::size_t size);
    void release(void* address);
    std::int64_t live() const;

  private:
    mutable std::mutex mutex_;
    std::unordered_map<void*, std::unique_ptr<std::byte[]>> live_;
};

} // namespace ascend_emulator
