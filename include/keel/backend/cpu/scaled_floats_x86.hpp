// decode_scaled (scaled_codes.hpp) to float on AVX2 and AVX-512: the same bits by way of halves, which the hardware widens, subnormal
// ones and all environments included.
//
// A code shifted to the top of a half is that half times a power of two, which goes into the scale.
#pragma once

#include <keel/backend/cpu/scaled_codes_x86.hpp>

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#if defined(__GNUC__) && !defined(__clang__) // GCC bug 105593, as in pack_avx512.hpp
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace keel::inline KEEL_ABI {

/// Codes whose numbers are those of a half but for a power of two, and whose NaN is the half's or one code alone: e5m2, e4m3.
template <class Code>
concept half_code = signed_byte_code<Code> && ((format_traits<Code>::exponent_bits == 5 && format_traits<Code>::special_values == specials::ieee) ||
                                               (format_traits<Code>::exponent_bits == 4 && format_traits<Code>::special_values == specials::fn));

namespace detail {

template <class M, class Code> struct half_codes {
    using traits = format_traits<Code>;
    static constexpr int codes_at_once = M::elements;
    static constexpr int up = 10 - traits::mantissa_bits, exponent = 15 - traits::bias; ///< a code's number is the half's times 2^exponent
    typename M::f factor;

    /// Whether scale 2^exponent is a normal number above 0.
    KEEL_FN static bool holds(float scale) {
        constexpr uint32_t first = static_cast<uint32_t>(exponent < 0 ? 1 - exponent : 0) << 23;
        constexpr uint32_t end = static_cast<uint32_t>(exponent > 0 ? 255 - exponent : 255) << 23;
        return bits(scale) - first < end - first;
    }
    KEEL_FN explicit half_codes(typename M::f scale) : factor(M::mul(scale, M::as_f(M::set32(bits(power_of_two(exponent)))))) {}

    template <class Put> KEEL_FN void operator()(Code const* from, float* to, Put const& put) const {
        constexpr uint32_t magnitude = traits::magnitude_code << up;
        auto half = M::land(M::template shl16<up>(M::load_signed_bytes(from)), M::set16(0x8000u | magnitude));
        if constexpr (traits::special_values == specials::fn) half = M::nan_where_all(half, M::set16(magnitude));
        typename M::f low, high;
        M::widen_halves(half, low, high);
        put(to, scaled(low));
        put(to + M::elements / 2, scaled(high));
    }

private:
    KEEL_FN typename M::i scaled(typename M::f v) const {
        auto const product = M::mul(v, factor);
        return M::if_nan(product, M::as_i(product), M::set32(nan_bits));
    }
};

} // namespace detail

template <half_code Code, word_arch A, class Block>
    requires(Block::size >= detail::word_machine<A>::elements)
KEEL_FN void decode_scaled(cpu_row_group<A> const& g, Block const& b, Code const* from, float* to, pack<A> const& scale) {
    using M = detail::word_machine<A>;
    using halves = detail::half_codes<M, Code>;
    int64_t const count = halves::holds(M::first(scale.v)) ? b.count / halves::codes_at_once * halves::codes_at_once : 0;
    if (count > 0) detail::decode_run<M>(halves(scale.v), g.streams, from + b.i, to + b.i, count);
    if (count < b.count) decode_scaled<cpu_row_group<A>, Block, Code const*, float*>(g, rest_of(b, count), from, to, scale);
}

} // namespace keel::inline KEEL_ABI

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#endif
