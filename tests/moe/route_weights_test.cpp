// Weights after the drop, and their gradient, against the formula and its finite differences in double.
#include <cmath>
#include <limits>

#include <keel/moe/capacity.hpp>
#include <keel/moe/route_weights.hpp>
#include <moe/router.hpp>
#include <support/backends.hpp>
#include <support/catch.hpp>

using namespace keel_test;
using keel::normalise_over;
using keel::score_function;
using keel::weight_rule;

namespace {

constexpr normalise_over both_sets[] = {normalise_over::chosen, normalise_over::served};

/// Routed, capped and rerouted tokens; token 5 is padding.
struct layer {
    int64_t tokens, experts, k;
    guarded_matrix<float> z;
    routed<> r;
    guarded_matrix<int32_t> ids;
    guarded_matrix<int64_t> slots, offsets;

    layer(int64_t t, int64_t e, int64_t chosen, int64_t spare, keel::route_options o)
        : tokens(t), experts(e), k(chosen), z(t, e, 1, floats(data_kind::normal, t * e, 41)), r(t, e, chosen, spare), ids(t, chosen, 1), slots(t, chosen, 2),
          offsets(1, e + 1) {
        o.spare = spare;
        guarded_matrix<float> bias(1, e);
        bias.set(0, 0, 0.75f); // an expert that everyone wants
        bool valid[64];
        for (int64_t i = 0; i < t; ++i) valid[i] = i != 5;
        r.run(keel::cpu{}, z.view(), {.bias = bias.vec(), .valid = keel::vec<bool const>(valid, t)}, o).or_throw();
        std::vector<int64_t> memory(static_cast<std::size_t>(e));
        keel::served_counts served(keel::vec(memory.data(), e));
        scratch ws(keel::reroute_overflow_workspace(t, e, chosen, spare));
        keel::reroute_overflow(keel::cpu{}, r.ids.view(), r.weights.view(), r.demand, ids.view(), {slots.view(), offsets.vec()}, served, {},
                               {keel::capacity_limit::factor(3, 4)}, ws.get())
            .or_throw();
    }
    bool serves(int64_t t, int64_t j) const { return slots.get(t, j) >= 0; }
};

double score(score_function s, std::vector<double> const& z, std::size_t e) {
    if (s == score_function::sigmoid) return 1 / (1 + std::exp(-z[e]));
    if (s == score_function::sqrt_softplus) return std::sqrt(std::log1p(std::exp(z[e])));
    double sum = 0;
    for (double v : z) sum += std::exp(v);
    return std::exp(z[e]) / sum;
}

/// The weights of token t for the logits z.
std::vector<double> weights(layer const& l, int64_t t, std::vector<double> const& z, keel::route_options o, normalise_over over) {
    std::vector<double> w;
    double sum = 0;
    for (int64_t j = 0; j < l.k; ++j) {
        double const s = score(o.score, z, static_cast<std::size_t>(l.ids.get(t, j)));
        w.push_back(over == normalise_over::chosen || l.serves(t, j) ? s : 0.0);
        sum += w.back();
    }
    bool const normalise = o.weight == weight_rule::normalised && l.k > 1;
    for (double& v : w) v *= static_cast<double>(o.scaling) / (normalise && sum > 0 ? sum : 1);
    return w;
}

} // namespace

TEST_CASE("weights over what serves, or over what was chosen, and their gradient: every score and rule, rerouted and dropped") {
    for (score_function s : all_scores)
        for (weight_rule rule : both_rules)
            for (normalise_over over : both_sets)
                for (int64_t k : {1, 3}) {
                    INFO("score " << static_cast<int>(s) << " rule " << static_cast<int>(rule) << " over " << static_cast<int>(over) << " k " << k);
                    keel::route_options const o{.score = s, .weight = rule, .scaling = 1.5f};
                    layer l(23, 6, k, 1, o);
                    guarded_matrix<float> w(l.tokens, k, 1), g(l.tokens, k, 0, floats(data_kind::normal, l.tokens * k, 3)), dz(l.tokens, l.experts);
                    keel::route_weights(keel::cpu{}, l.z.view(), l.ids.view(), l.slots.view(), w.view(), {over}, o).or_throw();
                    int64_t dropped = 0, moved = 0;
                    for (int64_t t = 0; t < l.tokens; ++t)
                        for (int64_t j = 0; j < k; ++j) {
                            if (!l.serves(t, j)) g.set(t, j, 0.0f); // what combine_backward gives
                            dropped += t != 5 && !l.serves(t, j) ? 1 : 0, moved += l.ids.get(t, j) != l.r.ids.get(t, j) ? 1 : 0;
                        }
                    REQUIRE(dropped > 0);
                    REQUIRE(moved > 0);
                    keel::route_backward(keel::cpu{}, g.view(), l.z.view(), l.ids.view(), w.view(), dz.view(), o).or_throw();
                    for (int64_t t = 0; t < l.tokens; ++t) {
                        std::vector<double> z;
                        for (int64_t e = 0; e < l.experts; ++e) z.push_back(l.z.at(t, e));
                        if (t == 5) {
                            for (int64_t j = 0; j < k; ++j) CHECK(w.at(t, j) == 0.0);
                            for (int64_t e = 0; e < l.experts; ++e) CHECK(dz.at(t, e) == 0.0);
                            continue;
                        }
                        auto const want = weights(l, t, z, o, over);
                        for (int64_t j = 0; j < k; ++j) CHECK(w.at(t, j) == Approx(want[static_cast<std::size_t>(j)]).epsilon(24 * 0x1p-24).margin(0)); // as in route_test
                        auto const loss = [&] {
                            auto const v = weights(l, t, z, o, over);
                            double sum = 0;
                            for (int64_t j = 0; j < k; ++j) sum += g.at(t, j) * v[static_cast<std::size_t>(j)];
                            return sum;
                        };
                        for (int64_t e = 0; e < l.experts; ++e) {
                            double& v = z[static_cast<std::size_t>(e)];
                            double const keep = v, h = 1e-5;
                            v = keep + h;
                            double const high = loss();
                            v = keep - h;
                            double const low = loss();
                            v = keep;
                            CHECK(dz.at(t, e) == Approx((high - low) / (2 * h)).margin(2e-6).epsilon(2e-6)); // as in route_backward_test
                        }
                    }
                    CHECK(w.untouched());
                }
}

TEST_CASE("over the chosen of route itself, the bits are route's; on every backend the same") {
    for (score_function s : all_scores)
        for (weight_rule rule : both_rules) {
            keel::route_options const o{.score = s, .weight = rule, .scaling = 2.5f};
            layer l(40, 9, 4, 0, o);
            guarded_matrix<float> w(40, 4, 1);
            keel::route_weights(keel::cpu{}, l.z.view(), l.r.ids.view(), l.slots.view(), w.view(), {normalise_over::chosen}, o).or_throw();
            CHECK(w.contents() == l.r.weights.contents());
            guarded_matrix<float> want(40, 4, 1);
            keel::route_weights(keel::reference{}, l.z.view(), l.ids.view(), l.slots.view(), want.view(), {normalise_over::served}, o).or_throw();
            for_each_backend([&](std::string const& name, auto const& be) {
                INFO(name);
                keel::route_weights(be, l.z.view(), l.ids.view(), l.slots.view(), w.view(), {normalise_over::served}, o).or_throw();
                CHECK(w.contents() == want.contents());
            });
        }
}

TEST_CASE("one that serves alone has all the weight, none that serves none, and vanishing scores are shared as exactly as others") {
    float const inf = std::numeric_limits<float>::infinity();
    guarded_matrix<float> z(5, 4, 0, {-200, -300, -200, 0, 1, 2, 3, 4, -200, 40, -200, 0, 1, -inf, -inf, 2, 1, inf, 0, 0}), w(5, 3);
    guarded_matrix<int32_t> ids(5, 3);
    guarded_matrix<int64_t> slots(5, 3);
    for (int64_t t = 0; t < 5; ++t)
        for (int64_t j = 0; j < 3; ++j) ids.set(t, j, static_cast<int32_t>(j)), slots.set(t, j, 0);
    slots.set(0, 1, -1), slots.set(0, 2, -1);                    // one serves
    for (int64_t j = 0; j < 3; ++j) slots.set(1, j, -1);         // none
    slots.set(2, 1, -1);                                         // the one of 40 dropped the token
    slots.set(3, 0, -1);                                         // only masked experts serve
    slots.set(4, 0, -1);                                         // a row with +Inf
    for (score_function s : all_scores) {
        keel::route_weights(keel::cpu{}, z.view(), ids.view(), slots.view(), w.view(), {normalise_over::served}, {.score = s, .scaling = 2.0f}).or_throw();
        CHECK(w.at(0, 0) == 2.0);
        CHECK(w.at(0, 1) == 0.0);
        for (int64_t j = 0; j < 3; ++j) {
            CHECK(w.at(1, j) == 0.0);
            CHECK(w.at(3, j) == 0.0);
            CHECK(std::isnan(w.at(4, j)));
        }
        CHECK(w.at(2, 0) == 1.0);
        CHECK(w.at(2, 1) == 0.0);
        CHECK(w.at(2, 2) == 1.0);
    }
}

TEST_CASE("a bad call of route_weights names the argument and writes nothing") {
    guarded_matrix<float> z(2, 4), w(2, 2, 0, {3, 3, 3, 3});
    guarded_matrix<int32_t> ids(2, 2);
    guarded_matrix<int64_t> slots(2, 2), wide(2, 3);
    auto const before = w.contents();
    auto const call = [&](normalise_over over, keel::view<int64_t, 2> where) {
        return keel::route_weights(keel::cpu{}, z.view(), ids.view(), where, w.view(), {over});
    };
    using keel::status_code;
    CHECK(call(static_cast<normalise_over>(2), slots.view()).message() == "route_weights: how.over has value = 2, wanted chosen or served (bad_option)");
    CHECK(call(normalise_over::served, wide.view()).code == status_code::bad_shape);
    ids.set(0, 1, 4);
    CHECK(call(normalise_over::served, slots.view()).code == status_code::bad_option);
    ids.set(0, 1, 1);
    CHECK(keel::route_weights(keel::cpu{}, z.view(), ids.view(), slots.view(), keel::columns(z.view(), 0, 2), {normalise_over::served}).code == status_code::overlap);
    CHECK(w.contents() == before);
    CHECK(call(normalise_over::served, slots.view()).ok());
}
