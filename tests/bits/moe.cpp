// Same bits: the router, its gradient, capacity, dispatch, combine and their gradients, the bias, a fresh router.
#include <keel/format/bf16.hpp>
#include <keel/moe/balance.hpp>
#include <keel/moe/dispatch.hpp>
#include <keel/moe/router_init.hpp>
#include <keel/moe/thresholds.hpp>
#include <moe/router.hpp>
#include <support/bits.hpp>

using namespace keel_test;

namespace {

template <class T> void add(digest& d, std::vector<T> const& v) { d.add(v.data(), v.size() * sizeof(T)); }

/// One layer's step: route, commit, drop, dispatch, combine, all gradients, update.
template <class B> void layer(B const& be, digest& d, data_kind kind, int64_t experts, keel::route_options options) {
    int64_t const tokens = 131, k = experts < 5 ? experts : 5, width = 45;
    guarded_matrix<keel::bf16> logits(tokens, experts, 1, floats(kind, tokens * experts, 1)), x(tokens, width, 0, floats(data_kind::normal, tokens * width, 2));
    guarded_matrix<keel::bf16> dy(tokens, width, 0, floats(data_kind::normal, tokens * width, 3)), y(tokens, width), dx(tokens, width);
    guarded_matrix<float> dweights(tokens, k), terms(tokens, 4), dlogits(tokens, experts);
    guarded_matrix<int64_t> slots(tokens, k), offsets(1, experts + 1);
    auto const count = static_cast<std::size_t>(experts);
    std::vector<float> bias = floats(data_kind::uniform, experts, 4);
    std::vector<int64_t> given(count), pending(count), ledger(static_cast<std::size_t>(keel::balance_ledger_size(1)));
    keel::balance_state const state{keel::vec(bias.data(), experts), keel::vec(pending.data(), experts),
                                    keel::vec(ledger.data(), keel::balance_ledger_size(1))};

    routed<> r(tokens, experts, k);
    r.run(be, logits.view(), {.bias = state.bias}, options).or_throw();
    d.add(r.ids), d.add(r.weights), d.add(r.log_sum), add(d, r.counts);

    keel::served_counts served(keel::vec(given.data(), experts));
    keel::expert_slots const where{slots.view(), offsets.vec()};
    scratch ws(keel::apply_capacity_workspace(tokens, experts));
    keel::apply_capacity(be, r.ids.view(), r.demand, where, served, {.limit = keel::capacity_limit::factor(5, 4)}, ws.get()).or_throw();
    d.add(slots), d.add(offsets), add(d, given);

    guarded_matrix<keel::bf16> rows(served.total(), width), drows(served.total(), width);
    keel::dispatch(be, x.view(), where, rows.view()).or_throw();
    keel::combine(be, rows.view(), where, r.weights.view(), x.view(), y.view(), {.share_terms = terms.view()}).or_throw();
    d.add(rows), d.add(y), d.add(terms);
    keel::routed_share share;
    keel::measure_routed_share(be, terms.view(), &share).or_throw();
    d.add(&share, sizeof share);

    keel::combine_backward(be, dy.view(), rows.view(), where, r.weights.view(), {.dexpert_rows = drows.view(), .dweights = dweights.view()}).or_throw();
    keel::dispatch_backward(be, drows.view(), where, dx.view()).or_throw();
    keel::route_backward(be, dweights.view(), logits.view(), r.ids.view(), r.weights.view(), dlogits.view(), options, {.z_loss = 0.01f}).or_throw();
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
    scratch more(keel::count_thresholds_workspace(tokens, experts, k));
    r.run(be, logits.view(), {.bias = state.bias}, options).or_throw();
    keel::count_thresholds(be, logits.view(), state.bias, k, thresholds, options.score, more.get()).or_throw();
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
            keel::route_options const options{.score = all_scores[which % 3], .weight = both_rules[which / 3 % 2], .scaling = 2.5f};
            same_bits(std::string("moe ") + name_of(kind) + " " + std::to_string(experts),
                      [&](auto const& be, digest& d) { layer(be, d, kind, experts, options); });
        }
    same_bits("router_init", [](auto const& be, digest& d) {
        guarded_matrix<float> w(10, 77);
        keel::router_init(be, w.view(), {.seed = 11}, {.norm = 0.5f, .orthogonal = true}).or_throw();
        d.add(w);
    });
    return disagreements != 0;
}
