// scaled_codes.hpp for rows of bf16 and float and FP8 codes on AVX2 and AVX-512: the same bits in less than half the instructions.
//
// A bf16 element is the upper half of its float. Of each 32-bit lane of a register of loaded elements, the upper half is one element as it
// stands and the lower half another after a shift, so two operations widen them, and a shift and a blend put their codes
// back in order. Signs, maxima and counts are taken a register or two at a time. The code itself is encode_bounded's (minifloat.hpp).
#pragma once

#include <keel/backend/cpu/row_group.hpp>
#include <keel/backend/cpu/word_machine.hpp>
#include <keel/backend/scaled_codes.hpp>
#include <keel/format/fp8.hpp>

#if defined(__AVX2__) && defined(__FMA__)

#if defined(__GNUC__) && !defined(__clang__) // GCC bug 105593, as in pack_avx512.hpp
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace keel::inline KEEL_ABI {

template <class A>
concept word_arch = detail::word_machine<A>::exists;
/// Codes of eight bits whose zero has a sign, so that the sign can be set on its own; subnormals that fit a table of 16.
template <class Code>
concept signed_byte_code = sizeof(Code) == 1 && format_traits<Code>::has_negative_zero && format_traits<Code>::sign_code == 0x80u &&
                           format_traits<Code>::mantissa_bits <= 4;

template <class X>
concept word_source = std::is_same_v<X, bf16> || std::is_same_v<X, float>;

namespace detail {

/// Magnitudes of bf16 as two registers of floats: elements 0, 2, 4, ... and 1, 3, 5, ...
template <class M> KEEL_FN void widen(typename M::i magnitudes, typename M::f& even, typename M::f& odd) {
    even = M::as_f(M::template shl32<16>(magnitudes));
    odd = M::as_f(M::land(magnitudes, M::set32(0xffff0000u)));
}

/// encode_bounded of magnitudes in the low byte of every lane, but for a constant that byte_offset takes off.
template <class M, class Code> struct byte_codes {
    using i = typename M::i;
    using f = typename M::f;
    using traits = format_traits<Code>;
    static constexpr int cut = 23 - traits::mantissa_bits;
    static constexpr uint32_t lowest = static_cast<uint32_t>(128 - traits::bias);
    static constexpr uint32_t byte_offset = ((lowest + static_cast<uint32_t>(cut)) << traits::mantissa_bits) & 0x7fu;

    KEEL_FN static i of(f v) { // v has two uses, so its product is not contracted into the sum
        i const exponent = M::land(M::as_i(v), M::set32(0x7f800000u));
        i const binade = M::max32(exponent, M::set32(lowest << 23));
        i const anchor = M::add32(binade, M::set32(static_cast<uint32_t>(cut) << 23));
        i const sum = M::as_i(M::add(v, M::as_f(anchor)));
        return M::add32(sum, M::template shr32<cut>(anchor));
    }
    /// The codes, in the low bytes of words, of a register of bf16 by the multipliers of elements 0, 2, ... and 1, 3, ...
    KEEL_FN static i of_words(i elements, f even_multiplier, f odd_multiplier) {
        f even, odd;
        widen<M>(M::land(elements, M::set16(0x7fff)), even, odd);
        i const low = of(M::mul(even, even_multiplier)), high = of(M::mul(odd, odd_multiplier));
        i const aligned = M::sub16(M::words_of(low, M::template shl32<16>(high)), M::set16(byte_offset));
        return M::choose(M::set16(0x7f), aligned, M::template shr16<8>(elements));
    }
};

/// 2 M::elements of them, by four registers of multipliers, to codes; how many others than zero became zero.
template <class M, class Code> KEEL_FN int64_t encode_some(bf16 const* from, Code* to, typename M::f const (&multiplier)[4]) {
    using codes = byte_codes<M, Code>;
    auto const first = M::load(from), second = M::load(from + M::elements);
    auto const bytes = M::bytes_of(codes::of_words(first, multiplier[0], multiplier[1]), codes::of_words(second, multiplier[2], multiplier[3]));
    prefetch_write(to);
    M::store_bytes(to, bytes);
    return M::flushed(bytes, first, second);
}
/// The same from floats, four registers.
template <class M, class Code> KEEL_FN int64_t encode_some(float const* from, Code* to, typename M::f const (&multiplier)[4]) {
    using codes = byte_codes<M, Code>;
    constexpr int64_t width = M::elements / 2;
    typename M::i element[4], code[4];
    for (int r = 0; r < 4; ++r) {
        prefetch_read(from + r * width);
        element[r] = M::load_words(from + r * width);
        auto const scaled = M::mul(M::as_f(M::land(element[r], M::set32(magnitude_mask))), multiplier[r]);
        auto const aligned = M::sub32(codes::of(scaled), M::set32(codes::byte_offset));
        code[r] = M::choose(M::set32(0x7f), aligned, M::template shr32<24>(element[r])); // one byte: the sign above the magnitude
    }
    auto const bytes = M::bytes_of(code);
    prefetch_write(to);
    M::store_bytes(to, bytes);
    return M::flushed(bytes, element);
}
/// Adds to lane 0.
template <class M, class U> KEEL_FN void add_count(U& words, int64_t count) { words = words + U::of(typename U::register_type(M::lone(count))); }

/// To bf16 in the upper half of each word, nearest even; NaN becomes the one NaN.
template <class M> KEEL_FN typename M::i rounded_up_half(typename M::f v) {
    auto const u = M::as_i(v);
    auto const odd = M::land(M::template shr32<16>(u), M::set32(1));
    return M::if_nan(v, M::add32(u, M::add32(odd, M::set32(0x7fff))), M::set32(0x7fff0000u));
}

} // namespace detail

/// What a block has after its first `done` elements.
template <class Block> KEEL_FN Block rest_of(Block const& b, int64_t done) { return {b.i + done, b.count - done, b.index}; }

template <word_arch A, class Block>
    requires(Block::size >= 2 * detail::word_machine<A>::elements)
KEEL_FN bits_pack<A> largest_magnitude(cpu_row_group<A> const& g, Block const& b, bf16 const* p) {
    using M = detail::word_machine<A>;
    using U = bits_pack<A>;
    auto top = M::zero();
    int64_t const count = b.count / M::elements * M::elements;
    if (Block::size <= 256)
        for (int64_t k = 0; k < count; k += M::elements) prefetch_read(p + b.i + k);
    for (int64_t k = 0; k < count; k += M::elements) {
        if (Block::size > 256) prefetch_read(p + b.i + k);
        top = M::max16(top, M::land(M::load(p + b.i + k), M::set16(0x7fff)));
    }
    typename M::f even, odd;
    detail::widen<M>(top, even, odd);
    using word = typename U::register_type;
    U const largest = umax(U::of(word(M::as_i(even))), U::of(word(M::as_i(odd))));
    if (count == b.count) return largest;
    return umax(largest, largest_magnitude<cpu_row_group<A>, Block, bf16 const*>(g, rest_of(b, count), p));
}

template <signed_byte_code Code, word_source X, word_arch A, class Block>
    requires(Block::size >= 2 * detail::word_machine<A>::elements)
KEEL_FN void encode_scaled(cpu_row_group<A> const& g, Block const& b, X const* from, Code* to, pack<A> const& multiplier,
                           bits_pack<A>& flushed) {
    using M = detail::word_machine<A>;
    typename M::f const same[4] = {multiplier.v, multiplier.v, multiplier.v, multiplier.v};
    int64_t lost = 0;
    constexpr int64_t step = 2 * M::elements;
    int64_t const count = b.count / step * step;
    for (int64_t k = 0; k < count; k += step) lost += detail::encode_some<M, Code>(from + b.i + k, to + b.i + k, same);
    detail::add_count<M>(flushed, lost);
    if (count < b.count)
        encode_scaled<Code, cpu_row_group<A>, Block, X const*, Code*>(g, rest_of(b, count), from, to, multiplier, flushed);
}

// Columns: two whole registers of them at a time; what is left goes the general way.

template <word_arch A>
KEEL_FN void raise_largest(cpu_row_group<A> const& g, bf16 const* p, int64_t pitch, int64_t rows, int64_t n, float* top) {
    using M = detail::word_machine<A>;
    int64_t const count = n / M::elements * M::elements;
    for (int64_t j = 0; j < count; j += M::elements) {
        auto largest = M::zero();
        for (int64_t row = 0; row < rows; ++row) {
            prefetch_read(p + row * pitch + j);
            largest = M::max16(largest, M::land(M::load(p + row * pitch + j), M::set16(0x7fff)));
        }
        M::raise(top + j, largest);
    }
    if (count < n) raise_largest<cpu_row_group<A>, bf16>(g, p + count, pitch, rows, n - count, top + count);
}

/// Of each register's elements: the multipliers of 0, 2, ..., then those of 1, 3, ...
template <class X, signed_byte_code Code, word_arch A>
    requires std::is_same_v<X, bf16>
KEEL_FN void arrange_multipliers(cpu_row_group<A> const&, float* multipliers, int64_t n) {
    using M = detail::word_machine<A>;
    constexpr int64_t half = M::elements / 2, step = 2 * M::elements;
    for (int64_t j = 0; j < n / step * step; j += M::elements) {
        typename M::f even, odd;
        M::split(M::load(multipliers + j), M::load(multipliers + j + half), even, odd);
        M::store(multipliers + j, even);
        M::store(multipliers + j + half, odd);
    }
}

template <word_arch A, word_source X, signed_byte_code Code>
KEEL_FN void encode_columns(cpu_row_group<A> const& g, X const* from, Code* to, int64_t n, float const* multipliers,
                            bits_pack<A>& flushed) {
    using M = detail::word_machine<A>;
    constexpr int64_t half = M::elements / 2, step = 2 * M::elements;
    int64_t lost = 0;
    int64_t const count = n / step * step;
    for (int64_t j = 0; j < count; j += step) {
        typename M::f const own[4] = {M::load(multipliers + j), M::load(multipliers + j + half), M::load(multipliers + j + 2 * half),
                                      M::load(multipliers + j + 3 * half)};
        lost += detail::encode_some<M, Code>(from + j, to + j, own);
    }
    detail::add_count<M>(flushed, lost);
    if (count < n)
        encode_columns<cpu_row_group<A>, X, Code>(g, from + count, to + count, n - count, multipliers + count, flushed);
}

template <signed_byte_code Code, word_arch A, class Block>
    requires(Block::size >= 2 * detail::word_machine<A>::elements)
KEEL_FN void decode_scaled(cpu_row_group<A> const& g, Block const& b, Code const* from, bf16* to, pack<A> const& scale) {
    using M = detail::word_machine<A>;
    int64_t const count = b.count / M::elements * M::elements;
    for (int64_t k = 0; k < count; k += M::elements) {
        prefetch_read(from + b.i + k);
        prefetch_write(to + b.i + k);
        typename M::f even, odd;
        detail::widen<M>(M::template decoded<Code>(M::load_bytes(from + b.i + k)), even, odd);
        auto const low = detail::rounded_up_half<M>(M::mul(even, scale.v)), high = detail::rounded_up_half<M>(M::mul(odd, scale.v));
        M::store(to + b.i + k, M::words_of(M::template shr32<16>(low), high));
    }
    if (count < b.count) decode_scaled<cpu_row_group<A>, Block, Code const*, bf16*>(g, rest_of(b, count), from, to, scale);
}

} // namespace keel::inline KEEL_ABI

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#endif
