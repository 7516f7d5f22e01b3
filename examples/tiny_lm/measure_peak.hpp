// The fused multiply-adds this machine can do: the yardstick of "share of peak".
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <stop_token>
#include <thread>
#include <vector>

#include <keel/backend/cpu/pack.hpp>

namespace tiny_lm {

/// Runs rounds of multiply-adds on one core, from registers; returns the flops done. A dozen independent chains hide an
/// fma's latency on two ports and still fit sixteen registers.
inline double spin_multiply_adds(std::int64_t rounds) {
    using pack = keel::pack<keel::native_arch>;
    constexpr int chains = 12;
    pack const a(0.999f), b(0.001f); // x = a x + b stays near 1
    pack x[chains];
    for (int c = 0; c < chains; ++c) x[c] = pack(static_cast<float>(c));
    for (std::int64_t i = 0; i < rounds; ++i)
#pragma GCC unroll 12
        for (int c = 0; c < chains; ++c) x[c] = fma(x[c], a, b);
    asm volatile("" : : "m"(x)); // the results count as used
    return static_cast<double>(rounds) * chains * pack::width * 2;
}

/// Peak fp32 flop/s of so many threads together, measured in a quarter of a second: all spin, and of fifty slices of
/// time the one in which most was done counts, since other programs only ever take from it. More threads than cores
/// have no higher peak, and would only keep this one from its clock.
inline double measure_peak(std::int64_t threads) {
    using clock = std::chrono::steady_clock;
    std::atomic<double> flops{0};
    std::vector<std::jthread> spinning;
    auto const cores = std::max<std::int64_t>(1, std::thread::hardware_concurrency());
    for (std::int64_t t = 0; t < std::min(threads, cores); ++t)
        spinning.emplace_back([&](std::stop_token const& stop) {
            while (!stop.stop_requested()) flops += spin_multiply_adds(5'000); // some 10 us, short against a slice
        });
    double best = 0;
    for (int slice = 0; slice < 50; ++slice) {
        double const before = flops;
        auto const start = clock::now();
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
        double const done = flops - before;
        best = std::max(best, done / std::chrono::duration<double>(clock::now() - start).count());
    }
    return best;
}

} // namespace tiny_lm
