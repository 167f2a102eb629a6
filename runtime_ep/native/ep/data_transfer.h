// Copies between host and device, and from device to device, as the runtime asks for them.
#pragma once

#include "ep/stream.h"
#include "ort/abi.h"

#include <cstddef>

namespace ep {

class DataTransfer final : public ort::OrtDataTransferImpl {
  public:
    DataTransfer();

  private:
    static void release(ort::OrtDataTransferImpl* self) noexcept;
    static bool can_copy(
        const ort::OrtDataTransferImpl* self, const ort::OrtMemoryDevice* source, const ort::OrtMemoryDevice* target
    ) noexcept;
    static ort::OrtStatus* copy_tensors(
        ort::OrtDataTransferImpl* self, const ort::OrtValue** sources, ort::OrtValue** targets,
        ort::OrtSyncStream** streams, std::size_t count
    ) noexcept;
};

// Copies all bytes of a value to another one of the same size. Copies to the host have happened when it returns; the
// others may wait on `stream`, and have happened too if it is null.
void copy_value(const ort::OrtValue* source, ort::OrtValue* target, Stream* stream);

} // namespace ep
