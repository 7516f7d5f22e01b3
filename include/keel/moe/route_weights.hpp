// The weights of experts that capacity has settled: after rerouting, or shared anew among those that serve the token.
//
//     keel::reroute_overflow(be, choices, weights, demand, ids, where, served, {}, capacity, ws).or_throw();
//     keel::route_weights(be, logits, ids, where.slots, weights, {.over = keel::normalise_over::served}, options).or_throw();
//     ...
//     keel::route_backward(be, dweights, logits, ids, weights, dlogits, options).or_throw();       // of these ids and weights
#pragma once

#include <keel/moe/route.hpp>

namespace keel {

/// Whose scores a token's weights are shared over.
///   chosen   all k experts, also those that dropped the token: their share is lost to it. Megatron; what route gives
///   served   those that serve it: what was dropped is shared out among them. DeepSpeed
/// A model keeps the one that it was trained with: surviving experts that suddenly weigh more made a perplexity of 14 one of 884
/// (colibri #865).
enum class normalise_over : uint8_t { chosen, served };

struct route_weights_options {
    normalise_over over; ///< no default: training and inference must agree
};

} // namespace keel

namespace keel::inline KEEL_ABI {

/// The logits of a token's experts, those that do not serve it as `nothing`.
template <class L, class I> struct served_logits {
    L const* logits;
    I const* ids;
    strided<int64_t const> slots;
    L const* nothing;
    KEEL_FN L const* element(int64_t i) const { return *slots.element(i) < 0 ? nothing : logits + static_cast<int64_t>(ids[i]); }
};

template <class L, class I> struct route_weights_row {
    view<L const, 2> logits;
    view<I const, 2> ids;
    view<int64_t const, 2> slots;
    view<float, 2> weights;
    normalise_over over;
    route_options options;
    L masked; ///< -Inf

    template <class G> KEEL_FN void operator()(G const& g, int64_t token) const {
        using F = typename G::value;
        int64_t const experts = logits.extent[1], k = ids.extent[1];
        float* const w = weights.at(token);
        if (ids(token, 0) < 0) return g.each(k, [&](auto at) { g.store(w, at, F(0.0f)); });
        L const* const z = logits.at(token);
        bool const soft = options.score == score_function::softmax;
        row_of_logits const row = read_logits(g, z, experts, soft && !shares_sum(options, k));
        if (over == normalise_over::chosen) return weights_of(g, indexed<L const, I const>{z, ids.at(token)}, k, row, options, w);
        weights_of(g, served_logits<L, I>{z, ids.at(token), {slots.at(token), slots.stride[1]}, &masked}, k, row, options, w);
    }
};

/// The weights of the experts ids of each token, as route computes them.
///
/// Formula        s = the score of ids' experts; w = scaling * s / (sum of s over all k, or over those with a slot), or scaling * s;
///                under `served` 0 without a slot, and all 0 where none serves. For ids of route and `chosen`, the bits of route's weights.
///                One expert a token: its score under any rule. One of several that serves alone has `scaling` whatever its logit, and no
///                gradient: what normalising after the drop means.
/// Shapes         logits [tokens, experts], ids [tokens, k] (-1: padding), slots [tokens, k] of any strides, weights [tokens, k]; columns
///                adjacent. Formats as route.
/// Gradient       route_backward with these ids and weights; combine_backward gives the dropped ones no dweights.
/// Padding        weights 0. Non-finite: as route; a row that is not sound has weights of NaN, under `served` the dropped ones too.
/// Status         bad_shape, bad_stride, bad_pointer, bad_option (ids, over, score, weight, scaling), overlap.
/// Aliasing       weights has memory of its own; it may be route's weights, which are not read. No workspace.
/// Cost           reads the logits once (twice from cache for softmax scores that are not normalised).
/// Source         the order of drop and normalisation of Megatron-LM (before) and DeepSpeed (after).
template <row_backend B, class L, class I>
status route_weights(B const& be, view<L, 2> logits, view<I, 2> ids, std::type_identity_t<view<int64_t const, 2>> slots,
                     view<float, 2> weights, route_weights_options how, route_options options = {}) {
    using format = std::remove_const_t<L>;
    int64_t const tokens = logits.extent[0], experts = logits.extent[1], k = ids.extent[1];
    validation check("route_weights");
    check.present("logits", logits).unit_stride("logits", logits);
    check.extent("ids", ids, 0, tokens).unit_stride("ids", ids);
    check.require(k >= 1 && k <= experts, status_code::bad_option, "ids", "columns", k, "1 up to the number of experts");
    check.shape("slots", slots, tokens, k);
    check.shape("weights", weights, tokens, k).unit_stride("weights", weights).distinct("weights", weights);
    check.disjoint("weights", weights, logits, ids, slots);
    check.require(how.over <= normalise_over::served, status_code::bad_option, "how.over", "value", static_cast<int64_t>(how.over),
                  "chosen or served");
    check_route_options(check, options);
    if (!check.ok()) return check.result;
    if constexpr (backend_traits<B>::space == memory_space::host) check_ids(check, ids, experts);
    if (!check.ok()) return check.result;
    format masked{};
    store_element(&masked, as_float(sign_bit | infinity_bits));
    be.for_rows(tokens, experts, route_weights_row<format, std::remove_const_t<I>>{logits, ids, slots, weights, how.over, options, masked});
    return check.result;
}

} // namespace keel::inline KEEL_ABI
