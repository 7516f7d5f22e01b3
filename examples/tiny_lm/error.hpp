// How a run can fail. Each error is one line on stderr and an exit code; --help lists the codes.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

#include "escape.hpp"

namespace tiny_lm {

/// A mistake that the user can mend: a bad argument, an unreadable file, a damaged checkpoint. Exit code 2; whoever
/// throws it has changed nothing yet.
struct user_error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

/// What was computed could not be written. Exit code 1.
struct write_error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

/// The text in double quotes, on one line of well-formed UTF-8 whatever it holds.
inline std::string quote(std::string_view text) { return '"' + escaped(text) + '"'; }

/// The form of every complaint: what it is about, what it was, what was wanted.
inline user_error complaint(std::string_view about, std::string_view got, std::string_view wanted) {
    return user_error(std::string(about) + ": got " + std::string(got) + ", wanted " + std::string(wanted));
}

} // namespace tiny_lm
