// What a call returns: ok, or which argument was wrong, what it was and what was wanted.
#pragma once

#include <string>
#include <type_traits>

#include <keel/config.hpp>

#if KEEL_HAS_EXCEPTIONS
#include <stdexcept>
#else
#include <cstdio>
#include <cstdlib>
#endif

namespace keel {

enum class status_code : uint8_t {
    ok,
    bad_shape,         ///< an extent differs from what the other arguments imply
    bad_stride,        ///< a stride that this primitive does not take
    bad_pointer,       ///< null data in a view that is not empty, or misaligned data
    bad_option,        ///< an option outside its range
    overlap,           ///< an output shares memory with another argument in a way the primitive does not allow
    small_workspace,   ///< the workspace is smaller than the *_workspace function asks for
    bad_state,         ///< a caller-owned state object contradicts the call
    non_finite,        ///< the data make the operation impossible; nothing was written
    unsupported,       ///< the backend cannot do this
    launch_failed,     ///< the device runtime refused the launch
};

KEEL_HOST constexpr char const* name_of(status_code code) {
    switch (code) {
    case status_code::ok: return "ok";
    case status_code::bad_shape: return "bad_shape";
    case status_code::bad_stride: return "bad_stride";
    case status_code::bad_pointer: return "bad_pointer";
    case status_code::bad_option: return "bad_option";
    case status_code::overlap: return "overlap";
    case status_code::small_workspace: return "small_workspace";
    case status_code::bad_state: return "bad_state";
    case status_code::non_finite: return "non_finite";
    case status_code::unsupported: return "unsupported";
    case status_code::launch_failed: return "launch_failed";
    }
    return "unknown";
}

/// The outcome of a call. Trivially copyable; the text is made only when message() is asked for.
/// Every char const* points at a string literal.
struct [[nodiscard]] status {
    status_code code = status_code::ok;
    char const* function = "";  ///< the primitive, e.g. "rms_norm"
    char const* argument = "";  ///< the argument at fault, e.g. "y"
    char const* property = "";  ///< what of it, e.g. "rows"; empty: `wanted_text` says all
    char const* wanted_text = ""; ///< what was wanted where a number does not say it
    int64_t got = 0;
    int64_t wanted = 0;
    char const* item = "";      ///< of a call over a list: what it is a list of, e.g. "parameter"
    int64_t index = 0;          ///< and which of them was at fault

    KEEL_FN constexpr bool ok() const { return code == status_code::ok; }

    /// "rms_norm: y has rows = 5, wanted 4 (bad_shape)"
    KEEL_HOST std::string message() const {
        if (ok()) return "ok";
        std::string text = std::string(function) + ": " + argument;
        if (*property != '\0') text += std::string(" has ") + property + " = " + std::to_string(got);
        text += ", wanted ";
        text += *wanted_text != '\0' ? std::string(wanted_text) : std::to_string(wanted);
        if (*item != '\0' && std::string(item) != property) text += std::string(", at ") + item + " " + std::to_string(index);
        return text + " (" + name_of(code) + ")";
    }

    /// Throws std::runtime_error with message() unless ok; without exceptions prints it and aborts.
    KEEL_HOST void or_throw() const {
        if (ok()) return;
#if KEEL_HAS_EXCEPTIONS
        throw std::runtime_error(message());
#else
        std::fputs((message() + "\n").c_str(), stderr);
        std::abort();
#endif
    }
};
static_assert(std::is_trivially_copyable_v<status>);

} // namespace keel
