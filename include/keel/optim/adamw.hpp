// AdamW on fp32 master weights, with the low-precision copy written in the same pass. Kernels: adamw_rows.hpp.
//
// For everything that is not a hidden matrix: embeddings, the output head, gains (as delta, so that decay pulls the gain to
// 1), biases, gates. A tensor is a run of `count` elements, whatever its shape.
#pragma once

#include <keel/backend/concepts.hpp>
#include <keel/core/validate.hpp>
#include <keel/core/workspace.hpp>
#include <keel/format/bf16.hpp>
#include <keel/format/float32.hpp>
#include <keel/guard/step_gate.hpp>
#include <keel/optim/adamw_rows.hpp>

namespace keel {

/// The weights that an optimiser moves.
template <class Shadow = bf16> struct adamw_weights {
    view<float, 1> master = {};  ///< updated in place
    view<Shadow, 1> shadow = {}; ///< optional: receives each new weight, rounded once
};

/// Caller-owned, zero at first. Save and restore all three.
struct adamw_state {
    view<float, 1> m = {}, v = {};
    int64_t* applied = nullptr; ///< steps applied so far, in the backend's memory; one count a tensor
};

} // namespace keel

namespace keel::inline KEEL_ABI {

KEEL_HOST int64_t adamw_chunks(int64_t count) { return count <= 0 ? 0 : (count + adamw_chunk - 1) / adamw_chunk; }

/// Bytes for adamw_step where its step_change is wanted; without it no workspace is needed.
KEEL_HOST int64_t adamw_step_workspace(int64_t count) { return workspace_total(workspace_bytes<step_change_part>(adamw_chunks(count))); }

/// One AdamW step of one tensor, unless the gate is closed.
///
/// Formula        g = gradient * gate.clip; m = fma(beta1, m, (1 - beta1) g); v = fma(beta2, v, ((1 - beta2) g) g);
///                d = m / fma(sqrt(v), 1 / sqrt(1 - beta2^t), epsilon); w = fma(-lr / (1 - beta1^t), d, fma(-lr * decay, w, w)).
///                All fp32; the factors are rounded once from double. t counts applied steps: a skipped one does not age the bias
///                correction.
/// Shapes         gradient, weights.master, weights.shadow (or absent), state.m, state.v [count], adjacent elements.
/// Formats        gradient float or bf16 (any format that loads), not written; shadow any of bf16, f16, float: one rounding.
/// Error          a step: m 4 * 2^-24 of its terms, v 5 * 2^-24 of itself, w 2 * 2^-24 of itself and 10 * 2^-24 of the update, which
///                takes m's relative error besides (m may cancel). Where v is subnormal it is coarse: see least_adamw_epsilon.
/// Status         bad_shape, bad_stride, bad_pointer, overlap, small_workspace, bad_option (learning_rate, weight_decay, a beta outside
///                [0, 1), epsilon below least_adamw_epsilon); on host backends bad_state (a negative count in state.applied).
/// Skipped        gate.apply == 0: every byte of weights, shadow and state stays as it was; change is 0.
/// Non-finite     none reaches this far through make_gate. With open_gate() a NaN or Inf gradient stays in its element. Finite
///                gradients beyond 2^63 count as 2^63: their squares would make v infinite for ever.
/// Aliasing       none between outputs, nor with the gradient. Zero sizes: the step counts in state.applied.
/// Workspace      adamw_step_workspace(count) where `change` is wanted.
/// Cost           reads gradient, m, v, w; writes m, v, w [and shadow]: 28 [30] bytes an element with fp32 gradients.
/// Source         Loshchilov & Hutter 2019, algorithm 2, with torch's decay by the learning rate. Deviation: m and v are not
///                rescaled, the bias corrections sit in the factors.
template <class Shadow = bf16, row_backend B, class Gradient>
status adamw_step(B const& be, view<Gradient, 1> gradient, adamw_weights<Shadow> weights, adamw_state state, step_gate const& gate,
                  adamw_options options = {}, step_change* change = nullptr, workspace ws = {}) {
    int64_t const count = weights.master.extent[0], chunks = adamw_chunks(count);
    auto const in_range = [](float x) { return x >= 0.0f && x <= 0x1.fffffep127f; };
    validation check("adamw_step");
    check.present("weights.master", weights.master).unit_stride("weights.master", weights.master);
    check.shape("gradient", gradient, count).unit_stride("gradient", gradient);
    check.shape("state.m", state.m, count).unit_stride("state.m", state.m);
    check.shape("state.v", state.v, count).unit_stride("state.v", state.v);
    if (!weights.shadow.absent()) check.shape("weights.shadow", weights.shadow, count).unit_stride("weights.shadow", weights.shadow);
    check.require(state.applied != nullptr, status_code::bad_pointer, "state.applied", "data, not null");
    check.require(in_range(options.learning_rate), status_code::bad_option, "options.learning_rate", "a finite number of 0 or more");
    check.require(in_range(options.weight_decay), status_code::bad_option, "options.weight_decay", "a finite number of 0 or more");
    check.require(options.beta1 >= 0.0f && options.beta1 < 1.0f, status_code::bad_option, "options.beta1", "a number in [0, 1)");
    check.require(options.beta2 >= 0.0f && options.beta2 < 1.0f, status_code::bad_option, "options.beta2", "a number in [0, 1)");
    check.require(in_range(options.epsilon) && options.epsilon >= least_adamw_epsilon, status_code::bad_option, "options.epsilon",
                  "a finite number of at least 2^-63 = 1.1e-19: v vanishes before a smaller one counts");
    if constexpr (backend_traits<B>::space == memory_space::host)
        check.require(!check.ok() || *state.applied >= 0, status_code::bad_state, "state.applied", "value",
                      check.ok() ? *state.applied : 0, "0 or more");
    check.disjoint("gradient", weights.master, gradient).disjoint("gradient", state.m, gradient).disjoint("gradient", state.v, gradient);
    check.disjoint("state.m", state.m, weights.master).disjoint("state.v", state.v, weights.master).disjoint("state.v", state.v, state.m);
    check.disjoint("weights.shadow", weights.shadow, weights.master, gradient, state.m, state.v);
    if (change != nullptr) check.enough(ws, adamw_step_workspace(count));
    if (!check.ok()) return check.result;

    auto* const parts = change == nullptr ? nullptr : ws.take<step_change_part>(chunks);
    be.for_rows(chunks, adamw_chunk,
                adamw_row<std::remove_const_t<Gradient>, Shadow>{gradient.data, weights.master.data, state.m.data, state.v.data,
                                                                 weights.shadow.data, count, state.applied, &gate, options, parts});
    be.for_rows(1, 1, count_applied_row{&gate, state.applied});
    if (change != nullptr) be.for_rows(1, chunks, step_change_row{parts, chunks, &gate, change});
    return check.result;
}

} // namespace keel::inline KEEL_ABI
