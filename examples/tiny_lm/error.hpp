// What the user can mend: a bad argument, an unreadable file, a damaged checkpoint.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

namespace tiny_lm {

/// A mistake that the user can mend. main prints its text as one line on stderr and ends with exit code 2; whoever
/// throws it has changed nothing yet.
struct user_error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

/// The text in double quotes, on one line whatever it holds: control bytes, quotes and backslashes are escaped.
inline std::string quote(std::string_view text) {
    constexpr char const* digits = "0123456789abcdef";
    std::string out = "\"";
    for (char const c : text) {
        auto const byte = static_cast<unsigned char>(c);
        if (byte < 0x20 || byte == 0x7f) {
            out += {'\\', 'x', digits[byte >> 4], digits[byte & 15]};
        } else {
            if (c == '"' || c == '\\') out += '\\';
            out += c;
        }
    }
    return out + '"';
}

/// The form of every complaint: what it is about, what it was, what was wanted.
inline user_error complaint(std::string_view about, std::string_view got, std::string_view wanted) {
    return user_error(std::string(about) + ": got " + std::string(got) + ", wanted " + std::string(wanted));
}

} // namespace tiny_lm
