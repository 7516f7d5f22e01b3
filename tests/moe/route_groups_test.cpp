// Group-limited selection and next choices, against the definition in double.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>

#include <moe/router.hpp>
#include <support/backends.hpp>
#include <support/catch.hpp>

using namespace keel_test;
using keel::group_score;
using keel::score_function;
using keel::weight_rule;

namespace {

constexpr float inf = std::numeric_limits<float>::infinity();
constexpr group_score both_ways[] = {group_score::top_two, group_score::best};

/// The k + spare experts of a row by their scores in double, and the least distance between two numbers that decided.
struct selection {
    std::vector<int64_t> ids;
    double margin = 1;
};
selection select(std::vector<double> const& z, std::vector<double> const& bias, keel::route_options o, std::size_t listed) {
    std::size_t const experts = z.size(), groups = static_cast<std::size_t>(o.groups), size = experts / groups;
    double sum = 0;
    for (double v : z) sum += std::exp(v);
    std::vector<double> c;
    for (std::size_t e = 0; e < experts; ++e) {
        double const s = o.score == score_function::softmax ? std::exp(z[e]) / sum
                         : o.score == score_function::sigmoid ? 1 / (1 + std::exp(-z[e])) : std::sqrt(std::log1p(std::exp(z[e])));
        c.push_back(s + bias[e]);
    }
    std::vector<double> score;
    for (std::size_t q = 0; q < groups; ++q) {
        std::vector<double> own(c.begin() + static_cast<std::ptrdiff_t>(q * size), c.begin() + static_cast<std::ptrdiff_t>((q + 1) * size));
        std::sort(own.rbegin(), own.rend());
        score.push_back(o.by == group_score::best ? own[0] : own[0] + own[1]);
    }
    selection s;
    auto const best = [&](std::vector<double> const& value, std::size_t count) {
        std::vector<std::size_t> order(value.size());
        std::iota(order.begin(), order.end(), 0u);
        std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return value[a] > value[b]; });
        for (std::size_t i = 0; i < count && i + 1 < value.size(); ++i) {
            double const apart = value[order[i]] - value[order[i + 1]];
            if (std::isfinite(apart)) s.margin = std::min(s.margin, apart);
        }
        order.resize(count);
        return order;
    };
    auto const chosen = best(score, static_cast<std::size_t>(o.top_groups));
    for (std::size_t e = 0; e < experts; ++e)
        if (std::find(chosen.begin(), chosen.end(), e / size) == chosen.end()) c[e] = -std::numeric_limits<double>::infinity();
    for (std::size_t e : best(c, listed)) s.ids.push_back(std::isinf(c[e]) ? -1 : static_cast<int64_t>(e));
    return s;
}

/// The ids of one row, the same on every backend.
std::vector<int64_t> ids_of(std::vector<float> const& row, std::vector<float> const& bias, int64_t k, int64_t spare, keel::route_options o) {
    auto const experts = static_cast<int64_t>(row.size());
    guarded_matrix<float> z(1, experts, 0, row), b(1, experts, 0, bias.empty() ? std::vector<float>(row.size()) : bias);
    o.spare = spare;
    std::vector<int64_t> first;
    for_each_backend([&](std::string const& name, auto const& be) {
        INFO(name);
        routed<> r(1, experts, k, spare);
        r.run(be, z.view(), {.bias = bias.empty() ? keel::view<float, 1>{} : b.vec()}, o).or_throw();
        std::vector<int64_t> own;
        for (int64_t j = 0; j < k + spare; ++j) own.push_back(r.id(0, j));
        if (first.empty()) first = own;
        CHECK(own == first);
    });
    return first;
}

} // namespace

TEST_CASE("a token's experts are the best of its best groups, and its next choices go on in the same order") {
    for (auto const& [experts, groups, top, k, spare] :
         {std::array<int64_t, 5>{64, 8, 4, 8, 0}, {12, 3, 1, 2, 3}, {32, 4, 2, 3, 2}, {10, 5, 2, 4, 4}, {16, 1, 1, 3, 5}, {40, 2, 2, 6, 1}})
        for (score_function s : all_scores)
            for (group_score by : both_ways)
                for (bool has_bias : {false, true}) {
                    int64_t const tokens = 67;
                    keel::route_options const o{.score = s, .groups = groups, .top_groups = top, .by = by, .spare = spare};
                    INFO("score " << static_cast<int>(s) << " by " << static_cast<int>(by) << " bias " << has_bias << " groups " << o.groups);
                    guarded_matrix<float> z(tokens, experts, 1, floats(data_kind::normal, tokens * experts, 5)), bias(1, experts, 0, floats(data_kind::uniform, experts, 6));
                    routed<> r(tokens, experts, k, spare), plain(tokens, experts, k);
                    keel::route_inputs const in{.bias = has_bias ? bias.vec() : keel::view<float, 1>{}};
                    r.run(keel::cpu{}, z.view(), in, o).or_throw();
                    int64_t unclear = 0, counted = 0;
                    for (int64_t t = 0; t < tokens; ++t) {
                        std::vector<double> row, b;
                        std::vector<int64_t> got;
                        for (int64_t e = 0; e < experts; ++e) row.push_back(z.at(t, e)), b.push_back(has_bias ? bias.at(0, e) : 0.0);
                        for (int64_t j = 0; j < k + spare; ++j) got.push_back(r.id(t, j));
                        selection const want = select(row, b, o, static_cast<std::size_t>(k + spare));
                        if (want.margin < 2e-6) ++unclear; // sums below 4 are good to 4 ulp of 2^-22
                        else CHECK(got == want.ids);
                    }
                    CHECK(unclear < 4);
                    // The counts are of the k choices; weights are those of the same experts without groups.
                    for (int64_t c : r.counts) counted += c;
                    CHECK(counted == tokens * k);
                    CHECK(r.demand.per_token() == k);
                    CHECK(r.untouched());
                    routed<> same(tokens, experts, k, spare);
                    same.run(keel::simt<32>{}, z.view(), in, o).or_throw();
                    CHECK(same.same(r));
                    if (spare > 0 && top == groups) { // next choices change nothing else
                        keel::route_options without = o;
                        without.spare = 0;
                        plain.run(keel::cpu{}, z.view(), in, without).or_throw();
                        CHECK(plain.weights.contents() == r.weights.contents());
                        CHECK(plain.counts == r.counts);
                    }
                }
}

TEST_CASE("groups are masked with less than any number: a bias below 0 lifts nobody from outside") { // a mask of 0 would
    std::vector<float> const z{3, 2, 1, 0, -1, -2, -3, -4}, low(8, -50.0f);
    for (score_function s : all_scores)
        for (group_score by : both_ways) {
            keel::route_options const o{.score = s, .groups = 4, .top_groups = 1, .by = by};
            CHECK(ids_of(z, low, 2, 0, o) == std::vector<int64_t>{0, 1});
            std::vector<float> uneven = low;
            uneven[7] = -40.0f; // the bias does choose among them
            CHECK(ids_of(z, uneven, 2, 0, o) == std::vector<int64_t>{7, 6});
        }
}

TEST_CASE("ties of groups go to the larger logit, then to the lower group") {
    keel::route_options const sigmoid{.groups = 3, .top_groups = 1};
    // All scores are 1 in fp32.
    CHECK(ids_of({20, 20, 20, 20, 20, 20}, {}, 2, 0, sigmoid) == std::vector<int64_t>{0, 1});
    CHECK(ids_of({20, 20, 20, 20, 20, 20.5f}, {}, 2, 0, sigmoid) == std::vector<int64_t>{5, 4});
    CHECK(ids_of({20, 20, 20.25f, 20, 20, 20.5f}, std::vector<float>{0, 0, 1, 0, 1, 0}, 2, 0, sigmoid) == std::vector<int64_t>{4, 5});
    CHECK(ids_of({0, 0, 0, 0, 0, 0}, std::vector<float>{1, 1, 1, 1, 1, 1.0f + 0x1p-20f}, 2, 0, sigmoid)[0] == 5);
}

TEST_CASE("masked experts and bad logits: the limit holds, ids stay distinct, next choices end") {
    for (score_function s : all_scores)
        for (group_score by : both_ways) {
            keel::route_options const o{.score = s, .groups = 2, .top_groups = 1, .by = by};
            // One expert of group 0 is left: by the two best it counts as masked, by the best it wins; what is masked there is taken then.
            auto const one = ids_of({5, -inf, -inf, 0, 0, 0}, {}, 2, 2, o);
            CHECK(one == (by == group_score::best ? std::vector<int64_t>{0, 1, -1, -1} : std::vector<int64_t>{3, 4, 5, -1}));
            // Every logit is a NaN, or all are masked: experts of one group.
            for (float bad : {std::numeric_limits<float>::quiet_NaN(), -inf})
                for (bool has_bias : {false, true})
                    CHECK(ids_of(std::vector<float>(6, bad), has_bias ? std::vector<float>{1, 2, 3, 4, 5, 6} : std::vector<float>{}, 3, 1, o) ==
                          std::vector<int64_t>{0, 1, 2, -1});
            // One NaN: the others of its group come first, none from outside.
            auto const nan = ids_of({9, std::numeric_limits<float>::quiet_NaN(), 8, 0, 0, 0}, {}, 3, 0, o);
            CHECK(nan == std::vector<int64_t>{0, 2, 1});
        }
    // Without groups the next choices end at the masked ones too, while the k choices may need them.
    CHECK(ids_of({1, -inf, 0, -inf}, {}, 1, 3, {}) == std::vector<int64_t>{0, 2, -1, -1});
    CHECK(ids_of({1, -inf, -inf, -inf}, {}, 2, 2, {}) == std::vector<int64_t>{0, 1, -1, -1});
}

TEST_CASE("groups and next choices that cannot be are refused by name") { // vLLM #29439, HF #48647
    guarded_matrix<float> z(4, 12, 0, floats(data_kind::normal, 48));
    routed<> r(4, 12, 4), wide(4, 12, 4, 2);
    auto const code = [&](routed<>& into, keel::route_options o) { return into.run(keel::cpu{}, z.view(), {}, o).code; };
    using keel::status_code;
    for (int64_t groups : {0, -1, 5, 12}) CHECK(code(r, {.groups = groups}) == status_code::bad_option); // 12: one expert a group
    CHECK(code(r, {.groups = 4, .top_groups = 0}) == status_code::bad_option);
    CHECK(code(r, {.groups = 4, .top_groups = 5}) == status_code::bad_option);
    CHECK(r.run(keel::cpu{}, z.view(), {}, {.groups = 4, .top_groups = 1}).message() == "route: ids has columns = 4, wanted no more than the groups' experts (bad_option)");
    CHECK(code(r, {.groups = 4, .top_groups = 2, .by = static_cast<group_score>(2)}) == status_code::bad_option);
    CHECK(code(r, {.spare = -1}) == status_code::bad_option);
    CHECK(code(wide, {.spare = 1}) == status_code::bad_shape);
    routed<> all(4, 12, 8, 5);
    CHECK(code(all, {.spare = 5}) == status_code::bad_option);
    CHECK(code(wide, {.spare = 2}) == status_code::ok);
    CHECK(code(r, {.groups = 4, .top_groups = 2}) == status_code::ok);
}
