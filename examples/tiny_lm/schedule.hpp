// The rates over a run.
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>

namespace tiny_lm {

/// Factor on the learning rates at a step, counted from 0: a linear rise over the warmup, then half a cosine down to a twentieth.
inline double learning_rate_factor(std::int64_t step, std::int64_t warmup, std::int64_t steps) {
    constexpr double least = 0.05;
    if (step < warmup) return static_cast<double>(step + 1) / static_cast<double>(warmup);
    if (steps <= warmup) return 1;
    double const done = static_cast<double>(step - warmup) / static_cast<double>(steps - warmup);
    return least + (1 - least) * 0.5 * (1 + std::cos(std::numbers::pi * done));
}

/// Factor on the balancing bias's rate: it falls evenly, by a constant ratio a step, to a twentieth. While the router learns fast the
/// bias must keep up with it; later a step of that size is larger than what parts the experts' scores, and demand would swing.
inline double balance_rate_factor(std::int64_t step, std::int64_t steps) {
    constexpr double least = 0.05;
    return std::pow(least, static_cast<double>(step) / static_cast<double>(steps));
}

} // namespace tiny_lm
