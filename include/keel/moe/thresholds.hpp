// Counts the thresholds of one forward pass, for the quantile rule of balance.hpp.
//
//     keel::threshold_counts thresholds(keel::rows(memory, experts, 1000));
//     keel::count_thresholds(be, logits, bias, k, thresholds, options, ws).or_throw();      // route's options
//     keel::commit(be, state, demand, thresholds, {.step = s, .micro_batch = m}).or_throw();   // state.thresholds adds them up
#pragma once

#include <keel/moe/route.hpp>
#include <keel/moe/threshold_groups.hpp>
#include <keel/moe/thresholds_rows.hpp>

namespace keel::inline KEEL_ABI {

/// Bytes for count_thresholds.
KEEL_HOST int64_t count_thresholds_workspace(int64_t tokens, int64_t experts, int64_t k, route_options options = {}) {
    int64_t const blocks = (experts + threshold_block - 1) / threshold_block;
    bool const grouped = options.top_groups < options.groups;
    int64_t const levels = grouped ? workspace_bytes<float>(tokens * experts) + workspace_bytes<group_standing>(tokens * options.groups)
                                   : workspace_bytes<float>(tokens);
    return workspace_total(workspace_bytes<int32_t>(tokens * (k + 1)) + workspace_bytes<float>(tokens * (k + 1)) + workspace_bytes<float>(tokens) + levels +
                           workspace_bytes<int64_t>(experts) + workspace_bytes<float>(blocks * threshold_block) + route_workspace(tokens, experts));
}

/// For each expert, into which bin its threshold falls, for each token.
///
/// Formula        a_t = the (k + 1)-th largest s + bias of the token; threshold = a_t - s_te, into bin (threshold - low) / width, cut to the
///                first and the last. s to fp32's accuracy (route orders its own by their last bit). fp32; the counts are exact.
/// Shapes         logits [tokens, experts], bias [experts], valid [tokens] as in route_inputs, thresholds over memory for [experts, bins];
///                columns adjacent. 1 <= k < experts: with all experts chosen no bias matters.
/// Formats        logits float or bf16.
/// Masked         an expert of -Inf has its threshold in the last bin, above every bias. A token that has not k + 1 others has theirs in
///                the first. A row with NaN or +Inf counts once for each expert, in bins that mean nothing, as its choice means nothing.
/// Groups         a_t is then of the expert e: the larger of the (k + 1)-th largest s + bias of those groups' experts that would be chosen with
///                e's among them, and of what e needs for its group to be (threshold_groups.hpp). Above such a threshold, with the
///                other biases as they are, an e that is chosen stays so; they may lie outside the bins. Where groups tie, or are masked
///                but for one expert under top_two, the level does not see who wins the tie and may count as never reached.
/// Options        score, groups, top_groups and by as route has them; the others are not read.
/// Status         bad_shape, bad_stride, bad_pointer, overlap, bad_option (k, score, groups, a bias that is not finite, a bias so large that
///                a bin has no width), small_workspace.
/// Aliasing       thresholds have memory of their own. Workspace: count_thresholds_workspace(tokens, experts, k, options).
/// Cost           a route with k + 1, one more pass over the logits for scores, and an increment an element. Groups: besides, 32 passes over top_groups
///                of them in the cached row, and as many for each group that is not chosen.
/// Source         the quantile balancing of Kimi K3, Megatron and torchtitan; there the histogram is of floats, or of one rank's tokens.
template <row_backend B, class L>
status count_thresholds(B const& be, view<L, 2> logits, view<float const, 1> bias, int64_t k, threshold_counts& thresholds,
                        route_options options = {}, workspace ws = {}, view<bool const, 1> valid = {}) {
    using format = std::remove_const_t<L>;
    static_assert(backend_traits<B>::space == memory_space::host, "counts are read on the host so far");
    int64_t const tokens = logits.extent[0], experts = logits.extent[1];
    view<int64_t, 2> const counts = threshold_counts_access::memory(thresholds);
    int64_t const bins = counts.extent[1];
    bool const grouped = options.top_groups < options.groups;
    validation check("count_thresholds");
    check.present("logits", logits).unit_stride("logits", logits).shape("bias", bias, experts).unit_stride("bias", bias);
    check.require(k >= 1 && k < experts, status_code::bad_option, "k", "value", k, "1 up to one less than the number of experts");
    check_selection(check, options, experts, 1);
    if (!check.ok()) return check.result;
    check.require(k <= options.top_groups * (experts / options.groups), status_code::bad_option, "k", "value", k, "no more than the groups' experts");
    check.extent("thresholds", counts, 0, experts).unit_stride("thresholds", counts).distinct("thresholds", counts);
    check.require(bins >= 2 && bins <= (1 << 20), status_code::bad_shape, "thresholds", "bins", bins, "2 up to 2^20");
    check.disjoint("thresholds", counts, logits, bias, valid);
    if (!check.ok()) return check.result;
    for (int64_t e = 0; check.ok() && e < experts; ++e)
        if (is_non_finite(bias(e))) check.fail(status_code::bad_option, "bias", "a number that is not finite at expert", e, 0, "none");
    if (!check.ok()) return check.result;
    threshold_range const range = threshold_range_of(bias, bins);
    check.require(range.width >= 0x1p-20f && range.width < as_float(infinity_bits), status_code::bad_option, "bias",
                  "numbers whose bins have a width");
    check.enough(ws, count_thresholds_workspace(tokens, experts, k, options));
    if (!check.ok()) return check.result;

    int64_t const blocks = (experts + threshold_block - 1) / threshold_block;
    int64_t const listed = grouped ? k : k + 1;
    auto const ids = rows(ws.take<int32_t>(tokens * listed), tokens, listed);
    auto const weights = rows(ws.take<float>(tokens * listed), tokens, listed);
    auto const log_sum = vec(ws.take<float>(tokens), tokens);
    auto* const level = ws.take<float>(grouped ? tokens * experts : tokens);
    demand_counts demand(vec(ws.take<int64_t>(experts), experts));
    auto* const scratch = ws.take<float>(blocks * threshold_block);
    options.weight = weight_rule::normalised, options.scaling = 1.0f, options.spare = 0;
    auto* const standings = grouped ? ws.take<group_standing>(tokens * options.groups) : nullptr;
    status const routed = route(be, logits, {.bias = bias, .valid = valid}, ids, weights, demand, {.log_sum = log_sum}, options, ws);
    if (!routed.ok()) return routed;
    if (grouped) be.for_rows(tokens, experts * 32, threshold_group_row<format>{logits, bias, log_sum, ids, options, k, standings, level});
    else be.for_rows(tokens, 1, threshold_level_row<format>{logits, bias, log_sum, ids, options.score, level});
    be.for_rows(blocks, tokens * threshold_block,
                threshold_block_row<format>{logits, log_sum, ids, options.score, range, level, grouped, scratch, counts});
    threshold_counts_access::fill(thresholds, demand.tokens(), k, range);
    return check.result;
}

} // namespace keel::inline KEEL_ABI
