// Packing: strips of A and B, decoded to fp32 and laid out in the order in which the micro-kernel reads them.
//
// An operand is seen as `lines` (rows of A, columns of B) by `depth` (k). A strip holds R lines: slot p of the strip is R
// floats, one a line. Slot p belongs to k = p, except where k goes by pairs (takes_pairs): there they are exchanged (slot 2i holds
// k = 2i+1), which is the order of the hardware's bf16 dot, and an odd depth ends with a pair whose odd element is zero. What has
// that dot packs pairs into words instead (packing_pairs.hpp).
// Lines past the operand's end hold anything: the rows and columns of C that they make are never stored.
//
// Registers are stored whole even where a slot is narrower. Groups of lines are written from the last to the first and
// slots in ascending order, so what a store writes too much is overwritten by a later one, or lies in the gap after the strip.
#pragma once

#include <cstring>
#include <type_traits>

#include <keel/backend/cpu/matmul_plan.hpp>
#include <keel/backend/cpu/micro_kernel.hpp>
#include <keel/backend/cpu/pack.hpp>
#include <keel/format/bf16.hpp>
#include <keel/format/format.hpp>

namespace keel::inline KEEL_ABI::detail {

/// Lines [0, lines) by [0, depth) of an operand; `readable` >= lines of them exist. Strides in elements of its format.
struct operand_block {
    void const* data;
    int64_t line_stride, depth_stride;
    int64_t lines, readable, depth;
};

/// Writes one strip, and tells the range of its elements where a kernel wants to know it.
using pack_function = exponent_range (*)(operand_block const& from, float* strip);
/// That range of lines that are not packed.
using watch_function = exponent_range (*)(operand_block const& from);

/// Floats from one strip to the next.
template <class A, int R> KEEL_FN constexpr int64_t strip_stride(int64_t slots) {
    return R * slots + (R % A::width == 0 ? 0 : strip_gap);
}

template <class F, class T> KEEL_FN F load_decoded(T const* p) {
    if constexpr (std::is_same_v<T, float>)
        return load<F>(p);
    else
        return decode_words<T, F>(load_words<bits_of<F>>(&p->bits));
}
template <class F, class T> KEEL_FN F load_decoded_partial(T const* p, int64_t n) {
    if constexpr (std::is_same_v<T, float>)
        return load_partial<F>(p, n);
    else
        return decode_words<T, F>(load_words_partial<bits_of<F>>(&p->bits, n));
}
template <class T> KEEL_FN float load_decoded_scalar(T const* p) {
    if constexpr (std::is_same_v<T, float>)
        return *p;
    else
        return decode_words<T, float>(static_cast<uint32_t>(p->bits));
}

/// A code of T as the bf16 that is equal to it.
template <class T, class U> KEEL_FN U as_bf16(U const& code) {
    if constexpr (std::is_same_v<T, bf16>)
        return code;
    else
        return shr<16>(bits(decode_words<T, pack<typename U::arch>>(code)));
}

/// A word's two neighbours of T as a pair of bf16.
template <class T, class U> KEEL_FN U pair_of_neighbours(U const& neighbours) {
    if constexpr (std::is_same_v<T, bf16>)
        return neighbours;
    else
        return as_bf16<T>(neighbours & U(0xffu)) | shl<16>(as_bf16<T>(shr<8>(neighbours)));
}
/// Elements [0, 2 w) from p on, two a word.
template <class U, class T> KEEL_FN U load_neighbours(T const* p) {
    if constexpr (sizeof(T) == 2) return load_bytes<U>(p);
    uint16_t words[std::size_t{U::width}];
    std::memcpy(&words[0], p, sizeof(words));
    return load_words<U>(&words[0]);
}
/// The same of n < 2 w elements; those past n count as zero codes.
template <class U, class T> KEEL_FN U load_neighbours_partial(T const* p, int64_t n) {
    if constexpr (sizeof(T) == 2 && requires { U::machine::load_bytes_partial(p, 1); })
        return U::of(U::machine::load_bytes_partial(p, 2 * static_cast<int>(n)));
    T some[std::size_t{2 * U::width}] = {};
    for (int64_t i = 0; i < n; ++i) some[i] = p[i];
    return load_neighbours<U>(&some[0]);
}

/// Adjacent lines: slots are copied.
template <class A, class T, bool Paired, int R> KEEL_FN void pack_across(operand_block const& from, float* strip) {
    using F = pack<A>;
    constexpr int w = A::width;
    int64_t const slots = Paired ? round_up(from.depth, 2) : from.depth;
    for (int line = (R - 1) / w * w; line >= 0; line -= w) {
        int64_t const left = smaller(from.readable - line, w);
        T const* const p = static_cast<T const*>(from.data) + line;
        for (int64_t slot = 0; slot < slots; ++slot) {
            int64_t const k = Paired ? slot ^ 1 : slot;
            F v(0.0f);
            __builtin_prefetch(p + (k + 16) * from.depth_stride);
            if (left == w && k < from.depth)
                v = load_decoded<F>(p + k * from.depth_stride);
            else if (left > 0 && k < from.depth)
                v = load_decoded_partial<F>(p + k * from.depth_stride, left);
            store(strip + slot * R + line, v);
        }
    }
}

/// Adjacent k: W x W blocks are transposed in registers. A block's word is one element, or a pair as bf16, which gives twice as
/// many slots.
template <class A, class T, bool Paired, int R> KEEL_FN void pack_along(operand_block const& from, float* strip) {
    using F = pack<A>;
    using U = bits_of<F>;
    constexpr int w = A::width, pair = Paired ? 2 : 1, step = pair * w;
    auto const put = [](U const& word, float* slot) {
        if constexpr (Paired) {
            store(slot, as_float(word & U(0xffff0000u)));
            store(slot + R, as_float(shl<16>(word)));
        } else {
            store(slot, as_float(word));
        }
    };
    for (int line = (R - 1) / w * w; line >= 0; line -= w) {
        T const* row[std::size_t{w}]; // past the end: the last line again
        for (int i = 0; i < w; ++i)
            row[i] = static_cast<T const*>(from.data) + smaller(line + i, from.lines - 1) * from.line_stride;
        int64_t k = 0;
        for (; k + step <= from.depth; k += step) {
            U block[std::size_t{w}];
            repeat<w>([&](auto i) {
                __builtin_prefetch(row[i] + k + 2 * step);
                if constexpr (Paired)
                    block[i] = pair_of_neighbours<T>(load_neighbours<U>(row[i] + k));
                else
                    block[i] = bits(load_decoded<F>(row[i] + k));
            });
            transpose(block);
            float* const slot = strip + k * R + line;
            repeat<w>([&](auto i) { put(block[i], slot + i * pair * R); });
        }
        if (int64_t const left = from.depth - k; left > 0) {
            U block[std::size_t{w}];
            for (int i = 0; i < w; ++i) {
                if constexpr (Paired)
                    block[i] = pair_of_neighbours<T>(load_neighbours_partial<U>(row[i] + k, left));
                else
                    block[i] = bits(load_decoded_partial<F>(row[i] + k, left));
            }
            transpose(block);
            for (int64_t i = 0; i * pair < left; ++i) put(block[i], strip + (k + i * pair) * R + line);
        }
    }
}

/// Any strides.
template <class T, bool Paired, int R> KEEL_FN void pack_strided(operand_block const& from, float* strip) {
    int64_t const slots = Paired ? round_up(from.depth, 2) : from.depth;
    for (int64_t slot = 0; slot < slots; ++slot) {
        int64_t const k = Paired ? slot ^ 1 : slot;
        T const* const p = static_cast<T const*>(from.data) + k * from.depth_stride;
        for (int line = 0; line < R; ++line)
            strip[slot * R + line] =
                line < from.lines && k < from.depth ? load_decoded_scalar(p + line * from.line_stride) : 0.0f;
    }
}

template <class A, class T, bool Paired, int R> KEEL_FLATTEN exponent_range pack_strip(operand_block const& from, float* strip) {
    if (from.depth_stride == 1)
        pack_along<A, T, Paired, R>(from, strip);
    else if (from.line_stride == 1)
        pack_across<A, T, Paired, R>(from, strip);
    else
        pack_strided<T, Paired, R>(from, strip);
    return {};
}

} // namespace keel::inline KEEL_ABI::detail
