// Bytes from one row to another, whole lines of them past the caches where that is asked for.
#pragma once

#include <keel/config.hpp>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace keel::inline KEEL_ABI {

#if defined(__SSE2__)
/// One line of 64 bytes; `to` is on its boundary.
KEEL_FN void copy_line_past_caches(unsigned char* to, unsigned char const* from) {
#if defined(__AVX512F__)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
#elif defined(__AVX__)
    for (int i = 0; i < 64; i += 32)
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), _mm256_loadu_si256(reinterpret_cast<__m256i const*>(from + i)));
#else
    for (int i = 0; i < 64; i += 16)
        _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), _mm_loadu_si128(reinterpret_cast<__m128i const*>(from + i)));
#endif
}
#endif

/// What is streamed wants a store_fence before others are told of it.
KEEL_FN void copy_bytes(void* to, void const* from, int64_t bytes, [[maybe_unused]] bool past_caches) {
    auto* out = static_cast<unsigned char*>(to);
    auto const* in = static_cast<unsigned char const*>(from);
#if defined(__SSE2__)
    if (past_caches && bytes >= 256) {
        auto const head = static_cast<int64_t>((64 - reinterpret_cast<uintptr_t>(to) % 64) % 64);
        __builtin_memcpy(out, in, static_cast<std::size_t>(head));
        int64_t i = head;
        for (; i + 64 <= bytes; i += 64) copy_line_past_caches(out + i, in + i);
        out += i, in += i, bytes -= i;
    }
#endif
    __builtin_memcpy(out, in, static_cast<std::size_t>(bytes));
}

} // namespace keel::inline KEEL_ABI
