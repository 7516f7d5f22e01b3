// Thresholds under a group limit: the level at which an expert's group and the expert itself are in.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include <keel/backend/cpu/cpu.hpp>
#include <keel/moe/balance.hpp>
#include <moe/quantile_layer.hpp>
#include <moe/router.hpp>
#include <support/backends.hpp>
#include <support/catch.hpp>

using namespace keel_test;
using keel::status_code;

namespace {

constexpr int64_t tokens = 200, experts = 40, k = 5, groups = 8, size = experts / groups, in = 3;

using numbers = std::vector<double>;

/// Skewed by expert, by group, and by group and token.
guarded_matrix<float> grouped_logits() {
    std::vector<float> z = floats(data_kind::normal, tokens * experts, 3), of_group = floats(data_kind::normal, tokens * groups, 4);
    for (std::size_t i = 0; i < z.size(); ++i) {
        std::size_t const e = i % std::size_t{experts}, q = e / std::size_t{size};
        z[i] += 0.05f * static_cast<float>(e) + 0.8f * of_group[i / std::size_t{experts} * std::size_t{groups} + q] + (q % 3 == 0 ? 1.5f : 0.0f);
    }
    return guarded_matrix<float>(tokens, experts, 1, z);
}
numbers scores_of(guarded_matrix<float> const& z, int64_t t) {
    numbers s;
    for (int64_t e = 0; e < experts; ++e) s.push_back(1 / (1 + std::exp(-z.at(t, e))));
    return s;
}
double group_score_of(numbers of_group, keel::group_score by) {
    std::sort(of_group.rbegin(), of_group.rend());
    return by == keel::group_score::best ? of_group[0] : of_group[0] + of_group[1];
}
numbers experts_of(numbers const& c, std::size_t q) {
    auto const first = c.begin() + static_cast<std::ptrdiff_t>(q) * size;
    return numbers(first, first + size);
}
/// All but q, best first.
std::vector<std::size_t> others_of(numbers const& c, std::size_t q, keel::group_score by) {
    std::vector<std::size_t> order;
    for (std::size_t p = 0; p < groups; ++p)
        if (p != q) order.push_back(p);
    std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return group_score_of(experts_of(c, a), by) > group_score_of(experts_of(c, b), by); });
    return order;
}
/// Whether e is selected by c.
bool selects(numbers const& c, std::size_t e, keel::group_score by) {
    auto const q = e / std::size_t{size};
    auto const others = others_of(c, q, by);
    double const own = group_score_of(experts_of(c, q), by);
    int64_t before = 0, better = 0;
    for (std::size_t p : others) before += group_score_of(experts_of(c, p), by) > own ? 1 : 0;
    if (before >= in) return false;
    for (std::size_t i = 0; i < c.size(); ++i) {
        bool const in_play = i / std::size_t{size} == q || std::find(others.begin(), others.begin() + in - 1, i / std::size_t{size}) != others.begin() + in - 1;
        better += in_play && c[i] > c[e] ? 1 : 0;
    }
    return better < k;
}
/// As the definition says.
double level_of(numbers const& c, std::size_t e, keel::group_score by) {
    auto const q = e / std::size_t{size};
    auto const others = others_of(c, q, by);
    numbers candidates = experts_of(c, q), rest = candidates;
    for (std::size_t i = 0; i + 1 < std::size_t{in}; ++i)
        for (double x : experts_of(c, others[i])) candidates.push_back(x);
    std::sort(candidates.rbegin(), candidates.rend());
    rest.erase(rest.begin() + static_cast<std::ptrdiff_t>(e % std::size_t{size}));
    double const rival = group_score_of(experts_of(c, others[std::size_t{in} - 1]), by), place = candidates[std::size_t{k}];
    if (group_score_of(rest, by) > rival) return place;
    double const partner = by == keel::group_score::best ? 0 : *std::max_element(rest.begin(), rest.end());
    return std::max(place, rival - partner);
}
keel::route_options limited(keel::group_score by) { return {.groups = groups, .top_groups = in, .by = by}; }

} // namespace

TEST_CASE("with groups a threshold is where an expert and its group come in") {
    auto logits = grouped_logits();
    std::vector<float> bias = floats(data_kind::normal, experts, 5);
    for (float& b : bias) b *= 0.05f;
    for (keel::group_score by : {keel::group_score::top_two, keel::group_score::best}) {
        histogram h(experts);
        h.run(keel::cpu{}, logits.view(), bias, k, limited(by)).or_throw();
        double const low = static_cast<double>(h.counts.range().low), width = static_cast<double>(h.counts.range().width);
        std::vector<numbers> exact(experts);
        int64_t chosen = 0, wrong_way = 0;
        for (int64_t t = 0; t < tokens; ++t) {
            numbers const s = scores_of(logits, t);
            numbers c = s;
            for (std::size_t e = 0; e < c.size(); ++e) c[e] += static_cast<double>(bias[e]);
            for (std::size_t e = 0; e < c.size(); ++e) {
                double const level = level_of(c, e, by);
                exact[e].push_back(level - s[e]);
                if (t % 10 != 0) continue;
                // The definition itself: what selects e turns at the level, where e is selected now; below it nothing selects e.
                numbers raised = c, lowered = c;
                raised[e] = level + 1e-9, lowered[e] = level - 1e-9;
                bool const now = selects(c, e, by);
                chosen += now ? 1 : 0;
                wrong_way += (now && !selects(raised, e, by)) || selects(lowered, e, by) || now != (c[e] > level) ? 1 : 0;
            }
        }
        CHECK(chosen == tokens / 10 * k);
        CHECK(wrong_way == 0);
        // s + bias below 4 to 3 ulp, the sum and difference of two such, three roundings with a division by the width: 2^-19 in all.
        int64_t wrong = 0;
        for (std::size_t e = 0; e < exact.size(); ++e) {
            int64_t up_to = 0;
            for (int64_t b = 0; b < bins; ++b) {
                up_to += h.memory[e * static_cast<std::size_t>(bins) + static_cast<std::size_t>(b)];
                double const edge = low + width * static_cast<double>(b + 1);
                auto const below = [&](double x) { return std::count_if(exact[e].begin(), exact[e].end(), [&](double v) { return v < x; }); };
                wrong += b + 1 < bins && (up_to < below(edge - 0x1p-19) || up_to > below(edge + 0x1p-19)) ? 1 : 0;
            }
            wrong += up_to != tokens ? 1 : 0;
        }
        CHECK(wrong == 0);
        for_each_backend([&](std::string const& name, auto const& be) {
            INFO(name);
            histogram other(experts);
            other.run(be, logits.view(), bias, k, limited(by)).or_throw();
            CHECK(other.memory == h.memory);
        });
    }
}

TEST_CASE("the quantile rule evens out a group-limited router, which thresholds that see no groups do not") {
    auto logits = grouped_logits();
    for (keel::group_score by : {keel::group_score::top_two, keel::group_score::best}) {
        double most[2];
        for (bool sees : {false, true}) {
            quantile_layer l(experts);
            histogram h(experts);
            routed<> r(tokens, experts, k);
            for (int64_t s = 0; s < 15; ++s) {
                r.run(keel::cpu{}, logits.view(), {.bias = l.state().bias}, limited(by)).or_throw();
                if (s == 0) CHECK(keel::max_over_mean(r.demand) > 2.5);
                h.run(keel::cpu{}, logits.view(), l.bias, k, sees ? limited(by) : keel::route_options{}).or_throw();
                keel::commit(keel::cpu{}, l.state(), r.demand, h.counts, {.step = s}).or_throw();
                l.update_by_quantile(keel::open_gate(), {.rule = keel::balance_rule::quantile, .rate = 0.5f}).or_throw();
            }
            r.run(keel::cpu{}, logits.view(), {.bias = l.state().bias}, limited(by)).or_throw();
            most[sees ? 1 : 0] = keel::max_over_mean(r.demand);
        }
        INFO("blind " << most[0] << ", seeing " << most[1]);
        CHECK(most[1] < 1.3);              // 25 tokens an expert: one more is 1.04
        CHECK(most[0] > most[1] + 0.05);
    }
}

TEST_CASE("groups of masked experts, of two, of all that may be chosen; padding and bad rows") {
    float const inf = std::numeric_limits<float>::infinity(), nan = std::nanf("");
    // Three groups of two, the best one chosen, both of its experts: nobody is next.
    guarded_matrix<float> z(4, 6, 0, {3, 2, 1, 0, -1, -2, /**/ 2, -inf, 1, 1, -1, -inf, /**/ 9, 9, 9, 9, 9, 9, /**/ nan, 1, 2, 3, 4, 5});
    bool const valid[] = {true, true, false, true};
    std::vector<float> const bias(6);
    keel::route_options const options{.groups = 3, .top_groups = 1};
    histogram h(6);
    h.run(keel::cpu{}, z.view(), bias, 2, options, keel::vec(valid, 4)).or_throw();
    CHECK(h.counts.tokens() == 3);
    list sums(6), last(6);
    for (std::size_t e = 0; e < 6; ++e) {
        for (std::size_t b = 0; b < bins; ++b) sums[e] += h.memory[e * bins + b];
        last[e] = h.memory[e * bins + bins - 1];
    }
    CHECK(sums == list(6, 3));
    CHECK(last[1] >= 1); // masked itself
    CHECK(last[0] >= 1); // its neighbour is masked, and with it the group
    CHECK(last[4] >= 1);
    // The first row by hand: expert 0's group stays in while it has more than 1.2310586 (0.7310586 + 0.5) less its neighbour's.
    double const way = 1.2310586 - 1 / (1 + std::exp(-2.0)) - 1 / (1 + std::exp(-3.0));
    auto const bin = static_cast<std::size_t>((way + 1) / 2 * bins);
    CHECK(h.memory[bin] >= 1);
    // Equal experts, three of three chosen: their group is in without any one of them, and nobody is next. For the others the way in is
    // long: 2 * 0.9525741 less a neighbour's and their own 0.5.
    guarded_matrix<float> equals(1, 6, 0, {3, 3, 3, 0, 0, 0});
    for_each_backend([&](std::string const& name, auto const& be) {
        INFO(name);
        h.run(be, equals.view(), bias, 3, {.groups = 2, .top_groups = 1}).or_throw();
        for (std::size_t e = 0; e < 3; ++e) CHECK(h.memory[e * bins] == 1);
        for (std::size_t e = 3; e < 6; ++e) CHECK(h.memory[e * bins + static_cast<std::size_t>((2 * 0.9525741 - 1 + 1) / 2 * bins)] == 1);
    });
}

TEST_CASE("groups that cannot be are refused by name, and nothing is counted") {
    auto logits = grouped_logits();
    std::vector<float> const bias(experts);
    histogram h(experts);
    list const untouched = h.memory;
    auto const refuses = [&](keel::route_options options, char const* argument, int64_t chosen = k) {
        keel::status const s = h.run(keel::cpu{}, logits.view(), bias, chosen, options);
        CHECK(s.code == status_code::bad_option);
        CHECK(std::string(s.argument) == argument);
    };
    refuses({.groups = 3}, "options.groups");
    refuses({.groups = experts}, "options.groups");
    refuses({.groups = 8, .top_groups = 9}, "options.top_groups");
    refuses({.groups = 8, .top_groups = 1}, "k", 6);
    refuses({.groups = 8, .top_groups = 3, .by = static_cast<keel::group_score>(2)}, "options.by");
    CHECK(keel::count_thresholds(keel::cpu{}, logits.view(), keel::vec(bias.data(), experts), k, h.counts, limited(keel::group_score::best)).code ==
          status_code::small_workspace);
    CHECK(h.memory == untouched);
}
