#include "ep/allocator.h"

#include "ep/stream.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace ep {
namespace {

Allocator& from(ort::OrtAllocator* self) {
    return *static_cast<Allocator*>(self);
}

// Sizes come in classes an eighth of a power of two apart, so that a sequence that grows by a token finds the block of
// the step before.
std::size_t size_class(std::size_t bytes) {
    const std::size_t size = cann::padded(bytes);
    const std::size_t step = std::max(cann::ALIGNMENT, std::bit_floor(size) / 8);
    return (size + step - 1) / step * step;
}

} // namespace

Allocator::Allocator(Device& device, bool pooled) : OrtAllocator{}, device_(device), pooled_(pooled) {
    version = ort::runtime.version;
    Alloc = alloc;
    Free = free;
    Info = info;
    AllocOnStream = alloc_on_stream;
    Shrink = shrink;
}

Allocator::~Allocator() {
    device_.settle();
}

void* Allocator::allocate(std::size_t bytes, std::uint64_t stream) noexcept {
    if (bytes == 0) {
        return nullptr;
    }
    try {
        const std::lock_guard lock(mutex_);
        Block block = reused_or_new(size_class(bytes), stream);
        block.stream = stream;
        void* memory = block.memory.get();
        in_use_.emplace(memory, std::move(block));
        return memory;
    } catch (const std::exception&) {
        return nullptr; // the runtime has no other way to hear of it; what uses the value says so
    }
}

Allocator::Block Allocator::reused_or_new(std::size_t size, std::uint64_t stream) {
    std::vector<Block>& blocks = free_[size];
    for (auto block = blocks.rbegin(); block != blocks.rend(); ++block) {
        const std::uint64_t in_order = block->stream == stream ? stream : NO_STREAM;
        if ((in_order != NO_STREAM) || device_.finished(block->freed, NO_STREAM)) {
            Block found = std::move(*block);
            blocks.erase(std::next(block).base());
            return found;
        }
    }
    device_.make_current();
    try {
        return {cann::allocate_device(size), size, stream, 0};
    } catch (const cann::Error& error) {
        if (error.code() != ACL_ERROR_RT_MEMORY_ALLOCATION) {
            throw;
        }
        trim();
        return {cann::allocate_device(size), size, stream, 0};
    }
}

void Allocator::free(void* memory) noexcept {
    Block block;
    {
        const std::lock_guard lock(mutex_);
        const auto found = in_use_.find(memory);
        if (found == in_use_.end()) {
            return;
        }
        block = std::move(found->second);
        in_use_.erase(found);
        block.freed = device_.now();
        if (pooled_) {
            free_[block.size].push_back(std::move(block));
            return;
        }
    }
    if (!device_.finished(block.freed, NO_STREAM)) {
        device_.settle();
    }
    try {
        device_.make_current();
    } catch (const cann::Error&) {
        // The memory is lost if the thread has no device; nobody could be told.
    }
}

void Allocator::trim() noexcept {
    device_.settle();
    free_.clear();
}

void* Allocator::alloc(ort::OrtAllocator* self, std::size_t size) noexcept {
    return from(self).allocate(size, NO_STREAM);
}

void* Allocator::alloc_on_stream(ort::OrtAllocator* self, std::size_t size, ort::OrtSyncStream* stream) noexcept {
    const Stream* on = Stream::of(stream);
    return from(self).allocate(size, on == nullptr ? NO_STREAM : on->id());
}

void Allocator::free(ort::OrtAllocator* self, void* memory) noexcept {
    from(self).free(memory);
}

const ort::OrtMemoryInfo* Allocator::info(const ort::OrtAllocator* self) noexcept {
    return static_cast<const Allocator*>(self)->device_.memory_info();
}

ort::OrtStatus* Allocator::shrink(ort::OrtAllocator* self) noexcept {
    const std::lock_guard lock(from(self).mutex_);
    from(self).trim();
    return nullptr;
}

} // namespace ep
