// Load-balancing losses: over the batch, over each sequence, over all ranks. Beside the bias, or instead of it.
//
//     keel::load_balance_factors(be, demand, demand.tokens(), factors, {.coefficient = 1e-2f}).or_throw();         // batch, or all ranks
//     keel::sequence_balance_factors(be, ids, documents, demand, factors, {.coefficient = 1e-4f}, ws).or_throw();   // each document
//     keel::load_balance_loss(be, logits, factors, {.documents = documents}, &loss, options, ws).or_throw();
//     keel::route_backward(be, dweights, logits, ids, weights, dlogits, options, {.factors = factors, .documents = documents}).or_throw();
//
// All are coefficient * experts * sum over e of f_e P_e, f_e the expert's share of the demand, P_e its mean share of the scores. f is a
// constant and comes from demand alone: of served counts the loss would be least where most is dropped (Megatron-LM #1617), and
// served_counts do not compile here. Kernels: load_balance_rows.hpp.
#pragma once

#include <keel/moe/route.hpp>

namespace keel {

struct balance_factor_options {
    float coefficient = 1.0f;    ///< 0 or more
    grad_mode mode = overwrite;  ///< accumulate: one loss on top of another
};

struct balance_loss_inputs {
    view<bool const, 1> valid = {};        ///< [tokens], as in route
    view<int64_t const, 1> documents = {}; ///< [documents + 1], first tokens, then the number of tokens. Absent: one row of factors
};

template <class Stage>
concept demanded_stage = std::is_same_v<Stage, demand_stage> || std::is_same_v<Stage, reduced_stage>;

} // namespace keel

namespace keel::inline KEEL_ABI {

KEEL_HOST void check_factors(validation& check, view<float, 2> factors, balance_factor_options const& options) {
    check.unit_stride("factors", factors).distinct("factors", factors);
    check.require(options.coefficient >= 0.0f && options.coefficient <= 0x1.fffffep127f, status_code::bad_option, "options.coefficient",
                  "a finite number of 0 or more");
}

/// What the loss multiplies the scores' shares by, from the demand of a batch, or of all ranks and micro-batches.
///
/// Formula        factor_e = coefficient * (experts * D_e / (k * demand.tokens())) / tokens, so that the loss is the sum over tokens and
///                experts of factor_e * p_e. fp32.
/// Tokens         those that the loss is a mean over: demand.tokens() for a batch; this rank's (or micro-batch's) for a demand that was
///                reduced over ranks, whose loss is the global one when the ranks' losses are averaged.
/// Shapes         factors [1, experts], or [n, experts]: the same for each. Columns adjacent.
/// Status         bad_shape, bad_stride, bad_pointer, bad_option (coefficient, tokens below 0), bad_state (demand not filled), overlap.
/// Zero sizes     no tokens: factors of 0.
/// Source         Fedus et al. 2022 (2101.03961) eq. 4 to 6 for k = 1; f as in DeepSeek-V3 (2412.19437) eq. 18; Qiu et al. 2025
///                (2501.11873) for the global batch.
template <row_backend B, demanded_stage Stage>
status load_balance_factors(B const& be, load_counts<Stage> const& demand, int64_t tokens, view<float, 2> factors,
                            balance_factor_options options = {}) {
    static_assert(backend_traits<B>::space == memory_space::host, "demand is read on the host so far");
    validation check("load_balance_factors");
    check.extent("factors", factors, 1, demand.experts()).disjoint("factors", factors, demand.counts());
    check.require(demand.filled(), status_code::bad_state, "demand", "demand that route has filled");
    check.require(tokens >= 0, status_code::bad_option, "tokens", "value", tokens, "0 or more");
    check_factors(check, factors, options);
    if (!check.ok()) return check.result;
    be.for_rows(factors.extent[0], factors.extent[1],
                balance_factor_row{demand.counts().data, 0, demand.tokens(), demand.per_token(), tokens, options.coefficient, options.mode, factors});
    return check.result;
}

/// Bytes for sequence_balance_factors.
KEEL_HOST int64_t sequence_balance_factors_workspace(int64_t documents, int64_t experts) {
    return workspace_total(workspace_bytes<int64_t>(documents * (experts + 1)));
}

/// The same for each document of a packed batch on its own: sequence-wise balance.
///
/// Formula        factor_qe = coefficient * (experts * D_qe / (k * T_q)) / T; D_q and T_q the demand and the tokens of document q without
///                padding, T those of the batch. The loss is then the mean over documents, weighted by their tokens: for documents of one
///                length, their plain mean.
/// Shapes         ids [tokens, k or more] from route (-1: padding), documents [n + 1] as in gated_attention, factors [n, experts].
/// Status         as above; bad_option (ids, documents), bad_state also where the ids are not those that the demand was counted on (such as
///                those after rerouting), small_workspace. Workspace: sequence_balance_factors_workspace(documents, experts).
/// Cost           one pass over the ids. A document is one item of work.
/// Source         DeepSeek-V3 (2412.19437) eq. 17 to 20.
template <row_backend B, class I>
status sequence_balance_factors(B const& be, view<I, 2> ids, std::type_identity_t<view<int64_t const, 1>> documents,
                                demand_counts const& demand, view<float, 2> factors, balance_factor_options options = {}, workspace ws = {}) {
    static_assert(backend_traits<B>::space == memory_space::host, "demand is read on the host so far");
    int64_t const tokens = ids.extent[0], experts = demand.experts(), k = demand.per_token(), count = documents.extent[0] - 1;
    validation check("sequence_balance_factors");
    check.present("ids", ids).require(demand.filled(), status_code::bad_state, "demand", "demand that route has filled");
    check.require(ids.extent[1] >= k, status_code::bad_state, "demand", "experts a token", k, "no more than ids has columns");
    check_documents(check, documents, tokens);
    check.shape("factors", factors, count, experts).disjoint("factors", factors, ids, documents, demand.counts());
    check_factors(check, factors, options);
    check.enough(ws, sequence_balance_factors_workspace(count, experts));
    if (!check.ok()) return check.result;
    check_ids(check, columns(ids, 0, k), experts);
    if (!check.ok()) return check.result;

    auto* const counts = ws.take<int64_t>(count * (experts + 1));
    be.for_rows(count, tokens / (count + 1) * k, document_count_row<std::remove_const_t<I>>{ids, k, experts, documents, counts});
    for (int64_t e = 0; e < experts; ++e) {
        int64_t sum = 0;
        for (int64_t q = 0; q < count; ++q) sum += counts[q * (experts + 1) + e];
        if (sum != demand[e]) check.fail(status_code::bad_state, "demand", "count", demand[e], sum);
    }
    if (!check.ok()) return check.result;
    be.for_rows(count, experts, balance_factor_row{counts, experts + 1, -1, k, demand.tokens(), options.coefficient, options.mode, factors});
    return check.result;
}

/// Bytes for load_balance_loss.
KEEL_HOST int64_t load_balance_loss_workspace(int64_t tokens) { return workspace_total(workspace_bytes<float>(tokens)); }

/// The loss that the factors make of a batch's logits.
///
/// Formula        p = softmax(z) for softmax scores; s / (sum of all s) for the others, in the log domain, without epsilon and without the bias.
///                loss = sum over tokens of (sum over experts of factor_e * p_e), both in THE reduction order, fp32.
///                Uniform demand and scores give the coefficient (times the batch's documents' weights, which sum to 1).
/// Shapes         logits [tokens, experts], factors [1, experts] or [documents, experts]; columns adjacent. `loss` in the backend's memory.
/// Gradient       route_backward with the same factors and documents.
/// Padding        counts nowhere. Non-finite: a logit of -Inf has p = 0; a row with NaN, or of nothing but -Inf, makes the loss NaN.
/// Status         bad_shape, bad_stride, bad_pointer, bad_option (score; on host backends documents), overlap, small_workspace.
/// Aliasing       loss has memory of its own. Workspace: load_balance_loss_workspace(tokens).
/// Cost           reads the logits once from memory, three times from cache.
template <row_backend B, class L>
status load_balance_loss(B const& be, view<L, 2> logits, std::type_identity_t<view<float const, 2>> factors, balance_loss_inputs inputs,
                         float* loss, route_options options = {}, workspace ws = {}) {
    int64_t const tokens = logits.extent[0], experts = logits.extent[1];
    validation check("load_balance_loss");
    check.present("logits", logits).unit_stride("logits", logits);
    check_balance_factors<B>(check, factors, inputs.documents, tokens, experts);
    if (!inputs.valid.absent()) check.shape("inputs.valid", inputs.valid, tokens);
    check.require(loss != nullptr, status_code::bad_pointer, "loss", "data, not null");
    check_route_options(check, options);
    check.disjoint("loss", vec(loss, 1), logits, factors, inputs.valid, inputs.documents).enough(ws, load_balance_loss_workspace(tokens));
    if (!check.ok()) return check.result;
    auto* const terms = ws.take<float>(tokens);
    be.for_rows(tokens, experts, balance_term_row<std::remove_const_t<L>>{logits, factors, inputs.valid, inputs.documents, options.score, terms});
    be.for_rows(1, tokens, balance_sum_row{terms, tokens, loss});
    return check.result;
}

} // namespace keel::inline KEEL_ABI
