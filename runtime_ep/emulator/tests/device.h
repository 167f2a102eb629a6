// A device for native tests: handles that release themselves.
#pragma once

#include "acl_abi.h"
#include "ascend_emulator.h"
#include "check.h"

#include <cstdint>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace ascend_emulator::tests {

// aclInit for the process; at the end nothing may be alive.
class Process {
  public:
    Process() { CHECK(aclInit(nullptr) == ACL_SUCCESS); }
    ~Process() {
        for (const char* kind : {"allocations", "tensors", "int_arrays", "executors", "streams", "events"}) {
            CHECK(ascend_emulator_live(kind) == 0);
        }
        CHECK(aclFinalize() == ACL_SUCCESS);
    }
};

class Stream {
  public:
    Stream() { CHECK(aclrtCreateStream(&handle_) == ACL_SUCCESS); }
    Stream(const Stream&) = delete;
    ~Stream() { CHECK(aclrtDestroyStream(handle_) == ACL_SUCCESS); }
    aclrtStream handle() const { return handle_; }
    void synchronise() const { CHECK(aclrtSynchronizeStream(handle_) == ACL_SUCCESS); }

  private:
    aclrtStream handle_ = nullptr;
};

class Memory {
  public:
    explicit Memory(std::size_t size) : size_(size) {
        CHECK(aclrtMalloc(&address_, size == 0 ? 1 : size, ACL_MEM_MALLOC_HUGE_FIRST) == ACL_SUCCESS);
    }
    Memory(Memory&& other) noexcept : size_(other.size_), address_(std::exchange(other.address_, nullptr)) {}
    ~Memory() {
        if (address_ != nullptr) {
            CHECK(aclrtFree(address_) == ACL_SUCCESS);
        }
    }
    void* address() const { return address_; }

    void write(const void* source) const {
        CHECK(aclrtMemcpy(address_, size_, source, size_, ACL_MEMCPY_HOST_TO_DEVICE) == ACL_SUCCESS);
    }
    void read(void* target) const {
        CHECK(aclrtMemcpy(target, size_, address_, size_, ACL_MEMCPY_DEVICE_TO_HOST) == ACL_SUCCESS);
    }

  private:
    std::size_t size_;
    void* address_ = nullptr;
};

using Dims = std::vector<std::int64_t>;

inline std::int64_t elements(const Dims& dims) {
    return std::accumulate(dims.begin(), dims.end(), std::int64_t{1}, std::multiplies<>());
}

// A tensor with memory of its own. `storage` is that of a weight in the format FRACTAL_NZ.
class Tensor {
  public:
    Tensor(const Dims& dims, aclDataType type, const Dims& storage = {})
        : count_(elements(dims)),
          size_(aclDataTypeSize(type)),
          memory_(std::size_t(count_) * size_) {
        const Dims& held = storage.empty() ? dims : storage;
        handle_ = aclCreateTensor(
            dims.data(), dims.size(), type, nullptr, 0, storage.empty() ? ACL_FORMAT_ND : ACL_FORMAT_FRACTAL_NZ,
            held.data(), held.size(), memory_.address()
        );
        CHECK(handle_ != nullptr);
    }
    Tensor(const Tensor&) = delete;
    ~Tensor() { CHECK(aclDestroyTensor(handle_) == ACL_SUCCESS); }

    aclTensor* handle() const { return handle_; }
    const Memory& memory() const { return memory_; }

    template<typename Element>
    void fill(const std::vector<Element>& values) const {
        CHECK(values.size() == std::size_t(count_) && sizeof(Element) == size_);
        memory_.write(values.data());
    }
    // Bytes that are small numbers in every type.
    void fill_randomly(std::mt19937& random) const {
        std::vector<std::uint8_t> bytes(std::size_t(count_) * size_);
        for (std::size_t i = 0; i < bytes.size(); ++i) {
            const bool high = size_ > 1 && i % size_ == size_ - 1;
            bytes[i] = high ? std::uint8_t(0x3C | (random() & 0x80)) : std::uint8_t(random());
        }
        memory_.write(bytes.data());
    }
    template<typename Element>
    std::vector<Element> read() const {
        CHECK(sizeof(Element) == size_);
        std::vector<Element> values(static_cast<std::size_t>(count_));
        memory_.read(values.data());
        return values;
    }

  private:
    std::int64_t count_;
    std::size_t size_;
    Memory memory_;
    aclTensor* handle_;
};

using SecondPhase = aclnnStatus (*)(void*, std::uint64_t, aclOpExecutor*, aclrtStream);

// Both phases of an operator; `first` is called with where to put workspace size and executor.
template<typename First>
void run(const Stream& stream, SecondPhase second, First first) {
    std::uint64_t size = 0;
    aclOpExecutor* executor = nullptr;
    const aclnnStatus status = first(&size, &executor);
    if (status != ACL_SUCCESS) {
        std::fprintf(stderr, "%d: %s\n", status, aclGetRecentErrMsg());
    }
    CHECK(status == ACL_SUCCESS);
    const Memory workspace(size);
    CHECK(second(size == 0 ? nullptr : workspace.address(), size, executor, stream.handle()) == ACL_SUCCESS);
    stream.synchronise();
}

} // namespace ascend_emulator::tests
