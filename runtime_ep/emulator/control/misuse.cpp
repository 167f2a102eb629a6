#include "control/misuse.h"

#include <cstdio>
#include <cstdlib>

namespace ascend_emulator {

void misuse(std::string_view sentence) {
    std::fprintf(stderr, "ascend_emulator: %.*s\n", static_cast<int>(sentence.size()), sentence.data());
    std::fflush(stderr);
    std::abort();
}

} // namespace ascend_emulator
