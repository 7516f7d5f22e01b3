// Same bits: the router, its losses and gradient, capacity with rerouting, dispatch, combine and their gradients, the bias, a fresh router.
#include <keel/format/bf16.hpp>
#include <keel/moe/balance.hpp>
#include <keel/moe/dispatch.hpp>
#include <keel/moe/load_balance.hpp>
#include <keel/moe/route_weights.hpp>
#include <keel/moe/router_init.hpp>
#include <keel/moe/thresholds.hpp>
#include <moe/router.hpp>
#include <support/bits.hpp>

using namespace keel_test;

namespace {

template <class T> void add(digest& d, std::vector<T> const& v) { d.add(v.data(), v.size() * sizeof(T)); }

/// One layer's step: route, commit, drop and reroute, weigh, dispatch, combine, all gradients, update.
template <class B> void layer(B const& be, digest& d, data_kind kind, int64_t experts, keel::route_options options, keel::drop_order order) {
    int64_t const tokens = 131, k = experts < 5 ? experts : 5, width = 45;
    guarded_matrix<keel::bf16> logits(tokens, experts, 1, floats(kind, tokens * experts, 1)), x(tokens, width, 0, floats(data_kind::normal, tokens * width, 2));
    guarded_matrix<keel::bf16> dy(tokens, width, 0, floats(data_kind::normal, tokens * width, 3)), y(tokens, width), dx(tokens, width);
    guarded_matrix<float> weights(tokens, k), dweights(tokens, k), terms(tokens, 4), dlogits(tokens, experts), factors(2, experts), loss(1, 1);
    guarded_matrix<int32_t> ids(tokens, k);
    guarded_matrix<int64_t> slots(tokens, k), offsets(1, experts + 1);
    auto const count = static_cast<std::size_t>(experts);
    std::vector<float> bias = floats(data_kind::uniform, experts, 4);
    std::vector<int64_t> given(count), pending(count), ledger(static_cast<std::size_t>(keel::balance_ledger_size(1)));
    int64_t const documents[] = {0, 50, tokens};
    keel::balance_state const state{keel::vec(bias.data(), experts), keel::vec(pending.data(), experts),
                                    keel::vec(ledger.data(), keel::balance_ledger_size(1))};

    routed<> r(tokens, experts, k, options.spare);
    r.run(be, logits.view(), {.bias = state.bias}, options).or_throw();
    d.add(r.ids), d.add(r.weights), d.add(r.log_sum), add(d, r.counts);

    keel::served_counts served(keel::vec(given.data(), experts));
    keel::expert_slots const where{slots.view(), offsets.vec()};
    scratch ws(keel::reroute_overflow_workspace(tokens, experts, k, options.spare));
    keel::reroute_overflow(be, r.ids.view(), r.weights.view(), r.demand, ids.view(), where, served, {}, {keel::capacity_limit::factor(5, 4), order}, ws.get()).or_throw();
    keel::route_weights(be, logits.view(), ids.view(), slots.view(), weights.view(), {keel::normalise_over::served}, options).or_throw();
    d.add(ids), d.add(slots), d.add(offsets), d.add(weights), add(d, given);

    scratch by_document(keel::sequence_balance_factors_workspace(2, experts)), by_token(keel::load_balance_loss_workspace(tokens));
    keel::sequence_balance_factors(be, r.ids.view(), keel::vec(&documents[0], 3), r.demand, factors.view(), {.coefficient = 0.1f}, by_document.get()).or_throw();
    keel::load_balance_loss(be, logits.view(), factors.view(), {.documents = keel::vec(&documents[0], 3)}, loss.view().data, options, by_token.get()).or_throw();
    d.add(factors), d.add(loss);

    guarded_matrix<keel::bf16> rows(served.total(), width), drows(served.total(), width);
    guarded_matrix<float> row_terms(1, served.total()), shares(1, experts);
    keel::dispatch(be, x.view(), where, rows.view()).or_throw();
    keel::combine(be, rows.view(), where, weights.view(), x.view(), y.view(), {.share_terms = terms.view(), .row_terms = row_terms.vec()}).or_throw();
    d.add(rows), d.add(y), d.add(terms);
    keel::routed_share share;
    keel::measure_routed_share(be, terms.view(), &share).or_throw();
    keel::measure_expert_shares(be, row_terms.vec(), offsets.vec(), share, shares.vec()).or_throw();
    d.add(&share, sizeof share), d.add(shares);

    keel::combine_backward(be, dy.view(), rows.view(), where, weights.view(), {.dexpert_rows = drows.view(), .dweights = dweights.view()}).or_throw();
    keel::dispatch_backward(be, drows.view(), where, dx.view()).or_throw();
    keel::route_backward(be, dweights.view(), logits.view(), ids.view(), weights.view(), dlogits.view(), options,
                         {.z_loss = 0.01f, .factors = factors.view(), .documents = keel::vec(&documents[0], 3)})
        .or_throw();
    d.add(drows), d.add(dweights), d.add(dx), d.add(dlogits);

    keel::commit(be, state, r.demand, {}).or_throw();
    keel::demand_counts all;
    keel::pending_demand(state, all).or_throw();
    keel::update_balance(be, state, keel::reduced_over_ranks(all), keel::open_gate()).or_throw();
    add(d, bias);

    // The same step by quantiles.
    if (experts != 64) return;
    int64_t const bins = 50;
    std::vector<int64_t> histogram(count * 50), sums(count * 50), signs(count);
    keel::balance_state const quantiles{state.bias, state.pending, state.ledger, keel::vec(signs.data(), experts), keel::rows(sums.data(), experts, bins)};
    keel::threshold_counts thresholds(keel::rows(histogram.data(), experts, bins));
    scratch more(keel::count_thresholds_workspace(tokens, experts, k, options));
    r.run(be, logits.view(), {.bias = state.bias}, options).or_throw();
    keel::count_thresholds(be, logits.view(), state.bias, k, thresholds, options, more.get()).or_throw();
    keel::commit(be, quantiles, r.demand, thresholds, {.step = 1}).or_throw();
    keel::pending_demand(quantiles, all).or_throw();
    keel::update_balance(be, quantiles, keel::reduced_over_ranks(all), keel::open_gate(), {.rule = keel::balance_rule::quantile, .rate = 0.5f}).or_throw();
    keel::centre_bias(be, quantiles).or_throw();
    add(d, histogram), add(d, bias), add(d, signs);
}

} // namespace

int main() {
    for (data_kind kind : all_kinds)
        for (int64_t experts : {3, 64, 300}) {
            auto const which = static_cast<std::size_t>(experts) % 3 + static_cast<std::size_t>(kind);
            keel::route_options options{.score = all_scores[which % 3], .weight = both_rules[which / 3 % 2], .scaling = 2.5f};
            if (experts > 3) options.spare = 2;
            if (experts == 64) options.groups = 4, options.top_groups = 2;
            if (experts == 300) options.groups = 50, options.top_groups = 3, options.by = keel::group_score::best;
            auto const order = static_cast<keel::drop_order>(static_cast<int>(kind) % 4);
            same_bits(std::string("moe ") + name_of(kind) + " " + std::to_string(experts),
                      [&](auto const& be, digest& d) { layer(be, d, kind, experts, options, order); });
        }
    same_bits("route fp32", [](auto const& be, digest& d) {
        guarded_matrix<float> z(70, 40, 1, floats(data_kind::any_bits, 70 * 40, 7)), g(70, 4, 0, floats(data_kind::normal, 280, 8)), dz(70, 40);
        routed<> r(70, 40, 4);
        r.run(be, z.view()).or_throw();
        keel::route_backward(be, g.view(), z.view(), r.ids.view(), r.weights.view(), dz.view()).or_throw();
        d.add(r.ids), d.add(r.weights), d.add(r.log_sum), d.add(dz);
    });
    same_bits("router_init", [](auto const& be, digest& d) {
        guarded_matrix<float> w(10, 77);
        keel::router_init(be, w.view(), {.seed = 11}, {.norm = 0.5f, .orthogonal = true}).or_throw();
        d.add(w);
    });
    return disagreements != 0;
}
