// Data events, counted and never hidden: what a lossy step did to the numbers that passed through it.
#pragma once

#include <keel/config.hpp>
#include <keel/core/lanes.hpp>

namespace keel {

/// Counters that a call adds to, when it is given one. All sums are of integers, so the result does not depend on threads.
/// The caller zeroes it (a fresh report is zero) and may pass the same one to many calls.
struct report {
    int64_t elements = 0;   ///< elements that were looked at
    int64_t saturated = 0;  ///< finite elements beyond the rounding boundary of the format's largest value
    int64_t flushed = 0;    ///< non-zero finite elements that became zero
    int64_t non_finite = 0; ///< NaN and Inf elements
    uint32_t scale_min_bits = 0xffffffffu; ///< smallest scale as fp32 bits (scales are positive, so bits order them)
    uint32_t scale_max_bits = 0;           ///< largest finite scale as fp32 bits

    KEEL_FN float scale_min() const { return as_float(scale_min_bits == 0xffffffffu ? 0u : scale_min_bits); }
    KEEL_FN float scale_max() const { return as_float(scale_max_bits); }
};

} // namespace keel

namespace keel::inline KEEL_ABI {

/// Adds to a counter that several threads share. Integers only: the order cannot show.
KEEL_FN void add_shared(int64_t& counter, int64_t amount) {
    if (amount == 0) return;
#if defined(__CUDA_ARCH__)
    atomicAdd(reinterpret_cast<unsigned long long*>(&counter), static_cast<unsigned long long>(amount));
#else
    __atomic_fetch_add(&counter, amount, __ATOMIC_RELAXED);
#endif
}
KEEL_FN void min_shared(uint32_t& word, uint32_t value) {
#if defined(__CUDA_ARCH__)
    atomicMin(&word, value);
#else
    uint32_t seen = __atomic_load_n(&word, __ATOMIC_RELAXED);
    while (value < seen && !__atomic_compare_exchange_n(&word, &seen, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
#endif
}
KEEL_FN void max_shared(uint32_t& word, uint32_t value) {
#if defined(__CUDA_ARCH__)
    atomicMax(&word, value);
#else
    uint32_t seen = __atomic_load_n(&word, __ATOMIC_RELAXED);
    while (value > seen && !__atomic_compare_exchange_n(&word, &seen, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
#endif
}


/// Adds one report to another that several threads share.
KEEL_FN void add_shared(report& to, report const& from) {
    add_shared(to.elements, from.elements);
    add_shared(to.saturated, from.saturated);
    add_shared(to.flushed, from.flushed);
    add_shared(to.non_finite, from.non_finite);
    min_shared(to.scale_min_bits, from.scale_min_bits);
    max_shared(to.scale_max_bits, from.scale_max_bits);
}

} // namespace keel::inline KEEL_ABI
