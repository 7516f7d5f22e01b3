// The router: which experts a token goes to, with what weights, and how many tokens each expert was asked to take.
//
//     keel::demand_counts demand(keel::vec(counts, experts));
//     keel::route(be, logits, {.bias = bias}, ids, weights, demand, {}, {.scaling = 2.5f}, ws).or_throw();
//     keel::route_backward(be, dweights, logits, ids, weights, dlogits, {.scaling = 2.5f}).or_throw();
//
// route is pure: evaluation and recomputation change nothing. What it counted enters the balancing bias by an explicit,
// idempotent commit (balance.hpp). Kernels: route_rows.hpp.
#pragma once

#include <keel/backend/concepts.hpp>
#include <keel/core/validate.hpp>
#include <keel/format/bf16.hpp>
#include <keel/format/float32.hpp>
#include <keel/moe/demand.hpp>
#include <keel/moe/route_rows.hpp>

namespace keel {

struct route_inputs {
    view<float const, 1> bias = {}; ///< [experts], added to the scores for the selection only. Absent: none
    view<bool const, 1> valid = {}; ///< [tokens], true for a token, false for padding. Absent: all are tokens
};

/// What the router can keep for losses and logs, caller-owned.
struct route_saved {
    view<float, 1> log_sum = {}; ///< [tokens], log(sum of e^z); 0 for padding. Absent: not saved
};

/// Losses on the logits themselves, whose gradients are added.
struct route_backward_options {
    float z_loss = 0.0f; ///< z_loss * sum over tokens of log_sum^2; usually coefficient / tokens; 0 or more
    view<float const, 2> factors = {};     ///< the load-balancing loss of these (load_balance.hpp). Absent: none
    view<int64_t const, 1> documents = {}; ///< as there
};

} // namespace keel

namespace keel::inline KEEL_ABI {

KEEL_HOST int64_t route_tiles(int64_t tokens) { return (tokens + route_tile_tokens - 1) / route_tile_tokens; }

/// Bytes for route.
KEEL_HOST int64_t route_workspace(int64_t tokens, int64_t experts) {
    int64_t const cells = route_tiles(tokens) * experts;
    return workspace_total(workspace_bytes<float>(cells) + 2 * workspace_bytes<uint32_t>(cells));
}

KEEL_HOST void check_route_options(validation& check, route_options const& options) {
    check.require(options.score <= score_function::sqrt_softplus, status_code::bad_option, "options.score", "value",
                  static_cast<int64_t>(options.score), "softmax, sigmoid or sqrt_softplus");
    check.require(options.weight <= weight_rule::scores, status_code::bad_option, "options.weight", "value",
                  static_cast<int64_t>(options.weight), "normalised or scores");
    check.require(options.scaling > 0.0f && options.scaling <= 0x1.fffffep127f, status_code::bad_option, "options.scaling",
                  "a finite number above 0");
}
/// What only the selection asks of the options: groups that divide the experts and hold k of them.
KEEL_HOST void check_selection(validation& check, route_options const& options, int64_t experts, int64_t k) {
    int64_t const groups = options.groups, top = options.top_groups;
    check.require(k >= 1 && k <= experts, status_code::bad_option, "ids", "columns", k, "1 up to the number of experts");
    check.require(groups >= 1, status_code::bad_option, "options.groups", "value", groups, "1 or more");
    if (!check.ok()) return;
    check.require(experts % groups == 0 && (groups == 1 || experts / groups >= 2), status_code::bad_option, "options.groups", "value", groups,
                  "a divisor of the experts that leaves two or more in a group");
    check.require(top >= 1 && top <= groups, status_code::bad_option, "options.top_groups", "value", top, "1 up to the number of groups");
    if (!check.ok()) return;
    check.require(k <= top * (experts / groups), status_code::bad_option, "ids", "columns", k, "no more than the groups' experts");
    check.require(options.by <= group_score::best, status_code::bad_option, "options.by", "value", static_cast<int64_t>(options.by),
                  "top_two or best");
}

/// Whether the bias is the same number for all experts, and so selects nothing.
KEEL_HOST bool is_uniform(view<float const, 1> bias) {
    for (int64_t e = 1; e < bias.extent[0]; ++e)
        if (bits(add(bias(e), 0.0f)) != bits(add(bias(0), 0.0f))) return false;
    return true;
}

/// Offsets of packed documents, from 0 to the number of tokens.
KEEL_HOST void check_documents(validation& check, view<int64_t const, 1> documents, int64_t tokens) {
    check.present("documents", documents);
    check.require(documents.extent[0] >= 1, status_code::bad_shape, "documents", "length", documents.extent[0], "documents + 1");
    for (int64_t i = 0; check.ok() && i < documents.extent[0]; ++i) {
        int64_t const least = i == 0 ? 0 : documents(i - 1), most = i == 0 ? 0 : tokens;
        check.require(documents(i) >= least && documents(i) <= most, status_code::bad_option, "documents", "an entry", documents(i),
                      "entries that start at 0 and do not decrease");
    }
    if (check.ok() && documents(documents.extent[0] - 1) != tokens)
        check.fail(status_code::bad_option, "documents", "last entry", documents(documents.extent[0] - 1), tokens);
}
/// A row of factors for each document, or one for all tokens. Offsets in a device's memory are taken as they are.
template <class B>
KEEL_HOST void check_balance_factors(validation& check, view<float const, 2> factors, view<int64_t const, 1> documents, int64_t tokens,
                                     int64_t experts) {
    if constexpr (backend_traits<B>::space == memory_space::host)
        if (!documents.absent()) check_documents(check, documents, tokens);
    check.shape("factors", factors, documents.absent() ? 1 : documents.extent[0] - 1, experts).unit_stride("factors", factors);
}

/// The first failed requirement on ids: an index in [0, experts), or -1 where padding may stand.
template <class I> KEEL_HOST void check_ids(validation& check, view<I, 2> ids, int64_t experts) {
    for (int64_t t = 0; t < ids.extent[0] && check.ok(); ++t)
        for (int64_t j = 0; j < ids.extent[1]; ++j) {
            auto const id = static_cast<int64_t>(ids(t, j));
            if (id >= -1 && id < experts && (id >= 0) == (ids(t, 0) >= 0)) continue;
            check.fail(status_code::bad_option, "ids", "value", id, 0, "an expert, or -1 in a whole row of padding");
            return;
        }
}

/// Selects k experts a token and gives each its weight; counts the demand.
///
/// Formula        s = softmax(z), sigmoid(z) or sqrt(softplus(z)); the k largest s + bias are selected; w = scaling * s / (sum of the
///                selected s), or scaling * s. fp32. The bias never enters the weights and has no gradient. Normalisation is in the
///                log domain and without epsilon: two logits of -200 share the weight as exactly as two of 0. k = 1: see weight_rule.
/// Order          by s + bias in fp32; ties: the larger logit first (sigmoid is 1 in fp32 from z = 17.4 on), then the lower index. Without a
///                bias, or with one that is the same for all experts, the order is that of the logits. Otherwise sums that differ by
///                less than their rounding (4 ulp of the score) may come in either order, the same one on every backend. ids stand in
///                the order of selection.
/// Groups         with options.top_groups below options.groups, all experts of a token are of its top_groups best groups, by
///                options.by; ties of groups: the larger of their largest logits first, then the lower group. In a group with NaN that ranks
///                with what -Inf masks, so that the limit holds in bad rows too.
/// Spare          with options.spare = r, ids has r further columns, the next choices in the same order: -1 where the groups have no expert left
///                that is not masked.
/// Shapes         logits [tokens, experts], inputs.bias [experts], inputs.valid [tokens], ids [tokens, k + spare], weights [tokens, k],
///                1 <= k <= experts, or the experts of the top groups; columns adjacent. demand over memory for [experts] counts. saved.log_sum [tokens].
/// Formats        logits float or bf16; ids int32 or int64; the rest fp32.
/// Padding        ids -1, weights 0; counted nowhere. Everything downstream takes -1 as "no expert".
/// Non-finite     a logit of -Inf masks its expert: it comes after every number whatever the bias, and weighs 0 when it must be
///                taken after all. A row that holds NaN or +Inf, or nothing but -Inf, has k distinct
///                valid ids and NaN weights, so that the fault reaches the step gate; it is counted like any row, and other rows are
///                unaffected. There NaN ranks after all numbers; +Inf ranks first without a bias, and with one by its score like any
///                logit. `events` counts the logits of tokens, and those that are not finite. A NaN in the bias ranks its expert after
///                all numbers, +-Inf first or last.
/// Status         bad_shape, bad_stride, bad_pointer, bad_option (k, spare, groups, score, weight, scaling, more than 2^42 assignments), overlap,
///                small_workspace.
/// Zero sizes     no tokens: zero demand.
/// Aliasing       outputs have memory of their own. Workspace: route_workspace(tokens, experts).
/// Cost           reads the logits from memory once and writes 8 to 12 bytes an assignment; k passes over each cached row.
/// Source         Wang et al. 2024 (2408.15664) for the bias; DeepSeek-V3 (2412.19437) eq. 16 without its epsilon, and its groups.
template <row_backend B, class L, class I>
status route(B const& be, view<L, 2> logits, route_inputs inputs, view<I, 2> ids, view<float, 2> weights, demand_counts& demand,
             route_saved saved = {}, route_options options = {}, workspace ws = {}, report* events = nullptr) {
    using format = std::remove_const_t<L>;
    static_assert(std::is_same_v<format, float> || std::is_same_v<format, bf16>, "logits are float or bf16");
    static_assert(std::is_same_v<I, int32_t> || std::is_same_v<I, int64_t>, "ids are int32 or int64");
    static_assert(backend_traits<B>::space == memory_space::host, "demand is read on the host so far");
    int64_t const tokens = logits.extent[0], experts = logits.extent[1], k = ids.extent[1] - options.spare;
    view<int64_t, 1> const counts = detail::load_counts_access::memory(demand);
    validation check("route");
    check.present("logits", logits).unit_stride("logits", logits);
    check.extent("ids", ids, 0, tokens).unit_stride("ids", ids).distinct("ids", ids);
    check.require(options.spare >= 0, status_code::bad_option, "options.spare", "value", options.spare, "0 or more");
    check_selection(check, options, experts, k);
    check.require(options.spare <= experts - k, status_code::bad_option, "options.spare", "value", options.spare,
                  "at most the experts that are not chosen");
    check.shape("weights", weights, tokens, k).unit_stride("weights", weights).distinct("weights", weights);
    check.shape("demand", counts, experts).unit_stride("demand", counts);
    if (!inputs.bias.absent()) check.shape("inputs.bias", inputs.bias, experts).unit_stride("inputs.bias", inputs.bias);
    if (!inputs.valid.absent()) check.shape("inputs.valid", inputs.valid, tokens);
    if (!saved.log_sum.absent()) check.shape("saved.log_sum", saved.log_sum, tokens).distinct("saved.log_sum", saved.log_sum);
    check_route_options(check, options);
    if (!check.ok()) return check.result;
    check.require(tokens <= detail::most_assignments / k, status_code::bad_option, "ids", "rows", tokens, "at most 2^42 / k");
    check.require(experts <= detail::most_experts, status_code::bad_shape, "logits", "columns", experts, "at most 2^20");
    check.disjoint("ids", ids, logits, inputs.bias, inputs.valid).disjoint("weights", weights, logits, inputs.bias, inputs.valid, ids);
    check.disjoint("demand", counts, logits, inputs.bias, inputs.valid, ids, weights);
    check.disjoint("saved.log_sum", saved.log_sum, logits, inputs.bias, inputs.valid, ids, weights, counts);
    check.enough(ws, route_workspace(tokens, experts));
    if (!check.ok()) return check.result;

    int64_t const tiles = route_tiles(tokens);
    route_scratch const scratch{ws.take<float>(tiles * experts), ws.take<uint32_t>(tiles * experts)};
    auto* const tile_counts = ws.take<uint32_t>(tiles * experts);
    view<float const, 1> const bias = is_uniform(inputs.bias) ? view<float const, 1>{} : inputs.bias;
    be.for_rows(tiles, route_tile_tokens * experts,
                route_tile<format, I>{{logits, bias, ids, weights, saved.log_sum, options}, inputs.valid, scratch, tile_counts, events});
    be.for_rows(1, tiles * experts, count_tiles{tile_counts, tiles, counts});
    int64_t total = 0;
    for (int64_t e = 0; e < experts; ++e) total += counts(e);
    detail::load_counts_access::fill(demand, total / k, k, total);
    if (events != nullptr) add_shared(events->elements, total / k * experts);
    return check.result;
}

/// The gradient of the logits. The selection is a constant; the bias has none.
///
/// Formula        with G = dweights, 0 where a token was dropped (combine_backward gives it so):
///                normalised: dz_j = w_j (G_j - sum(w G) / scaling) dlog s/dz_j; dlog s/dz = 1, sigmoid(-z), sigmoid(z) / (2 softplus(z)).
///                Normalisation came before the drop, so a dropped expert still has its share of the sum.
///                scores: dz_j = w_j G_j dlog s/dz_j; for softmax - softmax_e * sum(w G) for every expert e of the row besides.
///                z-loss: softmax_e * 2 z_loss log_sum. Load-balancing loss: p_e (factor_e - sum(factor p)) dlog s/dz_e, p as there, added
///                last. fp32, sums in THE reduction order, one rounding to dlogits.
/// Shapes         dweights, ids, weights [tokens, k] (the last two from route), logits, dlogits [tokens, experts]; columns adjacent.
/// Formats        dlogits float or bf16, overwritten; experts that were not selected get 0 where no term reaches them.
/// Options        score, weight and scaling as in the forward.
/// Padding        rows of ids -1 get 0. Non-finite: a NaN weight or gradient stays in its row.
/// Status         bad_shape, bad_stride, bad_pointer, bad_option (score, weight, scaling, z_loss; on host backends ids, documents), overlap.
/// Aliasing       dlogits has memory of its own. No workspace.
/// Cost           reads the logits once from memory (three times from cache where softmax takes part, three more for a load-balancing loss),
///                writes dlogits once.
template <row_backend B, class DW, class L, class I, class W, class D>
status route_backward(B const& be, view<DW, 2> dweights, view<L, 2> logits, view<I, 2> ids, view<W, 2> weights, view<D, 2> dlogits,
                      route_options options = {}, route_backward_options backward = {}) {
    using format = std::remove_const_t<L>;
    int64_t const tokens = logits.extent[0], experts = logits.extent[1], k = ids.extent[1];
    validation check("route_backward");
    check.present("logits", logits).unit_stride("logits", logits);
    check.extent("ids", ids, 0, tokens).unit_stride("ids", ids);
    check.require(k >= 1 && k <= experts, status_code::bad_option, "ids", "columns", k, "1 up to the number of experts");
    check.shape("weights", weights, tokens, k).unit_stride("weights", weights);
    check.shape("dweights", dweights, tokens, k).unit_stride("dweights", dweights);
    check.shape("dlogits", dlogits, tokens, experts).unit_stride("dlogits", dlogits).distinct("dlogits", dlogits);
    check.disjoint("dlogits", dlogits, logits).disjoint("dlogits", dlogits, ids).disjoint("dlogits", dlogits, weights);
    check.disjoint("dlogits", dlogits, dweights);
    check_route_options(check, options);
    check.require(backward.z_loss >= 0.0f && backward.z_loss <= 0x1.fffffep127f, status_code::bad_option, "backward.z_loss",
                  "a finite number of 0 or more");
    if (!backward.factors.absent()) check_balance_factors<B>(check, backward.factors, backward.documents, tokens, experts);
    check.disjoint("dlogits", dlogits, backward.factors, backward.documents);
    if (!check.ok()) return check.result;
    if constexpr (backend_traits<B>::space == memory_space::host) check_ids(check, ids, experts);
    if (!check.ok()) return check.result;
    be.for_rows(tokens, experts, route_backward_row<format, std::remove_const_t<I>, D>{dweights, logits, ids, weights, dlogits, options,
                                                                                      backward.z_loss, backward.factors, backward.documents});
    return check.result;
}

/// sum over tokens of log_sum^2, in THE reduction order: the router's z-loss is coefficient / tokens times this (Zoph et al. 2022,
/// 2202.08906, eq. 5). `sum_of_squares` is written, in the backend's memory; Inf where log_sum reaches 2^64, NaN where one is.
/// Status: bad_shape, bad_pointer, overlap.
template <row_backend B, class S> status router_z_loss(B const& be, view<S, 1> log_sum, float* sum_of_squares) {
    validation check("router_z_loss");
    check.present("log_sum", log_sum).require(sum_of_squares != nullptr, status_code::bad_pointer, "sum_of_squares", "data, not null");
    check.disjoint("sum_of_squares", vec(sum_of_squares, 1), log_sum);
    if (!check.ok()) return check.result;
    be.for_rows(1, log_sum.extent[0], square_sum_row{log_sum, sum_of_squares});
    return check.result;
}

} // namespace keel::inline KEEL_ABI
