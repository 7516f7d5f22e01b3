// A fresh router: rows of one norm, orthogonal where asked, and a bias that spreads the first batch.
#include <cmath>
#include <limits>

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
        // The options that the model routes with, next choices and all.
        guarded_matrix<float> spared(1, experts);
        keel::calibrate_bias(keel::cpu{}, logits.view(), k, spared.vec(), {.route = {.score = s, .spare = 3}}, ws.get()).or_throw();
        CHECK(spared.contents() == bias.contents());
    }
    // The options of a forward with groups and next choices.
    keel::route_options limited{.groups = 8, .top_groups = 3, .spare = 2};
    guarded_matrix<float> grouped(1, experts), listed(1, experts);
    keel::calibrate_bias(keel::cpu{}, logits.view(), k, listed.vec(), {.route = limited}, ws.get()).or_throw();
    limited.spare = 0;
    keel::calibrate_bias(keel::cpu{}, logits.view(), k, grouped.vec(), {.route = limited}, ws.get()).or_throw();
    CHECK(listed.contents() == grouped.contents());
    routed<> after(tokens, experts, k);
    after.run(keel::cpu{}, logits.view(), {.bias = grouped.vec()}, limited).or_throw();
    CHECK(keel::max_over_mean(after.demand) < 1.1); // neighbours move each other, so the last steps fit less well than without groups
    guarded_matrix<float> bias(1, experts);
    CHECK(keel::calibrate_bias(keel::cpu{}, logits.view(), 0, bias.vec(), {}, ws.get()).code == keel::status_code::bad_option);
    CHECK(keel::calibrate_bias(keel::cpu{}, logits.view(), k, bias.vec(), {.decay = 0.0f}, ws.get()).code == keel::status_code::bad_option);
    CHECK(keel::calibrate_bias(keel::cpu{}, logits.view(), k, bias.vec()).code == keel::status_code::small_workspace);
}

namespace {

/// Activations that share a mean of `size` times what they differ by, drawn anew for each step.
std::vector<float> activations(int64_t tokens, int64_t width, float size, uint32_t step) {
    std::vector<float> x = floats(data_kind::normal, tokens * width, 100 + step), mean = floats(data_kind::normal, width, 99);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = keel::fma(size, mean[i % mean.size()], x[i]);
    return x;
}
guarded_matrix<float> logits_of(std::vector<float> const& x, guarded_matrix<float> const& w) {
    int64_t const tokens = static_cast<int64_t>(x.size()) / w.columns();
    guarded_matrix<float> z(tokens, w.rows());
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t e = 0; e < w.rows(); ++e) {
            double sum = 0;
            for (int64_t j = 0; j < w.columns(); ++j) sum += w.at(e, j) * static_cast<double>(x[static_cast<std::size_t>(t * w.columns() + j)]);
            z.set(t, e, static_cast<float>(sum));
        }
    return z;
}
double busiest(guarded_matrix<float>& z, int64_t k, keel::view<float const, 1> bias = {}) {
    routed<> r(z.rows(), z.columns(), k);
    r.run(keel::cpu{}, z.view(), {.bias = bias}).or_throw();
    return keel::max_over_mean(r.demand);
}

} // namespace

TEST_CASE("an input with a large common mean crowns no experts at step 1") {
    int64_t const tokens = 800, width = 48, experts = 32, k = 4; // the worst load is experts / k = 8 times the mean
    // 100 tokens an expert: their number scatters by 9.4 (k / experts of 800 draws), the largest of 32 lies some 2.1 times that
    // above the mean, and the calibration of another batch scatters alike: 1.28. Half as much again for chance.
    double const fair = 1.42;
    for (bool orthogonal : {false, true}) {
        INFO("orthogonal rows " << orthogonal);
        guarded_matrix<float> plain(experts, width), away(experts, width);
        // Equal norms, orthogonal or not, do nothing against the mean.
        keel::router_init(keel::cpu{}, plain.view(), {.seed = 8}, {.orthogonal = orthogonal}).or_throw();
        for (float size : {1.0f, 2.0f}) {
            auto first = logits_of(activations(tokens, width, size, 0), plain), next = logits_of(activations(tokens, width, size, 1), plain);
            CHECK(busiest(next, k) > 3.5);
            scratch ws(keel::calibrate_bias_workspace(tokens, experts, k));
            guarded_matrix<float> bias(1, experts);
            keel::calibrate_bias(keel::cpu{}, first.view(), k, bias.vec(), {}, ws.get()).or_throw();
            CHECK(busiest(next, k, bias.vec()) < fair);
        }
        // A mean of ten: sigmoid has no digits left that a bias could work with; without the component there is no offset.
        std::vector<float> const batch = activations(tokens, width, 10.0f, 0);
        std::vector<float> mean(static_cast<std::size_t>(width));
        for (std::size_t i = 0; i < batch.size(); ++i) mean[i % mean.size()] += batch[i] / static_cast<float>(tokens);
        keel::router_init(keel::cpu{}, away.view(), {.seed = 8}, {.orthogonal = orthogonal}, keel::vec(mean.data(), width)).or_throw();
        auto crowned = logits_of(activations(tokens, width, 10.0f, 1), plain), spread = logits_of(activations(tokens, width, 10.0f, 1), away);
        CHECK(busiest(crowned, k) > 7.9);
        CHECK(busiest(spread, k) < fair);
        double size = 0;
        for (float m : mean) size += static_cast<double>(m) * static_cast<double>(m);
        for (int64_t e = 0; e < experts; ++e) {
            double along = 0;
            for (int64_t j = 0; j < width; ++j) along += away.at(e, j) * static_cast<double>(mean[static_cast<std::size_t>(j)]);
            CHECK(std::abs(along) / std::sqrt(size) < 48 * 0x1p-23); // 48 roundings of parts below 1; twice is enough
            CHECK(std::sqrt(dot(away, e, e)) == Approx(1.0).epsilon(0x1p-20));
        }
        for_each_backend([&](std::string const& name, auto const& be) {
            INFO(name);
            guarded_matrix<float> same(experts, width);
            keel::router_init(be, same.view(), {.seed = 8}, {.orthogonal = orthogonal}, keel::vec<float const>(mean.data(), width)).or_throw();
            CHECK(same.contents() == away.contents());
        });
    }
}

TEST_CASE("router_init: a direction of any size can be left, one that is no direction changes nothing, bad ones are refused") {
    int64_t const width = 20;
    guarded_matrix<float> wanted(6, width), w(6, width);
    std::vector<float> d = floats(data_kind::normal, width, 3), scaled = d;
    keel::router_init(keel::cpu{}, wanted.view(), {.seed = 1}, {}, keel::vec<float const>(d.data(), width)).or_throw();
    for (float size : {0x1p100f, 0x1p-100f}) { // their squares are no floats; a power of two keeps all quotients
        for (std::size_t j = 0; j < d.size(); ++j) scaled[j] = d[j] * size;
        keel::router_init(keel::cpu{}, w.view(), {.seed = 1}, {}, keel::vec<float const>(scaled.data(), width)).or_throw();
        CHECK(w.contents() == wanted.contents());
    }
    // A row that lies along the direction but for a ten-thousandth: what is left of it is all cancellation, and still at a right angle.
    std::vector<float> along(static_cast<std::size_t>(width));
    keel::router_init(keel::cpu{}, wanted.view(), {.seed = 1}).or_throw();
    for (int64_t j = 0; j < width; ++j) along[static_cast<std::size_t>(j)] = wanted.get(0, j) + 1e-4f * wanted.get(1, j);
    keel::router_init(keel::cpu{}, w.view(), {.seed = 1}, {}, keel::vec<float const>(along.data(), width)).or_throw();
    double part = 0, length = 0;
    for (int64_t j = 0; j < width; ++j) {
        double const a = static_cast<double>(along[static_cast<std::size_t>(j)]);
        part += w.at(0, j) * a, length += a * a;
    }
    CHECK(std::abs(part) / std::sqrt(length) < 20 * 0x1p-23);

    std::vector<float> zero(static_cast<std::size_t>(width));
    keel::router_init(keel::cpu{}, wanted.view(), {.seed = 1}).or_throw();
    keel::router_init(keel::cpu{}, w.view(), {.seed = 1}, {}, keel::vec<float const>(zero.data(), width)).or_throw();
    CHECK(w.contents() == wanted.contents());
    using keel::status_code;
    CHECK(keel::router_init(keel::cpu{}, w.view(), {}, {}, keel::vec<float const>(d.data(), width - 1)).code == status_code::bad_shape);
    CHECK(keel::router_init(keel::cpu{}, w.view(), {}, {}, keel::vec<float const>(w.view().at(2), width)).code == status_code::overlap);
    d[7] = std::numeric_limits<float>::infinity();
    CHECK(keel::router_init(keel::cpu{}, w.view(), {}, {}, keel::vec<float const>(d.data(), width)).message() ==
          "router_init: away_from has a number that is not finite at column = 7, wanted none (bad_option)");
    guarded_matrix<float> full(20, width);
    CHECK(keel::router_init(keel::cpu{}, full.view(), {}, {.orthogonal = true}, keel::vec<float const>(zero.data(), width)).code ==
          status_code::bad_option);
    CHECK(w.contents() == wanted.contents());
}
