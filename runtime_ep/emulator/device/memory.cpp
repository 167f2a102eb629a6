#include "device/memory.h"

#include "control/misuse.h"
#include "control/settings.h"
#include "device/red_zone.h"

#include <cstring>
#include <functional>
#include <iterator>
#include <utility>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

namespace ascend_emulator {
namespace {

constexpr std::size_t alignment = 512;
constexpr std::size_t page = 4096;
constexpr std::size_t default_capacity = std::size_t{64} << 30;

// Fresh memory up to this size is filled, so that nobody can rely on it being zero.
constexpr std::size_t filled_up_to = std::size_t{1} << 20;
constexpr int filling = 0xA5;

std::size_t round_up(std::size_t size, std::size_t unit) {
    return (size + unit - 1) / unit * unit;
}

std::byte* map(std::size_t size, int protection, int file) {
    void* address = mmap(nullptr, size, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
    if (address == MAP_FAILED) {
        misuse(text("cannot map ", size, " bytes of device memory; set ASCEND_EMULATOR_MEMORY to fewer"));
    }
    return static_cast<std::byte*>(address);
}

} // namespace

Lease::Lease(Lease&& other) noexcept : allocation_(other.allocation_), data_(std::exchange(other.data_, nullptr)) {}

Lease& Lease::operator=(Lease&& other) noexcept {
    std::swap(allocation_, other.allocation_);
    std::swap(data_, other.data_);
    return *this;
}

Lease::~Lease() {
    if (data_ != nullptr) {
        DeviceMemory::instance().give_back(allocation_);
    }
}

// Never destroyed: streams may still run when the process exits.
DeviceMemory& DeviceMemory::instance() {
    static auto& memory = *new DeviceMemory;
    return memory;
}

DeviceMemory::DeviceMemory()
    : capacity_(round_up(environment_number("ASCEND_EMULATOR_MEMORY", default_capacity), page)) {
    file_ = memfd_create("ascend_emulator", MFD_CLOEXEC);
    if (file_ < 0 || ftruncate(file_, static_cast<off_t>(capacity_)) != 0) {
        misuse("cannot make the file that holds the device's memory");
    }
    visible_ = map(capacity_, PROT_NONE, file_);
    accessible_ = map(capacity_, PROT_READ | PROT_WRITE, file_);
    free_.emplace(0, capacity_);
}

void* DeviceMemory::allocate(std::size_t size) {
    const std::size_t reserved = round_up(size, alignment) + red_zone;
    std::size_t offset = 0;
    {
        const std::lock_guard lock(mutex_);
        auto range = free_.begin();
        while (range != free_.end() && range->second < reserved) {
            ++range;
        }
        if (range == free_.end()) {
            return nullptr;
        }
        offset = range->first;
        const std::size_t rest = range->second - reserved;
        free_.erase(range);
        if (rest > 0) {
            free_.emplace(offset + reserved, rest);
        }
        allocations_.emplace(offset, Allocation{size, reserved});
        live_bytes_ += size;
    }
    mark_usable(accessible_ + offset, size);
    mark_unusable(accessible_ + offset + size, reserved - size);
    if (size <= filled_up_to) {
        std::memset(accessible_ + offset, filling, size);
    }
    return visible_ + offset;
}

void DeviceMemory::release(void* address) {
    if (!contains(address)) {
        misuse(text("aclrtFree was given ", address, ", which is no device memory"));
    }
    std::size_t offset = static_cast<std::size_t>(static_cast<std::byte*>(address) - visible_);
    const std::lock_guard lock(mutex_);
    const auto found = allocations_.find(offset);
    if (found == allocations_.end()) {
        misuse(
            text("aclrtFree was given ", address, ", which is no live allocation: freed before, or never allocated")
        );
    }
    if (found->second.leases > 0) {
        misuse(text("aclrtFree was given ", address, ", which work on a stream still uses: synchronise first"));
    }
    live_bytes_ -= found->second.size;
    std::size_t size = found->second.reserved;
    allocations_.erase(found);
    mark_unusable(accessible_ + offset, size);
    discard(offset, size);

    auto after = free_.lower_bound(offset);
    if (after != free_.end() && after->first == offset + size) {
        size += after->second;
        after = free_.erase(after);
    }
    if (after != free_.begin()) {
        const auto before = std::prev(after);
        if (before->first + before->second == offset) {
            before->second += size;
            return;
        }
    }
    free_.emplace(offset, size);
}

// Gives whole pages back to the system.
void DeviceMemory::discard(std::size_t offset, std::size_t size) {
    const std::size_t first = round_up(offset, page);
    const std::size_t last = (offset + size) / page * page;
    if (first < last) {
        fallocate(
            file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(first),
            static_cast<off_t>(last - first)
        );
    }
}

bool DeviceMemory::contains(const void* address) const {
    const auto* byte = static_cast<const std::byte*>(address);
    return std::less_equal<>()(visible_, byte) && std::less<>()(byte, visible_ + capacity_);
}

Lease DeviceMemory::lease(const void* address, std::size_t size, std::string_view what) {
    if (size == 0) {
        return {};
    }
    if (!contains(address)) {
        misuse(text(what, " is at ", address, ", which is no device memory"));
    }
    const auto offset = static_cast<std::size_t>(static_cast<const std::byte*>(address) - visible_);
    const std::lock_guard lock(mutex_);
    auto found = allocations_.upper_bound(offset);
    if (found == allocations_.begin() || (--found, offset >= found->first + found->second.size)) {
        misuse(text(what, " is at ", address, ", device memory that is not allocated, or was freed"));
    }
    const std::size_t room = found->first + found->second.size - offset;
    if (size > room) {
        misuse(text(what, " has ", size, " bytes at ", address, ", of which ", room, " are allocated"));
    }
    ++found->second.leases;
    return {found->first, accessible_ + offset};
}

void DeviceMemory::give_back(std::size_t allocation) {
    const std::lock_guard lock(mutex_);
    --allocations_.at(allocation).leases;
}

std::int64_t DeviceMemory::live_allocations() const {
    const std::lock_guard lock(mutex_);
    return static_cast<std::int64_t>(allocations_.size());
}

std::int64_t DeviceMemory::live_bytes() const {
    const std::lock_guard lock(mutex_);
    return static_cast<std::int64_t>(live_bytes_);
}

} // namespace ascend_emulator
