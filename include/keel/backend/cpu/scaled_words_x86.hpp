// decode_scaled (scaled_codes.hpp) to bf16 on AVX2 and AVX-512: the same bits from a table a block.
//
// Of a block's values the mantissas are few: those of the codes of one binade times the scale, rounded, and those of the codes below all
// binades. Sixteen words hold them, a code's lowest bits choose one and its exponent is added.
#pragma once

#include <keel/backend/cpu/scaled_codes_x86.hpp>

#if defined(__AVX2__) && defined(__FMA__)

#if defined(__GNUC__) && !defined(__clang__) // GCC bug 105593, as in pack_avx512.hpp
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace keel::inline KEEL_ABI {

namespace detail {

/// To bf16 in the upper half of each word, nearest even; NaN becomes the one NaN.
template <class M> KEEL_FN typename M::i rounded_up_half(typename M::f v) {
    auto const u = M::as_i(v);
    auto const odd = M::land(M::template shr32<16>(u), M::set32(1));
    return M::if_nan(v, M::add32(u, M::add32(odd, M::set32(0x7fff))), M::set32(0x7fff0000u));
}

/// The words of one block's codes.
template <class M, class Code> struct word_lookup {
    using i = typename M::i;
    using traits = format_traits<Code>;
    static constexpr int up = 7 - traits::mantissa_bits; ///< from a code's fields to bf16's
    static constexpr uint32_t binade = 1u << traits::mantissa_bits;
    typename M::word_table table;

    /// Whether all codes' values, but those without a leading one, have one in bf16 too when scaled, and none becomes Inf. As bits: NaN and
    /// what is negative are above all.
    KEEL_FN static bool holds(float scale) {
        constexpr int largest = static_cast<int>(traits::max_code >> traits::mantissa_bits) - traits::bias;
        constexpr uint32_t first = static_cast<uint32_t>(traits::bias) << 23, last = static_cast<uint32_t>(253 - largest) << 23;
        return bits(scale) - first <= last - first;
    }
    /// The entries' values before scaling: 0 ... binade - 1 are the mantissas of the lowest binade, those at the end the codes below.
    struct entries {
        alignas(64) float of[16];
    };
    static constexpr entries values() {
        entries e{};
        for (uint32_t m = 0; m < binade; ++m) {
            e.of[m] = decode(from_word<Code>(binade + m));
            e.of[16 - binade + m] = decode(from_word<Code>(m));
        }
        return e;
    }
    KEEL_FN explicit word_lookup(typename M::f scale) {
        static constexpr entries unscaled = values();
        table = M::make_table(&unscaled.of[0], [&](typename M::f v) { return M::template shr32<16>(rounded_up_half<M>(M::mul(v, scale))); },
                              binade << up);
    }
    /// Codes in the low bytes of words.
    KEEL_FN i operator()(i codes) const {
        i const magnitude = M::land(codes, M::set16(0x7f));
        i const base = M::max16(M::land(codes, M::set16(0x7f & ~(binade - 1))), M::set16(binade));
        i const word = M::add16(M::look_up(table, M::sub16(magnitude, base)), M::template shl16<up>(base));
        i const sign = M::template shl16<8>(codes);
        i signed_word = M::choose(M::set16(0x8000), sign, word);
        if constexpr (traits::has_infinity)
            signed_word = M::if_above(magnitude, traits::max_code, signed_word, M::choose(M::set16(0x8000), sign, M::set16(0x7f80)));
        return M::if_above(magnitude, traits::max_code + traits::has_infinity, signed_word, M::set16(0x7fff));
    }
};

} // namespace detail

template <signed_byte_code Code, word_arch A, class Block>
    requires(Block::size >= 2 * detail::word_machine<A>::elements && format_traits<Code>::mantissa_bits <= 3)
KEEL_FN void decode_scaled(cpu_row_group<A> const& g, Block const& b, Code const* from, bf16* to, pack<A> const& scale) {
    using M = detail::word_machine<A>;
    using lookup = detail::word_lookup<M, Code>;
    int64_t const count = lookup::holds(M::first(scale.v)) ? b.count / M::elements * M::elements : 0;
    if (count > 0) {
        lookup const words_of(scale.v);
        Code const* const codes = from + b.i;
        bf16* const words = to + b.i;
        if (g.streams && detail::holds_registers<M>(words))
            for (int64_t k = 0; k < count; k += M::elements) M::stream(words + k, words_of(M::load_bytes(codes + k)));
        else
            for (int64_t k = 0; k < count; k += M::elements) {
                prefetch_read(codes + k);
                prefetch_write(words + k);
                M::store(words + k, words_of(M::load_bytes(codes + k)));
            }
    }
    if (count < b.count) decode_scaled<cpu_row_group<A>, Block, Code const*, bf16*>(g, rest_of(b, count), from, to, scale);
}

} // namespace keel::inline KEEL_ABI

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#endif
