// The text: bytes to learn from, and bytes that training never sees.
//
// The last sixteenth of every file is held out, as one contiguous piece: neighbouring sentences of a book are so
// alike that a random split would measure memory. Training text and held-out text are each the concatenation of the
// files' parts, in the order given.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "digest.hpp"
#include "error.hpp"
#include "files.hpp"
#include "numbers.hpp"

namespace tiny_lm {

using byte_span = std::span<std::uint8_t const>;

struct corpus {
    std::vector<std::uint8_t> train;
    std::vector<std::uint8_t> held_out;
    std::uint64_t digest = 0; ///< of both, so that a resumed run can tell that it reads the same text
};

inline constexpr std::size_t held_out_part = 16; ///< one byte in so many

/// Splits one text and appends it to what is there.
inline void append_text(corpus& text, byte_span bytes) {
    std::size_t const kept = bytes.size() - bytes.size() / held_out_part;
    text.train.insert(text.train.end(), bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(kept));
    text.held_out.insert(text.held_out.end(), bytes.begin() + static_cast<std::ptrdiff_t>(kept), bytes.end());
}

/// Reads and splits the files. user_error if one is missing, unreadable or empty, or if they are together too short
/// for a context of `sequence` bytes: the held-out text must fill one context and its next byte, the training text
/// two.
inline corpus read_corpus(std::vector<std::string> const& paths, std::int64_t sequence) {
    corpus text;
    for (auto const& path : paths) {
        auto const bytes = read_file(path);
        if (bytes.empty()) throw complaint("--text", quote(path) + ", an empty file", "a text");
        append_text(text, bytes);
    }
    auto const context = static_cast<std::size_t>(sequence);
    if (text.held_out.size() < context + 1 || text.train.size() < 2 * context)
        throw complaint("--text", shortest(text.train.size() + text.held_out.size()) + " bytes",
                        "at least " + shortest(held_out_part * (context + 1)) + " for --sequence " +
                            shortest(sequence));
    text.digest = digest_of(text.held_out, digest_of(text.train));
    return text;
}

/// Number of windows that cut a held-out text into contexts, each followed by its next byte: every byte but the
/// first, and but those of a last partial window, is predicted exactly once.
inline std::int64_t held_out_windows(corpus const& text, std::int64_t sequence) {
    return (static_cast<std::int64_t>(text.held_out.size()) - 1) / sequence;
}

/// Window w of these: sequence + 1 bytes, of which the first `sequence` are inputs and the last `sequence` are targets.
inline byte_span held_out_window(corpus const& text, std::int64_t w, std::int64_t sequence) {
    return byte_span(text.held_out)
        .subspan(static_cast<std::size_t>(w * sequence), static_cast<std::size_t>(sequence + 1));
}

} // namespace tiny_lm
