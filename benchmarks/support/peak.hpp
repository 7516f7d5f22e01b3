// The peaks of one core, measured where it is needed: the clock of a shared machine moves.
#pragma once

#include <ctime>

#include <benchmark/benchmark.h>

#include <keel/backend/cpu/pack.hpp>
#include <keel/backend/cpu/pair_dot.hpp>

namespace keel_bench {

/// Seconds of processor time of this thread.
inline double thread_seconds() {
    std::timespec t{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

/// Flops a second of independent chains of `flops` a step in registers, best of five runs of a few milliseconds.
template <class Step> KEEL_FLATTEN double peak_of(double flops, Step const& step) {
    using F = keel::pack<keel::native_arch>;
    constexpr int chains = 12; // latency 4, two a cycle: 8 suffice
    constexpr long rounds = 400000;
    double best = 0;
    float seed = 1.0f;
    benchmark::DoNotOptimize(seed);
    for (int run = 0; run < 5; ++run) {
        F acc[std::size_t{chains}];
        keel::detail::repeat<chains>([&](auto c) { acc[c] = F(seed * static_cast<float>(c)); });
        F const factor(seed * 0.999f), summand(seed * 0.001f);
        double const start = thread_seconds();
        for (long i = 0; i < rounds; ++i)
            keel::detail::repeat<chains>([&](auto c) { acc[c] = step(acc[c], factor, summand); });
        double const seconds = thread_seconds() - start;
        keel::detail::repeat<chains>([&](auto c) { benchmark::DoNotOptimize(tree_sum(acc[c])); });
        double const total = flops * chains * F::width * static_cast<double>(rounds);
        if (total / seconds > best) best = total / seconds;
    }
    return best;
}
inline double fma_peak() {
    return peak_of(2.0, [](auto const& acc, auto const& factor, auto const& summand) { return fma(acc, factor, summand); });
}
/// Of the dot of bf16 pairs into fp32 sums; the fma peak where no instruction does that.
template <class A = keel::native_arch> double dot_peak() {
    using F = keel::pack<A>;
    if constexpr (requires(F x) { keel::detail::pair_dot_step<A>::add(x, x, x); })
        return peak_of(4.0, [](F const& acc, F const& left, F const& right) { return keel::detail::pair_dot_step<A>::add(left, right, acc); });
    else return fma_peak();
}

} // namespace keel_bench
