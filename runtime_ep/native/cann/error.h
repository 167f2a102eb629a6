// Failures of CANN, with what its own message says of them.
#pragma once

#include "cann/acl_abi.h"

#include <stdexcept>
#include <string>

namespace cann {

// A call that failed: "aclnnX returned 561002 (ACLNN_ERR_INNER_TILING_ERROR, ...): <CANN's words>; <what to do next>".
class Error : public std::runtime_error {
  public:
    Error(const std::string& function, std::int32_t code);
    // The same failure, with what the caller knows of it: `context` in front, `details` before the advice.
    Error(const Error& cause, const std::string& context, const std::string& details);

    std::int32_t code() const { return code_; }

  private:
    Error(std::int32_t code, const std::string& failure);

    std::int32_t code_;
    std::string failure_; // without the advice
};

// Throws Error unless `code` is success.
inline void check(std::int32_t code, const char* function) {
    if (code != ACL_SUCCESS) [[unlikely]] {
        throw Error(function, code);
    }
}

// What a code means, in a few words; empty for an unknown one.
std::string meaning(std::int32_t code);

// A clause that says what to do next.
std::string advice(std::int32_t code);

// The line of one of CANN's messages that says what is wrong, freed of codes, process ids and places in its source.
std::string telling_line(const std::string& message);

} // namespace cann
