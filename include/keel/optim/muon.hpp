// Muon: momentum, orthogonalised by Newton-Schulz, scaled by the logical matrix's shape; for the hidden matrices of a model.
//
//     muon_parameter<> p{.plan = plan_muon(1, rows, columns), .gradient = stacked(g), .weight = stacked(w), .momentum = stacked(m)};
//     muon_step(be, p, gate, {.learning_rate = 1e-3f, .weight_decay = 0.1f}, ws).or_throw();
//
// One call takes all matrices of a model, as a list of parameters, keel::vec(list): they are spread over the backend's threads, the
// costly ones first. What they are kept in is their type, and a list has one; T of the plan is T of the parameter:
//
//     muon_parameter<bf16, bf16, bf16, float, bf16> p{.plan = plan_muon<bf16>(...), ..., .applied = &count, .random = {.key = {...}}};
//                                                                bf16 products, gradients and weights (no master), fp32 momentum
//
// What torch.optim.Muon(lr, weight_decay) does is a plan with {.scale = muon_scale::spectral, .coefficients = coefficients<keller, T>()}
// (adjust_lr_fn "match_rms_adamw": the default scale) and the options as they are; its products are of bf16.
// Plans: muon_plan.hpp; mathematics: muon_rows.hpp, newton_schulz_iteration.hpp; how it is dealt to threads: muon_tasks.hpp.
#pragma once

#include <keel/core/validate.hpp>
#include <keel/format/bf16.hpp>
#include <keel/format/float32.hpp>
#include <keel/optim/muon_tasks.hpp>

namespace keel::inline KEEL_ABI {

/// Bytes for muon_step over this list: scratch for the costliest matrix, a thread. The size, but no result, depends on
/// be.concurrency().
template <matmul_backend B, class... Kinds> int64_t muon_step_workspace(B const& be, view<muon_parameter<Kinds...> const, 1> parameters) {
    return muon_sizes::of(be, parameters).bytes(be.concurrency());
}
template <matmul_backend B, class... Kinds> int64_t muon_step_workspace(B const& be, view<muon_parameter<Kinds...>, 1> parameters) {
    return muon_step_workspace(be, view<muon_parameter<Kinds...> const, 1>(parameters));
}

/// ... over one parameter.
template <matmul_backend B, class... Kinds> int64_t muon_step_workspace(B const& be, muon_parameter<Kinds...> const& parameter) {
    return muon_step_workspace(be, vec(&parameter, 1));
}

/// That one parameter's views fit its plan and share no memory.
template <class T, class Gradient, class Shadow, class Momentum, class Weight>
KEEL_HOST void check_parameter(validation& check, muon_parameter<T, Gradient, Shadow, Momentum, Weight> const& p, int64_t index) {
    static_assert(std::is_same_v<Weight, float> || sizeof(Weight) == 2, "keel: a weight is an fp32 master or has 16 bits");
    check.require(p.plan.valid(), status_code::bad_state, "plan", "parameter", index, "parts that cover the rows, each row once, in whole matrices");
    if (!check.ok()) return; // what follows counts on the plan's numbers
    for (int k = 0; check.ok() && k < p.plan.part_count; ++k)
        check.require(p.plan.iteration(k).valid(), status_code::bad_option, "plan", "parameter", index,
                      "at most 64 steps in form gram: it restarts no later");
    auto const shaped = [&](char const* name, auto const& v) {
        check.shape(name, v, p.plan.stack, p.plan.rows, p.plan.columns).distinct(name, v);
    };
    shaped("weight", p.weight);
    check.shape("gradient", p.gradient, p.plan.stack, p.plan.rows, p.plan.columns).disjoint("gradient", p.gradient, p.weight);
    if constexpr (is_block_state<Momentum>)
        check_state_rows(check, "momentum", "momentum.scales", p.momentum, p.plan.stack * p.plan.rows, p.plan.columns);
    else shaped("momentum", p.momentum);
    check_apart(check, "momentum", p.momentum, p.weight, p.gradient);
    if (!p.shadow.absent()) {
        check.require(std::is_same_v<Weight, float>, status_code::unsupported, "shadow", "parameter", index, "none beside weights of 16 bits");
        shaped("shadow", p.shadow);
        check_apart(check, "shadow", p.shadow, p.weight, p.gradient, p.momentum);
    }
    if (!p.compensation.absent()) {
        check.require(!std::is_same_v<Weight, float>, status_code::unsupported, "compensation", "parameter", index, "none beside fp32 weights");
        shaped("compensation", p.compensation);
        check_apart(check, "compensation", p.compensation, p.weight, p.gradient, p.momentum);
    }
    if (!p.second_moment.absent()) {
        check.shape("second_moment", p.second_moment, p.plan.stack, p.plan.rows).distinct("second_moment", p.second_moment);
        check_apart(check, "second_moment", p.second_moment, p.weight, p.gradient, p.momentum, p.shadow, p.compensation);
    }
    check.require(p.plan.options.wanted_error >= 0.0f, status_code::bad_option, "plan.options.wanted_error", "parameter", index, "a number of 0 or more");
    check_measures(check, p.measures, p.plan.matrices());
    auto const apart_from_measures = [&](auto const&... v) { (check_measures_apart(check, p.measures, v), ...); };
    apart_from_measures(p.weight, p.gradient, p.shadow, p.compensation, p.second_moment);
    if constexpr (is_block_state<Momentum>) apart_from_measures(p.momentum.codes, p.momentum.scales);
    else apart_from_measures(p.momentum);
    check.require(p.applied != nullptr || !draws_numbers_of(p), status_code::bad_pointer, "applied", "data, not null, where something is rounded by chance");
    check.require(p.applied == nullptr || *p.applied >= 0, status_code::bad_state, "applied", "parameter", index, "0 or more");
    uint64_t const pitch = p.random.pitch != 0 ? p.random.pitch : static_cast<uint64_t>(p.plan.columns);
    bool const in_rows = p.weight.stride[1] == 1 && p.plan.columns > 1, is_small = pitch <= (uint64_t{1} << 31) && pitch * static_cast<uint64_t>(p.plan.rows) < uint64_t{1} << 32;
    check.require(!draws_numbers_of(p) || is_block_state<Momentum> || in_rows || is_small, status_code::unsupported, "random.pitch", "parameter",
                  index, "fewer than 2^32 elements a weight that lies in columns");
}

KEEL_HOST bool is_finite(view<float, 2> const& v) {
    uint32_t largest = 0;
    for (int64_t i = 0; !v.absent() && i < v.extent[0]; ++i)
        for (int64_t j = 0; j < v.extent[1]; ++j) largest = umax(largest, magnitude(v(i, j)));
    return largest < infinity_bits;
}

/// One Muon step of every listed parameter, unless the gate is closed.
///
/// Formula        x = (1 - mu) (gradient * gate.clip), or without (1 - mu) for heavy_ball; M = fma(mu, M, x);
///                U = nesterov ? fma(mu, M, x) : M; O = newton_schulz(U) for each logical matrix of the plan;
///                with a second moment s = sum of O^2 over a row / columns, v = fma(beta2, v, (1 - beta2) s),
///                O = O * sqrt(sum of s / sum of (s / v)) / sqrt(v), sums over the matrix's rows: its Frobenius norm stays;
///                w = fma(-lr * scale, O, fma(-lr * decay, w, w)), without the decay where it is cautious and O and w have opposite signs.
///                All fp32. Clipping acts on the gradient, never on O.
/// Shapes         gradient, weight, momentum, shadow and compensation (or absent) [stack, rows, columns] of the plan; any strides, fast where
///                rows or columns are adjacent; second_moment [stack, rows]; momentum in blocks [stack * rows, columns], columns adjacent.
///                The scale comes from the logical matrix, whatever memory it shares and whatever lies between its rows.
/// Formats        gradient float or bf16 (any format that loads), not written; products in T; weight float, bf16 or f16; momentum float,
///                bf16, f16 or blocks of 8 bits; shadow any of bf16, f16, float.
/// Rounding       x, M and U one each an operation, in fp32; U to T after the norm; each product to T; w once for decay and once for
///                the step; shadow once from w. The factors lr * scale and lr * decay once from double. U is made of M as it is in fp32, before
///                fewer bits round it by chance (state_rows.hpp); 16-bit weights as weight_rows.hpp says.
/// Random numbers parameter.random names them by the element's place in the weight: the same for any threads, batches, parts and layouts.
/// Status         of a list the message names the parameter. bad_shape, bad_stride, bad_pointer, overlap, bad_option (options outside their ranges; a plan of more than 64 steps of gram or with a
///                wanted error below 0),
///                unsupported (a shadow of 16-bit weights, compensation of fp32 ones), bad_state (a plan whose parts do not
///                cover its rows, a negative count; got: the parameter),
///                small_workspace; non_finite (momentum; got: the parameter whose direction would not be finite; second_moment): found before anything
///                of any parameter is written. An unsafe set may overflow: non_finite (plan; got: the first such parameter): its
///                momentum has moved and its step is counted, its weight, shadow, compensation and second moment have not moved, other
///                parameters have made their step.
/// Aliasing       within a parameter all that is written has memory of its own (overlap); that two parameters share none is
///                the caller's part.
/// Skipped        gate.apply == 0: every byte of weights, shadows, compensation, momentum, second moments and counts stays as it was;
///                changes are 0.
/// Zero           a direction of zeros moves nothing but decay, and lets momentum and second moment fade. A parameter without a gradient is
///                left out of the list.
/// Order          the same bits for any thread count, for a list or one call a parameter, and for parts or matrices of their own (whose
///                random.first and pitch say where they lay).
/// Measures       of O before the second moment balances its rows; a direction of zeros has error 1 after 0 steps. Not written where the
///                gate is closed, nor of a matrix that an unsafe set takes out of the range.
/// Workspace      muon_step_workspace(be, parameters). `change` of a call that fails with non_finite is 0; it counts what was stored, with
///                compensation what was added.
/// Cost           the plans' flops; reads gradient and momentum twice, writes momentum and weight once. (One read finds the norm of all
///                matrices, before any is written.)
/// Source         Jordan 2024; scale and decay after Moonlight (Liu et al. 2025); second moment after NorMuon (Li et al. 2025, 2510.05491),
///                with its code's restored norm; cautious decay after dion. Deviations: no epsilon, scale-free.
template <matmul_backend B, class T, class... Kinds>
status muon_step(B const& be, view<muon_parameter<T, Kinds...> const, 1> parameters, step_gate const& gate, muon_options options, workspace ws) {
    static_assert(backend_traits<B>::space == memory_space::host, "the host looks at the largest elements before it goes on");
    validation check("muon_step");
    check.present("parameters", parameters).unit_stride("parameters", parameters);
    check.require(is_rate(options.learning_rate), status_code::bad_option, "options.learning_rate", "a number in [0, 2^40]");
    check.require(is_rate(options.weight_decay), status_code::bad_option, "options.weight_decay", "a number in [0, 2^40]");
    check.require(options.momentum >= 0.0f && options.momentum < 1.0f, status_code::bad_option, "options.momentum", "a number in [0, 1)");
    check.require(options.beta2 >= 0.0f && options.beta2 < 1.0f, status_code::bad_option, "options.beta2", "a number in [0, 1)");
    for (int64_t i = 0; check.ok() && i < parameters.extent[0]; ++i)
        check_parameter(check.of(parameters.extent[0] > 1 ? "parameter" : "", i), parameters(i), i);
    check.of("");
    if (!check.ok()) return check.result;
    muon_sizes const sizes = muon_sizes::of(be, parameters);
    check.enough(ws, sizes.bytes(be.concurrency()));
    if (!check.ok()) return check.result;
    for (int64_t i = 0; i < parameters.extent[0]; ++i)
        if (parameters(i).change != nullptr) *parameters(i).change = {};
    if (gate.apply == 0) return check.result;

    using parameter = muon_parameter<T, Kinds...>;
    muon_schedule<parameter> const schedule(parameters, ws.take<muon_group>(sizes.groups));
    auto* const tops = ws.take<uint32_t>(sizes.matrices);
    auto* const inverses = ws.take<float>(sizes.matrices);
    auto* const changes = ws.take<step_change>(sizes.matrices);
    // Enough matrices: a thread each. Few: all threads inside the products.
    bool const spread = sizes.matrices >= be.concurrency();
    workspace const scratch = ws.part(sizes.workers(be.concurrency()) * sizes.scratch);
    auto const run = [&](auto const& inner) {
        using call_type = muon_call<std::remove_cvref_t<decltype(inner)>, parameter>;
        call_type const call{inner, schedule, &gate, options, tops, inverses, changes, scratch, sizes.scratch};
        auto const all_finite = [&](char const* argument, char const* wanted) {
            int64_t index = 0;
            for (int64_t i = 0; i < parameters.extent[0]; ++i)
                for (int64_t k = 0; k < parameters(i).plan.matrices(); ++k, ++index)
                    check.require(tops[index] < infinity_bits, status_code::non_finite, argument, "NaN or Inf in parameter", i, wanted);
            return check.ok();
        };
        for_matrices(be, sizes.matrices, spread, muon_norm_task<call_type>{call});
        if (!all_finite("momentum", "finite values")) return;
        for (int64_t i = 0; i < parameters.extent[0]; ++i)
            check.require(is_finite(parameters(i).second_moment), status_code::non_finite, "second_moment", "NaN or Inf in parameter", i, "finite values");
        if (!check.ok()) return;
        for_matrices(be, sizes.matrices, spread, muon_update_task<call_type, T>{call});
        for (int64_t i = 0; i < parameters.extent[0]; ++i)
            if (parameters(i).applied != nullptr) *parameters(i).applied += 1;
        all_finite("plan", "coefficients that keep its direction finite");
    };
    if (spread) run(be.alone());
    else run(be);
    int64_t index = 0;
    for (int64_t i = 0; check.ok() && i < parameters.extent[0]; ++i)
        for (int64_t k = 0; k < parameters(i).plan.matrices(); ++k, ++index)
            if (parameters(i).change != nullptr) *parameters(i).change += changes[index];
    return check.result;
}
template <matmul_backend B, class... Kinds>
status muon_step(B const& be, view<muon_parameter<Kinds...>, 1> parameters, step_gate const& gate, muon_options options, workspace ws) {
    return muon_step(be, view<muon_parameter<Kinds...> const, 1>(parameters), gate, options, ws);
}
/// One parameter, for what has a list of its own elsewhere.
template <matmul_backend B, class... Kinds>
status muon_step(B const& be, muon_parameter<Kinds...> const& parameter, step_gate const& gate, muon_options options, workspace ws) {
    return muon_step(be, vec(&parameter, 1), gate, options, ws);
}

} // namespace keel::inline KEEL_ABI
