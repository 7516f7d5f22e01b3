// How a row's elements pass between memory and fp32 lanes, whatever their format: what every group's load and store share.
#pragma once

#include <type_traits>

#include <keel/core/lanes.hpp>
#include <keel/format/format.hpp>

namespace keel::inline KEEL_ABI {

/// The storage word of a format's element: p->bits.
template <class T> KEEL_FN auto* storage_of(T* p) { return &p->bits; }

template <class T, overflow O, rounding R = rounding::nearest_even, class F> KEEL_FN bits_of<F> encode_with(F const& v) {
    return encode_words<T, O, R>(v);
}

/// Encodes fp32 lanes for a plain store. float, bf16 and f16 follow IEEE (nearest even, overflow to Inf) unless a policy is
/// named; FP8 must be given one, because every default would hide a decision.
template <class T, auto... Policy, class F> KEEL_FN bits_of<F> encode_stored(F const& v) {
    if constexpr (sizeof...(Policy) == 0) {
        static_assert(sizeof(T) > 1, "storing FP8 needs an overflow policy: g.store<overflow::saturate>(p, at, v)");
        return encode_words<T, overflow::to_nonfinite, rounding::nearest_even>(v);
    } else {
        return encode_with<T, Policy...>(v);
    }
}
/// One element to and from a float.
template <class T> KEEL_FN float load_element(T const* p) {
    if constexpr (std::is_same_v<T, float>) return *p;
    else return decode_words<T, float>(static_cast<uint32_t>(*storage_of(p)));
}
template <auto... Policy, class T> KEEL_FN void store_element(T* p, float v) {
    if constexpr (std::is_same_v<T, float>) *p = canonical(v);
    else *storage_of(p) = static_cast<std::remove_reference_t<decltype(*storage_of(p))>>(encode_stored<T, Policy...>(v));
}

} // namespace keel::inline KEEL_ABI
