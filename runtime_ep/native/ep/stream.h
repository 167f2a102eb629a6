// A stream of the device, with what belongs to one: its workspace, its staging memory, its notifications.
//
// The runtime gives every concurrent run a stream of its own, so that nothing here is used by two threads at once,
// except what `Device` asks of all streams.
#pragma once

#include "cann/objects.h"
#include "ep/device.h"
#include "ort/abi.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace ep {

// Device memory that only grows.
class GrowingMemory {
  public:
    // At least `bytes` of it; what an earlier call returned may be gone. Null for 0 bytes.
    void* at_least(std::size_t bytes, Stream& stream);

  private:
    cann::DeviceMemory memory_;
    std::size_t capacity_ = 0;
};

class Stream final : public ort::OrtSyncStreamImpl {
  public:
    explicit Stream(Device& device);
    ~Stream();
    Stream(const Stream&) = delete;
    Stream& operator=(const Stream&) = delete;

    // The stream behind one of the runtime's; null for null and for another provider's.
    static Stream* of(ort::OrtSyncStream* stream);

    Device& device() const { return device_; }
    std::uint64_t id() const { return id_; }
    aclrtStream handle() const { return handle_.get(); }

    // Says that work was put on the stream; call it after every launch and every asynchronous copy.
    void submitted() { last_submitted_.store(device_.tick(), std::memory_order_release); }
    // The same of a launch, with words for it in case it fails on the device. They must live until then.
    void launched(const std::string& description) {
        launches_.push_back(&description);
        submitted();
    }
    // Waits for all of it. Throws what failed on the device.
    void synchronise();
    void settle() noexcept;
    bool finished(std::uint64_t moment) const;

    // Copies to the device behind the work that is on the stream. `host` may change when this returns.
    void upload(void* device, const void* host, std::size_t bytes);
    // Copies to the host; returns when the bytes are there.
    void download(void* host, const void* device, std::size_t bytes);
    void copy(void* to, const void* from, std::size_t bytes);

    // For the second phase of a launch, and for tensors that live for one launch.
    void* workspace(std::size_t bytes) { return workspace_.at_least(bytes, *this); }
    void* scratch(std::size_t bytes) { return scratch_.at_least(bytes, *this); }

    cann::EventHandle take_event();
    void give_event(cann::EventHandle event) noexcept;

  private:
    static void release(ort::OrtSyncStreamImpl* self) noexcept;
    static void* get_handle(ort::OrtSyncStreamImpl* self) noexcept;
    static ort::OrtStatus*
    create_notification(ort::OrtSyncStreamImpl* self, ort::OrtSyncNotificationImpl** notification) noexcept;
    static ort::OrtStatus* flush(ort::OrtSyncStreamImpl* self) noexcept;
    static ort::OrtStatus* on_session_run_end(ort::OrtSyncStreamImpl* self) noexcept;

    Device& device_;
    std::uint64_t id_;
    cann::StreamHandle handle_;
    std::atomic<std::uint64_t> last_submitted_{0};
    std::atomic<std::uint64_t> last_finished_{0};
    std::vector<const std::string*> launches_; // since the last time that the stream was waited for
    GrowingMemory workspace_;
    GrowingMemory scratch_;

    // Pinned memory, because an asynchronous copy reads it after the caller has gone on.
    cann::HostMemory staging_;
    std::size_t staging_capacity_ = 0;
    std::size_t staging_used_ = 0;

    std::mutex events_mutex_;
    std::vector<cann::EventHandle> events_;
};

} // namespace ep
