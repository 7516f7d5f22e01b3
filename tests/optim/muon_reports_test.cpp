// Faults that were reported of other optimisers' steps, as tests of this one. What other files hold already, by report:
//
//     Keller Jordan #4, #52, optax #1170       muon_test: momentum is not ignored, EMA and heavy ball are two things
//     Keller Jordan #54, pytorch_optimizer #371   muon_test: a zero gradient moves nothing but decay, which acts once and unscaled
//     DeepSpeed #7713, #8439                   muon_test: clipping acts on the gradient; gradients are const there and here
//     DeepSpeed #8432                          muon_test, muon_formats_test: a gradient that is not finite poisons nothing
//     Megatron #4731, maxtext #4798, dion #121, PaddleFleet #1703, EO #80   logical_matrices_test
//     NorMuon #7, #9, #10, DeepSpeed #7748, Megatron #6920   muon_formats_test, saved_state_test, and muon_test's bf16 gradients
#include <cmath>
#include <limits>

#include <keel/backend/cpu/cpu.hpp>
#include <optim/matrices.hpp>
#include <optim/muon_problem.hpp>
#include <support/catch.hpp>

using namespace keel_test;

namespace {

keel::cpu<> const be;
constexpr keel::step_gate open{.apply = 1, .clip = 1.0f};

/// A step from zero momentum: what a gradient of these values makes of the weights.
std::vector<unsigned char> weights_after(int64_t rows, int64_t columns, std::vector<float> const& gradient, keel::muon_options const& options = {}) {
    muon_problem<> p(keel::plan_muon(1, rows, columns));
    p.gradient = guarded_matrix<float>(rows, columns, 3, gradient);
    p.step(be, open, options).or_throw();
    return p.weight.contents();
}

} // namespace

TEST_CASE("neither size nor the order of sizes in a row shows in a step: gradients of 2^-60 to 2^60, rows that begin with nothing") {
    // EO #238, #254, #229; HeavyBall #73: sums of squares that vanish; and a norm past FLT_MAX, which was a silent no-op.
    int64_t const r = 6, c = 300;
    auto gradient = floats(data_kind::normal, r * c, 8);
    auto const at = [&](int64_t i, int64_t j) -> float& { return gradient[static_cast<std::size_t>(i * c + j)]; };
    for (int64_t j = 0; j < c; ++j) at(2, j) = 0.0f;
    for (int64_t j = 0; j < 140; ++j) at(3, j) = 0.0f, at(4, j) *= 0x1p-60f, at(5, j) *= 0x1p-29f;
    for (int64_t j = 140; j < c; ++j) at(1, j) *= 0x1p-50f;
    auto const want = weights_after(r, c, gradient);
    CHECK(want != muon_problem<>(keel::plan_muon(1, r, c)).weight.contents());
    for (int exponent : {-60, -40, 40, 60}) {
        auto scaled = gradient;
        for (float& x : scaled) x = std::ldexp(x, exponent);
        INFO("2^" << exponent);
        CHECK(weights_after(r, c, scaled) == want);
    }
    // newton_schulz takes the norm in its own walks; both are the same norm.
    guarded_matrix<float> u(r, c, 0, gradient), o(r, c);
    scratch memory(keel::newton_schulz_workspace(be, r, c));
    keel::newton_schulz(be, u.view(), o.view(), {}, {}, memory.get()).or_throw();
    muon_problem<> p(keel::plan_muon(1, r, c, {}, {.scale = keel::muon_scale::unit}));
    p.gradient = u, p.weight = guarded_matrix<float>(r, c, 1);
    p.step(be, open, {.learning_rate = 1.0f, .momentum = 0.0f, .nesterov = false}).or_throw();
    CHECK((to_matrix(p.weight) + to_matrix(o)).cwiseAbs().maxCoeff() == 0.0);
    // Entries of 1e18 in numbers: a norm of 6e19, whose square is Inf in fp32.
    std::vector<float> huge(64 * 64), tiny(64 * 64);
    auto const signs = floats(data_kind::normal, 64 * 64, 9);
    for (std::size_t i = 0; i < huge.size(); ++i) huge[i] = 1e18f * signs[i], tiny[i] = 1e-30f * signs[i];
    auto const start = muon_problem<>(keel::plan_muon(1, 64, 64));
    for (auto const& values : {huge, tiny}) {
        muon_problem<> q(keel::plan_muon(1, 64, 64));
        q.gradient = guarded_matrix<float>(64, 64, 3, values);
        q.step(be, open, {.learning_rate = 0.5f}).or_throw();
        double const rms = (to_matrix(q.weight) - to_matrix(start.weight)).norm() / 64 / 0.5;
        CHECK(rms == Approx(0.2).epsilon(0.13)); // match_rms_adamw, whatever the gradient's size
    }
    // Subnormal gradients: finite, and a step.
    CHECK(weights_after(8, 8, floats(data_kind::subnormal, 64)) != muon_problem<>(keel::plan_muon(1, 8, 8)).weight.contents());
}

TEST_CASE("a step is not that of SGD: all directions of a gradient move alike") { // DeepSpeed #8441: Newton-Schulz never ran
    // Singular values of 1 and of 2^-6 in two rows: SGD would move the second 64 times less.
    muon_problem<> p(keel::plan_muon(1, 2, 4));
    p.gradient = guarded_matrix<float>(2, 4, 3, {1, 0, 0, 0, 0, 0x1p-6f, 0, 0});
    auto const start = p.weight;
    p.step(be, open, {.learning_rate = 0.1f}).or_throw();
    double const first = start.at(0, 0) - p.weight.at(0, 0), second = start.at(1, 1) - p.weight.at(1, 1);
    CHECK(first > 0.0);
    CHECK(second > 0.7 * first);
    CHECK(second < 1.4 * first); // Polar Express: 0.85 to 1.13 at these singular values
}

TEST_CASE("a stack as deep as its matrices are wide is a stack") { // HeavyBall's batched norm, divided by that of another matrix
    muon_problem<> stack(keel::plan_muon(5, 3, 5));
    for (int64_t i = 0; i < 15; ++i)
        for (int64_t j = 0; j < 5; ++j) stack.gradient.set(i, j, stack.gradient.get(i, j) * static_cast<float>(1 << (i / 3 * 4)));
    std::vector<muon_problem<>> single;
    for (int64_t s = 0; s < 5; ++s) {
        muon_problem<> p(keel::plan_muon(1, 3, 5));
        for (int64_t i = 0; i < 3; ++i) p.take_row(i, stack, s * 3 + i);
        p.step(be, open, {}).or_throw();
        single.push_back(p);
    }
    stack.step(be, open, {}).or_throw();
    for (int64_t i = 0; i < 15; ++i) CHECK(single[static_cast<std::size_t>(i / 3)].same_row(i % 3, stack, i, i % 3, i % 3));
}

TEST_CASE("shards without rows, and places past 2^32, are counted right") { // dion #74; dion #102, #103, xtuner #2029: 32-bit offsets
    for (auto [stack, rows, columns] : {std::tuple<int64_t, int64_t, int64_t>{0, 4, 4}, {2, 0, 4}, {2, 4, 0}}) {
        INFO(stack << "x" << rows << "x" << columns);
        muon_problem<> p(keel::plan_muon(stack, rows, columns));
        p.balanced = true;
        CHECK(p.step(be, open, {.weight_decay = 0.1f}).ok());
        CHECK(p.applied == 1);
    }
    auto const plan = keel::plan_muon(320, int64_t{1} << 33, 3072, {{"a", int64_t{1} << 32, 1 << 16, 0, 1, 2}, {"b", int64_t{1} << 32, 1 << 16, 1, 1, 2}});
    auto const last = plan.matrix(plan.matrices() - 1);
    CHECK(last.item == 319);
    CHECK(last.first_row == (int64_t{1} << 33) - 2 * (int64_t{1} << 16) + 1);
    CHECK(last.first_row + last.map(last.rows - 1) == (int64_t{1} << 33) - 1);
    // Weights whose items and rows lie further apart than 2^31 elements would be: the addresses are taken with 64 bits.
    keel::muon_parameter<> p{.plan = keel::plan_muon(3, 2, 8)};
    auto* const base = reinterpret_cast<float*>(std::uintptr_t{1} << 40);
    p.weight = {base, {3, 2, 8}, {int64_t{1} << 33, int64_t{1} << 32, 1}};
    auto const matrix = p.plan.matrix(2);
    keel::muon_matrix<keel::muon_parameter<>> const m(p, matrix);
    CHECK(reinterpret_cast<std::uintptr_t>(m.lay(p.weight).at(1, 3)) - reinterpret_cast<std::uintptr_t>(base) == 4 * ((std::uintptr_t{1} << 34) + (std::uintptr_t{1} << 32) + 3));
}

TEST_CASE("gradients are read, never written, in any format, and so are states of a step that is refused") { // Keller Jordan's and DeepSpeed's lerp_
    muon_problem<> p(keel::plan_muon(2, 7, 9));
    auto const gradient = p.gradient.contents();
    for (auto rule : {keel::momentum_rule::ema, keel::momentum_rule::heavy_ball}) p.step(be, open, {.rule = rule}).or_throw();
    CHECK(p.gradient.contents() == gradient);
    CHECK(p.gradient.untouched());
    auto const bits = p.bits();
    for (float bad : {-1.0f, std::numeric_limits<float>::infinity(), std::nanf("")})
        CHECK(p.step(be, open, {.learning_rate = bad}).code == keel::status_code::bad_option);
    for (float bad : {-0.1f, 1.0f, std::nanf("")}) {
        CHECK(p.step(be, open, {.momentum = bad}).code == keel::status_code::bad_option);
        CHECK(p.step(be, open, {.beta2 = bad}).code == keel::status_code::bad_option);
    }
    CHECK(p.bits() == bits);
}

TEST_CASE("a second moment that is not finite is found before anything is written") { // it would pass for the smallest, and its row for the largest
    for (float const bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
        muon_problem<> p(keel::plan_muon(2, 6, 9));
        p.balanced = true;
        p.second.set(1, 4, bad);
        auto const bits = p.bits();
        auto const s = p.step(be, open, {});
        CHECK(s.code == keel::status_code::non_finite);
        CHECK(std::string(s.argument) == "second_moment");
        CHECK(p.bits() == bits);
        CHECK(p.step(be, keel::step_gate{}, {}).ok()); // a closed gate reads none
    }
}
