// pack<Arch>: one SIMD register of floats, with the operations of core/lanes.hpp and those on memory.
//
// Most of it is xsimd; what xsimd lacks or rounds differently comes from intrinsics, one machine<Arch> per instruction
// set (pack_x86.hpp, pack_avx512.hpp, pack_neon.hpp). Every operation gives the same bits on every machine, NaN payloads aside.
#pragma once

#include <keel/backend/cpu/arch.hpp>
#include <keel/backend/cpu/pack_scalar.hpp>
#if defined(__x86_64__)
#include <keel/backend/cpu/pack_avx512.hpp>
#elif defined(__aarch64__)
#include <keel/backend/cpu/pack_neon.hpp>
#endif
#include <keel/core/lanes.hpp>

namespace keel::inline KEEL_ABI {

#define KEEL_PACK_2(type, name, expression)                                                                            \
    KEEL_FN friend type name(type const& a, type const& b) { return type::of(expression); }

/// Truth values of the lanes.
template <class A> struct mask_pack {
    using machine = detail::machine<A>;
    using register_type = typename machine::m;
    static constexpr int width = A::width;
    register_type v;

    mask_pack() = default;
    KEEL_FN mask_pack(bool x) : v(machine::set_mask(x)) {}
    KEEL_FN static mask_pack of(register_type const& v) {
        mask_pack r;
        r.v = v;
        return r;
    }
    KEEL_PACK_2(mask_pack, operator&, machine::and_mask(a.v, b.v))
    KEEL_PACK_2(mask_pack, operator|, machine::or_mask(a.v, b.v))
    KEEL_FN friend bool any(mask_pack const& a) { return machine::any(a.v); } ///< true in some lane
};

/// 32-bit words of the lanes, unsigned unless the operation says otherwise.
template <class A> struct bits_pack {
    using machine = detail::machine<A>;
    using register_type = typename machine::u;
    using arch = A;
    static constexpr int width = A::width;
    register_type v;

    bits_pack() = default;
    KEEL_FN bits_pack(uint32_t x) : v(machine::set(x)) {}
    KEEL_FN static bits_pack of(register_type const& v) {
        bits_pack r;
        r.v = v;
        return r;
    }
    KEEL_PACK_2(bits_pack, operator+, a.v + b.v)
    KEEL_PACK_2(bits_pack, operator-, a.v - b.v)
    KEEL_PACK_2(bits_pack, operator&, a.v& b.v)
    KEEL_PACK_2(bits_pack, operator|, a.v | b.v)
    KEEL_PACK_2(bits_pack, operator^, a.v ^ b.v)
    KEEL_PACK_2(bits_pack, umin, machine::umin(a.v, b.v))
    KEEL_PACK_2(bits_pack, umax, machine::umax(a.v, b.v))
    KEEL_PACK_2(bits_pack, smax, machine::smax(a.v, b.v))
    KEEL_PACK_2(bits_pack, shr_by, machine::shr_by(a.v, b.v))
    KEEL_FN friend mask_pack<A> gt(bits_pack const& a, bits_pack const& b) {
        return mask_pack<A>::of(machine::gt(a.v, b.v));
    }
    KEEL_FN friend mask_pack<A> eq(bits_pack const& a, bits_pack const& b) {
        return mask_pack<A>::of(machine::eq(a.v, b.v));
    }
    KEEL_FN friend bits_pack select(mask_pack<A> const& m, bits_pack const& a, bits_pack const& b) {
        return of(machine::select(m.v, a.v, b.v));
    }
};

/// A::width floats.
template <class A> struct pack {
    using machine = detail::machine<A>;
    using register_type = typename machine::f;
    using arch = A;
    static constexpr int width = A::width;
    register_type v;

    pack() = default;
    KEEL_FN pack(float x) : v(machine::set(x)) {}
    KEEL_FN static pack of(register_type const& v) {
        pack r;
        r.v = v;
        return r;
    }
    KEEL_PACK_2(pack, operator+, a.v + b.v)
    KEEL_PACK_2(pack, operator-, a.v - b.v)
    KEEL_PACK_2(pack, operator*, a.v* b.v)
    KEEL_PACK_2(pack, operator/, machine::div(a.v, b.v))
    KEEL_PACK_2(pack, add, a.v + b.v)
    KEEL_PACK_2(pack, div, machine::div(a.v, b.v))
    KEEL_FN friend pack fma(pack const& a, pack const& b, pack const& c) { return of(machine::fma(a.v, b.v, c.v)); }
    KEEL_FN friend pack mul(pack const& a, pack const& b) {
        if constexpr (compiler_fuses) return fma(a, b, pack(-0.0f));
        else return of(a.v * b.v);
    }
    KEEL_FN friend pack sqrt(pack const& a) { return of(machine::sqrt(a.v)); }
    KEEL_FN friend bits_pack<A> bits(pack const& a) { return bits_pack<A>::of(machine::bits(a.v)); }
    KEEL_FN friend pack select(mask_pack<A> const& m, pack const& a, pack const& b) {
        return of(machine::select(m.v, a.v, b.v));
    }
};
#undef KEEL_PACK_2

template <class A> KEEL_FN pack<A> as_float(bits_pack<A> const& a) {
    return pack<A>::of(detail::machine<A>::as_float(a.v));
}
template <int K, class A> KEEL_FN bits_pack<A> shl(bits_pack<A> const& a) {
    return bits_pack<A>::of(detail::machine<A>::template shl<K>(a.v));
}
template <int K, class A> KEEL_FN bits_pack<A> shr(bits_pack<A> const& a) {
    return bits_pack<A>::of(detail::machine<A>::template shr<K>(a.v));
}

template <class A> struct lane_traits<pack<A>> {
    using bits = bits_pack<A>;
    using mask = mask_pack<A>;
    static constexpr int width = A::width;
};
template <class A> struct scalar_of_<bits_pack<A>> { using type = uint32_t; };
template <class A> struct scalar_of_<mask_pack<A>> { using type = bool; };

// --- memory: p needs no alignment; the partial forms touch n elements, 0 <= n <= width, and fill with +0 ---------------

template <class F> KEEL_FN F load(float const* p) { return F::of(F::machine::load(p)); }
template <class F> KEEL_FN F load_partial(float const* p, int64_t n) {
    return F::of(F::machine::load_partial(p, static_cast<int>(n)));
}
/// Unsigned words, zero-extended from W = uint32_t, uint16_t or uint8_t.
template <class U, class W> KEEL_FN U load_words(W const* p) { return U::of(U::machine::load_words(p)); }
template <class U, class W> KEEL_FN U load_words_partial(W const* p, int64_t n) {
    return U::of(U::machine::load_words_partial(p, static_cast<int>(n)));
}
/// 4 * width bytes as they stand, e.g. two 16-bit elements a word; p need not be aligned for words.
template <class U> KEEL_FN U load_bytes(void const* p) { return U::of(U::machine::load_bytes(p)); }
template <class A> KEEL_FN void store(float* p, pack<A> const& x) { detail::machine<A>::store(p, x.v); }
template <class A> KEEL_FN void store_partial(float* p, pack<A> const& x, int64_t n) {
    detail::machine<A>::store_partial(p, x.v, static_cast<int>(n));
}
/// The low bits of every lane, as W = uint32_t, uint16_t or uint8_t.
template <class W, class A> KEEL_FN void store_words(W* p, bits_pack<A> const& x) {
    detail::machine<A>::store_words(p, x.v);
}
template <class W, class A> KEEL_FN void store_words_partial(W* p, bits_pack<A> const& x, int64_t n) {
    detail::machine<A>::store_words_partial(p, x.v, static_cast<int>(n));
}

// --- across lanes ------------------------------------------------------------------------------------------------------

/// The sum by a halving tree, high bit first: lane i meets lane i + width/2, then i + width/4, ...
template <class A> KEEL_FN float tree_sum(pack<A> const& x) { return detail::machine<A>::tree_sum(x.v); }
/// The largest unsigned word.
template <class A> KEEL_FN uint32_t max_word(bits_pack<A> const& x) { return detail::machine<A>::max_word(x.v); }
/// The sum of the words, modulo 2^32.
template <class A> KEEL_FN uint32_t sum_words(bits_pack<A> const& x) { return detail::machine<A>::sum_words(x.v); }
/// 0, 1, 2, ...
template <class U> KEEL_FN U iota() {
    alignas(64) static constexpr uint32_t index[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return load_words<U>(&index[0]);
}
/// Lane j of row i changes places with lane i of row j.
template <class A> KEEL_FN void transpose(bits_pack<A> (&rows)[A::width]) { detail::machine<A>::transpose(rows); }

} // namespace keel::inline KEEL_ABI
