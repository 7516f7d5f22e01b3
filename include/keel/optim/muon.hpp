// Muon: momentum, orthogonalised by Newton-Schulz, scaled by the logical matrix's shape; for the hidden matrices of a model.
//
//     muon_parameter<> p{.plan = plan_muon(1, rows, columns), .gradient = stacked(g), .weight = stacked(w), .momentum = stacked(m)};
//     muon_step(be, keel::vec(&p, 1), gate, {.learning_rate = 1e-3f, .weight_decay = 0.1f}, ws).or_throw();
//
// One call takes all matrices of a model: they are spread over the backend's threads, the costly ones first.
// Plans: muon_plan.hpp; mathematics: muon_rows.hpp, newton_schulz_iteration.hpp; how it is dealt to threads: muon_tasks.hpp.
#pragma once

#include <keel/core/validate.hpp>
#include <keel/format/bf16.hpp>
#include <keel/format/float32.hpp>
#include <keel/optim/muon_tasks.hpp>

namespace keel::inline KEEL_ABI {

/// Bytes for muon_step over this list: scratch for the costliest matrix, a thread. The size, but no result, depends on
/// be.concurrency().
template <matmul_backend B, class T, class Gradient, class Shadow>
int64_t muon_step_workspace(B const& be, view<muon_parameter<T, Gradient, Shadow> const, 1> parameters) {
    return muon_sizes::of(be, parameters).bytes(be.concurrency());
}
template <matmul_backend B, class T, class Gradient, class Shadow>
int64_t muon_step_workspace(B const& be, view<muon_parameter<T, Gradient, Shadow>, 1> parameters) {
    return muon_step_workspace(be, view<muon_parameter<T, Gradient, Shadow> const, 1>(parameters));
}

/// One Muon step of every listed parameter, unless the gate is closed.
///
/// Formula        x = (1 - mu) (gradient * gate.clip), or without (1 - mu) for heavy_ball; M = fma(mu, M, x);
///                U = nesterov ? fma(mu, M, x) : M; O = newton_schulz(U) for each logical matrix of the plan;
///                w = fma(-lr * scale, O, fma(-lr * decay, w, w)). All fp32. Clipping acts on the gradient, never on O.
/// Shapes         gradient, weight, momentum, shadow (or absent) [stack, rows, columns] of the plan; any strides, fast where rows or
///                columns are adjacent. The scale comes from the logical matrix, whatever memory it shares.
/// Formats        gradient float or bf16 (any format that loads), not written; products in T; shadow any of bf16, f16, float.
/// Rounding       x, M and U one each an operation, in fp32; U to T after the norm; each product to T; w once for decay and once for
///                the step; shadow once from w. The factors lr * scale and lr * decay once from double.
/// Status         bad_shape, bad_stride, bad_pointer, bad_option (options outside their ranges; a plan of more than 64 steps of gram),
///                unsupported (form gram in bf16), bad_state (a plan whose parts do not cover its rows; got: the parameter),
///                small_workspace; non_finite (momentum; got: the parameter whose direction would not be finite): found before anything
///                of any parameter is written. An unsafe set may overflow: non_finite (plan; got: the first such parameter): its
///                momentum has moved, its weight and shadow have not, other parameters have made their step.
/// Aliasing       within a parameter weight, momentum and shadow have memory of their own (overlap); that two parameters share none is
///                the caller's part.
/// Skipped        gate.apply == 0: every byte of weights, shadows and momentum stays as it was; changes are 0.
/// Zero           a direction of zeros moves nothing but decay. A parameter without a gradient is left out of the list.
/// Order          the same bits for any thread count, for a list or one call a parameter, and for parts or matrices of their own.
/// Workspace      muon_step_workspace(be, parameters). `change` of a call that fails with non_finite is 0.
/// Cost           the plans' flops; reads gradient and momentum three times, writes momentum and weight once.
/// Source         Jordan 2024; scale and decay after Moonlight (Liu et al. 2025). Deviations: no epsilon, scale-free.
template <matmul_backend B, class T, class Gradient, class Shadow>
status muon_step(B const& be, view<muon_parameter<T, Gradient, Shadow> const, 1> parameters, step_gate const& gate,
                 muon_options options, workspace ws) {
    static_assert(backend_traits<B>::space == memory_space::host, "the host looks at the largest elements before it goes on");
    auto const in_range = [](float x) { return x >= 0.0f && x <= 0x1.fffffep127f; };
    validation check("muon_step");
    check.present("parameters", parameters).unit_stride("parameters", parameters);
    check.require(in_range(options.learning_rate), status_code::bad_option, "options.learning_rate", "a finite number of 0 or more");
    check.require(in_range(options.weight_decay), status_code::bad_option, "options.weight_decay", "a finite number of 0 or more");
    check.require(options.momentum >= 0.0f && options.momentum < 1.0f, status_code::bad_option, "options.momentum", "a number in [0, 1)");
    for (int64_t i = 0; check.ok() && i < parameters.extent[0]; ++i) {
        auto const& p = parameters(i);
        check.require(p.plan.valid(), status_code::bad_state, "plan", "parameter", i, "parts that cover the rows, in whole matrices");
        check.require(std::is_same_v<T, float> || p.plan.options.form != newton_schulz_form::gram, status_code::unsupported, "plan",
                      "parameter", i, "plain or symmetric: Gram in bf16 leaves the certified range");
        for (int k = 0; check.ok() && k < p.plan.part_count; ++k)
            check.require(p.plan.iteration(k).valid(), status_code::bad_option, "plan", "parameter", i,
                          "at most 64 steps in form gram: it restarts no later");
        check.shape("weight", p.weight, p.plan.stack, p.plan.rows, p.plan.columns).distinct("weight", p.weight);
        check.shape("gradient", p.gradient, p.plan.stack, p.plan.rows, p.plan.columns).disjoint("gradient", p.gradient, p.weight);
        check.shape("momentum", p.momentum, p.plan.stack, p.plan.rows, p.plan.columns).distinct("momentum", p.momentum);
        check.disjoint("momentum", p.momentum, p.weight).disjoint("momentum", p.momentum, p.gradient);
        if (p.shadow.absent()) continue;
        check.shape("shadow", p.shadow, p.plan.stack, p.plan.rows, p.plan.columns).distinct("shadow", p.shadow);
        check.disjoint("shadow", p.shadow, p.weight).disjoint("shadow", p.shadow, p.gradient).disjoint("shadow", p.shadow, p.momentum);
    }
    if (!check.ok()) return check.result;
    muon_sizes const sizes = muon_sizes::of(be, parameters);
    check.enough(ws, sizes.bytes(be.concurrency()));
    if (!check.ok()) return check.result;
    for (int64_t i = 0; i < parameters.extent[0]; ++i)
        if (parameters(i).change != nullptr) *parameters(i).change = {};
    if (gate.apply == 0) return check.result;

    muon_schedule<muon_parameter<T, Gradient, Shadow>> const schedule(parameters, ws.take<muon_group>(sizes.groups));
    auto* const tops = ws.take<uint32_t>(sizes.matrices);
    auto* const changes = ws.take<step_change>(sizes.matrices);
    // Enough matrices: a thread each. Few: all threads inside the products.
    bool const spread = sizes.matrices >= be.concurrency();
    workspace const scratch = ws.part(sizes.workers(be.concurrency()) * sizes.scratch);
    auto const run = [&](auto const& inner) {
        using call_type = muon_call<std::remove_cvref_t<decltype(inner)>, T, Gradient, Shadow>;
        call_type const call{inner, schedule, &gate, options, tops, changes, scratch, sizes.scratch};
        for_matrices(be, sizes.matrices, spread, muon_largest_task<call_type>{call});
        int64_t index = 0;
        for (int64_t i = 0; i < parameters.extent[0]; ++i)
            for (int64_t k = 0; k < parameters(i).plan.matrices(); ++k, ++index)
                check.require(tops[index] < infinity_bits, status_code::non_finite, "momentum", "parameter", i, "finite values");
        if (!check.ok()) return;
        for_matrices(be, sizes.matrices, spread, muon_update_task<call_type, T, Shadow>{call});
        index = 0;
        for (int64_t i = 0; i < parameters.extent[0]; ++i)
            for (int64_t k = 0; k < parameters(i).plan.matrices(); ++k, ++index)
                check.require(tops[index] < infinity_bits, status_code::non_finite, "plan", "parameter", i,
                              "coefficients that keep its direction finite");
    };
    if (spread) run(be.alone());
    else run(be);
    int64_t index = 0;
    for (int64_t i = 0; check.ok() && i < parameters.extent[0]; ++i)
        for (int64_t k = 0; k < parameters(i).plan.matrices(); ++k, ++index)
            if (parameters(i).change != nullptr) *parameters(i).change += changes[index];
    return check.result;
}
template <matmul_backend B, class T, class Gradient, class Shadow>
status muon_step(B const& be, view<muon_parameter<T, Gradient, Shadow>, 1> parameters, step_gate const& gate, muon_options options,
                 workspace ws) {
    return muon_step(be, view<muon_parameter<T, Gradient, Shadow> const, 1>(parameters), gate, options, ws);
}

} // namespace keel::inline KEEL_ABI
