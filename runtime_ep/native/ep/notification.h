// What one stream tells others, or the host: "I have come this far".
#pragma once

#include "cann/objects.h"
#include "ep/stream.h"
#include "ort/abi.h"

namespace ep {

class Notification final : public ort::OrtSyncNotificationImpl {
  public:
    explicit Notification(Stream& producer);

  private:
    static void release(ort::OrtSyncNotificationImpl* self) noexcept;
    static ort::OrtStatus* activate(ort::OrtSyncNotificationImpl* self) noexcept;
    static ort::OrtStatus* wait_on_device(ort::OrtSyncNotificationImpl* self, ort::OrtSyncStream* consumer) noexcept;
    static ort::OrtStatus* wait_on_host(ort::OrtSyncNotificationImpl* self) noexcept;

    Stream& producer_;
    cann::EventHandle event_;
};

} // namespace ep
