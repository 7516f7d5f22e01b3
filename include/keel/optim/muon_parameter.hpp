// What muon_step is given: a parameter with its gradient and state, and the options of a step.
#pragma once

#include <keel/format/bf16.hpp>
#include <keel/format/float32.hpp>
#include <keel/optim/muon_plan.hpp>
#include <keel/optim/muon_rows.hpp>
#include <keel/optim/newton_schulz.hpp>

namespace keel {

struct muon_options {
    float learning_rate = 1e-3f; ///< of this step; 0 to 2^40. The plan's scale multiplies it
    float momentum = 0.95f;      ///< mu, in [0, 1)
    momentum_rule rule = momentum_rule::ema;
    bool nesterov = true;
    float weight_decay = 0.0f; ///< decoupled: w loses learning_rate * weight_decay of itself, unscaled; 0 to 2^40
    decay_rule decay = decay_rule::decoupled;
    float beta2 = 0.95f; ///< of NorMuon's second moment, in [0, 1), where a parameter has one
};

/// A parameter [stack, rows, columns] as its plan cuts it. A dense layer's weight is [1, out, in]: stacked(w).
///
/// Momentum       float, bf16, f16, or 8-bit codes in blocks along the columns: row_blocks<e4m3> of [stack * rows, columns] (state_rows.hpp).
/// Weight         float: a master, with or without a shadow. bf16, f16: the weight alone, rounded by chance, or with `compensation` as
///                kahan.hpp keeps it.
template <class T = float, class Gradient = float, class Shadow = bf16, class Momentum = float, class Weight = float> struct muon_parameter {
    muon_plan<T> plan;
    view<Gradient const, 3> gradient = {};
    view<Weight, 3> weight = {};            ///< updated in place
    state_view<Momentum, 3> momentum = {};  ///< state, zero at first
    view<Shadow, 3> shadow = {};            ///< optional, of fp32 weights: receives each new weight, rounded once
    step_change* change = nullptr;          ///< optional: how far this step moved the parameter
    view<float, 2> second_moment = {};      ///< optional, [stack, rows], state, zero at first: NorMuon's (normuon_rows.hpp)
    view<Weight, 3> compensation = {};      ///< optional, of 16-bit weights, state, zero at first
    int64_t* applied = nullptr;             ///< steps applied so far, state; needed where something is rounded by chance
    random_elements random = {};            ///< element [s, i, j] draws the block first + (s * rows + i) * pitch + j of key, whose step has
                                            ///< the applied steps added
    newton_schulz_measures measures = {};   ///< optional, [plan.matrices()] each, of the logical matrices in the plan's order
};

/// Whether anything of a parameter is rounded by chance.
template <class T, class Gradient, class Shadow, class Momentum, class Weight>
KEEL_HOST bool draws_numbers_of(muon_parameter<T, Gradient, Shadow, Momentum, Weight> const& p) {
    return draws_numbers<Momentum> || (draws_numbers<Weight> && p.compensation.absent());
}

/// A matrix as a stack of one.
template <class T> KEEL_HOST view<T, 3> stacked(view<T, 2> v) { return {v.data, {1, v.extent[0], v.extent[1]}, {0, v.stride[0], v.stride[1]}}; }

} // namespace keel
