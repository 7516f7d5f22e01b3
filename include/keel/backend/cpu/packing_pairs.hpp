// Packing for the dot of pairs (pair_dot.hpp): slot p of a strip holds k = 2p in the low half of its words and k = 2p + 1 in the high
// half, as bf16; an odd depth ends with a pair whose odd element is zero. Strips are otherwise those of packing.hpp.
#pragma once

#include <cstring>

#include <keel/backend/cpu/packing.hpp>
#include <keel/backend/cpu/pair_dot.hpp>
#include <keel/backend/cpu/pair_words.hpp>

namespace keel::inline KEEL_ABI::detail {

/// Adjacent lines: two rows of k become one of words.
template <class A, class T, int R> KEEL_FN exponent_range pack_pairs_across(operand_block const& from, float* strip) {
    using U = bits_pack<A>;
    constexpr int w = A::width;
    exponent_watch<A> watch;
    if (R == 2 * w && from.readable >= R && from.depth % 2 == 0) {
        T const* even = static_cast<T const*>(from.data);
        for (int64_t k = 0; k < from.depth; k += 2, even += 2 * from.depth_stride, strip += R) {
            U words[2];
            __builtin_prefetch(even + 16 * from.depth_stride), __builtin_prefetch(even + 17 * from.depth_stride);
            pair_words<A, T>{}.across_two(even, even + from.depth_stride, words);
            watch.take(words[0]), watch.take(words[1]);
            store(strip, as_float(words[0])), store(strip + w, as_float(words[1]));
        }
        return watch.range();
    }
    for (int line = (R - 1) / w * w; line >= 0; line -= w) {
        int64_t const left = smaller(from.readable - line, w);
        T const* const p = static_cast<T const*>(from.data) + line;
        float* slot = strip + line;
        int64_t k = 0;
        if (left == w)
            for (; k + 2 <= from.depth; k += 2, slot += R) {
                T const* const even = p + k * from.depth_stride;
                U const words = pair_words<A, T>{}.across(even, even + from.depth_stride);
                watch.take(words);
                store(slot, as_float(words));
            }
        auto const row = [&](int64_t at) {
            if (at >= from.depth || left <= 0) return U(0u);
            auto const* const codes = &p[at * from.depth_stride].bits;
            return as_bf16<T>(left == w ? load_words<U>(codes) : load_words_partial<U>(codes, left));
        };
        for (; k < from.depth; k += 2, slot += R) {
            U const words = row(k) | shl<16>(row(k + 1));
            watch.take(words);
            store(slot, as_float(words));
        }
    }
    return watch.range();
}

/// Adjacent k: W x W blocks of words are transposed in registers.
template <class A, class T, int R> KEEL_FN exponent_range pack_pairs_along(operand_block const& from, float* strip) {
    using U = bits_pack<A>;
    constexpr int w = A::width, step = 2 * w;
    exponent_watch<A> watch;
    for (int line = (R - 1) / w * w; line >= 0; line -= w) {
        T const* row[std::size_t{w}]; // past the end: the last line again
        for (int i = 0; i < w; ++i) row[i] = static_cast<T const*>(from.data) + smaller(line + i, from.lines - 1) * from.line_stride;
        for (int64_t k = 0; k < from.depth; k += step) {
            int64_t const left = smaller(from.depth - k, step);
            U block[std::size_t{w}];
            if (left == step) {
                repeat<w>([&](auto i) {
                    __builtin_prefetch(row[i] + k + 2 * step);
                    block[i] = pair_words<A, T>{}.along(row[i] + k);
                    watch.take(block[i]);
                });
            } else {
                for (int i = 0; i < w; ++i) {
                    block[i] = pair_of_neighbours<T>(load_neighbours_partial<U>(row[i] + k, left));
                    watch.take(block[i]);
                }
            }
            transpose(block);
            float* const slot = strip + k / 2 * R + line;
            if (left == step) {
                repeat<w>([&](auto i) { store(slot + i * R, as_float(block[i])); });
            } else {
                for (int64_t i = 0; 2 * i < left; ++i) store(slot + i * R, as_float(block[i]));
            }
        }
    }
    return watch.range();
}

/// Any strides.
template <class A, class T, int R> KEEL_FN exponent_range pack_pairs_strided(operand_block const& from, float* strip) {
    exponent_watch<A> watch;
    constexpr int w = A::width, padded = (R + w - 1) / w * w;
    for (int64_t k = 0; k < from.depth; k += 2) {
        uint32_t words[std::size_t{padded}] = {};
        for (int line = 0; line < R && line < from.lines; ++line) {
            T const* const p = static_cast<T const*>(from.data) + line * from.line_stride + k * from.depth_stride;
            words[line] = bits(load_decoded_scalar(p)) >> 16;
            if (k + 1 < from.depth) words[line] |= bits(load_decoded_scalar(p + from.depth_stride)) & 0xffff0000u;
        }
        for (int line = 0; line < R; line += w) watch.take(load_words<bits_pack<A>>(&words[line]));
        std::memcpy(strip + k / 2 * R, &words[0], std::size_t{R} * sizeof(float));
    }
    return watch.range();
}

/// Lines with adjacent k, an even number, which stay where they lie.
template <class A, class T> KEEL_FLATTEN exponent_range watch_pairs(operand_block const& from) {
    using U = bits_pack<A>;
    constexpr int step = 2 * A::width;
    exponent_watch<A> watch;
    T const* row = static_cast<T const*>(from.data);
    int64_t const whole = from.depth / step * step;
    for (int64_t line = 0; line < from.lines; ++line, row += from.line_stride) {
        for (int64_t k = 0; k < whole; k += step) watch.take(load_neighbours<U>(row + k));
        if (whole < from.depth) watch.take(load_neighbours_partial<U>(row + whole, from.depth - whole));
    }
    return watch.range();
}

template <class A, class T, int R> KEEL_FLATTEN exponent_range pack_pair_strip(operand_block const& from, float* strip) {
    if (from.depth_stride == 1) return pack_pairs_along<A, T, R>(from, strip);
    if (from.line_stride == 1) return pack_pairs_across<A, T, R>(from, strip);
    return pack_pairs_strided<A, T, R>(from, strip);
}

} // namespace keel::inline KEEL_ABI::detail
