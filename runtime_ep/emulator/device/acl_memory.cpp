// acl runtime: memory and copies.
#include "acl_abi.h"
#include "control/entry_point.h"
#include "control/misuse.h"
#include "device/context.h"
#include "device/host_memory.h"
#include "device/memory.h"
#include "device/stream.h"

#include <cstring>
#include <string_view>

using namespace ascend_emulator;

namespace {

[[noreturn]] void invalid(const std::string& sentence) {
    throw Failure{ACL_ERROR_INVALID_PARAM, sentence};
}

void require_room(std::size_t capacity, std::size_t count) {
    if (count > capacity) {
        invalid(text("count must be at most the size of the destination, ", capacity, ", got ", count));
    }
}

// Which side of a copy is the device's.
struct Sides {
    bool dst_on_device;
    bool src_on_device;
};

Sides sides(const void* dst, const void* src, aclrtMemcpyKind kind) {
    const DeviceMemory& memory = DeviceMemory::instance();
    switch (kind) {
    case ACL_MEMCPY_HOST_TO_HOST:
        return {false, false};
    case ACL_MEMCPY_HOST_TO_DEVICE:
    case ACL_MEMCPY_HOST_TO_BUF_TO_DEVICE:
        return {true, false};
    case ACL_MEMCPY_DEVICE_TO_HOST:
        return {false, true};
    case ACL_MEMCPY_DEVICE_TO_DEVICE:
    case ACL_MEMCPY_INNER_DEVICE_TO_DEVICE:
    case ACL_MEMCPY_INTER_DEVICE_TO_DEVICE:
        return {true, true};
    case ACL_MEMCPY_DEFAULT:
        return {memory.contains(dst), memory.contains(src)};
    }
    invalid(text("kind must be one of aclrtMemcpyKind, got ", static_cast<int>(kind)));
}

void require_side(const void* address, bool on_device, std::string_view name) {
    if (address == nullptr) {
        invalid(text(name, " must not be null"));
    }
    if (DeviceMemory::instance().contains(address) != on_device) {
        const auto* expected = on_device ? " must be device memory" : " must be host memory";
        throw Failure{ACL_ERROR_RT_PARAM_INVALID, text(name, expected, " with this kind of copy, got ", address)};
    }
}

// A copy whose device sides are on lease.
class Copy {
  public:
    Copy(void* dst, const void* src, std::size_t count, aclrtMemcpyKind kind)
        : dst_(static_cast<std::byte*>(dst)),
          src_(static_cast<const std::byte*>(src)),
          count_(count) {
        const auto [dst_on_device, src_on_device] = sides(dst, src, kind);
        require_side(dst, dst_on_device, "dst");
        require_side(src, src_on_device, "src");
        if (dst_on_device) {
            dst_lease_ = DeviceMemory::instance().lease(dst, count, "the destination of a copy");
            dst_ = dst_lease_.data();
        }
        if (src_on_device) {
            src_lease_ = DeviceMemory::instance().lease(src, count, "the source of a copy");
            src_ = src_lease_.data();
        }
    }

    void operator()() const {
        if (count_ > 0) {
            std::memmove(dst_, src_, count_);
        }
    }

  private:
    std::byte* dst_;
    const std::byte* src_;
    std::size_t count_;
    Lease dst_lease_;
    Lease src_lease_;
};

// Bytes on lease, all to be set to one value.
class Fill {
  public:
    Fill(void* device, std::int32_t value, std::size_t count)
        : value_(value),
          count_(count),
          lease_(DeviceMemory::instance().lease(device, count, "what is to be filled")) {}

    void operator()() const {
        if (count_ > 0) {
            std::memset(lease_.data(), value_, count_);
        }
    }

  private:
    std::int32_t value_;
    std::size_t count_;
    Lease lease_;
};

} // namespace

aclError aclrtMalloc(void** device, std::size_t size, aclrtMemMallocPolicy) {
    return guarded<"aclrtMalloc">([&] {
        if (device == nullptr || size == 0) {
            invalid("aclrtMalloc needs a place for the address and a size above 0");
        }
        require_device();
        *device = DeviceMemory::instance().allocate(size);
        if (*device == nullptr) {
            throw Failure{ACL_ERROR_RT_MEMORY_ALLOCATION, text("no room for ", size, " bytes of device memory")};
        }
    });
}

aclError aclrtFree(void* device) {
    return guarded_release<"aclrtFree">([&] {
        if (device == nullptr) {
            invalid("aclrtFree needs an address, got null");
        }
        DeviceMemory::instance().release(device);
    });
}

aclError aclrtMallocHost(void** host, std::size_t size) {
    return guarded<"aclrtMallocHost">([&] {
        if (host == nullptr || size == 0) {
            invalid("aclrtMallocHost needs a place for the address and a size above 0");
        }
        require_device();
        *host = HostMemory::instance().allocate(size);
    });
}

aclError aclrtFreeHost(void* host) {
    return guarded_release<"aclrtFreeHost">([&] {
        if (host == nullptr) {
            invalid("aclrtFreeHost needs an address, got null");
        }
        HostMemory::instance().release(host);
    });
}

aclError aclrtGetMemInfo(aclrtMemAttr, std::size_t* free, std::size_t* total) {
    return guarded<"aclrtGetMemInfo">([&] {
        if (free == nullptr || total == nullptr) {
            invalid("aclrtGetMemInfo needs places for both sizes");
        }
        require_device();
        const DeviceMemory& memory = DeviceMemory::instance();
        *total = memory.capacity();
        *free = *total - static_cast<std::size_t>(memory.live_bytes());
    });
}

aclError aclrtMemset(void* device, std::size_t capacity, std::int32_t value, std::size_t count) {
    return guarded<"aclrtMemset">([&] {
        require_device();
        require_room(capacity, count);
        Fill(device, value, count)();
    });
}

aclError
aclrtMemsetAsync(void* device, std::size_t capacity, std::int32_t value, std::size_t count, aclrtStream stream) {
    return guarded<"aclrtMemsetAsync">([&] {
        require_device();
        require_room(capacity, count);
        streams().get(stream, "aclrtMemsetAsync").enqueue(Fill(device, value, count));
    });
}

aclError aclrtMemcpy(void* dst, std::size_t capacity, const void* src, std::size_t count, aclrtMemcpyKind kind) {
    return guarded<"aclrtMemcpy">([&] {
        require_device();
        require_room(capacity, count);
        Copy(dst, src, count, kind)();
    });
}

aclError aclrtMemcpyAsync(
    void* dst, std::size_t capacity, const void* src, std::size_t count, aclrtMemcpyKind kind, aclrtStream stream
) {
    return guarded<"aclrtMemcpyAsync">([&] {
        require_device();
        require_room(capacity, count);
        streams().get(stream, "aclrtMemcpyAsync").enqueue(Copy(dst, src, count, kind));
    });
}
