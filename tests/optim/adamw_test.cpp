// AdamW against the textbook in double, the gate's promises, and the same bits on every backend.
#include <cmath>
#include <limits>

#include <keel/format/f16.hpp>
#include <keel/optim/adamw.hpp>
#include <support/backends.hpp>
#include <support/catch.hpp>
#include <support/data.hpp>

using namespace keel_test;

namespace {

/// Weights, state and gradient of one tensor, each guarded.
template <class Shadow = keel::bf16> struct problem {
    guarded_matrix<float> w, m, v;
    guarded_matrix<Shadow> shadow;
    int64_t applied = 0;

    explicit problem(int64_t n, data_kind kind = data_kind::normal)
        : w(1, n, 0, floats(kind, n, 21)), m(1, n), v(1, n), shadow(1, n) {}
    keel::adamw_state state() { return {.m = m.vec(), .v = v.vec(), .applied = &applied}; }
    keel::adamw_weights<Shadow> weights() { return {.master = w.vec(), .shadow = shadow.vec()}; }
    template <class B, class Gradient>
    keel::step_change step(B const& be, guarded_matrix<Gradient>& gradient, keel::step_gate const& gate, keel::adamw_options options) {
        scratch memory(keel::adamw_step_workspace(w.columns()));
        keel::step_change change;
        keel::adamw_step<Shadow>(be, gradient.vec(), weights(), state(), gate, options, &change, memory.get()).or_throw();
        return change;
    }
    uint64_t bits() const {
        digest d;
        d.add(w), d.add(m), d.add(v), d.add(shadow);
        d.add(&applied, sizeof(applied));
        return d.value();
    }
    bool untouched() const { return w.untouched() && m.untouched() && v.untouched() && shadow.untouched(); }
};

keel::step_gate clipped(float clip) { return {.apply = 1, .clip = clip, .pre_clip_norm = 0.0}; }
constexpr keel::step_gate closed{};

} // namespace

TEST_CASE("adamw_step follows the textbook in double") {
    keel::adamw_options const options{.learning_rate = 3e-3f, .beta1 = 0.9f, .beta2 = 0.95f, .epsilon = 1e-8f, .weight_decay = 0.1f};
    auto const d = [](float x) { return static_cast<double>(x); };
    for (int64_t n : {1, 17, 1000, 8193}) {
        problem p(n);
        for (int t = 1; t <= 12; ++t) {
            guarded_matrix<float> gradient(1, n, 0, floats(data_kind::normal, n, static_cast<uint64_t>(100 + t)));
            auto const before = p;
            float const clip = t % 3 == 0 ? 0.37f : 1.0f;
            p.step(keel::reference{}, gradient, clipped(clip), options);
            for (int64_t i = 0; i < n; ++i) {
                double const g = gradient.at(0, i) * d(clip), b1 = d(options.beta1), b2 = d(options.beta2), unit = 0x1p-24;
                double const m = b1 * before.m.at(0, i) + (1 - b1) * g, v = b2 * before.v.at(0, i) + (1 - b2) * g * g;
                double const m_hat = m / (1 - std::pow(b1, t)), v_hat = v / (1 - std::pow(b2, t));
                double const direction = m_hat / (std::sqrt(v_hat) + d(options.epsilon)), w = before.w.at(0, i);
                double const want = w - d(options.learning_rate) * d(options.weight_decay) * w - d(options.learning_rate) * direction;
                // Two roundings of the terms' size reach m, four v; the direction adds six more to what m's cancellation left.
                double const m_error = 4 * unit * (std::abs(b1 * before.m.at(0, i)) + std::abs((1 - b1) * g));
                REQUIRE(std::abs(p.m.at(0, i) - m) <= m_error);
                REQUIRE(std::abs(p.v.at(0, i) - v) <= 5 * unit * v);
                double const moved_error = d(options.learning_rate) * std::abs(direction) * (10 * unit + m_error / std::abs(m));
                REQUIRE(std::abs(p.w.at(0, i) - want) <= 2 * unit * std::abs(w) + moved_error);
                REQUIRE(p.shadow.get(0, i).bits == to_format<keel::bf16>(p.w.get(0, i)).bits);
            }
        }
        CHECK(p.applied == 12);
        CHECK(p.untouched());
    }
}

TEST_CASE("adamw_step gives the same bits on every backend, with and without its sums") {
    keel::adamw_options const options{.learning_rate = 1e-2f, .weight_decay = 0.01f};
    for (data_kind kind : {data_kind::normal, data_kind::huge, data_kind::subnormal, data_kind::any_bits})
        for (int64_t n : {1, 100, 2049, 20000}) {
            INFO(name_of(kind) << " " << n);
            guarded_matrix<float> gradient(1, n, 0, floats(kind, n, 31));
            problem want(n);
            keel::step_change change;
            for (int t = 0; t < 3; ++t) change = want.step(keel::reference{}, gradient, clipped(0.5f), options);
            for_each_backend([&](std::string const& name, auto const& be) {
                INFO(name);
                problem p(n), q(n);
                for (int t = 0; t < 3; ++t) {
                    auto const c = p.step(be, gradient, clipped(0.5f), options);
                    if (t == 2) CHECK(std::memcmp(&c, &change, sizeof c) == 0);
                    keel::adamw_step(be, gradient.vec(), q.weights(), q.state(), clipped(0.5f), options).or_throw();
                }
                CHECK(p.bits() == want.bits());
                CHECK(q.bits() == want.bits());
                CHECK(p.untouched());
            });
        }
}

TEST_CASE("a skipped step leaves every byte and does not age the bias correction") { // DeepSpeed 8035, OLMo-core 309
    problem p(5000);
    guarded_matrix<float> gradient(1, 5000, 0, floats(data_kind::normal, 5000)), poison(1, 5000, 0, floats(data_kind::with_nan, 5000));
    p.step(keel::cpu{}, gradient, keel::open_gate(), {});
    auto const before = p.bits();
    auto const change = p.step(keel::cpu{}, poison, closed, {.weight_decay = 0.5f});
    CHECK(p.bits() == before);
    CHECK(change.update_squares == 0.0);
    CHECK(change.ratio() == 0.0);
    CHECK(p.applied == 1);
    // The next step is the second, as if the skipped one had not been.
    problem q(5000);
    for (int t = 0; t < 2; ++t) q.step(keel::cpu{}, gradient, keel::open_gate(), {});
    p.step(keel::cpu{}, gradient, keel::open_gate(), {});
    CHECK(p.bits() == q.bits());
}

TEST_CASE("gradients are const, clip multiplies them, and clip = 1 changes no bit") { // KJ grad.lerp_, DeepSpeed #8439
    guarded_matrix<float> gradient(1, 999, 0, floats(data_kind::normal, 999)), halved = gradient;
    auto const before = gradient.contents();
    problem p(999), q(999), r(999);
    p.step(keel::cpu{}, gradient, clipped(0.5f), {});
    CHECK(gradient.contents() == before);
    for (int64_t i = 0; i < 999; ++i) halved.set(0, i, gradient.get(0, i) * 0.5f);
    q.step(keel::cpu{}, halved, clipped(1.0f), {});
    r.step(keel::cpu{}, halved, keel::open_gate(), {});
    CHECK(p.bits() == q.bits());
    CHECK(q.bits() == r.bits());
}

TEST_CASE("no finite gradient makes the state infinite, and none that is not finite is hidden") {
    guarded_matrix<float> gradient(1, 4, 0, {3e38f, -1e25f, 1e19f, 1e-30f});
    problem p(4);
    for (int t = 0; t < 100; ++t) p.step(keel::cpu{}, gradient, keel::open_gate(), {.learning_rate = 0.01f});
    for (int64_t i = 0; i < 4; ++i) {
        CHECK(std::isfinite(p.v.at(0, i)));
        CHECK(std::isfinite(p.w.at(0, i)));
    }
    problem fresh(4);
    fresh.step(keel::cpu{}, gradient, keel::open_gate(), {.learning_rate = 0.01f});
    problem const start(4);
    CHECK(fresh.w.at(0, 0) - start.w.at(0, 0) == Approx(-0.01).epsilon(1e-4)); // the first step's direction is the sign
    CHECK(fresh.w.at(0, 1) - start.w.at(0, 1) == Approx(0.01).epsilon(1e-4));
    guarded_matrix<float> bad(1, 4, 0, {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), 1.0f, 0.0f});
    problem q(4);
    q.step(keel::cpu{}, bad, keel::open_gate(), {});
    CHECK(std::isnan(q.w.at(0, 0)));
    CHECK(!std::isfinite(q.v.at(0, 1)));
    CHECK(std::isfinite(q.w.at(0, 2)));
    CHECK(q.w.at(0, 3) == start.w.at(0, 3));
}

TEST_CASE("a gradient whose square vanishes steps no further than the learning rate") { // torch: |g| / epsilon
    for (float beta2 : {0.0f, 0.95f, 0.999f, 0x1.fffffep-1f})
        for (float size : {1e-18f, 1e-19f, 1e-20f, 1e-21f, 1e-22f, 1e-25f, 1e-30f, 1e-40f}) {
            INFO(beta2 << " " << size);
            guarded_matrix<float> gradient(1, 1, 0, {size});
            problem p(1);
            p.w.set(0, 0, 0.0f);
            float furthest = 0;
            for (int t = 0; t < 50; ++t) {
                float const from = p.w.get(0, 0);
                p.step(keel::cpu{}, gradient, keel::open_gate(), {.learning_rate = 1.0f, .beta2 = beta2, .epsilon = keel::least_adamw_epsilon});
                furthest = std::max(furthest, std::abs(p.w.get(0, 0) - from));
            }
            // Exactly g / (g + epsilon) for a constant gradient. v is coarse or lost where g is not above epsilon, so at most 1 and a half.
            CHECK(furthest <= 1.5f);
            double const want = static_cast<double>(size) / (static_cast<double>(size) + 0x1p-63);
            CHECK(static_cast<double>(furthest) >= 0.4 * want);
        }
}

TEST_CASE("decay acts once, without gradient too, and pulls delta to 0") {
    guarded_matrix<float> zero(1, 64);
    problem p(64);
    problem const start(64);
    p.step(keel::cpu{}, zero, keel::open_gate(), {.learning_rate = 0.1f, .weight_decay = 0.5f});
    for (int64_t i = 0; i < 64; ++i) CHECK(p.w.at(0, i) == Approx(0.95 * start.w.at(0, i)).epsilon(1e-6));
}

TEST_CASE("step_change measures what was stored") {
    problem p(20000);
    auto const before = p.w;
    guarded_matrix<float> gradient(1, 20000, 0, floats(data_kind::normal, 20000));
    auto const change = p.step(keel::cpu{}, gradient, keel::open_gate(), {.learning_rate = 0.01f});
    double moved = 0, weight = 0;
    for (int64_t i = 0; i < 20000; ++i) {
        moved += std::pow(p.w.at(0, i) - before.at(0, i), 2);
        weight += std::pow(p.w.at(0, i), 2);
    }
    CHECK(change.update_squares == Approx(moved).epsilon(1e-5)); // fp32 differences and sums
    CHECK(change.weight_squares == Approx(weight).epsilon(1e-5));
    CHECK(change.ratio() == Approx(std::sqrt(moved / weight)).epsilon(1e-5));
    auto twice = change;
    twice += change;
    CHECK(twice.ratio() == Approx(change.ratio()));
}

TEST_CASE("adamw_step takes bf16 gradients and other shadows, and says what is wrong") {
    guarded_matrix<keel::bf16> gradient(1, 300, 0, floats(data_kind::normal, 300));
    guarded_matrix<float> same(1, 300), wrong(1, 299);
    for (int64_t i = 0; i < 300; ++i) same.set(0, i, static_cast<float>(gradient.at(0, i)));
    problem<keel::f16> p(300), q(300);
    p.step(keel::cpu{}, gradient, keel::open_gate(), {});
    q.step(keel::cpu{}, same, keel::open_gate(), {});
    CHECK(p.bits() == q.bits());

    keel::cpu be;
    auto const before = p.bits();
    auto const code = [&](auto const& grad, keel::adamw_weights<keel::f16> w, keel::adamw_state s, keel::adamw_options o) {
        return keel::adamw_step<keel::f16>(be, grad, w, s, keel::open_gate(), o).code;
    };
    using keel::status_code;
    CHECK(code(wrong.vec(), p.weights(), p.state(), {}) == status_code::bad_shape);
    CHECK(code(keel::vec(same.view().data, 300, 2), p.weights(), p.state(), {}) == status_code::bad_stride);
    CHECK(code(same.vec(), p.weights(), {.m = p.m.vec(), .v = p.v.vec()}, {}) == status_code::bad_pointer);
    CHECK(code(same.vec(), p.weights(), {.m = p.m.vec(), .v = p.m.vec(), .applied = &p.applied}, {}) == status_code::overlap);
    CHECK(code(p.w.vec(), p.weights(), p.state(), {}) == status_code::overlap);
    CHECK(code(same.vec(), p.weights(), p.state(), {.learning_rate = -1.0f}) == status_code::bad_option);
    for (float const rate : {0x1.000002p40f, std::numeric_limits<float>::infinity()}) { // a factor made of it would overflow
        CHECK(code(same.vec(), p.weights(), p.state(), {.learning_rate = rate}) == status_code::bad_option);
        CHECK(code(same.vec(), p.weights(), p.state(), {.weight_decay = rate}) == status_code::bad_option);
    }
    CHECK(code(same.vec(), p.weights(), p.state(), {.beta1 = 1.0f}) == status_code::bad_option);
    CHECK(code(same.vec(), p.weights(), p.state(), {.beta2 = std::nanf("")}) == status_code::bad_option);
    for (float epsilon : {0.0f, 0x1.fffffep-64f, std::numeric_limits<float>::infinity(), std::nanf("")})
        CHECK(code(same.vec(), p.weights(), p.state(), {.epsilon = epsilon}) == status_code::bad_option);
    // The low-precision copy over anything that the step reads or writes.
    auto const over = [](guarded_matrix<float>& x) { return keel::vec(reinterpret_cast<keel::f16*>(x.view().data), 300); };
    for (guarded_matrix<float>* x : {&p.w, &p.m, &p.v, &same})
        CHECK(code(same.vec(), {.master = p.w.vec(), .shadow = over(*x)}, p.state(), {}) == status_code::overlap);
    p.applied = -1; // a count that no run ever had
    CHECK(code(same.vec(), p.weights(), p.state(), {}) == status_code::bad_state);
    p.applied = 1;
    CHECK(p.bits() == before);
    keel::step_change change;
    CHECK(keel::adamw_step<keel::f16>(be, same.vec(), p.weights(), p.state(), keel::open_gate(), {}, &change).code ==
          status_code::small_workspace);
    // Nothing to do is done, and counted.
    int64_t applied = 0;
    CHECK(keel::adamw_step(be, keel::view<float, 1>{}, {}, {.applied = &applied}, keel::open_gate()).ok());
    CHECK(applied == 1);
}
