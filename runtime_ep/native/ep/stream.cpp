#include "ep/stream.h"

#include "ep/notification.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace ep {
namespace {

constexpr std::size_t SMALLEST_STAGING = 1U << 20;
constexpr std::size_t LARGEST_STAGING = 32U << 20;
constexpr std::size_t STAGING_ALIGNMENT = 64;

std::uint64_t next_id() {
    static std::atomic<std::uint64_t> last{0};
    return ++last;
}

std::string in_words(const std::vector<const std::string*>& launches) {
    constexpr std::size_t MOST = 8;
    std::string words;
    for (std::size_t i = 0; i < std::min(MOST, launches.size()); ++i) {
        words += (i == 0 ? "; the stream was running " : ", ") + *launches[i];
    }
    return words + (launches.size() > MOST ? " and others" : "");
}

Stream& from(ort::OrtSyncStreamImpl* self) {
    return *static_cast<Stream*>(self);
}

} // namespace

void* GrowingMemory::at_least(std::size_t bytes, Stream& stream) {
    if (bytes > capacity_) {
        stream.synchronise(); // earlier launches may be using it
        memory_ = cann::DeviceMemory();
        capacity_ = 0;
        memory_ = cann::allocate_device(bytes);
        capacity_ = bytes;
    }
    return bytes == 0 ? nullptr : memory_.get();
}

Stream::Stream(Device& device) : OrtSyncStreamImpl{}, device_(device), id_(next_id()) {
    ort_version_supported = ort::runtime.version;
    Release = release;
    GetHandle = get_handle;
    CreateNotification = create_notification;
    Flush = flush;
    OnSessionRunEnd = on_session_run_end;
    device.make_current();
    handle_ = cann::create_stream();
    device.add(*this);
}

Stream::~Stream() {
    device_.settle();
    device_.remove(*this);
}

Stream* Stream::of(ort::OrtSyncStream* stream) {
    if (stream == nullptr) {
        return nullptr;
    }
    // onnxruntime 1.24 also passes streams here that are not of a provider's making, with whatever for an
    // implementation.
    const ort::OrtSyncStreamImpl* implementation = ort::ep_api().SyncStream_GetImpl(stream);
    if (!Device::has_stream(implementation)) {
        return nullptr;
    }
    return static_cast<Stream*>(const_cast<ort::OrtSyncStreamImpl*>(implementation));
}

void Stream::synchronise() {
    const std::uint64_t moment = last_submitted_.load(std::memory_order_acquire);
    const std::vector<const std::string*> launches = std::exchange(launches_, {});
    try {
        cann::check(cann::functions().aclrtSynchronizeStream(handle_.get()), "aclrtSynchronizeStream");
    } catch (const cann::Error& error) {
        throw cann::Error(error, "", in_words(launches));
    }
    last_finished_.store(moment, std::memory_order_release);
    staging_used_ = 0;
}

void Stream::settle() noexcept {
    const std::uint64_t moment = last_submitted_.load(std::memory_order_acquire);
    // The first call may only tell of something that failed before.
    if (cann::functions().aclrtSynchronizeStream(handle_.get()) != ACL_SUCCESS) {
        cann::functions().aclrtSynchronizeStream(handle_.get());
    }
    last_finished_.store(moment, std::memory_order_release);
}

bool Stream::finished(std::uint64_t moment) const {
    const std::uint64_t done = last_finished_.load(std::memory_order_acquire);
    return done >= std::min(moment, last_submitted_.load(std::memory_order_acquire));
}

void Stream::upload(void* device, const void* host, std::size_t bytes) {
    auto* to = static_cast<std::byte*>(device);
    const auto* from = static_cast<const std::byte*>(host);
    while (bytes > 0) {
        if (staging_used_ == staging_capacity_) {
            synchronise();
            if (const std::size_t wanted = std::clamp(bytes, SMALLEST_STAGING, LARGEST_STAGING);
                wanted > staging_capacity_) {
                staging_ = cann::HostMemory();
                staging_capacity_ = 0;
                staging_ = cann::allocate_host(wanted);
                staging_capacity_ = wanted;
            }
        }
        const std::size_t part = std::min(bytes, staging_capacity_ - staging_used_);
        auto* staged = static_cast<std::byte*>(staging_.get()) + staging_used_;
        std::memcpy(staged, from, part);
        cann::check(
            cann::functions().aclrtMemcpyAsync(to, part, staged, part, ACL_MEMCPY_HOST_TO_DEVICE, handle_.get()),
            "aclrtMemcpyAsync"
        );
        submitted();
        const std::size_t end = staging_used_ + part + STAGING_ALIGNMENT - 1;
        staging_used_ = std::min(staging_capacity_, end / STAGING_ALIGNMENT * STAGING_ALIGNMENT);
        to += part;
        from += part;
        bytes -= part;
    }
}

void Stream::download(void* host, const void* device, std::size_t bytes) {
    synchronise();
    if (bytes > 0) {
        cann::check(
            cann::functions().aclrtMemcpy(host, bytes, device, bytes, ACL_MEMCPY_DEVICE_TO_HOST), "aclrtMemcpy"
        );
    }
}

void Stream::copy(void* to, const void* from, std::size_t bytes) {
    if (bytes > 0 && to != from) {
        cann::check(
            cann::functions().aclrtMemcpyAsync(to, bytes, from, bytes, ACL_MEMCPY_DEVICE_TO_DEVICE, handle_.get()),
            "aclrtMemcpyAsync"
        );
        submitted();
    }
}

cann::EventHandle Stream::take_event() {
    const std::lock_guard lock(events_mutex_);
    if (events_.empty()) {
        device_.make_current();
        return cann::create_event();
    }
    cann::EventHandle event = std::move(events_.back());
    events_.pop_back();
    return event;
}

void Stream::give_event(cann::EventHandle event) noexcept {
    const std::lock_guard lock(events_mutex_);
    events_.push_back(std::move(event));
}

void Stream::release(ort::OrtSyncStreamImpl* self) noexcept {
    delete &from(self);
}

void* Stream::get_handle(ort::OrtSyncStreamImpl* self) noexcept {
    return from(self).handle();
}

ort::OrtStatus*
Stream::create_notification(ort::OrtSyncStreamImpl* self, ort::OrtSyncNotificationImpl** notification) noexcept {
    return ort::guarded([&] { *notification = new Notification(from(self)); });
}

ort::OrtStatus* Stream::flush(ort::OrtSyncStreamImpl* self) noexcept {
    return ort::guarded([&] {
        from(self).device().make_current();
        from(self).synchronise();
    });
}

// The runtime calls Flush behind it.
ort::OrtStatus* Stream::on_session_run_end(ort::OrtSyncStreamImpl*) noexcept {
    return nullptr;
}

} // namespace ep
