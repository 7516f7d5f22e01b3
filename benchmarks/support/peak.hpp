// The fma peak of one core, measured where it is needed: the clock of a shared machine moves.
#pragma once

#include <ctime>

#include <benchmark/benchmark.h>

#include <keel/backend/cpu/pack.hpp>

namespace keel_bench {

/// Seconds of processor time of this thread.
inline double thread_seconds() {
    std::timespec t{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

/// Flops a second of independent fp32 fma chains in registers, best of five runs of a few milliseconds.
inline double fma_peak() {
    using F = keel::pack<keel::native_arch>;
    constexpr int chains = 12; // latency 4, two a cycle: 8 suffice
    constexpr long rounds = 400000;
    double best = 0;
    float seed = 1.0f;
    benchmark::DoNotOptimize(seed);
    for (int run = 0; run < 5; ++run) {
        F acc[chains];
        for (int c = 0; c < chains; ++c) acc[c] = F(seed * static_cast<float>(c));
        F const factor(seed * 0.999f), step(seed * 0.001f);
        double const start = thread_seconds();
        for (long i = 0; i < rounds; ++i)
            for (int c = 0; c < chains; ++c) acc[c] = fma(acc[c], factor, step);
        double const seconds = thread_seconds() - start;
        for (int c = 0; c < chains; ++c) benchmark::DoNotOptimize(tree_sum(acc[c]));
        double const flops = 2.0 * chains * F::width * static_cast<double>(rounds);
        if (flops / seconds > best) best = flops / seconds;
    }
    return best;
}

} // namespace keel_bench
