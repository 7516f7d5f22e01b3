// The quantile rule: thresholds counted exactly, and a bias at which every expert has its share.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include <keel/backend/cpu/cpu.hpp>
#include <keel/moe/balance.hpp>
#include <moe/quantile_layer.hpp>
#include <moe/router.hpp>
#include <support/backends.hpp>
#include <support/catch.hpp>

using namespace keel_test;
using keel::score_function, keel::status_code;

namespace {

double score(score_function f, std::vector<double> const& z, std::size_t e) {
    double sum = 0;
    for (double x : z) sum += std::exp(x);
    if (f == score_function::softmax) return std::exp(z[e]) / sum;
    return f == score_function::sigmoid ? 1 / (1 + std::exp(-z[e])) : std::sqrt(std::log1p(std::exp(z[e])));
}

/// [experts][tokens] thresholds as the definition says, in double.
std::vector<std::vector<double>> thresholds_of(guarded_matrix<float> const& logits, std::vector<float> const& bias, int64_t k, score_function f) {
    auto const experts = static_cast<std::size_t>(logits.columns());
    std::vector<std::vector<double>> out(experts);
    for (int64_t t = 0; t < logits.rows(); ++t) {
        std::vector<double> z(experts), s(experts), c(experts);
        for (std::size_t e = 0; e < experts; ++e) z[e] = logits.at(t, static_cast<int64_t>(e));
        for (std::size_t e = 0; e < experts; ++e) s[e] = score(f, z, e), c[e] = s[e] + static_cast<double>(bias[e]);
        std::nth_element(c.begin(), c.begin() + k, c.end(), std::greater<>());
        for (std::size_t e = 0; e < experts; ++e) out[e].push_back(c[static_cast<std::size_t>(k)] - s[e]);
    }
    return out;
}

/// Skewed logits: expert e is liked by 0.2 e.
guarded_matrix<float> skewed(int64_t tokens, int64_t experts, uint32_t seed) {
    std::vector<float> z = floats(data_kind::normal, tokens * experts, seed);
    for (std::size_t i = 0; i < z.size(); ++i) z[i] += 0.2f * static_cast<float>(i % static_cast<std::size_t>(experts));
    return guarded_matrix<float>(tokens, experts, 1, z);
}

} // namespace

TEST_CASE("thresholds are those of the definition, counted once a token and expert") {
    int64_t const tokens = 300, experts = 70, k = 6; // more experts than one block of 64
    auto logits = skewed(tokens, experts, 3);
    std::vector<float> bias = floats(data_kind::normal, experts, 4);
    for (float& b : bias) b *= 0.05f;
    for (score_function f : all_scores) {
        INFO("score " << static_cast<int>(f));
        histogram h(experts);
        h.run(keel::cpu{}, logits.view(), bias, k, {.score = f}).or_throw();
        CHECK(h.counts.tokens() == tokens);
        CHECK(h.counts.per_token() == k);
        auto const exact = thresholds_of(logits, bias, k, f);
        double const low = static_cast<double>(h.counts.range().low), width = static_cast<double>(h.counts.range().width);
        CHECK(low == Approx(static_cast<double>(*std::min_element(bias.begin(), bias.end())) - 1));
        CHECK(low + bins * width == Approx(static_cast<double>(*std::max_element(bias.begin(), bias.end())) + 1));
        // Scores below 4 to 3 ulp, and three roundings of numbers below 4 with a division by the width: a threshold may be
        // off by this much, and so on either side of an edge.
        double const off = 0x1p-20;
        int64_t wrong = 0;
        for (std::size_t e = 0; e < exact.size(); ++e) {
            int64_t up_to = 0;
            for (int64_t b = 0; b < bins; ++b) {
                up_to += h.memory[e * static_cast<std::size_t>(bins) + static_cast<std::size_t>(b)];
                double const edge = low + width * static_cast<double>(b + 1);
                auto const below = [&](double x) { return std::count_if(exact[e].begin(), exact[e].end(), [&](double v) { return v < x; }); };
                wrong += b + 1 < bins && (up_to < below(edge - off) || up_to > below(edge + off)) ? 1 : 0;
            }
            wrong += up_to != tokens ? 1 : 0;
        }
        CHECK(wrong == 0);
        for_each_backend([&](std::string const& name, auto const& be) {
            INFO(name);
            histogram other(experts);
            other.run(be, logits.view(), bias, k, {.score = f}).or_throw();
            CHECK(other.memory == h.memory);
        });
    }
}

TEST_CASE("the bias becomes each expert's quantile, centred, and so does the mean of many steps") {
    int64_t const tokens = 509, experts = 12, k = 5; // k * tokens / experts is no integer
    auto logits = skewed(tokens, experts, 5);
    quantile_layer l(experts);
    histogram h(experts);
    routed<> r(tokens, experts, k);
    r.run(keel::cpu{}, logits.view(), {.bias = l.state().bias}).or_throw();
    double const before = keel::max_over_mean(r.demand);
    h.run(keel::cpu{}, logits.view(), l.bias, k).or_throw();
    auto exact = thresholds_of(logits, l.bias, k, score_function::sigmoid);
    keel::commit(keel::cpu{}, l.state(), r.demand, h.counts, {}).or_throw();
    l.update_by_quantile().or_throw();
    std::vector<double> wanted;
    double mean = 0;
    for (auto& of_expert : exact) {
        std::sort(of_expert.begin(), of_expert.end());
        wanted.push_back(of_expert[static_cast<std::size_t>(k * tokens / experts)]);
        mean += wanted.back() / static_cast<double>(experts);
    }
    double const width = static_cast<double>(h.counts.range().width);
    for (std::size_t e = 0; e < wanted.size(); ++e) {
        INFO("expert " << e);
        CHECK(std::abs(static_cast<double>(l.bias[e]) - (wanted[e] - mean)) < 2 * width); // a bin of its own, one of the mean
    }
    // A few more steps on the same tokens: the load is even to what a bin can tell.
    for (int64_t s = 1; s < 6; ++s) {
        r.run(keel::cpu{}, logits.view(), {.bias = l.state().bias}).or_throw();
        h.run(keel::cpu{}, logits.view(), l.bias, k).or_throw();
        keel::commit(keel::cpu{}, l.state(), r.demand, h.counts, {.step = s}).or_throw();
        l.update_by_quantile().or_throw();
        double sum = 0;
        for (float b : l.bias) sum += static_cast<double>(b);
        CHECK(std::abs(sum) < 12 * 0x1p-23); // centred, each rounded below 1
    }
    r.run(keel::cpu{}, logits.view(), {.bias = l.state().bias}).or_throw();
    CHECK(before > 1.7);
    CHECK(keel::max_over_mean(r.demand) < 1.08); // a bin is 0.01 of score or 0.04 of logit: 2 to 4% of an expert's tokens, twice
}

TEST_CASE("a quantile lies where its bin says, to the rounding: few tokens, a share that is met exactly, empty bins after it") {
    int64_t const tokens = 4, experts = 4, k = 1; // the first of an expert's four thresholds is its share
    auto logits = skewed(tokens, experts, 12);
    for (int64_t t = 0; t < tokens; ++t) logits.set(t, 3, logits.get(t, 3) + 5.0f); // all choose the last
    for (float deadband : {0.0f, 1.0f, 10.0f}) { // of 1: an expert that nobody or that two tokens chose is within
        INFO("deadband " << deadband);
        quantile_layer l(experts);
        l.bias = {0.01f, 0.0f, -0.02f, 0.01f};
        auto const before = l.bias;
        histogram h(experts);
        routed<> r(tokens, experts, k);
        r.run(keel::cpu{}, logits.view(), {.bias = l.state().bias}).or_throw();
        REQUIRE(r.counts == list{0, 0, 0, 4});
        h.run(keel::cpu{}, logits.view(), l.bias, k).or_throw();
        keel::commit(keel::cpu{}, l.state(), r.demand, h.counts, {}).or_throw();
        l.update_by_quantile(keel::open_gate(), {.rule = keel::balance_rule::quantile, .rate = 0.5f, .deadband = deadband}).or_throw();
        double way[4], mean = 0;
        for (std::size_t e = 0; e < 4; ++e) {
            std::size_t bin = 0, count = 0;
            while ((count += static_cast<std::size_t>(h.memory[e * bins + bin])) == 0) ++bin;
            double const in_bin = 1.0 / static_cast<double>(count); // one token's worth of those in it
            way[e] = static_cast<double>(h.counts.range().low) + static_cast<double>(h.counts.range().width) * (static_cast<double>(bin) + in_bin) - static_cast<double>(before[e]);
            if (deadband >= (e == 3 ? 3.0f : 1.0f)) way[e] = 0; // 4 tokens are 3 means from the mean, 0 are 1
            mean += way[e] / 4;
        }
        for (std::size_t e = 0; e < 4; ++e) // roundings of numbers below 2: of the quantile, the way, its mean and the sum
            CHECK(static_cast<double>(l.bias[e]) == Approx(static_cast<double>(before[e]) + 0.5 * (way[e] - mean)).epsilon(0).margin(4 * 0x1p-24));
        CHECK((l.ledger[7] == 1) == (deadband > 3.0f)); // all within: still
    }
}

TEST_CASE("thresholds of micro-batches and ranks add as integers: two halves move the bias as the whole") {
    int64_t const tokens = 200, experts = 8, k = 3;
    auto logits = skewed(tokens, experts, 7);
    guarded_matrix<float> first(120, experts), second(80, experts);
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t e = 0; e < experts; ++e) (t < 120 ? first : second).set(t < 120 ? t : t - 120, e, logits.get(t, e));
    quantile_layer whole(experts), parts(experts);
    auto const forward = [&](quantile_layer& l, guarded_matrix<float>& z, int64_t m) {
        histogram h(experts);
        routed<> r(z.rows(), experts, k);
        r.run(keel::cpu{}, z.view(), {.bias = l.state().bias}).or_throw();
        h.run(keel::cpu{}, z.view(), l.bias, k).or_throw();
        keel::commit(keel::cpu{}, l.state(), r.demand, h.counts, {.micro_batch = m}).or_throw();
        quantile_layer const once = l;
        keel::commit(keel::cpu{}, l.state(), r.demand, h.counts, {.micro_batch = m}).or_throw(); // recomputed: counts once
        CHECK(l.same(once));
    };
    guarded_matrix<float> copy = logits;
    forward(whole, copy, 0);
    forward(parts, first, 0);
    forward(parts, second, 1);
    CHECK(whole.thresholds == parts.thresholds);
    CHECK(whole.pending == parts.pending);
    // Half the way, the rule of the quantile as a moving average; the skipped step forgets the thresholds as well.
    quantile_layer skipped = whole;
    skipped.update_by_quantile(keel::step_gate{}).or_throw();
    CHECK(skipped.same(quantile_layer(experts)));
    quantile_layer half = whole;
    whole.update_by_quantile().or_throw();
    parts.update_by_quantile().or_throw();
    half.update_by_quantile(keel::open_gate(), {.rule = keel::balance_rule::quantile, .rate = 0.5f}).or_throw();
    CHECK(equal_bits(whole.bias, parts.bias));
    CHECK(whole.thresholds == list(static_cast<std::size_t>(experts * bins), 0));
    for (std::size_t e = 0; e < 8; ++e) CHECK(half.bias[e] == 0.5f * whole.bias[e]); // from 0, and a power of two
    CHECK(whole.ledger[5] == experts);
    CHECK(whole.signs == half.signs);
}

TEST_CASE("padding, masked experts and bad rows each count as the contract says") {
    int64_t const experts = 4, k = 1;
    float const inf = std::numeric_limits<float>::infinity(), nan = std::nanf("");
    guarded_matrix<float> z(4, experts, 0, {3, 2, 1, -inf, /**/ 9, 9, 9, 9, /**/ 5, -inf, -inf, -inf, /**/ nan, 1, 2, 3});
    bool const valid[] = {true, false, true, true};
    std::vector<float> const bias(4);
    histogram h(experts);
    h.run(keel::cpu{}, z.view(), bias, k, {}, keel::vec(valid, 4)).or_throw();
    CHECK(h.counts.tokens() == 3);
    list sums(4), last(4), first(4);
    for (std::size_t e = 0; e < 4; ++e) {
        for (std::size_t b = 0; b < bins; ++b) sums[e] += h.memory[e * bins + b];
        first[e] = h.memory[e * bins], last[e] = h.memory[e * bins + bins - 1];
    }
    CHECK(sums == list(4, 3));
    CHECK(first[0] >= 1); // the third row: nobody else is there, any bias does
    CHECK(last[3] >= 2);  // masked in two rows
    CHECK(last[1] >= 1);
    // No tokens at all: nothing is counted, and nothing moves.
    guarded_matrix<float> none(0, experts);
    h.run(keel::cpu{}, none.view(), bias, k).or_throw();
    CHECK(h.memory == list(static_cast<std::size_t>(experts * bins), 0));
    quantile_layer l(experts);
    list zero(4);
    keel::commit(keel::cpu{}, l.state(), demand_of(zero, 0, k), h.counts, {}).or_throw();
    l.update_by_quantile().or_throw();
    CHECK(l.bias == bias);
}

TEST_CASE("thresholds that do not belong to the demand, the bias or the state are refused before anything is added") {
    int64_t const tokens = 60, experts = 6, k = 2;
    auto logits = skewed(tokens, experts, 9);
    quantile_layer l(experts);
    histogram h(experts);
    routed<> r(tokens, experts, k);
    r.run(keel::cpu{}, logits.view(), {.bias = l.state().bias}).or_throw();
    h.run(keel::cpu{}, logits.view(), l.bias, k).or_throw();
    quantile_layer const fresh = l;
    keel::cpu const be;
    CHECK(keel::commit(be, l.state(), r.demand, {}).code == status_code::bad_state);                      // none given
    CHECK(keel::commit(be, l.layer::state(), r.demand, h.counts, {}).code == status_code::bad_state);     // none kept
    CHECK(keel::commit(be, l.state(), r.demand, histogram(experts).counts, {}).code == status_code::bad_state); // not filled
    histogram other(experts, bins + 1);
    other.run(be, logits.view(), l.bias, k).or_throw();
    CHECK(keel::commit(be, l.state(), r.demand, other.counts, {}).code == status_code::bad_shape);
    histogram wide(experts);
    wide.run(be, logits.view(), l.bias, k + 1).or_throw();
    CHECK(std::string(keel::commit(be, l.state(), r.demand, wide.counts, {}).property) == "experts a token");
    guarded_matrix<float> fewer(tokens - 1, experts);
    for (int64_t t = 0; t + 1 < tokens; ++t)
        for (int64_t e = 0; e < experts; ++e) fewer.set(t, e, logits.get(t, e));
    wide.run(be, fewer.view(), l.bias, k).or_throw();
    CHECK(std::string(keel::commit(be, l.state(), r.demand, wide.counts, {}).property) == "tokens");
    wide.run(be, logits.view(), std::vector<float>{0, 0, 0, 0, 0, 1}, k).or_throw();
    auto const s = keel::commit(be, l.state(), r.demand, wide.counts, {});
    CHECK(s.message() == "commit: thresholds, wanted thresholds that were counted with state.bias (bad_state)");
    h.memory[0] += 1;
    CHECK(std::string(keel::commit(be, l.state(), r.demand, h.counts, {}).property) == "sum of an expert");
    h.memory[0] -= 1;
    CHECK(l.same(fresh));
    // Demand that was reduced over ranks beside thresholds that were not.
    keel::commit(be, l.state(), r.demand, h.counts, {}).or_throw();
    quantile_layer const one = l;
    list both = r.counts;
    for (int64_t& c : both) c *= 2;
    auto const unreduced = keel::update_balance(be, l.state(), keel::reduced_over_ranks(demand_of(both, 2 * tokens, k)), keel::open_gate(),
                                                {.rule = keel::balance_rule::quantile, .rate = 1.0f});
    CHECK(std::string(unreduced.argument) == "state.thresholds");
    CHECK(l.same(one));
    // A commit that comes after its step's update: the bias has moved, the thresholds are still of the old one.
    l.update_by_quantile().or_throw();
    quantile_layer const updated = l;
    CHECK_FALSE(equal_bits(updated.bias, fresh.bias));
    CHECK(keel::commit(be, l.state(), r.demand, h.counts, {}).ok());
    CHECK(keel::commit(be, l.state(), r.demand, h.counts, {.step = 1}).code == status_code::bad_state);
    CHECK(l.same(updated));
    layer plain(experts);
    keel::commit(be, plain.state(), r.demand, {}).or_throw();
    CHECK(update(plain, keel::open_gate(), {.rule = keel::balance_rule::quantile}).code == status_code::bad_option);
    // The counting call itself.
    list const untouched = other.memory;
    CHECK(other.run(be, logits.view(), l.bias, experts).code == status_code::bad_option);
    CHECK(other.run(be, logits.view(), std::vector<float>(6, std::numeric_limits<float>::infinity()), k).code == status_code::bad_option);
    CHECK(other.run(be, logits.view(), std::vector<float>(6, 1e30f), k).code == status_code::bad_option);
    CHECK(histogram(experts, 1).run(be, logits.view(), l.bias, k).code == status_code::bad_shape);
    CHECK(keel::count_thresholds(be, logits.view(), keel::vec(l.bias.data(), experts), k, other.counts).code == status_code::small_workspace);
    CHECK(other.memory == untouched);
}
