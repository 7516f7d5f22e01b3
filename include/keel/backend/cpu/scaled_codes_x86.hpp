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

/// bf16 as two registers of floats: elements 0, 2, 4, ... and 1, 3, 5, ...
template <class M> KEEL_FN void widen(typename M::i elements, typename M::f& even, typename M::f& odd) {
    even = M::as_f(M::template shl32<16>(elements));
    odd = M::as_f(M::land(elements, M::set32(0xffff0000u)));
}

/// encode_bounded in the seven low bits of every lane; those above are anything. Where the machine has no maximum that keeps a sign, of
/// magnitudes only.
///
/// v is rounded where the sum with a large power of two rounds it: 2^cut of v's binade, or of the smallest normal code's, whose lowest bits
/// then are v's mantissa. The factor's own lowest bits and the binade's exponent add up to the code.
template <class M, class Code> struct byte_codes {
    using i = typename M::i;
    using f = typename M::f;
    using traits = format_traits<Code>;
    static constexpr int cut = 23 - traits::mantissa_bits;
    static constexpr uint32_t lowest = static_cast<uint32_t>(128 - traits::bias);
    static constexpr uint32_t offset = (128u - (lowest << traits::mantissa_bits) % 128u) % 128u; // even, so that ties stay even
    static constexpr uint32_t anchor = static_cast<uint32_t>(127 + cut) << 23 | offset;

    struct parts {
        i binade, sum;
    };
    KEEL_FN static parts of(f v) {
        i binade;
        if constexpr (M::has_signed_max)
            binade = M::as_i(M::signed_max(M::as_f(M::land(M::as_i(v), M::set32(0xff800000u))), M::as_f(M::set32(lowest << 23))));
        else
            binade = M::max32(M::land(M::as_i(v), M::set32(0x7f800000u)), M::set32(lowest << 23));
        return {binade, M::as_i(M::fma(M::as_f(binade), M::as_f(M::set32(anchor)), v))};
    }
    KEEL_FN static i low(parts p) { return M::add32(p.sum, M::template shr32<cut>(p.binade)); }
    /// What of x goes into of(): all of it, or its magnitude.
    template <uint32_t Magnitude> KEEL_FN static i encoded_part(i x) { return M::has_signed_max ? x : M::land(x, M::set32(Magnitude)); }

    /// The codes, in the low bytes of words, of a register of bf16 by the multipliers of elements 0, 2, ... and 1, 3, ...
    KEEL_FN static i of_words(i elements, f even_multiplier, f odd_multiplier) {
        f even, odd;
        widen<M>(encoded_part<0x7fff7fffu>(elements), even, odd);
        parts const high = of(M::mul(odd, odd_multiplier));
        i const words = M::add_upper(low(of(M::mul(even, even_multiplier))), M::template shl32<16>(high.sum), M::template shr32<cut - 16>(high.binade));
        return M::choose(M::set16(0x7f), words, M::template shr16<8>(elements));
    }
    /// The same of a register of floats, in the low bytes of 32-bit lanes.
    KEEL_FN static i of_floats(i elements, f multiplier) {
        i const code = low(of(M::mul(M::as_f(encoded_part<magnitude_mask>(elements)), multiplier)));
        return M::choose(M::set32(0x7f), code, M::template shr32<24>(elements)); // one byte: the sign above the magnitude
    }
};

/// Whether p lies on a boundary of registers.
template <class M, class T> KEEL_FN bool holds_registers(T const* p) {
    return reinterpret_cast<uintptr_t>(p) % sizeof(typename M::i) == 0;
}

template <class M, bool Streams, class Code> KEEL_FN void put_bytes(Code* to, typename M::i bytes) {
    if constexpr (Streams) {
        M::stream(to, bytes);
    } else {
        prefetch_write(to);
        M::store_bytes(to, bytes);
    }
}

/// 2 M::elements of them, by four registers of multipliers, to codes; how many others than zero became zero.
template <class M, bool Streams = false, class Code> KEEL_FN int64_t encode_some(bf16 const* from, Code* to, typename M::f const (&multiplier)[4]) {
    using codes = byte_codes<M, Code>;
    auto const first = M::load(from), second = M::load(from + M::elements);
    auto const bytes = M::bytes_of(codes::of_words(first, multiplier[0], multiplier[1]), codes::of_words(second, multiplier[2], multiplier[3]));
    put_bytes<M, Streams>(to, bytes);
    return M::flushed(bytes, first, second);
}
/// The same from floats, four registers.
template <class M, bool Streams = false, class Code> KEEL_FN int64_t encode_some(float const* from, Code* to, typename M::f const (&multiplier)[4]) {
    using codes = byte_codes<M, Code>;
    constexpr int64_t width = M::elements / 2;
    typename M::i element[4], code[4];
    for (int r = 0; r < 4; ++r) {
        prefetch_read(from + r * width);
        element[r] = M::load_words(from + r * width);
        code[r] = codes::of_floats(element[r], multiplier[r]);
    }
    auto const bytes = M::bytes_of(code);
    put_bytes<M, Streams>(to, bytes);
    return M::flushed(bytes, element);
}
/// n numbers, whole turns of the decoder, from their codes.
template <class M, class Decoder, class Code, class Y> KEEL_FN void decode_run(Decoder const& decoder, bool streams, Code const* from, Y* to, int64_t n) {
    auto const walk = [&](auto const& put) {
        for (int64_t k = 0; k < n; k += Decoder::codes_at_once) {
            prefetch_read(from + k);
            decoder(from + k, to + k, put);
        }
    };
    if (streams && holds_registers<M>(to))
        walk([](Y* p, typename M::i v) { M::stream(p, v); });
    else
        walk([](Y* p, typename M::i v) {
            prefetch_write(p);
            M::store_bytes(p, v);
        });
}
/// Adds to lane 0.
template <class M, class U> KEEL_FN void add_count(U& words, int64_t count) { words = words + U::of(typename U::register_type(M::lone(count))); }

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
    for (int64_t k = 0; k < count; k += step) lost += detail::encode_some<M, false, Code>(from + b.i + k, to + b.i + k, same);
    detail::add_count<M>(flushed, lost);
    if (count < b.count)
        encode_scaled<Code, cpu_row_group<A>, Block, X const*, Code*>(g, rest_of(b, count), from, to, multiplier, flushed);
}

/// Blocks of C elements that fill registers of A's words, and fit into two of them or are filled by pairs.
template <int C, class A>
concept word_blocks = C % detail::word_machine<A>::elements == 0 &&
                      (C % (2 * detail::word_machine<A>::elements) == 0 || C == detail::word_machine<A>::elements);

template <int C, word_arch A, word_source X, signed_byte_code Code>
    requires word_blocks<C, A>
KEEL_FN void encode_blocks(cpu_row_group<A> const& g, X const* from, Code* to, int64_t n, float const* multipliers, bits_pack<A>& flushed) {
    using M = detail::word_machine<A>;
    constexpr int64_t step = 2 * M::elements, whole_blocks = C > step ? C : step;
    int64_t const count = n / whole_blocks * whole_blocks;
    int64_t lost = 0;
    auto const each = [&](auto streams) {
        for (int64_t k = 0; k < count; k += step) {
            auto const one = pack<A>(multipliers[k / C]).v, other = pack<A>(multipliers[(k + M::elements) / C]).v;
            typename M::f const own[4] = {one, one, other, other};
            lost += detail::encode_some<M, streams(), Code>(from + k, to + k, own);
        }
    };
    if (g.streams && detail::holds_registers<M>(to)) each(std::true_type{});
    else each(std::false_type{});
    detail::add_count<M>(flushed, lost);
    if (count < n) encode_blocks<C, cpu_row_group<A>, X, Code>(g, from + count, to + count, n - count, multipliers + count / C, flushed);
}

namespace detail {

/// The largest |x| of C elements in whole registers, as a float.
template <class M, int C> KEEL_FN float largest_of(bf16 const* p) {
    auto top = M::zero();
    repeat<C / M::elements>([&](auto r) { top = M::max16(top, M::land(M::load(p + r * M::elements), M::set16(0x7fff))); });
    return as_float(M::largest16(top) << 16);
}
template <class M, int C> KEEL_FN float largest_of(float const* p) {
    constexpr int width = M::elements / 2;
    auto top = M::zero();
    repeat<C / width>([&](auto r) { top = M::max32(top, M::land(M::load_words(p + r * width), M::set32(magnitude_mask))); });
    return as_float(M::largest32(top));
}

} // namespace detail

template <int C, word_arch A, word_source X, signed_byte_code Code>
    requires(word_blocks<C, A> && C <= 1024)
KEEL_FN void encode_tile_and_look(cpu_row_group<A> const& g, tile<X const> const& x, tile<Code> const& to, float const* multipliers,
                                  bits_pack<A>& flushed, tile<X const> const& next, X const* after, float* next_top) {
    using M = detail::word_machine<A>;
    constexpr int64_t step = 2 * M::elements, together = C > step ? C : step;
    if (x.rows != next.rows || x.columns != next.columns || x.columns % together != 0) {
        encode_tile<C>(g, x, to, multipliers, flushed);
        return largest_of_tile<C>(g, next, next_top);
    }
    int64_t const blocks = x.columns / C;
    int64_t lost = 0;
    auto const walk = [&](auto streams) {
        for (int64_t k = 0; k < x.columns; k += together)
            for (int64_t row = 0; row < x.rows; ++row) {
                X const* const from = x.p + row * x.pitch + k;
                X const* const look = next.p + row * next.pitch + k;
                for (int64_t line = 0; line < together * static_cast<int64_t>(sizeof(X)); line += 64)
                    __builtin_prefetch(address(after, row * next.pitch + k, line));
                for (int64_t i = 0; i < together; i += C) next_top[row * blocks + (k + i) / C] = detail::largest_of<M, C>(look + i);
                for (int64_t i = 0; i < together; i += step) {
                    float const* const m = multipliers + row * blocks;
                    auto const one = pack<A>(m[(k + i) / C]).v, other = pack<A>(m[(k + i + M::elements) / C]).v;
                    typename M::f const own[4] = {one, one, other, other};
                    lost += detail::encode_some<M, streams(), Code>(from + i, to.p + row * to.pitch + k + i, own);
                }
            }
    };
    bool const rows_hold_registers = to.rows == 1 || to.pitch % static_cast<int64_t>(sizeof(typename M::i)) == 0;
    if (g.streams && detail::holds_registers<M>(to.p) && rows_hold_registers) walk(std::true_type{});
    else walk(std::false_type{});
    detail::add_count<M>(flushed, lost);
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
        lost += detail::encode_some<M, false, Code>(from + j, to + j, own);
    }
    detail::add_count<M>(flushed, lost);
    if (count < n)
        encode_columns<cpu_row_group<A>, X, Code>(g, from + count, to + count, n - count, multipliers + count, flushed);
}

template <int C, word_arch A>
    requires(word_blocks<C, A> && C <= 8 * detail::word_machine<A>::elements)
KEEL_FN void raise_both(cpu_row_group<A> const& g, bf16 const* p, int64_t pitch, int64_t rows, int64_t n, float* column_top, float* block_top,
                        int64_t blocks) {
    using M = detail::word_machine<A>;
    constexpr int registers = C / M::elements;
    int64_t const count = n / C * C;
    for (int64_t j = 0; j < count; j += C) {
        typename M::i column[std::size_t{registers}];
        detail::repeat<registers>([&](auto r) { column[r] = M::zero(); });
        for (int64_t row = 0; row < rows; ++row) {
            auto largest = M::zero();
            detail::repeat<registers>([&](auto r) {
                bf16 const* const from = p + row * pitch + j + r * M::elements;
                auto const v = M::land(M::load(from), M::set16(0x7fff));
                column[r] = M::max16(column[r], v);
                largest = M::max16(largest, v);
            });
            block_top[row * blocks + j / C] = as_float(M::largest16(largest) << 16);
        }
        detail::repeat<registers>([&](auto r) { M::raise(column_top + j + r * M::elements, column[r]); });
    }
    if (count < n) raise_both<C, cpu_row_group<A>, bf16>(g, p + count, pitch, rows, n - count, column_top + count, block_top + count / C, blocks);
}

template <int C, word_arch A, signed_byte_code Code>
    requires word_blocks<C, A>
KEEL_FN void encode_both(cpu_row_group<A> const& g, bf16 const* from, Code* along, Code* down, int64_t n, float const* block_multipliers,
                         float const* column_multipliers, bits_pack<A>& flushed, bf16 const* after) {
    using M = detail::word_machine<A>;
    using codes = detail::byte_codes<M, Code>;
    constexpr int64_t half = M::elements / 2, step = 2 * M::elements, whole_blocks = C > step ? C : step;
    int64_t const count = n / whole_blocks * whole_blocks;
    int64_t lost = 0;
    auto const walk = [&](auto streams) {
        for (int64_t k = 0; k < count; k += step) {
            for (int64_t line = 0; line < 2 * step; line += 64) __builtin_prefetch(address(after, k, line), 0, 2);
            auto const first = M::load(from + k), second = M::load(from + k + M::elements);
            auto const one = pack<A>(block_multipliers[k / C]).v, other = pack<A>(block_multipliers[(k + M::elements) / C]).v;
            float const* const m = column_multipliers + k;
            auto const by_block = M::bytes_of(codes::of_words(first, one, one), codes::of_words(second, other, other));
            auto const by_column = M::bytes_of(codes::of_words(first, M::load(m), M::load(m + half)),
                                               codes::of_words(second, M::load(m + 2 * half), M::load(m + 3 * half)));
            detail::put_bytes<M, streams()>(along + k, by_block);
            detail::put_bytes<M, streams()>(down + k, by_column);
            lost += M::flushed(by_block, first, second) + M::flushed(by_column, first, second);
        }
    };
    if (g.streams && detail::holds_registers<M>(along) && detail::holds_registers<M>(down)) walk(std::true_type{});
    else walk(std::false_type{});
    detail::add_count<M>(flushed, lost);
    if (count < n)
        encode_both<C, cpu_row_group<A>, bf16, Code>(g, from + count, along + count, down + count, n - count, block_multipliers + count / C,
                                                     column_multipliers + count, flushed, address(after, count));
}

} // namespace keel::inline KEEL_ABI

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#endif
