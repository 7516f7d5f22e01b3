// How fast the run goes, and when it will end.
#pragma once

#include <cstdint>

namespace tiny_lm {

/// A running mean of the seconds a step takes, over about the last twenty.
class pace {
public:
    void add(double seconds) {
        constexpr double keep = 0.95;
        mean_ = keep * mean_ + (1 - keep) * seconds;
        weight_ = keep * weight_ + (1 - keep); // the share of real steps in the mean, which starts from zero
    }
    double seconds_a_step() const { return mean_ / weight_; }
    double seconds_left(std::int64_t steps) const { return static_cast<double>(steps) * seconds_a_step(); }

private:
    double mean_ = 0, weight_ = 0;
};

} // namespace tiny_lm
