// AdamW on fp32 master weights, with the low-precision copy written in the same pass. Kernels: adamw_rows.hpp.
//
// For everything that is not a hidden matrix: embeddings, the output head, gains (as delta, so that decay pulls the gain to
// 1), biases, gates. A tensor is a run of `count` elements, whatever its shape.
//
//     adamw_step(be, gradient, {.master = w, .shadow = bf16_copy}, {.m = m, .v = v, .applied = &count}, gate, {.weight_decay = 0.1f}).or_throw();
//     adamw_step(be, gradient, stochastic_weights<>{w}, {.m = m, .v = v, .applied = &count}, gate, {.key = {.seed = 1, .tensor = 7}}).or_throw();
#pragma once

#include <keel/backend/concepts.hpp>
#include <keel/core/validate.hpp>
#include <keel/core/workspace.hpp>
#include <keel/format/bf16.hpp>
#include <keel/format/float32.hpp>
#include <keel/guard/step_gate.hpp>
#include <keel/optim/adamw_rows.hpp>

namespace keel {

/// Caller-owned, zero at first (codes of zero and scales of any finite value). Save and restore all three (saved_state.hpp). M and V
/// say what the moments are kept in: float, bf16, f16 or row_blocks<e4m3> and the like (state_rows.hpp), then of one row.
template <class M = float, class V = M> struct adamw_state_of {
    state_view<M, 1> m = {};
    state_view<V, 1> v = {};
    int64_t* applied = nullptr; ///< steps applied so far, in the backend's memory; one count a tensor
};
using adamw_state = adamw_state_of<>;

} // namespace keel

namespace keel::inline KEEL_ABI {

KEEL_HOST int64_t adamw_chunks(int64_t count) { return count <= 0 ? 0 : (count + adamw_chunk - 1) / adamw_chunk; }

/// Bytes for adamw_step where its step_change is wanted; without it no workspace is needed.
KEEL_HOST int64_t adamw_step_workspace(int64_t count) { return workspace_total(workspace_bytes<step_change_part>(adamw_chunks(count))); }

/// That the weights are `count` elements in memory of their own, apart from the gradient and the state.
template <class Shadow, class... Others>
KEEL_HOST void check_weights(validation& check, adamw_weights<Shadow> const& w, int64_t count, Others const&... others) {
    check.shape("weights.master", w.master, count).unit_stride("weights.master", w.master);
    check_apart(check, "weights.master", w.master, others...);
    if (w.shadow.absent()) return;
    check.shape("weights.shadow", w.shadow, count).unit_stride("weights.shadow", w.shadow);
    check_apart(check, "weights.shadow", w.shadow, w.master, others...);
}
template <class Weight, class... Others>
KEEL_HOST void check_weights(validation& check, stochastic_weights<Weight> const& w, int64_t count, Others const&... others) {
    static_assert(sizeof(Weight) == 2, "keel: weights without a master have 16 bits");
    check.shape("weights.weight", w.weight, count).unit_stride("weights.weight", w.weight);
    check_apart(check, "weights.weight", w.weight, others...);
}
template <class Weight, class... Others>
KEEL_HOST void check_weights(validation& check, kahan_weights<Weight> const& w, int64_t count, Others const&... others) {
    static_assert(sizeof(Weight) == 2, "keel: compensation is for weights of 16 bits; fp32 weights are masters");
    check.shape("weights.weight", w.weight, count).unit_stride("weights.weight", w.weight);
    check.shape("weights.compensation", w.compensation, count).unit_stride("weights.compensation", w.compensation);
    check_apart(check, "weights.weight", w.weight, others...);
    check_apart(check, "weights.compensation", w.compensation, w.weight, others...);
}
template <class Shadow> KEEL_HOST int64_t count_of(adamw_weights<Shadow> const& w) { return w.master.extent[0]; }
template <class Weights> KEEL_HOST int64_t count_of(Weights const& w) { return w.weight.extent[0]; }

/// One AdamW step of one tensor, unless the gate is closed.
///
/// Formula        g = gradient * gate.clip; m = fma(beta1, m, (1 - beta1) g); v = fma(beta2, v, ((1 - beta2) g) g);
///                d = m / fma(sqrt(v), 1 / sqrt(1 - beta2^t), epsilon); w = fma(-lr / (1 - beta1^t), d, fma(-lr * decay, w, w)), without the
///                decay where it is cautious and d and w have opposite signs.
///                All fp32; the factors are rounded once from double. t counts applied steps: a skipped one does not age the bias
///                correction.
/// Weights        adamw_weights: an fp32 master, with or without a copy. stochastic_weights: 16 bits, rounded by chance. kahan_weights: 16
///                bits, fma(-step, d, -lr * decay * w) added with compensation as kahan_update does.
/// Shapes         gradient, every view of weights, state.m, state.v [count], adjacent elements; of state in blocks codes [1, count] and
///                scales [1, blocks].
/// Formats        gradient float or bf16 (any format that loads), not written; shadow any of bf16, f16, float: one rounding.
///                State float, bf16, f16, or 8-bit codes scaled by blocks of 128 or any other power of two that is at least 16 and at most 8192.
///                The step takes the new moments as they are in fp32, before they are rounded for storage.
/// Error          a step: m 4 * 2^-24 of its terms, v 5 * 2^-24 of itself, w 2 * 2^-24 of itself and 10 * 2^-24 of the update, which
///                takes m's relative error besides (m may cancel). Where v is subnormal it is coarse: see least_adamw_epsilon.
///                State and weights in fewer bits besides at most one code's distance each, its mean 0 (state_rows.hpp); but a v above 0 in
///                blocks never falls to 0: it is then the smallest code.
/// Random numbers element i of the call draws the block options.first_element + i of options.key, with the count of applied steps added to
///                key.step: the same for any threads, backend and shards that start at multiples of a block. A key of its own for each tensor.
/// Status         bad_shape, bad_stride, bad_pointer, overlap, small_workspace, bad_option (learning_rate, weight_decay, a beta outside
///                [0, 1), epsilon below least_adamw_epsilon); on host backends bad_state (a negative count in state.applied).
/// Skipped        gate.apply == 0: every byte of weights, shadow, compensation, state and scales stays as it was; change is 0.
/// Non-finite     none reaches this far through make_gate. With open_gate() a NaN or Inf gradient stays in its element (of codes without
///                Inf it is NaN; its block's scale is that of the finite elements). Finite
///                gradients beyond 2^63 count as 2^63: their squares would make v infinite for ever.
/// Aliasing       none between outputs, nor with the gradient. Zero sizes: the step counts in state.applied.
/// Workspace      adamw_step_workspace(count) where `change` is wanted. `change` counts what was stored, with compensation what was added.
/// Cost           reads gradient, m, v, w; writes m, v, w [and shadow]: 28 [30] bytes an element with fp32 gradients. Rounding by chance is
///                bound by arithmetic, a Philox block an element; state in blocks reads the gradient and itself three times, twice from cache.
/// Source         Loshchilov & Hutter 2019, algorithm 2, with torch's decay by the learning rate. Deviation: m and v are not
///                rescaled, the bias corrections sit in the factors. Cautious decay as in dion and modded-nanogpt; 8-bit states after
///                Dettmers et al. 2022 (2110.02861), with FP8 codes rounded by chance in place of a table.
template <row_backend B, class Gradient, class Weights, class M = float, class V = M>
status adamw_step(B const& be, view<Gradient, 1> gradient, Weights weights, adamw_state_of<M, V> state, step_gate const& gate,
                  adamw_options options = {}, step_change* change = nullptr, workspace ws = {}) {
    int64_t const count = count_of(weights), chunks = adamw_chunks(count);
    validation check("adamw_step");
    check_weights(check, weights, count, gradient, state.m, state.v);
    check.shape("gradient", gradient, count).unit_stride("gradient", gradient);
    check_state_run(check, "state.m", "state.m.scales", state.m, count);
    check_state_run(check, "state.v", "state.v.scales", state.v, count);
    check.require(state.applied != nullptr, status_code::bad_pointer, "state.applied", "data, not null");
    check.require(is_rate(options.learning_rate), status_code::bad_option, "options.learning_rate", "a number in [0, 2^40]");
    check.require(is_rate(options.weight_decay), status_code::bad_option, "options.weight_decay", "a number in [0, 2^40]");
    check.require(options.beta1 >= 0.0f && options.beta1 < 1.0f, status_code::bad_option, "options.beta1", "a number in [0, 1)");
    check.require(options.beta2 >= 0.0f && options.beta2 < 1.0f, status_code::bad_option, "options.beta2", "a number in [0, 1)");
    check.require(options.epsilon >= least_adamw_epsilon && options.epsilon <= 0x1.fffffep127f, status_code::bad_option, "options.epsilon",
                  "a finite number of at least 2^-63 = 1.1e-19: v vanishes before a smaller one counts");
    if constexpr (backend_traits<B>::space == memory_space::host)
        check.require(!check.ok() || *state.applied >= 0, status_code::bad_state, "state.applied", "value",
                      check.ok() ? *state.applied : 0, "0 or more");
    check_apart(check, "state.m", state.m, gradient);
    check_apart(check, "state.v", state.v, gradient, state.m);
    if (change != nullptr) check.enough(ws, adamw_step_workspace(count));
    if (!check.ok()) return check.result;

    auto* const parts = change == nullptr ? nullptr : ws.take<step_change_part>(chunks);
    be.for_rows(chunks, adamw_chunk,
                adamw_row<std::remove_const_t<Gradient>, Weights, M, V>{gradient.data, weights, state.m, state.v, count, state.applied, &gate,
                                                                        options, parts});
    be.for_rows(1, 1, count_applied_row{&gate, state.applied});
    if (change != nullptr) be.for_rows(1, chunks, step_change_row{parts, chunks, &gate, change});
    return check.result;
}
/// The usual one: fp32 master and state, named without their types.
template <class Shadow = bf16, row_backend B, class Gradient>
status adamw_step(B const& be, view<Gradient, 1> gradient, adamw_weights<Shadow> weights, adamw_state state, step_gate const& gate,
                  adamw_options options = {}, step_change* change = nullptr, workspace ws = {}) {
    return adamw_step<B, Gradient, adamw_weights<Shadow>, float, float>(be, gradient, weights, state, gate, options, change, ws);
}

} // namespace keel::inline KEEL_ABI
