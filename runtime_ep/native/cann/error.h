// Failures of CANN, with what its own message says of them.
#pragma once

#include "cann/acl_abi.h"

#include <stdexcept>
#include <string>

namespace cann {

// A call that failed: which function, with which code, and the telling line of aclGetRecentErrMsg.
class Error : public std::runtime_error {
  public:
    Error(std::string function, std::int32_t code);

    std::int32_t code() const { return code_; }

    // "aclnnX returned 561002 (tiling failed): <CANN's own words>"
    // The advice is a clause that says what to do next.
    std::string advice() const;

  private:
    std::int32_t code_;
};

// Throws Error unless `code` is success.
inline void check(std::int32_t code, const char* function) {
    if (code != ACL_SUCCESS) [[unlikely]] {
        throw Error(function, code);
    }
}

// What a code means, in a few words; empty for an unknown one.
std::string meaning(std::int32_t code);

// The line of one of CANN's messages that says what is wrong, freed of codes, process ids and places in its source.
std::string telling_line(const std::string& message);

} // namespace cann
