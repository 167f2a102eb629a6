// Device memory for the runtime, kept for reuse, so that a run in steady state asks the device for none.
//
// The runtime frees a value as soon as the host has launched its last reader, while the device may not have begun it.
// A freed block is therefore used again on the stream it was allocated for, which does things in order, or anywhere
// once every stream has done what it was given before the block was freed.
#pragma once

#include "cann/objects.h"
#include "ep/device.h"
#include "ort/abi.h"

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace ep {

class Allocator final : public ort::OrtAllocator {
  public:
    // Without `pooled` a block goes back to the device when it is freed: right for values that users hold.
    Allocator(Device& device, bool pooled);
    ~Allocator();
    Allocator(const Allocator&) = delete;
    Allocator& operator=(const Allocator&) = delete;

  private:
    static constexpr std::uint64_t NO_STREAM = 0;

    struct Block {
        cann::DeviceMemory memory;
        std::size_t size = 0;
        std::uint64_t stream = NO_STREAM; // it was allocated for
        std::uint64_t freed = 0;
    };

    // Null, as the runtime wants it, when the device has no room.
    void* allocate(std::size_t bytes, std::uint64_t stream) noexcept;
    Block reused_or_new(std::size_t size, std::uint64_t stream);
    void free(void* memory) noexcept;
    void trim() noexcept;

    static void* alloc(ort::OrtAllocator* self, std::size_t size) noexcept;
    static void* alloc_on_stream(ort::OrtAllocator* self, std::size_t size, ort::OrtSyncStream* stream) noexcept;
    static void free(ort::OrtAllocator* self, void* memory) noexcept;
    static const ort::OrtMemoryInfo* info(const ort::OrtAllocator* self) noexcept;
    static ort::OrtStatus* shrink(ort::OrtAllocator* self) noexcept;

    Device& device_;
    bool pooled_;
    std::mutex mutex_;
    std::unordered_map<void*, Block> in_use_;
    std::unordered_map<std::size_t, std::vector<Block>> free_; // by size
};

} // namespace ep
