// Everything that CANN hands out, owned: what is acquired is released, whatever fails in between.
#pragma once

#include "cann/acl_abi.h"
#include "cann/error.h"
#include "cann/library.h"

#include <cstddef>
#include <utility>

namespace cann {

// A handle that is released once; failures of a release are of no use to anybody and are dropped.
template<typename Handle, typename Release>
class Owned {
  public:
    Owned() = default;
    explicit Owned(Handle handle) : handle_(handle) {}
    Owned(Owned&& other) noexcept : handle_(std::exchange(other.handle_, Handle{})) {}
    Owned& operator=(Owned&& other) noexcept {
        std::swap(handle_, other.handle_);
        return *this;
    }
    ~Owned() {
        if (handle_ != Handle{}) {
            Release{}(handle_);
        }
    }

    Handle get() const { return handle_; }
    Handle release() { return std::exchange(handle_, Handle{}); }
    explicit operator bool() const { return handle_ != Handle{}; }

  private:
    Handle handle_{};
};

struct FreeDevice {
    void operator()(void* memory) const { functions().aclrtFree(memory); }
};
struct FreeHost {
    void operator()(void* memory) const { functions().aclrtFreeHost(memory); }
};
struct DestroyStream {
    void operator()(aclrtStream stream) const { functions().aclrtDestroyStream(stream); }
};
struct DestroyEvent {
    void operator()(aclrtEvent event) const { functions().aclrtDestroyEvent(event); }
};
struct DestroyTensor {
    void operator()(aclTensor* tensor) const { functions().aclDestroyTensor(tensor); }
};
struct DestroyIntArray {
    void operator()(aclIntArray* array) const { functions().aclDestroyIntArray(array); }
};
// An executor that was never launched: only a repeatable one may be destroyed by hand.
struct DestroyExecutor {
    void operator()(aclOpExecutor* executor) const {
        functions().aclSetAclOpExecutorRepeatable(executor);
        functions().aclDestroyAclOpExecutor(executor);
    }
};

using DeviceMemory = Owned<void*, FreeDevice>;
using HostMemory = Owned<void*, FreeHost>; // pinned
using StreamHandle = Owned<aclrtStream, DestroyStream>;
using EventHandle = Owned<aclrtEvent, DestroyEvent>;
using TensorHandle = Owned<aclTensor*, DestroyTensor>;
using IntArrayHandle = Owned<aclIntArray*, DestroyIntArray>;
using ExecutorHandle = Owned<aclOpExecutor*, DestroyExecutor>;

inline constexpr std::size_t ALIGNMENT = 512;

// Bytes to ask the device for: kernels may read 32 bytes past the end of a tensor.
constexpr std::size_t padded(std::size_t bytes) {
    return (bytes + 32 + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

inline DeviceMemory allocate_device(std::size_t bytes) {
    void* memory = nullptr;
    check(functions().aclrtMalloc(&memory, padded(bytes), ACL_MEM_MALLOC_HUGE_FIRST), "aclrtMalloc");
    return DeviceMemory(memory);
}

inline HostMemory allocate_host(std::size_t bytes) {
    void* memory = nullptr;
    check(functions().aclrtMallocHost(&memory, bytes), "aclrtMallocHost");
    return HostMemory(memory);
}

inline StreamHandle create_stream() {
    aclrtStream stream = nullptr;
    check(functions().aclrtCreateStream(&stream), "aclrtCreateStream");
    return StreamHandle(stream);
}

inline EventHandle create_event() {
    aclrtEvent event = nullptr;
    check(functions().aclrtCreateEvent(&event), "aclrtCreateEvent");
    return EventHandle(event);
}

} // namespace cann
