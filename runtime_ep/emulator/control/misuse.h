// Programs that CANN would let corrupt memory end here, with a sentence that says what they did.
#pragma once

#include <sstream>
#include <string>
#include <string_view>

namespace ascend_emulator {

// The parts written one after the other.
template<typename... Parts>
std::string text(const Parts&... parts) {
    std::ostringstream stream;
    (stream << ... << parts);
    return stream.str();
}

// Prints "ascend_emulator: `sentence`" and aborts.
[[noreturn]] void misuse(std::string_view sentence);

} // namespace ascend_emulator
