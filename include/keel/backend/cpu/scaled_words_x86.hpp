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

/// What all tables of words are made of.
template <class Code> struct word_entries {
    using traits = format_traits<Code>;
    static constexpr int up = 7 - traits::mantissa_bits; ///< from a code's fields to bf16's
    static constexpr uint32_t binade = 1u << traits::mantissa_bits;

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
    static constexpr entries unscaled = values();
    /// Of the entries from p on, in the low words of 32-bit lanes.
    template <class M> KEEL_FN static typename M::i words(float const* p, typename M::f scale) {
        return M::template shr32<16>(rounded_up_half<M>(M::mul(M::load(p), scale)));
    }
};

/// The words of one block's codes, `codes_at_once` of them: on AVX-512, which looks words up.
template <class M, class Code> struct word_lookup : word_entries<Code> {
    using typename word_entries<Code>::traits;
    using word_entries<Code>::up, word_entries<Code>::binade, word_entries<Code>::unscaled;
    using i = typename M::i;
    static constexpr int codes_at_once = M::elements;
    i table;

    KEEL_FN explicit word_lookup(typename M::f scale)
        : table(M::make_table(word_entries<Code>::template words<M>(&unscaled.of[0], scale), binade << up)) {}

    template <class Put> KEEL_FN void operator()(Code const* from, bf16* to, Put const& put) const {
        i const codes = M::load_bytes(from), magnitude = M::land(codes, M::set16(0x7f));
        i const base = M::max16(M::land(codes, M::set16(0x7f & ~(binade - 1))), M::set16(binade));
        i const word = M::add16(M::look_up(table, M::sub16(magnitude, base)), M::template shl16<up>(base));
        i const sign = M::template shl16<8>(codes);
        i signed_word = M::choose(M::set16(0x8000), sign, word);
        if constexpr (traits::has_infinity)
            signed_word = M::if_above(magnitude, traits::max_code, signed_word, M::choose(M::set16(0x8000), sign, M::set16(0x7f80)));
        put(to, M::if_above(magnitude, traits::max_code + traits::has_infinity, signed_word, M::set16(0x7fff)));
    }
};

/// On AVX2, which looks bytes up: one table has the exponents, the other the mantissas, and two bytes meet last.
template <class Code> struct word_lookup<word_machine<arch::avx2>, Code> : word_entries<Code> {
    using typename word_entries<Code>::traits;
    using word_entries<Code>::binade, word_entries<Code>::unscaled;
    using M = word_machine<arch::avx2>;
    using i = M::i;
    static constexpr int codes_at_once = 2 * M::elements;
    i exponents, mantissas; ///< less the lowest binade's; a bit above their place

    KEEL_FN explicit word_lookup(M::f scale) {
        auto const words = [&](int k) { return word_entries<Code>::template words<M>(&unscaled.of[k], scale); };
        i const all = M::words_in_order(words(0), words(8));
        exponents = M::sub8(M::bytes_twice(M::shr16<7>(all)), M::set8(1));
        mantissas = M::bytes_twice(M::land(M::add16(all, all), M::set16(0xfe)));
    }
    template <class Put> KEEL_FN void operator()(Code const* from, bf16* to, Put const& put) const {
        i const codes = M::load_for_unpacking(from), magnitude = M::land(codes, M::set8(0x7f));
        i const base = M::max8(M::land(codes, M::set8(0x7f & ~(binade - 1))), M::set8(binade));
        i const at = M::land(M::sub8(magnitude, base), M::set8(15));
        i exponent = M::add8(M::look_up(exponents, at), M::shr16<traits::mantissa_bits>(base)), mantissa = M::look_up(mantissas, at);
        i const is_nan = M::above8(magnitude, M::set8(traits::max_code + traits::has_infinity));
        if constexpr (traits::has_infinity) {
            i const is_large = M::above8(magnitude, M::set8(traits::max_code));
            exponent = M::lor(exponent, is_large);
            mantissa = M::unless(is_large, mantissa);
        }
        exponent = M::lor(exponent, is_nan), mantissa = M::lor(mantissa, is_nan);
        i const sign = M::unless(is_nan, M::land(codes, M::set8(0x80)));
        put(to, M::lor(M::shr16<1>(M::low_pairs(mantissa, exponent)), M::low_pairs(M::zero(), sign)));
        put(to + M::elements, M::lor(M::shr16<1>(M::high_pairs(mantissa, exponent)), M::high_pairs(M::zero(), sign)));
    }
};

} // namespace detail

template <signed_byte_code Code, word_arch A, class Block>
    requires(Block::size >= 2 * detail::word_machine<A>::elements && format_traits<Code>::mantissa_bits <= 3)
KEEL_FN void decode_scaled(cpu_row_group<A> const& g, Block const& b, Code const* from, bf16* to, pack<A> const& scale) {
    using M = detail::word_machine<A>;
    using lookup = detail::word_lookup<M, Code>;
    int64_t const count = lookup::holds(M::first(scale.v)) ? b.count / lookup::codes_at_once * lookup::codes_at_once : 0;
    if (count > 0) detail::decode_run<M>(lookup(scale.v), g.streams, from + b.i, to + b.i, count);
    if (count < b.count) decode_scaled<cpu_row_group<A>, Block, Code const*, bf16*>(g, rest_of(b, count), from, to, scale);
}

} // namespace keel::inline KEEL_ABI

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#endif
