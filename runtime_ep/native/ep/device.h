// One NPU, as long as the process lives: values on it may outlive sessions, and even the registration of the library.
#pragma once

#include "cann/objects.h"
#include "ort/runtime.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <vector>

namespace ep {

inline constexpr std::uint32_t VENDOR_ID = 0x19E5;
inline constexpr const char* PROVIDER_NAME = "AscendExecutionProvider";

class Stream;

class Device {
  public:
    // The device with that number.
    static Device& get(int id);

    int id() const { return id_; }
    const ort::OrtMemoryInfo* memory_info() const { return memory_info_; }

    // Makes it the device of the calling thread, which every call of CANN needs.
    void make_current() const;

    // Waits for everything that was submitted to it.
    void synchronise() const;
    // The same, whatever fails: for use before something is freed that the device may still be reading.
    void settle() noexcept;

    // Moments order what the host does and what streams were given: later ones are larger.
    std::uint64_t now() const { return clock_.load(std::memory_order_acquire); }
    std::uint64_t tick() { return clock_.fetch_add(1, std::memory_order_acq_rel) + 1; }
    // Whether every stream but `except` has done all that it was given up to `moment`.
    bool finished(std::uint64_t moment, std::uint64_t except) const;

    void add(Stream& stream);
    void remove(Stream& stream);
    // The stream with that handle, of whatever device; null for an unknown one.
    static Stream* stream(aclrtStream handle);
    // Whether that is a stream of whatever device; looks at the address only.
    static bool has_stream(const void* stream);

  private:
    explicit Device(int id);

    int id_;
    ort::OrtMemoryInfo* memory_info_ = nullptr;
    std::atomic<std::uint64_t> clock_{0};
    mutable std::shared_mutex mutex_;
    std::vector<Stream*> streams_;
};

} // namespace ep
