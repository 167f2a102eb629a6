#include "ep/notification.h"

namespace ep {
namespace {

Notification& from(ort::OrtSyncNotificationImpl* self) {
    return *static_cast<Notification*>(self);
}

} // namespace

Notification::Notification(Stream& producer)
    : OrtSyncNotificationImpl{},
      producer_(producer),
      event_(producer.take_event()) {
    ort_version_supported = ort::runtime.version;
    Release = release;
    Activate = activate;
    WaitOnDevice = wait_on_device;
    WaitOnHost = wait_on_host;
}

void Notification::release(ort::OrtSyncNotificationImpl* self) noexcept {
    Notification& notification = from(self);
    notification.producer_.give_event(std::move(notification.event_));
    delete &notification;
}

ort::OrtStatus* Notification::activate(ort::OrtSyncNotificationImpl* self) noexcept {
    return ort::guarded([&] {
        Stream& producer = from(self).producer_;
        producer.device().make_current();
        cann::check(cann::functions().aclrtRecordEvent(from(self).event_.get(), producer.handle()), "aclrtRecordEvent");
        producer.submitted();
    });
}

ort::OrtStatus*
Notification::wait_on_device(ort::OrtSyncNotificationImpl* self, ort::OrtSyncStream* consumer) noexcept {
    Stream* stream = Stream::of(consumer);
    if (stream == nullptr) { // the host consumes, through a kernel of the CPU provider
        return wait_on_host(self);
    }
    return ort::guarded([&] {
        stream->device().make_current();
        cann::check(
            cann::functions().aclrtStreamWaitEvent(stream->handle(), from(self).event_.get()), "aclrtStreamWaitEvent"
        );
        stream->submitted();
    });
}

ort::OrtStatus* Notification::wait_on_host(ort::OrtSyncNotificationImpl* self) noexcept {
    return ort::guarded([&] {
        from(self).producer_.device().make_current();
        cann::check(cann::functions().aclrtSynchronizeEvent(from(self).event_.get()), "aclrtSynchronizeEvent");
    });
}

} // namespace ep
