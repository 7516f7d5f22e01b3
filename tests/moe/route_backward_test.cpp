// The router's gradient against finite differences of its formulas in double, with the selection frozen.
#include <cmath>
#include <limits>
#include <memory>

#include <moe/router.hpp>
#include <support/backends.hpp>
#include <support/catch.hpp>

using namespace keel_test;
using keel::score_function;
using keel::weight_rule;

namespace {

using row = std::vector<double>;

double score(score_function s, row const& z, std::size_t e) {
    if (s == score_function::sigmoid) return 1 / (1 + std::exp(-z[e]));
    if (s == score_function::sqrt_softplus) return std::sqrt(std::log1p(std::exp(z[e])));
    double sum = 0;
    for (double v : z) sum += std::exp(v);
    return std::exp(z[e]) / sum;
}

/// <G, weights> + z_loss * log_sum^2 of one token, ids given.
double loss(keel::route_options o, row const& z, std::vector<std::size_t> const& ids, row const& g, double z_loss) {
    double sum = 0, total = 0, exponentials = 0;
    for (std::size_t e : ids) sum += score(o.score, z, e);
    if (o.weight == weight_rule::scores || ids.size() == 1) sum = 1;
    for (std::size_t j = 0; j < ids.size(); ++j) total += g[j] * static_cast<double>(o.scaling) * score(o.score, z, ids[j]) / sum;
    for (double v : z) exponentials += std::exp(v);
    return total + z_loss * std::log(exponentials) * std::log(exponentials);
}

} // namespace

TEST_CASE("route_backward is the derivative: every score, rule and k, with dropped tokens and z-loss") {
    int64_t const tokens = 3, experts = 6;
    for (score_function s : all_scores)
        for (weight_rule rule : both_rules)
            for (int64_t k : {1, 3, 6})
                for (float z_loss : {0.0f, 0.125f}) {
                    INFO("score " << static_cast<int>(s) << " rule " << static_cast<int>(rule) << " k " << k << " z " << z_loss);
                    keel::route_options const options{.score = s, .weight = rule, .scaling = 1.5f};
                    guarded_matrix<float> z(tokens, experts, 1, floats(data_kind::normal, tokens * experts, 31)), dz(tokens, experts, 2);
                    guarded_matrix<float> bias(1, experts, 0, floats(data_kind::uniform, experts)), g(tokens, k, 1, floats(data_kind::normal, tokens * k, 7));
                    g.set(1, k - 1, 0.0f); // dropped: combine_backward gives it no gradient
                    routed<> r(tokens, experts, k);
                    r.run(keel::cpu{}, z.view(), {.bias = bias.vec()}, options).or_throw();
                    keel::route_backward(keel::cpu{}, g.view(), z.view(), r.ids.view(), r.weights.view(), dz.view(), options, {.z_loss = z_loss}).or_throw();
                    for (int64_t t = 0; t < tokens; ++t) {
                        row logits, up;
                        std::vector<std::size_t> ids;
                        for (int64_t e = 0; e < experts; ++e) logits.push_back(z.at(t, e));
                        for (int64_t j = 0; j < k; ++j) ids.push_back(static_cast<std::size_t>(r.id(t, j))), up.push_back(g.at(t, j));
                        for (int64_t e = 0; e < experts; ++e) {
                            double& v = logits[static_cast<std::size_t>(e)];
                            double const keep = v, h = 1e-5;
                            v = keep + h;
                            double const high = loss(options, logits, ids, up, static_cast<double>(z_loss));
                            v = keep - h;
                            double const low = loss(options, logits, ids, up, static_cast<double>(z_loss));
                            v = keep;
                            // Values of O(1) in fp32: some 20 roundings of 2^-24. The difference quotient is good to 1e-9.
                            CHECK(dz.at(t, e) == Approx((high - low) / (2 * h)).margin(2e-6).epsilon(2e-6));
                        }
                    }
                    CHECK(dz.untouched());
                }
}

TEST_CASE("route_backward stays exact where scores vanish or saturate") {
    // Normalised over two logits near -100, sigmoid: p = (1, e^-1) / (1 + e^-1), dz = p_0 p_1 (G_0 - G_1) to each side.
    guarded_matrix<float> z(1, 3, 0, {-100.0f, -101.0f, -300.0f}), dz(1, 3), g(1, 2, 0, {2.0f, -1.0f});
    routed<> r(1, 3, 2);
    double const p = 1 / (1 + std::exp(-1.0));
    r.run(keel::cpu{}, z.view(), {}).or_throw();
    keel::route_backward(keel::cpu{}, g.view(), z.view(), r.ids.view(), r.weights.view(), dz.view()).or_throw();
    CHECK(dz.at(0, 0) == Approx(3 * p * (1 - p)).epsilon(1e-6));
    CHECK(dz.at(0, 1) == Approx(-3 * p * (1 - p)).epsilon(1e-6));
    CHECK(dz.at(0, 2) == 0.0);
    // sqrt(softplus) there is e^(z/2): the same with half the exponent.
    double const q = 1 / (1 + std::exp(-0.5));
    r.run(keel::cpu{}, z.view(), {}, {.score = score_function::sqrt_softplus}).or_throw();
    keel::route_backward(keel::cpu{}, g.view(), z.view(), r.ids.view(), r.weights.view(), dz.view(), {.score = score_function::sqrt_softplus}).or_throw();
    CHECK(dz.at(0, 0) == Approx(1.5 * q * (1 - q)).epsilon(1e-6));
    // A score itself of 1e-44 or e^-50 still has its slope.
    r.run(keel::cpu{}, z.view(), {}, {.score = score_function::sqrt_softplus, .weight = weight_rule::scores}).or_throw();
    keel::route_backward(keel::cpu{}, g.view(), z.view(), r.ids.view(), r.weights.view(), dz.view(),
                         {.score = score_function::sqrt_softplus, .weight = weight_rule::scores})
        .or_throw();
    CHECK(dz.at(0, 0) == Approx(std::exp(-50.0)).epsilon(1e-6));
    // Saturated: sigmoid(30) is 1 in fp32, its slope e^-30 is not 0.
    guarded_matrix<float> high(1, 1, 0, {30.0f}), dhigh(1, 1), one(1, 1, 0, {1.0f});
    routed<> h(1, 1, 1);
    h.run(keel::cpu{}, high.view()).or_throw();
    keel::route_backward(keel::cpu{}, one.view(), high.view(), h.ids.view(), h.weights.view(), dhigh.view()).or_throw();
    CHECK(dhigh.at(0, 0) == Approx(std::exp(-30.0)).epsilon(1e-6));
}

TEST_CASE("padding and bad rows stay in their rows; the gradient keeps its bits on every backend") {
    int64_t const tokens = 67, experts = 37, k = 4;
    guarded_matrix<float> z(tokens, experts, 1, floats(data_kind::normal, tokens * experts)), g(tokens, k, 0, floats(data_kind::normal, tokens * k));
    for (int64_t e = 0; e < experts; ++e) z.set(5, e, std::nanf(""));
    auto valid = std::make_unique<bool[]>(static_cast<std::size_t>(tokens));
    for (int64_t t = 0; t < tokens; ++t) valid[static_cast<std::size_t>(t)] = t != 9;
    for (score_function s : all_scores)
        for (weight_rule rule : both_rules) {
            keel::route_options const options{.score = s, .weight = rule};
            routed<int64_t> r(tokens, experts, k);
            r.run(keel::cpu{}, z.view(), {.valid = keel::vec(valid.get(), tokens)}, options).or_throw();
            guarded_matrix<float> want(tokens, experts, 1);
            keel::route_backward(keel::reference{}, g.view(), z.view(), r.ids.view(), r.weights.view(), want.view(), options, {.z_loss = 0.5f}).or_throw();
            for (int64_t e = 0; e < experts; ++e) CHECK(want.at(9, e) == 0.0);
            CHECK(std::isnan(want.at(5, r.id(5, 0))));
            for (int64_t e = 0; e < experts; ++e) CHECK(std::isfinite(want.at(4, e)));
            for_each_backend([&](std::string const& name, auto const& be) {
                INFO(name);
                guarded_matrix<float> got(tokens, experts, 1);
                keel::route_backward(be, g.view(), z.view(), r.ids.view(), r.weights.view(), got.view(), options, {.z_loss = 0.5f}).or_throw();
                CHECK(got.contents() == want.contents());
            });
            guarded_matrix<keel::bf16> half(tokens, experts, 3), same(tokens, experts);
            keel::route_backward(keel::cpu{}, g.view(), z.view(), r.ids.view(), r.weights.view(), half.view(), options, {.z_loss = 0.5f}).or_throw();
            for (int64_t e = 0; e < experts; ++e)
                CHECK(half.at(3, e) == keel_test::to_double(to_format<keel::bf16>(want.get(3, e)))); // one rounding
            keel::route_backward(keel::reference{}, g.view(), z.view(), r.ids.view(), r.weights.view(), same.view(), options, {.z_loss = 0.5f}).or_throw();
            CHECK(half.contents() == same.contents());
            CHECK(half.untouched());
        }
}

TEST_CASE("a bad call of route_backward names the argument and writes nothing") {
    guarded_matrix<float> z(2, 4), g(2, 2), w(2, 2), dz(2, 4, 0, std::vector<float>(8, 3.0f));
    guarded_matrix<int32_t> ids(2, 2);
    auto const before = dz.contents();
    auto const call = [&] { return keel::route_backward(keel::cpu{}, g.view(), z.view(), ids.view(), w.view(), dz.view()); };
    ids.set(1, 1, 4);
    CHECK(call().message() == "route_backward: ids has value = 4, wanted an expert, or -1 in a whole row of padding (bad_option)");
    ids.set(1, 1, -1);
    CHECK(call().code == keel::status_code::bad_option);
    CHECK(keel::route_backward(keel::cpu{}, g.view(), z.view(), ids.view(), w.view(), z.view()).code == keel::status_code::overlap);
    ids.set(1, 1, 1);
    auto const with = [&](keel::route_options options, float z_loss) {
        return keel::route_backward(keel::cpu{}, g.view(), z.view(), ids.view(), w.view(), dz.view(), options, {.z_loss = z_loss}).code;
    };
    for (float z_loss : {-1e-3f, std::nanf(""), std::numeric_limits<float>::infinity()}) CHECK(with({}, z_loss) == keel::status_code::bad_option);
    CHECK(with({.score = static_cast<score_function>(7)}, 0.0f) == keel::status_code::bad_option);
    CHECK(with({.weight = static_cast<weight_rule>(7)}, 0.0f) == keel::status_code::bad_option);
    CHECK(with({.scaling = -1.0f}, 0.0f) == keel::status_code::bad_option);
    ids.set(1, 1, -1);
    CHECK(dz.contents() == before);
    ids.set(1, 0, -1);
    CHECK(call().ok());
}
