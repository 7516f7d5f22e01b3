// Muon against its formula in double with the SVD as orthogonaliser, and the promises around it: logical matrices, the gate, threads.
#include <limits>

#include <keel/backend/cpu/cpu.hpp>
#include <keel/backend/cpu/matmul.hpp>
#include <keel/backend/cpu/thread_pool.hpp>
#include <keel/optim/muon.hpp>
#include <optim/matrices.hpp>
#include <support/catch.hpp>

using namespace keel_test;
using keel::bf16;
using keel::momentum_rule;
using keel::muon_scale;

namespace {

keel::cpu<> const be;
constexpr keel::step_gate open = {.apply = 1, .clip = 1.0f};

/// One parameter with state, as rows of a guarded matrix [stack * rows, columns].
struct parameter {
    keel::muon_plan<> plan;
    guarded_matrix<float> gradient, weight, momentum;
    guarded_matrix<bf16> shadow;
    keel::step_change change;

    explicit parameter(keel::muon_plan<> const& p, uint64_t seed = 1)
        : plan(p), gradient(p.stack * p.rows, p.columns, 3, floats(data_kind::normal, p.stack * p.rows * p.columns, seed)),
          weight(p.stack * p.rows, p.columns, 1, floats(data_kind::uniform, p.stack * p.rows * p.columns, seed + 50)),
          momentum(p.stack * p.rows, p.columns), shadow(p.stack * p.rows, p.columns) {}
    template <class T> keel::view<T, 3> cube(guarded_matrix<T>& m) {
        auto const v = m.view();
        return {v.data, {plan.stack, plan.rows, plan.columns}, {plan.rows * v.stride[0], v.stride[0], 1}};
    }
    keel::muon_parameter<> get() {
        return {.plan = plan, .gradient = cube(gradient), .weight = cube(weight), .momentum = cube(momentum), .shadow = cube(shadow), .change = &change};
    }
    void set_gradient(uint64_t seed) {
        gradient = guarded_matrix<float>(gradient.rows(), gradient.columns(), 3,
                                         floats(data_kind::normal, gradient.rows() * gradient.columns(), seed));
    }
    uint64_t bits() const {
        digest d;
        d.add(weight), d.add(momentum), d.add(shadow);
        return d.value();
    }
    bool untouched() const { return weight.untouched() && momentum.untouched() && shadow.untouched() && gradient.untouched(); }
};

template <class B> keel::status step(B const& backend, std::vector<parameter*> const& list, keel::step_gate const& gate, keel::muon_options options) {
    std::vector<keel::muon_parameter<>> p;
    for (parameter* x : list) p.push_back(x->get());
    auto const parameters = keel::vec(p.data(), static_cast<int64_t>(p.size()));
    scratch memory(keel::muon_step_workspace(backend, parameters));
    return keel::muon_step(backend, parameters, gate, options, memory.get());
}

/// The formula in double; O from the SVD.
struct reference_state {
    matrix weight, momentum;
    void step(matrix const& gradient, double clip, keel::muon_options o, double scale) {
        double const mu = static_cast<double>(o.momentum), rate = static_cast<double>(o.learning_rate);
        matrix const x = (o.rule == momentum_rule::ema ? 1 - mu : 1.0) * clip * gradient;
        momentum = mu * momentum + x;
        matrix const u = o.nesterov ? matrix(mu * momentum + x) : momentum;
        weight = weight * (1 - rate * static_cast<double>(o.weight_decay)) - rate * scale * mapped(u, keel::coefficients<keel::polar_express>());
    }
};

} // namespace

TEST_CASE("muon_step follows its formula, for each momentum rule, with and without Nesterov") {
    for (auto [r, c] : {std::pair<int64_t, int64_t>{12, 20}, {25, 10}})
        for (momentum_rule rule : {momentum_rule::ema, momentum_rule::heavy_ball})
            for (bool nesterov : {true, false}) {
                INFO(r << "x" << c << " rule " << static_cast<int>(rule) << " nesterov " << nesterov);
                keel::muon_options const options{
                    .learning_rate = 0.02f, .momentum = 0.9f, .rule = rule, .nesterov = nesterov, .weight_decay = 0.5f};
                parameter p(keel::plan_muon(1, r, c));
                reference_state want{to_matrix(p.weight), to_matrix(p.momentum)};
                double const scale = 0.2 * std::sqrt(static_cast<double>(std::max(r, c)));
                for (uint64_t t = 0; t < 3; ++t) {
                    p.set_gradient(70 + t);
                    auto const before = p.weight;
                    double const clip = t == 1 ? 0.3 : 1.0;
                    step(be, {&p}, {.apply = 1, .clip = static_cast<float>(clip)}, options).or_throw();
                    want.step(to_matrix(p.gradient), clip, options, scale);
                    CHECK((to_matrix(p.momentum) - want.momentum).cwiseAbs().maxCoeff() < 2e-6); // a few roundings of numbers up to 5
                    // O is right to some 1e-3 where fp32 loses small singular values (slope 976, see newton_schulz_test), times rate * scale
                    CHECK((to_matrix(p.weight) - want.weight).cwiseAbs().maxCoeff() < 0.02 * scale * 2e-3);
                    matrix const moved = to_matrix(p.weight) - to_matrix(before);
                    CHECK(p.change.update_squares == Approx(moved.squaredNorm()).epsilon(1e-5));
                    CHECK(p.change.weight_squares == Approx(to_matrix(p.weight).squaredNorm()).epsilon(1e-5));
                    for (int64_t i = 0; i < r; ++i) CHECK(p.shadow.get(i, 3).bits == to_format<bf16>(p.weight.get(i, 3)).bits);
                }
                CHECK(p.untouched());
            }
}

TEST_CASE("row parts, heads and experts are matrices of their own, bit for bit") { // Megatron #4731, maxtext #4798, dion #121
    keel::muon_options const options{.learning_rate = 0.01f, .weight_decay = 0.1f};
    // 2 experts of a gated QKV: 4 blocks of unequal rows, q and k by heads.
    parameter fused(keel::plan_muon(2, 48, 20, {{"q", 24, 3}, {"k", 8, 2}, {"v", 6}, {"gate", 10}}));
    struct block {
        int64_t first, rows;
    };
    std::vector<block> const blocks = {{0, 8}, {8, 8}, {16, 8}, {24, 4}, {28, 4}, {32, 6}, {38, 10}};
    std::vector<parameter> single;
    for (int64_t item = 0; item < 2; ++item)
        for (block b : blocks) {
            parameter p(keel::plan_muon(1, b.rows, 20));
            for (int64_t i = 0; i < b.rows; ++i)
                for (int64_t j = 0; j < 20; ++j) {
                    p.gradient.set(i, j, fused.gradient.get(item * 48 + b.first + i, j));
                    p.weight.set(i, j, fused.weight.get(item * 48 + b.first + i, j));
                }
            single.push_back(p);
        }
    step(be, {&fused}, open, options).or_throw();
    step(be, {&fused}, open, options).or_throw();
    for (std::size_t s = 0; s < single.size(); ++s) {
        parameter& p = single[s];
        step(be, {&p}, open, options).or_throw();
        step(be, {&p}, open, options).or_throw();
        int64_t const first = static_cast<int64_t>(s / blocks.size()) * 48 + blocks[s % blocks.size()].first;
        auto const same_rows = [&](auto const& a, auto const& b) {
            for (int64_t i = 0; i < p.plan.rows; ++i)
                for (int64_t j = 0; j < 20; ++j)
                    if (keel::to_word(a.get(i, j)) != keel::to_word(b.get(first + i, j))) return false;
            return true;
        };
        INFO("matrix " << s);
        CHECK(same_rows(p.weight, fused.weight));
        CHECK(same_rows(p.momentum, fused.momentum));
        CHECK(same_rows(p.shadow, fused.shadow));
    }
    CHECK(fused.untouched());
}

TEST_CASE("a list on two threads gives the bits of one call a parameter on one") {
    auto const make = [] {
        return std::vector<parameter>{parameter(keel::plan_muon(5, 16, 24), 1), parameter(keel::plan_muon(1, 70, 30), 2),
                                      parameter(keel::plan_muon(1, 40, 9, {{"a", 13}, {"b", 27}}), 3), parameter(keel::plan_muon(1, 1, 7), 4),
                                      parameter(keel::plan_muon(0, 3, 3), 5)};
    };
    auto const pointers = [](std::vector<parameter>& v) {
        std::vector<parameter*> p;
        for (auto& x : v) p.push_back(&x);
        return p;
    };
    auto one_by_one = make(), together = make(), threaded = make(), reversed = make();
    keel::thread_pool const two(2), sixteen(16);
    for (int t = 0; t < 2; ++t) {
        for (auto& p : one_by_one) {
            auto const alone = p.get();
            keel::muon_step(be, alone, open, {}, scratch(keel::muon_step_workspace(be, alone)).get()).or_throw();
        }
        step(be, pointers(together), open, {}).or_throw();
        step(keel::cpu(two), pointers(threaded), open, {}).or_throw();
        auto list = pointers(reversed);
        std::reverse(list.begin(), list.end());
        step(keel::cpu(sixteen), list, open, {}).or_throw(); // more threads than matrices: they go into the products
    }
    for (std::size_t i = 0; i < one_by_one.size(); ++i) {
        INFO("parameter " << i);
        for (auto* other : {&together, &threaded, &reversed}) {
            CHECK((*other)[i].bits() == one_by_one[i].bits());
            CHECK((*other)[i].change.update_squares == one_by_one[i].change.update_squares);
            CHECK((*other)[i].change.weight_squares == one_by_one[i].change.weight_squares);
        }
    }
}

TEST_CASE("a skipped step leaves every byte, and a bad parameter stops all of them before a write") {
    parameter a(keel::plan_muon(1, 10, 12), 1), b(keel::plan_muon(3, 6, 5), 2);
    step(be, {&a, &b}, open, {}).or_throw();
    uint64_t const bits_a = a.bits(), bits_b = b.bits();
    step(be, {&a, &b}, keel::step_gate{}, {.weight_decay = 0.5f}).or_throw();
    CHECK(a.bits() == bits_a);
    CHECK(b.bits() == bits_b);
    CHECK(a.change.ratio() == 0.0);
    // Past an open gate, what is not finite is found in time: DeepSpeed #8432.
    for (float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
        b.gradient.set(13, 2, bad);
        auto const s = step(be, {&a, &b}, open, {.weight_decay = 0.5f});
        CHECK(s.code == keel::status_code::non_finite);
        CHECK(s.got == 1);
        CHECK(a.bits() == bits_a);
        CHECK(b.bits() == bits_b);
    }
    // Also where only the sum overflows.
    b.set_gradient(2);
    b.gradient.set(0, 0, 3e38f);
    b.momentum.set(0, 0, 3e38f);
    uint64_t const full = b.bits();
    CHECK(step(be, {&b}, open, {.rule = momentum_rule::heavy_ball}).code == keel::status_code::non_finite);
    CHECK(b.bits() == full);
}

namespace {
/// A set that overflows: s -> 6 s and more.
struct diverging {
    static constexpr char const *name = "diverging", *source = "this test";
    static constexpr keel::newton_schulz_term listed[] = {{3.0, 2.0, 1.0}};
    static constexpr int default_steps = 5;
    static constexpr keel::longer_run more = keel::longer_run::cycle;
};
} // namespace

TEST_CASE("coefficients that overflow never reach a weight") {
    parameter a(keel::plan_muon(1, 10, 12), 1), b(keel::plan_muon(2, 6, 5, {}, {.coefficients = keel::unsafe_coefficients<diverging>()}), 2);
    auto const weight = b.weight.contents();
    auto const shadow = b.shadow.contents();
    auto const s = step(be, {&a, &b}, open, {.weight_decay = 0.5f});
    CHECK(s.code == keel::status_code::non_finite);
    CHECK(std::string(s.argument) == "plan");
    CHECK(s.got == 1);
    CHECK(b.weight.contents() == weight);
    CHECK(b.shadow.contents() == shadow);
    CHECK(b.change.ratio() == 0.0);
}

TEST_CASE("clipping acts on the gradient, never on the step") { // DeepSpeed #7713, #8439
    parameter p(keel::plan_muon(1, 14, 9)), q(keel::plan_muon(1, 14, 9)), r(keel::plan_muon(1, 14, 9));
    auto const gradient = p.gradient.contents();
    step(be, {&p}, {.apply = 1, .clip = 0x1p-7f}, {}).or_throw();
    step(be, {&q}, open, {}).or_throw();
    CHECK(p.weight.contents() == q.weight.contents()); // O does not know its input's norm
    CHECK(p.momentum.contents() != q.momentum.contents());
    CHECK(p.gradient.contents() == gradient);
    for (int64_t i = 0; i < 14; ++i)
        for (int64_t j = 0; j < 9; ++j) r.gradient.set(i, j, r.gradient.get(i, j) * 0x1p-7f);
    step(be, {&r}, open, {}).or_throw();
    CHECK(r.bits() == p.bits());
}

TEST_CASE("EMA and heavy ball are two things that start alike; momentum is not ignored") { // KJ #52, #4; optax #1170
    auto const run = [](momentum_rule rule, bool nesterov, int steps) {
        parameter p(keel::plan_muon(1, 10, 16));
        for (int t = 0; t < steps; ++t) {
            p.set_gradient(static_cast<uint64_t>(200 + t));
            step(be, {&p}, open, {.rule = rule, .nesterov = nesterov}).or_throw();
        }
        return to_matrix(p.weight);
    };
    auto const distance = [](matrix const& a, matrix const& b) { return (a - b).norm(); };
    matrix const start = to_matrix(parameter(keel::plan_muon(1, 10, 16)).weight);
    for (bool nesterov : {true, false})
        CHECK(distance(run(momentum_rule::ema, nesterov, 3), run(momentum_rule::heavy_ball, nesterov, 3)) <
              1e-3 * distance(run(momentum_rule::ema, nesterov, 3), start));
    // With the buffer ignored the second step would be that of its gradient alone.
    for (bool nesterov : {true, false}) {
        matrix const first = run(momentum_rule::ema, nesterov, 1), second = run(momentum_rule::ema, nesterov, 2);
        parameter fresh(keel::plan_muon(1, 10, 16));
        matrix const before = to_matrix(fresh.weight);
        fresh.set_gradient(201);
        step(be, {&fresh}, open, {.nesterov = nesterov}).or_throw();
        CHECK(distance(second - first, to_matrix(fresh.weight) - before) > 0.3 * distance(second, first));
    }
    CHECK(distance(run(momentum_rule::ema, true, 2), run(momentum_rule::ema, false, 2)) > 1e-4);
}

TEST_CASE("a zero gradient moves nothing but decay, which acts once and unscaled") { // KJ #54, pytorch_optimizer #371
    parameter p(keel::plan_muon(1, 9, 40));
    p.gradient = guarded_matrix<float>(9, 40, 3);
    matrix const before = to_matrix(p.weight);
    step(be, {&p}, open, {.learning_rate = 0.1f}).or_throw();
    CHECK(to_matrix(p.weight) == before);
    step(be, {&p}, open, {.learning_rate = 0.1f, .weight_decay = 0.5f}).or_throw();
    CHECK((to_matrix(p.weight) - 0.95 * before).cwiseAbs().maxCoeff() < 1e-7);
}

TEST_CASE("the scale is that of the logical matrix") { // EO #80, and a fused weight's shape is nobody's shape
    CHECK(keel::muon_scale_of(muon_scale::match_rms_adamw, 16, 64) == 1.6f);
    CHECK(keel::muon_scale_of(muon_scale::match_rms_adamw, 64, 16) == 1.6f);
    CHECK(keel::muon_scale_of(muon_scale::spectral, 64, 16) == 2.0f);
    CHECK(keel::muon_scale_of(muon_scale::spectral, 16, 64) == 1.0f);
    CHECK(keel::muon_scale_of(muon_scale::spectral_mup, 16, 64) == 0.5f);
    CHECK(keel::muon_scale_of(muon_scale::unit, 16, 64) == 1.0f);
    CHECK(keel::muon_scale_of(muon_scale::unit_rms, 16, 64) == 8.0f);
    CHECK(keel::muon_scale_of(muon_scale::analytic_rms_adamw, 64, 16) == Approx(8 * std::sqrt((1 - 0.9) / (1 + 0.9))).epsilon(1e-7));
    CHECK(std::string(keel::name_of(muon_scale::analytic_rms_adamw)) == "analytic_rms_adamw");
    auto const fused = keel::plan_muon(1, 192, 64, {{"q", 64}, {"k", 64}, {"v", 64}}, {.scale = muon_scale::spectral});
    CHECK(fused.scale(0) == 1.0f); // of the slab it would be sqrt(3)
    // RMS of a full-rank update under match_rms_adamw: 0.2 times the singular values' RMS.
    parameter p(keel::plan_muon(1, 30, 120));
    matrix const before = to_matrix(p.weight);
    step(be, {&p}, open, {.learning_rate = 0.5f}).or_throw();
    double const rms = (to_matrix(p.weight) - before).norm() / std::sqrt(30.0 * 120.0) / 0.5;
    CHECK(rms == Approx(0.2).epsilon(0.13)); // Polar Express: 0.87 to 1.124
}

TEST_CASE("a plan prints what it does and finds parts that do not fit") {
    auto const plan = keel::plan_muon(2, 1536, 512, {{"q", 1024, 16}, {"k", 256, 4}, {"v", 256}});
    CHECK(plan.valid());
    CHECK(plan.matrices() == 42);
    auto const m = plan.matrix(21 + 18);
    CHECK(m.item == 1);
    CHECK(m.first_row == 1024 + 2 * 64);
    CHECK(m.rows == 64);
    CHECK(m.part == 1);
    CHECK_THAT(plan.text(), Catch::Matchers::ContainsSubstring("q: 32 of 64 x 512: gram, 5 steps of polar_express"));
    CHECK_THAT(plan.text(), Catch::Matchers::ContainsSubstring("scale 4.52548"));
    CHECK(!keel::plan_muon(1, 100, 10, {{"a", 60}, {"b", 50}}).valid());
    CHECK(!keel::plan_muon(1, 100, 10, {{"a", 50, 3}, {"b", 50}}).valid());
    CHECK(!keel::plan_muon(1, 17, 10, {{}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {"all", 17}}).valid());
    parameter p(keel::plan_muon(1, 10, 12, {{"a", 4}, {"b", 5}}));
    CHECK(step(be, {&p}, open, {}).code == keel::status_code::bad_state);
}

TEST_CASE("weights stored the other way round, bf16 gradients and bf16 products") {
    parameter p(keel::plan_muon(1, 18, 7));
    guarded_matrix<float> w(7, 18), m(7, 18), g(7, 18);
    for (int64_t i = 0; i < 18; ++i)
        for (int64_t j = 0; j < 7; ++j) w.set(j, i, p.weight.get(i, j)), g.set(j, i, p.gradient.get(i, j));
    keel::muon_parameter<> const turned[] = {{.plan = p.plan, .gradient = keel::stacked(transposed(g.view())),
                                              .weight = keel::stacked(transposed(w.view())), .momentum = keel::stacked(transposed(m.view()))}};
    scratch memory(keel::muon_step_workspace(be, keel::vec(turned, 1)));
    keel::muon_step(be, keel::vec(turned, 1), open, {}, memory.get()).or_throw();
    step(be, {&p}, open, {}).or_throw();
    CHECK((to_matrix(w).transpose() - to_matrix(p.weight)).cwiseAbs().maxCoeff() < 1e-6); // the norm's last bit, times 1e-3 * 0.85
    CHECK(to_matrix(m).transpose() == to_matrix(p.momentum));

    parameter q(keel::plan_muon(1, 18, 7));
    guarded_matrix<bf16> half(18, 7);
    for (int64_t i = 0; i < 18; ++i)
        for (int64_t j = 0; j < 7; ++j) half.set(i, j, to_format<bf16>(q.gradient.get(i, j)));
    matrix const before = to_matrix(q.weight);
    keel::muon_parameter<bf16, bf16> const low[] = {{.plan = keel::plan_muon<bf16>(1, 18, 7), .gradient = keel::stacked(half.view()),
                                                     .weight = keel::stacked(q.weight.view()), .momentum = keel::stacked(q.momentum.view())}};
    scratch low_memory(keel::muon_step_workspace(be, keel::vec(low, 1)));
    keel::muon_step(be, keel::vec(low, 1), open, {}, low_memory.get()).or_throw();
    matrix const high = to_matrix(p.weight) - before, got = to_matrix(q.weight) - before;
    CHECK(got.cwiseProduct(high).sum() > 0.99 * high.norm() * got.norm()); // the same step to bf16's precision
    CHECK((got - high).norm() > 1e-6);
}

TEST_CASE("muon_step says what is wrong and writes nothing") {
    parameter p(keel::plan_muon(1, 8, 6)), q(keel::plan_muon(1, 8, 6));
    auto const before = p.bits();
    using keel::status_code;
    auto const code = [&](auto change) {
        keel::muon_parameter<> x[] = {p.get()};
        keel::muon_options o;
        change(x[0], o);
        scratch memory(keel::muon_step_workspace(be, keel::vec(x, 1)));
        return keel::muon_step(be, keel::vec(x, 1), open, o, memory.get()).code;
    };
    CHECK(code([&](auto& x, auto&) { x.gradient = keel::stacked(slice(q.gradient.view(), 0, 7)); }) == status_code::bad_shape);
    CHECK(code([&](auto& x, auto&) { x.momentum = {}; }) == status_code::bad_shape);
    CHECK(code([&](auto& x, auto&) { x.weight.stride[1] = 0; }) == status_code::bad_stride);
    CHECK(code([&](auto& x, auto&) { x.momentum = x.weight; }) == status_code::overlap);
    CHECK(code([&](auto& x, auto&) { x.gradient = x.weight; }) == status_code::overlap);
    // The shadow takes a weight as it is made: over anything else it would be read back as an input.
    auto const over = [](keel::view<float, 3> v) {
        return keel::view<bf16, 3>{reinterpret_cast<bf16*>(v.data), {1, 8, 6}, {2 * v.stride[0], 2 * v.stride[1], 2 * v.stride[2]}};
    };
    CHECK(code([&](auto& x, auto&) { x.shadow = over(x.weight); }) == status_code::overlap);
    CHECK(code([&](auto& x, auto&) { x.shadow = over(p.cube(p.gradient)); }) == status_code::overlap);
    CHECK(code([&](auto& x, auto&) { x.shadow = over(x.momentum); }) == status_code::overlap);
    CHECK(code([&](auto& x, auto&) { x.shadow.stride[1] = 0; }) == status_code::bad_stride);
    CHECK(code([&](auto& x, auto&) {
              x.plan = keel::plan_muon(1, 8, 6, {}, {.coefficients = keel::coefficients<keel::keller, float, 65>(), .form = keel::newton_schulz_form::gram});
          }) == status_code::bad_option);
    CHECK(code([&](auto&, auto& o) { o.momentum = 1.0f; }) == status_code::bad_option);
    CHECK(code([&](auto&, auto& o) { o.learning_rate = std::nanf(""); }) == status_code::bad_option);
    CHECK(code([&](auto&, auto& o) { o.weight_decay = -1.0f; }) == status_code::bad_option);
    CHECK(code([&](auto&, auto& o) { o.learning_rate = 0x1.000002p40f; }) == status_code::bad_option);
    CHECK(p.bits() == before);
    keel::muon_parameter<> x[] = {p.get(), q.get()};
    CHECK(keel::muon_step(be, keel::vec(x, 1), open, {}, {}).code == status_code::small_workspace);
    x[1].weight.extent[1] = 7; // of a model's hundreds, which one
    CHECK(keel::muon_step(be, keel::vec(x, 2), open, {}, {}).message() == "muon_step: weight has dimension 1 = 7, wanted 8, at parameter 1 (bad_shape)");
    CHECK(keel::muon_step(be, keel::vec(x, 1), open, {.momentum = 1.0f}, {}).message() == "muon_step: options.momentum, wanted a number in [0, 1) (bad_option)");
    CHECK(keel::muon_step(be, keel::view<keel::muon_parameter<>, 1>{}, open, {}, scratch(64).get()).ok());
}
