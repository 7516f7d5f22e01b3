// A 64-bit digest (FNV-1a) that tells damaged data from sound data. No protection against an adversary.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace tiny_lm {

inline constexpr std::uint64_t empty_digest = 0xcbf29ce484222325u;

/// Continues a digest over more bytes: a span, vector or string of anything one byte wide. Each step is a bijection of the
/// state, so a change confined to one byte is always seen.
template <class Bytes> std::uint64_t digest_of(Bytes const& bytes, std::uint64_t digest = empty_digest) {
    for (auto const byte : bytes) {
        static_assert(sizeof byte == 1);
        digest = (digest ^ static_cast<std::uint8_t>(byte)) * 0x100000001b3u;
    }
    return digest;
}

/// Sixteen hexadecimal digits.
inline std::string hexadecimal(std::uint64_t digest) {
    std::string text(16, '0');
    for (std::size_t i = 16; i-- > 0; digest >>= 4) text[i] = "0123456789abcdef"[digest & 15];
    return text;
}

} // namespace tiny_lm
