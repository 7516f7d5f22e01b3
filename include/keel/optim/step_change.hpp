// How far a step moved the weights: the update/weight ratio of the health line, from the pass that updates them.
#pragma once

#include <keel/core/lanes.hpp>
#include <keel/guard/step_gate_rows.hpp>

namespace keel {

/// Sums over the elements of one call, in the backend's memory: what was really stored, decay included. Sums of several tensors
/// add up. A skipped step moves nothing: both are 0.
struct step_change {
    double update_squares = 0.0; ///< sum of (new weight - old weight)^2, fp32 values
    double weight_squares = 0.0; ///< sum of (new weight)^2

    KEEL_FN step_change& operator+=(step_change const& other) {
        update_squares += other.update_squares;
        weight_squares += other.weight_squares;
        return *this;
    }
    /// ||update|| / ||weight||; 0 for zero weights.
    KEEL_FN double ratio() const { return weight_squares > 0.0 ? __builtin_sqrt(update_squares / weight_squares) : 0.0; }
};

} // namespace keel

namespace keel::inline KEEL_ABI {

/// One chunk's or row's share, in fp32 and THE reduction order.
struct step_change_part {
    float update_squares, weight_squares;
};

/// The parts in order, in double.
struct step_change_row {
    step_change_part const* parts;
    int64_t part_count;
    step_gate const* gate;
    step_change* change;

    template <class G> KEEL_FN void operator()(G const& g, int64_t) const {
        if (!g.leader()) return;
        step_change sum;
        for (int64_t p = 0; p < (gate->apply != 0 ? part_count : 0); ++p) {
            sum.update_squares += static_cast<double>(parts[p].update_squares);
            sum.weight_squares += static_cast<double>(parts[p].weight_squares);
        }
        *change = sum;
    }
};

} // namespace keel::inline KEEL_ABI
