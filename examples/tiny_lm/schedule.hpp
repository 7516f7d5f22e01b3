// The learning rate over a run.
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

} // namespace tiny_lm
