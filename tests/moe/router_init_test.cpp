// A fresh router: rows of one norm, orthogonal where asked, and a bias that spreads the first batch.
#include <cmath>

#include <keel/moe/router_init.hpp>
#include <moe/router.hpp>
#include <support/backends.hpp>
#include <support/catch.hpp>

using namespace keel_test;

namespace {

double dot(guarded_matrix<float> const& a, int64_t i, int64_t j) {
    double s = 0;
    for (int64_t c = 0; c < a.columns(); ++c) s += a.at(i, c) * a.at(j, c);
    return s;
}

} // namespace

TEST_CASE("router_init: equal norms, independent of threads and strides, orthogonal where asked") {
    for (bool orthogonal : {false, true}) {
        guarded_matrix<float> w(24, 50, 3), other(24, 50), dense(24, 50);
        keel::router_init_options const options{.norm = 1.75f, .orthogonal = orthogonal};
        keel::router_init(keel::cpu{}, w.view(), {.seed = 4}, options).or_throw();
        for (int64_t i = 0; i < 24; ++i) {
            CHECK(std::sqrt(dot(w, i, i)) == Approx(1.75).epsilon(0x1p-20)); // the sum's 2^-21 and three roundings
            for (int64_t j = 0; j < i; ++j)
                if (orthogonal) CHECK(std::abs(dot(w, i, j)) < 1.75 * 1.75 * 4e-7); // 50 products, each off by 2^-24 at most
        }
        CHECK(w.untouched());
        keel::router_init(keel::cpu{}, other.view(), {.seed = 5}, options).or_throw();
        keel::router_init(keel::cpu{}, dense.view(), {.seed = 4}, options).or_throw();
        CHECK(other.contents() != w.contents());
        for_each_backend([&](std::string const& name, auto const& be) {
            INFO(name);
            guarded_matrix<float> same(24, 50);
            keel::router_init(be, same.view(), {.seed = 4}, options).or_throw();
            CHECK(same.contents() == dense.contents());
            CHECK(same.contents() == w.contents());
        });
    }
    guarded_matrix<float> square(8, 8), wide(9, 8);
    CHECK(keel::router_init(keel::cpu{}, square.view(), {}, {.orthogonal = true}).ok());
    for (int64_t i = 0; i < 8; ++i)
        for (int64_t j = 0; j < i; ++j) CHECK(std::abs(dot(square, i, j)) < 1e-6); // the last row is all cancellation
    CHECK(keel::router_init(keel::cpu{}, wide.view(), {}, {.orthogonal = true}).code == keel::status_code::bad_option);
    CHECK(keel::router_init(keel::cpu{}, wide.view(), {}, {.norm = 0.0f}).code == keel::status_code::bad_option);
}

TEST_CASE("calibrate_bias: a large common mean crowns no experts") {
    // Logits of 32 experts whose offsets are twice what tokens differ by.
    int64_t const tokens = 1000, experts = 32, k = 4;
    std::vector<float> z = floats(data_kind::normal, tokens * experts, 6), offset = floats(data_kind::normal, experts, 7);
    for (int64_t i = 0; i < tokens * experts; ++i) z[static_cast<std::size_t>(i)] += 2 * offset[static_cast<std::size_t>(i % experts)];
    guarded_matrix<float> logits(tokens, experts, 0, z);
    scratch ws(keel::calibrate_bias_workspace(tokens, experts, k));
    for (keel::score_function s : all_scores) {
        guarded_matrix<float> bias(1, experts);
        routed<> before(tokens, experts, k), after(tokens, experts, k);
        before.run(keel::cpu{}, logits.view(), {.bias = bias.vec()}, {.score = s}).or_throw();
        keel::calibrate_bias(keel::cpu{}, logits.view(), k, bias.vec(), {.route = {.score = s}}, ws.get()).or_throw();
        after.run(keel::cpu{}, logits.view(), {.bias = bias.vec()}, {.score = s}).or_throw();
        CHECK(keel::max_over_mean(before.demand) > 4);
        CHECK(keel::max_over_mean(after.demand) < 1.03); // 2 or 3 tokens of 125; the last steps are 4e-8
        // Never worse than what came in.
        guarded_matrix<float> kept(1, experts, 0, std::vector<float>(32, 0.0f));
        for (int64_t e = 0; e < experts; ++e) kept.set(0, e, bias.get(0, e));
        keel::calibrate_bias(keel::cpu{}, logits.view(), k, kept.vec(), {.route = {.score = s}, .rounds = 3, .rate = 10.0f}, ws.get()).or_throw();
        CHECK(kept.contents() == bias.contents());
    }
    guarded_matrix<float> bias(1, experts);
    CHECK(keel::calibrate_bias(keel::cpu{}, logits.view(), 0, bias.vec(), {}, ws.get()).code == keel::status_code::bad_option);
    CHECK(keel::calibrate_bias(keel::cpu{}, logits.view(), k, bias.vec(), {.decay = 0.0f}, ws.get()).code == keel::status_code::bad_option);
    CHECK(keel::calibrate_bias(keel::cpu{}, logits.view(), k, bias.vec()).code == keel::status_code::small_workspace);
}
