// Packing: strips of A and B, decoded to fp32 and laid out in the order in which the micro-kernel reads them.
//
// An operand is seen as `lines` (rows of A, columns of B) by `depth` (k). A strip holds R lines: slot p of the strip is R
// floats, one a line, with zeros for lines past the end. Slot p belongs to k = p, except where both operands are bf16: there
// pairs are exchanged (slot 2i holds k = 2i+1), which is the order of the hardware's bf16 dot, and an odd depth ends
// with a pair whose odd element is zero.
#pragma once

#include <type_traits>

#include <keel/backend/cpu/pack.hpp>
#include <keel/backend/cpu/matmul_plan.hpp>
#include <keel/format/bf16.hpp>
#include <keel/format/format.hpp>

namespace keel::inline KEEL_ABI::detail {

/// Lines [0, lines) by [0, depth) of an operand. Strides in elements of its format.
struct operand_block {
    void const* data;
    int64_t line_stride, depth_stride;
    int64_t lines, depth;
};

/// Writes one strip of R >= lines lines to `strip`.
using pack_function = void (*)(operand_block const& from, int64_t R, float* strip);

template <class U, class T> KEEL_FN auto decode_pack(U const& words) {
    using F = pack<typename U::arch>;
    if constexpr (std::is_same_v<T, float>) return as_float(words);
    else return decode_words<T, F>(words);
}
template <class F, class T> KEEL_FN F load_decoded(T const* p) {
    if constexpr (std::is_same_v<T, float>) return load<F>(p);
    else return decode_words<T, F>(load_words<bits_of<F>>(&p->bits));
}
template <class F, class T> KEEL_FN F load_decoded_partial(T const* p, int64_t n) {
    if constexpr (std::is_same_v<T, float>) return load_partial<F>(p, n);
    else return decode_words<T, F>(load_words_partial<bits_of<F>>(&p->bits, n));
}
template <class T> KEEL_FN float load_decoded_scalar(T const* p) {
    if constexpr (std::is_same_v<T, float>) return *p;
    else return decode_words<T, float>(static_cast<uint32_t>(p->bits));
}

/// The two elements from p on of W pairs, as words; `left` elements exist, the others count as zero.
template <class U> KEEL_FN U load_pairs(bf16 const* p, int64_t left) {
    constexpr int64_t elements = 2 * U::width;
    U words;
    if (left >= elements) {
        __builtin_memcpy(&words.v, p, sizeof words.v);
    } else {
        bf16 some[std::size_t{elements}] = {};
        for (int64_t i = 0; i < left; ++i) some[i] = p[i];
        __builtin_memcpy(&words.v, &some[0], sizeof words.v);
    }
    return words;
}

/// Where a strip is one register or less, a full store may spill into the next slot, which is written later.
template <class A> struct slot_writer {
    float* strip;
    int64_t R, end; ///< end: floats in the strip

    KEEL_FN void operator()(int64_t slot, int64_t line, pack<A> const& v) const {
        int64_t const at = slot * R + line;
        if (line + A::width <= R || (R < A::width && at + A::width <= end)) store(strip + at, v);
        else store_partial(strip + at, v, R - line);
    }
};

/// Adjacent lines: slots are copied.
template <class A, class T, bool Paired> KEEL_FN void pack_across(operand_block const& from, int64_t R, float* strip) {
    using F = pack<A>;
    constexpr int w = A::width;
    int64_t const depth = Paired ? round_up(from.depth, 2) : from.depth;
    slot_writer<A> const write{strip, R, R * depth};
    for (int64_t slot = 0; slot < depth; ++slot) {
        int64_t const k = Paired ? slot ^ 1 : slot;
        T const* const p = static_cast<T const*>(from.data) + k * from.depth_stride;
        for (int64_t line = 0; line < R; line += w) {
            int64_t const left = k < from.depth ? from.lines - line : 0;
            F const v = left >= w ? load_decoded<F>(p + line) : left > 0 ? load_decoded_partial<F>(p + line, left) : F(0.0f);
            write(slot, line, v);
        }
    }
}

/// Adjacent k, one format: W x W blocks are transposed in registers.
template <class A, class T> KEEL_FN void pack_along(operand_block const& from, int64_t R, float* strip) {
    using F = pack<A>;
    using U = bits_of<F>;
    constexpr int w = A::width;
    slot_writer<A> const write{strip, R, R * from.depth};
    for (int64_t k = 0; k < from.depth; k += w)
        for (int64_t line = 0; line < R; line += w) {
            int64_t const left = from.depth - k;
            U block[std::size_t{w}];
            for (int64_t i = 0; i < w; ++i) {
                T const* const p = static_cast<T const*>(from.data) + (line + i) * from.line_stride + k;
                if (line + i >= from.lines) block[i] = U(0u);
                else if (left >= w) block[i] = bits(load_decoded<F>(p));
                else block[i] = bits(load_decoded_partial<F>(p, left));
            }
            transpose(block);
            for (int64_t i = 0; i < w && i < left; ++i) write(k + i, line, as_float(block[i]));
        }
}

/// Adjacent k, bf16 in pairs: one word is a pair, so a transposed block gives twice W slots.
template <class A> KEEL_FN void pack_pairs(operand_block const& from, int64_t R, float* strip) {
    using F = pack<A>;
    using U = bits_of<F>;
    constexpr int w = A::width;
    slot_writer<A> const write{strip, R, R * round_up(from.depth, 2)};
    for (int64_t k = 0; k < from.depth; k += 2 * w)
        for (int64_t line = 0; line < R; line += w) {
            int64_t const left = from.depth - k;
            U block[std::size_t{w}];
            for (int64_t i = 0; i < w; ++i) {
                bf16 const* const p = static_cast<bf16 const*>(from.data) + (line + i) * from.line_stride + k;
                if (line + i >= from.lines) block[i] = U(0u);
                else block[i] = load_pairs<U>(p, left);
            }
            transpose(block);
            for (int64_t i = 0; i < w && 2 * i < left; ++i) {
                write(k + 2 * i, line, as_float(block[i] & U(0xffff0000u)));
                write(k + 2 * i + 1, line, as_float(shl<16>(block[i])));
            }
        }
}

/// Any strides.
template <class A, class T, bool Paired> KEEL_FN void pack_strided(operand_block const& from, int64_t R, float* strip) {
    int64_t const depth = Paired ? round_up(from.depth, 2) : from.depth;
    for (int64_t slot = 0; slot < depth; ++slot) {
        int64_t const k = Paired ? slot ^ 1 : slot;
        T const* const p = static_cast<T const*>(from.data) + k * from.depth_stride;
        for (int64_t line = 0; line < R; ++line)
            strip[slot * R + line] =
                line < from.lines && k < from.depth ? load_decoded_scalar(p + line * from.line_stride) : 0.0f;
    }
}

template <class A, class T, bool Paired> KEEL_FLATTEN void pack_strip(operand_block const& from, int64_t R, float* strip) {
    if (from.depth_stride == 1) {
        if constexpr (Paired) pack_pairs<A>(from, R, strip);
        else pack_along<A, T>(from, R, strip);
    } else if (from.line_stride == 1) {
        pack_across<A, T, Paired>(from, R, strip);
    } else {
        pack_strided<A, T, Paired>(from, R, strip);
    }
}

} // namespace keel::inline KEEL_ABI::detail
