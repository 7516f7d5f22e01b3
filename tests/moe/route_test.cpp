// The router against its formulas in double, its ties, its bad rows, and every backend against the reference.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <memory>
#include <set>

#include <moe/router.hpp>
#include <support/backends.hpp>
#include <support/catch.hpp>

using namespace keel_test;
using keel::score_function;
using keel::weight_rule;

namespace {

constexpr float inf = std::numeric_limits<float>::infinity();
constexpr float quiet = std::numeric_limits<float>::quiet_NaN();

/// log s(z) in long double; `row` is the token's logits.
long double log_score(score_function s, std::vector<double> const& row, std::size_t e) {
    long double const z = static_cast<long double>(row[e]);
    if (s == score_function::sigmoid) return z < 0 ? z - std::log1p(std::exp(z)) : -std::log1p(std::exp(-z));
    if (s == score_function::sqrt_softplus) {
        long double const softplus = std::log1p(std::exp(-std::abs(z))) + std::max(z, 0.0L);
        return 0.5L * (z < -40 ? z : std::log(softplus));
    }
    long double const top = static_cast<long double>(*std::max_element(row.begin(), row.end()));
    long double sum = 0;
    for (double v : row) sum += std::exp(static_cast<long double>(v) - top);
    return z - top - std::log(sum);
}

/// Ids are the k best by s + bias, within what fp32 can tell apart, in order; weights are the formula's on these ids.
template <class L, class I>
void check_rows(guarded_matrix<L> const& logits, guarded_matrix<float> const& bias, routed<I> const& r, keel::route_options options) {
    std::vector<int64_t> count(r.counts.size(), 0);
    int64_t const experts = logits.columns(), k = r.ids.columns();
    for (int64_t t = 0; t < logits.rows(); ++t) {
        INFO("token " << t << " of " << logits.rows() << ", experts " << experts << ", k " << k << ", score " << static_cast<int>(options.score));
        std::vector<double> row;
        for (int64_t e = 0; e < experts; ++e) row.push_back(logits.at(t, e));
        std::vector<double> biased;
        for (int64_t e = 0; e < experts; ++e)
            biased.push_back(static_cast<double>(std::exp(log_score(options.score, row, static_cast<std::size_t>(e)))) + bias.at(0, e));
        std::set<int64_t> chosen;
        long double sum = 0;
        for (int64_t j = 0; j < k; ++j) {
            REQUIRE(r.id(t, j) >= 0);
            REQUIRE(r.id(t, j) < experts);
            ++count[static_cast<std::size_t>(r.id(t, j))];
            chosen.insert(r.id(t, j));
            sum += std::exp(log_score(options.score, row, static_cast<std::size_t>(r.id(t, j))));
        }
        REQUIRE(static_cast<int64_t>(chosen.size()) == k);
        // A score is good to 4 ulp, and s + bias is rounded once: two sums closer than that may come in either order.
        double const blur = 8 * 0x1p-24 * (1 + std::abs(*std::max_element(biased.begin(), biased.end())));
        for (int64_t j = 0; j + 1 < k; ++j)
            CHECK(biased[static_cast<std::size_t>(r.id(t, j))] >= biased[static_cast<std::size_t>(r.id(t, j + 1))] - blur);
        for (int64_t e = 0; e < experts; ++e)
            if (chosen.count(e) == 0) CHECK(biased[static_cast<std::size_t>(e)] <= biased[static_cast<std::size_t>(r.id(t, k - 1))] + blur);
        for (int64_t j = 0; j < k; ++j) {
            long double const s = std::exp(log_score(options.score, row, static_cast<std::size_t>(r.id(t, j))));
            bool const normalise = options.weight == weight_rule::normalised && k > 1;
            double const want = static_cast<double>(static_cast<long double>(options.scaling) * (normalise ? s / sum : s));
            // At most 8 roundings of a half ulp and the functions' 4 ulp; e^(z - shift) adds 1/2 ulp of an argument up to 16.
            CHECK(std::abs(r.weights.at(t, j) - want) <= want * 24 * 0x1p-24 + 0x1p-149);
        }
        CHECK(r.log_sum.at(0, t) == Approx(static_cast<double>(static_cast<long double>(row[0]) - log_score(score_function::softmax, row, 0)))
                                        .epsilon(4 * 0x1p-24)
                                        .margin(4 * 0x1p-24 * (1 + std::abs(row[0]))));
    }
    CHECK(count == r.counts);
    CHECK(r.demand.total() == k * logits.rows());
    CHECK(r.demand.tokens() == logits.rows());
    CHECK(r.untouched());
}

} // namespace

TEST_CASE("route matches its formulas in double: any score, rule, k and number of experts") {
    for (auto [tokens, experts, k] : {std::array<int64_t, 3>{70, 8, 2}, {65, 1, 1}, {3, 300, 8}, {9, 160, 3}, {5, 7, 7}, {4, 300, 300}, {130, 64, 8}})
        for (score_function s : all_scores)
            for (weight_rule rule : both_rules) {
                if (!every_case && k == 300) continue;
                keel::route_options const options{.score = s, .weight = rule, .scaling = 2.5f};
                guarded_matrix<float> z(tokens, experts, 2, floats(data_kind::normal, tokens * experts, 3));
                guarded_matrix<float> bias(1, experts, 0, floats(data_kind::uniform, experts, 4)), none(1, experts);
                routed<> r(tokens, experts, k);
                r.run(keel::cpu{}, z.view(), {.bias = bias.vec()}, options).or_throw();
                check_rows(z, bias, r, options);
                r.run(keel::cpu{}, z.view(), {}, options).or_throw();
                check_rows(z, none, r, options);
                guarded_matrix<keel::bf16> half(tokens, experts, 1, floats(data_kind::normal, tokens * experts, 5));
                routed<int64_t> q(tokens, experts, k);
                q.run(keel::cpu{}, half.view(), {.bias = bias.vec()}, options).or_throw();
                check_rows(half, bias, q, options);
            }
}

TEST_CASE("a row's route does not depend on the rows around it") {
    guarded_matrix<float> z(150, 40, 0, floats(data_kind::normal, 150 * 40));
    routed<> all(150, 40, 4);
    all.run(keel::cpu{}, z.view()).or_throw();
    for (int64_t t : {0, 63, 64, 149}) {
        routed<> one(1, 40, 4);
        one.run(keel::cpu{}, keel::slice(z.view(), t, 1)).or_throw();
        for (int64_t j = 0; j < 4; ++j) {
            CHECK(one.id(0, j) == all.id(t, j));
            CHECK(one.weights.get(0, j) == all.weights.get(t, j));
        }
    }
}

TEST_CASE("the bias selects and nothing else: weights are of the unbiased scores, to fp32 accuracy") { // aiter #4247; TE recovers (s + b) - b
    guarded_matrix<float> z(1, 4, 0, {-11.5f, -7.0f, 0.5f, 3.0f}), bias(1, 4, 0, {34.5f, 34.5f, -34.5f, -34.5f});
    for (weight_rule rule : both_rules) {
        routed<> r(1, 4, 2);
        r.run(keel::cpu{}, z.view(), {.bias = bias.vec()}, {.weight = rule}).or_throw();
        CHECK(r.id(0, 0) == 1);
        CHECK(r.id(0, 1) == 0);
        double const a = 1 / (1 + std::exp(7.0)), b = 1 / (1 + std::exp(11.5)), unit = rule == weight_rule::scores ? 1.0 : a + b;
        CHECK(r.weights.at(0, 0) == Approx(a / unit).epsilon(1e-6)); // 12 roundings of 2^-24; 14% off when recovered by subtraction
        CHECK(r.weights.at(0, 1) == Approx(b / unit).epsilon(1e-6));
    }
    routed<> with(1, 4, 3), without(1, 4, 3);
    guarded_matrix<float> small(1, 4, 0, {0.0f, 0.001f, 0.0f, 0.0f});
    for (score_function s : all_scores) {
        with.run(keel::cpu{}, z.view(), {.bias = small.vec()}, {.score = s}).or_throw();
        without.run(keel::cpu{}, z.view(), {}, {.score = s}).or_throw();
        CHECK(with.same(without));
    }
}

TEST_CASE("normalisation needs no epsilon: tiny scores share the weight as exactly as large ones") {
    for (float z : {0.0f, -50.0f, -200.0f, -1e30f, 80.0f})
        for (score_function s : all_scores) {
            guarded_matrix<float> row(1, 3, 0, {z, z - 1e6f - std::abs(z), z});
            routed<> r(1, 3, 2);
            r.run(keel::cpu{}, row.view(), {}, {.score = s}).or_throw();
            CHECK(r.weights.at(0, 0) == 0.5);
            CHECK(r.weights.at(0, 1) == 0.5);
        }
    // ln 3 apart at -90: 3 to 1, or sqrt 3 to 1. ulp(90) = 2^-17 bounds what the rounded logit can say.
    float const apart = -90.0f - std::log(3.0f);
    guarded_matrix<float> row(1, 2, 0, {-90.0f, apart});
    double const ratio = std::exp(-90.0 - static_cast<double>(apart));
    routed<> r(1, 2, 2);
    r.run(keel::cpu{}, row.view(), {}, {.score = score_function::sigmoid}).or_throw();
    CHECK(r.weights.at(0, 0) / r.weights.at(0, 1) == Approx(ratio).epsilon(1e-6));
    r.run(keel::cpu{}, row.view(), {}, {.score = score_function::sqrt_softplus}).or_throw();
    CHECK(r.weights.at(0, 0) / r.weights.at(0, 1) == Approx(std::sqrt(ratio)).epsilon(1e-6));
}

TEST_CASE("one expert a token: its weight is its score, under either rule") { // Megablocks #87; a normalised weight would be constant
    guarded_matrix<float> z(1, 3, 0, {0.5f, 1.5f, -1.0f});
    for (weight_rule rule : both_rules) {
        routed<> r(1, 3, 1);
        r.run(keel::cpu{}, z.view(), {}, {.weight = rule, .scaling = 2.0f}).or_throw();
        CHECK(r.weights.at(0, 0) == Approx(2 / (1 + std::exp(-1.5))).epsilon(1e-6));
    }
    routed<> dense(1, 1, 1); // E = 1
    dense.run(keel::cpu{}, keel::columns(z.view(), 0, 1), {}, {.score = score_function::softmax}).or_throw();
    CHECK(dense.weights.at(0, 0) == 1.0);
}

TEST_CASE("bad logits: ids stay distinct and valid, the row's weights say so, other rows are unaffected") { // vLLM #39391, SGLang #30079
    int64_t const experts = 37, k = 5;
    std::vector<float> const good = floats(data_kind::normal, experts);
    struct bad_row {
        std::vector<float> z;
        bool sound;
        std::vector<int64_t> ids; ///< what the last ids must be, where the rule says it
    };
    std::vector<bad_row> cases;
    cases.push_back({std::vector<float>(37, quiet), false, {0, 1, 2, 3, 4}});
    cases.push_back({std::vector<float>(37, -quiet), false, {0, 1, 2, 3, 4}});
    cases.push_back({std::vector<float>(37, -inf), false, {0, 1, 2, 3, 4}}); // lane padding (+0) never wins a tie: vLLM #32058
    cases.push_back({std::vector<float>(37, inf), false, {0, 1, 2, 3, 4}});
    auto one = good;
    one[4] = quiet;
    cases.push_back({one, false, {}});
    one[4] = inf;
    cases.push_back({one, false, {4}});
    one[4] = -inf;
    cases.push_back({one, true, {}});
    std::vector<float> few(37, quiet);
    few[30] = -1.0f, few[36] = -2.0f, few[2] = -inf;
    cases.push_back({few, false, {30, 36, 2, 0, 1}});
    for (score_function s : all_scores)
        for (bool with_bias : {false, true})
            for (auto const& c : cases) {
                INFO("score " << static_cast<int>(s) << " bias " << with_bias << " case " << (&c - cases.data()));
                guarded_matrix<float> z(3, experts, 0, floats(data_kind::normal, 3 * experts, 8)), bias(1, experts);
                routed<> before(3, experts, k), r(3, experts, k);
                keel::route_inputs const in{.bias = with_bias ? bias.vec() : keel::view<float, 1>{}};
                before.run(keel::cpu{}, z.view(), in, {.score = s}).or_throw();
                for (int64_t e = 0; e < experts; ++e) z.set(1, e, c.z[static_cast<std::size_t>(e)]);
                r.run(keel::cpu{}, z.view(), in, {.score = s}).or_throw();
                std::set<int64_t> ids;
                for (int64_t j = 0; j < k; ++j) {
                    ids.insert(r.id(1, j));
                    CHECK(std::isnan(r.weights.at(1, j)) == !c.sound);
                    if (static_cast<std::size_t>(j) < c.ids.size()) CHECK(r.id(1, j) == c.ids[static_cast<std::size_t>(j)]);
                    for (int64_t t : {0, 2}) {
                        CHECK(r.id(t, j) == before.id(t, j));
                        CHECK(r.weights.get(t, j) == before.weights.get(t, j));
                    }
                }
                CHECK(static_cast<int64_t>(ids.size()) == k);
                CHECK(*ids.begin() >= 0);
                CHECK(*ids.rbegin() < experts);
                if (c.ids.empty()) CHECK(ids.count(4) == 0); // the bad expert is taken last
                CHECK(r.demand.total() == 3 * k);
                routed<> same(3, experts, k);
                same.run(keel::simt<32>{}, z.view(), in, {.score = s}).or_throw();
                CHECK(same.same(r));
            }
    // -Inf is a mask: score 0, weight 0 when it must be taken after all.
    guarded_matrix<float> masked(1, 3, 0, {1.0f, -inf, -inf});
    routed<> r(1, 3, 2);
    for (score_function s : all_scores) {
        r.run(keel::cpu{}, masked.view(), {}, {.score = s}).or_throw();
        CHECK(r.id(0, 1) == 1);
        CHECK(r.weights.at(0, 0) == 1.0);
        CHECK(r.weights.at(0, 1) == 0.0);
    }
    // ... and no bias brings it back: the mask is not a score that the bias could lift.
    guarded_matrix<float> lifting(1, 3, 0, {-10.0f, 0.0f, inf}), two(1, 2, 0, {0.0f, -inf}), low(1, 2, 0, {-0.6f, 0.0f});
    for (score_function s : all_scores)
        for (weight_rule rule : both_rules) {
            r.run(keel::cpu{}, masked.view(), {.bias = lifting.vec()}, {.score = s, .weight = rule}).or_throw();
            CHECK(r.id(0, 0) == 0);
            CHECK(r.id(0, 1) == 1);
            CHECK(r.weights.at(0, 0) > 0.0);
            CHECK(r.weights.at(0, 1) == 0.0);
            routed<> one_of_two(1, 2, 1);
            one_of_two.run(keel::cpu{}, two.view(), {.bias = low.vec()}, {.score = s, .weight = rule}).or_throw();
            CHECK(one_of_two.id(0, 0) == 0);
        }
    // The report counts what is not finite.
    keel::report events;
    scratch ws(keel::route_workspace(1, 3));
    keel::route(keel::cpu{}, masked.view(), {}, r.ids.view(), r.weights.view(), r.demand, {}, {}, ws.get(), &events).or_throw();
    CHECK(events.non_finite == 2);
    CHECK(events.elements == 3);
    bool const is_token[] = {false};
    events = {};
    keel::route(keel::cpu{}, masked.view(), {.valid = keel::vec(&is_token[0], 1)}, r.ids.view(), r.weights.view(), r.demand, {}, {}, ws.get(), &events)
        .or_throw();
    CHECK(events.elements == 0);
    CHECK(events.non_finite == 0);
}

// exp and what is made of it is not monotone to the last bit: the larger of two neighbouring logits can have the smaller score.
TEST_CASE("a bias that is the same for all experts changes nothing: the order is that of the logits") {
    int64_t const experts = 64, k = 8;
    guarded_matrix<float> zeros(1, experts), same(1, experts, 0, std::vector<float>(64, 0.375f));
    zeros.set(0, 5, -0.0f);
    for (float start : {-1.0397f, -0.34657f, 0.34657f, 1.0397f, 0.0f, 8.0f, -8.0f}) {
        std::vector<float> row; // neighbours, falling and rising by turns
        float up = start, down = start;
        for (int64_t e = 0; e < experts; ++e) row.push_back(e % 2 == 0 ? up = std::nextafter(up, inf) : down = std::nextafter(down, -inf));
        guarded_matrix<float> z(1, experts, 0, row);
        for (score_function s : all_scores) {
            routed<> none(1, experts, k), with(1, experts, k);
            none.run(keel::cpu{}, z.view(), {}, {.score = s}).or_throw();
            for (int64_t j = 0; j < k; ++j) CHECK(none.id(0, j) == experts - 2 - 2 * j);
            for (auto* bias : {&zeros, &same}) {
                with.run(keel::cpu{}, z.view(), {.bias = bias->vec()}, {.score = s}).or_throw();
                CHECK(with.same(none));
            }
        }
    }
}

TEST_CASE("+Inf ranks first without a bias, and with one by its score like any logit") {
    guarded_matrix<float> z(1, 3, 0, {0.0f, std::numeric_limits<float>::infinity(), 1.0f}), bias(1, 3, 0, {0.0f, -10.0f, 0.0f});
    for (score_function s : all_scores) {
        routed<> plain(1, 3, 2), biased(1, 3, 2);
        plain.run(keel::cpu{}, z.view(), {}, {.score = s}).or_throw();
        CHECK(plain.id(0, 0) == 1);
        biased.run(keel::cpu{}, z.view(), {.bias = bias.vec()}, {.score = s}).or_throw();
        // sqrt(softplus(FLT_MAX)) is far above any bias; the others are at most 1.
        CHECK(biased.id(0, 0) == (s == score_function::sqrt_softplus ? 1 : 2));
        CHECK(std::isnan(biased.weights.at(0, 0)));
    }
}

TEST_CASE("the largest finite logits give finite weights, log-sums and gradients") {
    float const top = 2.5e38f; // top - -top is beyond FLT_MAX
    guarded_matrix<float> z(3, 4, 0, {top, -top, top, -top, -top, -top, -top, -top, -top, 0.0f, 1.0f, top}), g(3, 2, 0, {1, -1, 2, 3, -2, 1});
    for (score_function s : all_scores)
        for (weight_rule rule : both_rules) {
            routed<> r(3, 4, 2);
            keel::route_options const options{.score = s, .weight = rule};
            r.run(keel::cpu{}, z.view(), {}, options).or_throw();
            guarded_matrix<float> dz(3, 4);
            keel::route_backward(keel::cpu{}, g.view(), z.view(), r.ids.view(), r.weights.view(), dz.view(), options, {.z_loss = 1e-3f}).or_throw();
            for (int64_t t = 0; t < 3; ++t) {
                INFO(static_cast<int>(s) << " " << static_cast<int>(rule) << " row " << t);
                CHECK(r.log_sum.at(0, t) == Approx(t == 1 ? -2.5e38 : 2.5e38).epsilon(1e-6));
                bool const vanished = t == 1 && rule == weight_rule::scores && s != score_function::softmax; // e^-2.5e38
                for (int64_t j = 0; j < 2; ++j) {
                    CHECK(std::isfinite(r.weights.at(t, j)));
                    if (vanished) CHECK(r.weights.at(t, j) == 0.0);
                }
                if (t == 1 && rule == weight_rule::normalised) CHECK(r.weights.at(t, 1) == 0.5);
                for (int64_t e = 0; e < 4; ++e) CHECK(std::isfinite(dz.at(t, e)));
            }
        }
}

TEST_CASE("padding takes no expert, weighs nothing and is counted nowhere") { // Megatron #6114: also where tokens == experts
    for (auto [tokens, experts] : {std::array<int64_t, 2>{6, 6}, {70, 9}}) {
        guarded_matrix<float> z(tokens, experts, 0, floats(data_kind::normal, tokens * experts));
        auto valid = std::make_unique<bool[]>(static_cast<std::size_t>(tokens));
        for (int64_t t = 0; t < tokens; ++t) valid[static_cast<std::size_t>(t)] = t % 3 != 1; // true = a token
        keel::view<bool const, 1> const mask = keel::vec(valid.get(), tokens);
        routed<> r(tokens, experts, 2), all(tokens, experts, 2);
        r.run(keel::cpu{}, z.view(), {.valid = mask}).or_throw();
        all.run(keel::cpu{}, z.view()).or_throw();
        std::vector<int64_t> count(static_cast<std::size_t>(experts));
        int64_t kept = 0;
        for (int64_t t = 0; t < tokens; ++t)
            for (int64_t j = 0; j < 2; ++j) {
                bool const is_token = t % 3 != 1;
                CHECK(r.id(t, j) == (is_token ? all.id(t, j) : -1));
                CHECK(r.weights.at(t, j) == (is_token ? all.weights.at(t, j) : 0.0));
                if (is_token) ++count[static_cast<std::size_t>(r.id(t, j))], kept += j;
            }
        CHECK(r.counts == count);
        CHECK(r.demand.tokens() == kept);
        routed<> same(tokens, experts, 2);
        same.run(keel::simt<32>{}, z.view(), {.valid = mask}).or_throw();
        CHECK(same.same(r));
    }
}

TEST_CASE("no tokens: zero demand") { // SGLang #22455
    routed<> r(0, 5, 2);
    r.run(keel::cpu{}, keel::rows(static_cast<float*>(nullptr), 0, 5)).or_throw();
    CHECK(r.counts == std::vector<int64_t>(5, 0));
    CHECK(r.demand.filled());
    CHECK(r.demand.tokens() == 0);
    CHECK(keel::max_over_mean(r.demand) == 0.0);
    CHECK(keel::dead_experts(r.demand) == 0);
}

TEST_CASE("router_z_loss sums the squares of log_sum") {
    guarded_matrix<float> z(500, 6, 0, floats(data_kind::normal, 3000));
    routed<> r(500, 6, 2);
    r.run(keel::cpu{}, z.view()).or_throw();
    double want = 0;
    for (int64_t t = 0; t < 500; ++t) want += r.log_sum.at(0, t) * r.log_sum.at(0, t);
    float got = 0, same = 0;
    keel::router_z_loss(keel::cpu{}, r.log_sum.vec(), &got).or_throw();
    keel::router_z_loss(keel::reference{}, r.log_sum.vec(), &same).or_throw();
    CHECK(static_cast<double>(got) == Approx(want).epsilon(1e-6));
    CHECK(got == same);
    auto const before = r.log_sum.contents();
    CHECK(keel::router_z_loss(keel::cpu{}, r.log_sum.vec(), r.log_sum.view().data + 3).code == keel::status_code::overlap);
    CHECK(r.log_sum.contents() == before);
}

TEST_CASE("a bad call of route names the argument and writes nothing") {
    keel::cpu be;
    guarded_matrix<float> z(4, 6, 0, floats(data_kind::normal, 24)), bias(1, 5);
    routed<> r(4, 6, 2);
    auto const before = r.ids.contents();
    CHECK(r.run(be, z.view(), {.bias = bias.vec()}).code == keel::status_code::bad_shape);
    CHECK(r.run(be, keel::columns(z.view(), 0, 5)).message() == "route: demand has length = 6, wanted 5 (bad_shape)");
    CHECK(r.run(be, z.view(), {}, {.scaling = 0.0f}).code == keel::status_code::bad_option);
    CHECK(r.run(be, z.view(), {}, {.scaling = quiet}).code == keel::status_code::bad_option);
    CHECK(r.run(be, z.view(), {}, {.score = static_cast<keel::score_function>(3)}).message() ==
          "route: options.score has value = 3, wanted softmax, sigmoid or sqrt_softplus (bad_option)");
    CHECK(r.run(be, z.view(), {}, {.weight = static_cast<keel::weight_rule>(2)}).code == keel::status_code::bad_option);
    auto const with = [&](keel::view<int32_t, 2> ids, keel::view<float, 2> weights, keel::workspace ws) {
        return keel::route(be, z.view(), {}, ids, weights, r.demand, {}, {}, ws).code;
    };
    scratch ws(keel::route_workspace(4, 6));
    guarded_matrix<int32_t> many(4, 7), none(4, 0);
    guarded_matrix<float> many_weights(4, 7);
    CHECK(with(many.view(), many_weights.view(), ws.get()) == keel::status_code::bad_option); // k > E
    CHECK(with(keel::columns(many.view(), 0, 0), keel::columns(many_weights.view(), 0, 0), ws.get()) == keel::status_code::bad_option);
    CHECK(with(r.ids.view(), r.weights.view(), {}) == keel::status_code::small_workspace);
    CHECK(with(r.ids.view(), keel::columns(z.view(), 0, 2), ws.get()) == keel::status_code::overlap);
    guarded_matrix<float> fit(1, 6);
    auto const save_to = [&](keel::view<float, 1> log_sum) {
        return keel::route(be, z.view(), {.bias = fit.vec()}, r.ids.view(), r.weights.view(), r.demand, {.log_sum = log_sum}, {}, ws.get()).code;
    };
    CHECK(save_to(keel::vec(fit.vec().data, 4)) == keel::status_code::overlap);
    CHECK(save_to(keel::vec(reinterpret_cast<float*>(r.ids.view().data), 4)) == keel::status_code::overlap);
    CHECK(r.ids.contents() == before);
    CHECK(r.counts == std::vector<int64_t>(6, -7));
    CHECK_FALSE(r.demand.filled());
}
