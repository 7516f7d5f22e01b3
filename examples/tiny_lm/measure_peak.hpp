// The fused multiply-adds this machine can do: the yardstick of "share of peak".
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <stop_token>
#include <thread>
#include <vector>

namespace tiny_lm {

#if defined(__AVX512F__)
inline constexpr int vector_bytes = 64;
#elif defined(__AVX__)
inline constexpr int vector_bytes = 32;
#else
inline constexpr int vector_bytes = 16;
#endif

/// Runs `rounds` of multiply-adds on one core from registers: enough independent chains to hide an fma's latency on
/// two ports, few enough to fit the registers. Returns the flops done. a*b + c is one fma where the target has it.
inline double spin_multiply_adds(std::int64_t rounds) {
    typedef float vector __attribute__((vector_size(vector_bytes)));
    constexpr int chains = 12;
    vector const a = vector{} + 0.999f, b = vector{} + 0.001f; // x = a x + b stays near 1
    vector x[chains];
    for (int c = 0; c < chains; ++c) x[c] = vector{} + static_cast<float>(c);
    for (std::int64_t i = 0; i < rounds; ++i)
#pragma GCC unroll 12
        for (int c = 0; c < chains; ++c) x[c] = x[c] * a + b;
    vector sum{};
    for (int c = 0; c < chains; ++c) sum += x[c];
    asm volatile("" : : "m"(sum)); // the result counts as used
    return static_cast<double>(rounds) * chains * (vector_bytes / sizeof(float)) * 2;
}

/// Peak fp32 flop/s of so many threads together, measured in a quarter of a second: all spin, and of fifty slices of
/// time the one in which most was done counts, since other programs only ever take from it.
inline double measure_peak(std::int64_t threads) {
    using clock = std::chrono::steady_clock;
    std::atomic<double> flops{0};
    std::vector<std::jthread> spinning;
    for (std::int64_t t = 0; t < threads; ++t)
        spinning.emplace_back([&](std::stop_token const& stop) {
            while (!stop.stop_requested()) flops += spin_multiply_adds(20'000); // under 0.1 ms, short against a slice
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
