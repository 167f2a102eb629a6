// Work shared by all threads of the device.
#pragma once

#include <cstdint>
#include <functional>

namespace ascend_emulator {

// Calls `body(first, last)` for pieces of [0, count) on several threads, and returns when all are done. Pieces have
// `grain` elements wherever they run, so results do not depend on the number of threads. Throws what `body` threw.
void parallel_for(
    std::int64_t count, std::int64_t grain, const std::function<void(std::int64_t first, std::int64_t last)>& body
);

} // namespace ascend_emulator
