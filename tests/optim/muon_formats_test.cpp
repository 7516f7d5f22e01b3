// muon_step with momentum of 16 and of 8 bits, weights without a master, NorMuon's second moment and cautious decay. The oracle is the fp32 step,
// which muon_test.cpp holds against the formula: what is kept in fewer bits is its value, rounded once.
#include <cmath>

#include <keel/backend/cpu/cpu.hpp>
#include <keel/backend/cpu/thread_pool.hpp>
#include <keel/backend/reference_matmul.hpp>
#include <keel/optim/kahan.hpp>
#include <optim/muon_problem.hpp>
#include <support/catch.hpp>

using namespace keel_test;
using keel::bf16;
using keel::e4m3;

namespace {

using codes = keel::block_scaled<e4m3, keel::e8m0_scale, 1, 32>;
using in_codes = muon_problem<codes, bf16>; ///< 8-bit momentum, 16-bit weights
using in_halves = muon_problem<bf16, float>;

keel::cpu<> const be;
constexpr keel::step_gate open{.apply = 1, .clip = 1.0f};

/// The fp32 parameter with the values that another holds now.
template <class Problem> muon_problem<> in_fp32(Problem const& p) {
    muon_problem<> q(p.plan);
    for (int64_t i = 0; i < p.rows(); ++i)
        for (int64_t j = 0; j < p.plan.columns; ++j) {
            q.gradient.set(i, j, p.gradient.get(i, j));
            q.weight.set(i, j, static_cast<float>(p.weight.at(i, j)));
            q.momentum.values.set(i, j, p.momentum.at(i, j));
        }
    q.balanced = p.balanced;
    for (int64_t s = 0; s < p.plan.stack; ++s)
        for (int64_t i = 0; i < p.plan.rows; ++i) q.second.set(s, i, p.second.get(s, i));
    return q;
}
bf16 by_chance(float x, uint32_t noise) { return keel::encode<bf16, keel::overflow::saturate_finite, keel::rounding::stochastic>(x, noise); }

/// Element [i, j]'s words in a step of muon_problem.
keel::random_block<uint32_t> words(int64_t i, int64_t columns, int64_t j, int64_t applied) {
    return keel::random_block_of<uint32_t>({5, static_cast<uint32_t>(100 + applied), 2}, static_cast<uint64_t>(i * columns), static_cast<uint32_t>(j));
}

} // namespace

TEST_CASE("momentum of fewer bits is the fp32 step's, rounded by chance once; the step itself does not see the rounding") {
    keel::muon_options const options{.learning_rate = 0.02f, .momentum = 0.9f, .weight_decay = 0.1f};
    auto const plan = keel::plan_muon(2, 24, 70, {{"a", 16, 2}, {"b", 8}});
    in_halves half(plan);
    in_codes code(plan);
    for (int64_t t = 0; t < 3; ++t) {
        half.set_gradient(static_cast<uint64_t>(20 + t)), code.set_gradient(static_cast<uint64_t>(20 + t));
        auto want_half = in_fp32(half), want_code = in_fp32(code);
        auto const before = code;
        half.step(be, open, options).or_throw(), code.step(be, open, options).or_throw();
        want_half.step(be, open, options).or_throw(), want_code.step(be, open, options).or_throw();
        CHECK(half.weight.contents() == want_half.weight.contents());
        for (int64_t i = 0; i < 48; ++i)
            for (int64_t first = 0; first < 70; first += 32) {
                int64_t const end = std::min<int64_t>(70, first + 32);
                float amax = 0;
                for (int64_t j = first; j < end; ++j) amax = std::max(amax, std::abs(want_code.momentum.at(i, j)));
                auto const s = keel::scale_rules::round_up::of<float, e4m3, float>(keel::e8m0_scale{}, keel::bits(amax));
                for (int64_t j = first; j < end; ++j) {
                    auto const noise = words(i, 70, j, t);
                    REQUIRE(half.momentum.values.get(i, j).bits == by_chance(want_half.momentum.at(i, j), noise.word[0]).bits);
                    float const scaled = want_code.momentum.at(i, j) * s.multiplier;
                    if (std::abs(scaled) >= 0x1p-9f) { // below it: to nearest, see adamw_formats_test
                        auto const q = keel::encode<e4m3, keel::overflow::saturate_finite, keel::rounding::stochastic>(scaled, noise.word[0]);
                        REQUIRE(code.momentum.codes.get(i, j).bits == q.bits);
                    }
                    REQUIRE(code.weight.get(i, j).bits == by_chance(want_code.weight.get(i, j), noise.word[2]).bits);
                }
            }
        CHECK(half.change.update_squares == want_half.change.update_squares);
        double moved = 0;
        for (int64_t i = 0; i < 48; ++i)
            for (int64_t j = 0; j < 70; ++j) moved += std::pow(code.weight.at(i, j) - before.weight.at(i, j), 2);
        CHECK(code.change.update_squares == Approx(moved).epsilon(1e-5)); // fp32 sums
    }
    CHECK(half.untouched());
    CHECK(code.untouched());
    CHECK(code.applied == 3);
}

TEST_CASE("compensated weights move by what kahan_update adds") {
    keel::muon_options const options{.learning_rate = 0.003f};
    in_codes p(keel::plan_muon(1, 20, 33));
    p.compensated = true;
    guarded_matrix<bf16> w = p.weight, c = p.rest;
    for (int64_t t = 0; t < 3; ++t) {
        p.set_gradient(static_cast<uint64_t>(30 + t));
        auto want = in_fp32(p);
        want.weight = guarded_matrix<float>(20, 33, 1); // from zero, what the fp32 step stores is the change itself
        p.step(be, open, options).or_throw();
        want.step(be, open, options).or_throw();
        for (int64_t i = 0; i < 20; ++i) {
            auto const row = [&](auto& m) { return keel::vec(m.view().at(i), 33); };
            keel::kahan_update<bf16>(be, row(want.weight), {row(w), row(c)}, open).or_throw();
        }
        CHECK(p.weight.contents() == w.contents());
        CHECK(p.rest.contents() == c.contents());
        CHECK(p.change.update_squares == want.change.update_squares);
    }
}

TEST_CASE("a second moment brings rows to one size and keeps the whole's norm, for weights in rows and in columns") { // NorMuon #9: the axis is the output's
    auto const orthogonal = [](bool balanced, muon_problem<>& p) {
        p.weight = guarded_matrix<float>(p.rows(), p.plan.columns, 1);
        p.balanced = balanced;
        p.step(be, open, {.learning_rate = 1.0f, .beta2 = 0.9f}).or_throw();
    };
    keel::muon_plan_options<> const unit{.scale = keel::muon_scale::unit};
    for (auto [r, c] : {std::pair<int64_t, int64_t>{12, 30}, {30, 12}, {5, 1}}) {
        INFO(r << "x" << c);
        muon_problem<> plain(keel::plan_muon(1, r, c, {}, unit)), p = plain;
        std::vector<double> v(static_cast<std::size_t>(r));
        for (uint64_t t = 0; t < 3; ++t) {
            plain.set_gradient(40 + t), p.set_gradient(40 + t);
            orthogonal(false, plain), orthogonal(true, p);
            std::vector<double> s;
            double before = 0, after = 0;
            for (int64_t i = 0; i < r; ++i) {
                double sum = 0;
                for (int64_t j = 0; j < c; ++j) sum += std::pow(plain.weight.at(i, j), 2);
                s.push_back(sum / static_cast<double>(c));
                double& moment = v[static_cast<std::size_t>(i)];
                moment = 0.9 * moment + 0.1 * s.back();
                before += s.back(), after += s.back() / std::max(moment, 1e-10);
            }
            double norm = 0, plain_norm = 0;
            for (int64_t i = 0; i < r; ++i) {
                double const moment = v[static_cast<std::size_t>(i)];
                CHECK(p.second.at(0, i) == Approx(moment).epsilon(1e-5));
                for (int64_t j = 0; j < c; ++j) {
                    double const want = plain.weight.at(i, j) * std::sqrt(before / after / std::max(moment, 1e-10));
                    REQUIRE(std::abs(p.weight.at(i, j) - want) <= 1e-5 * std::abs(want)); // fp32: beta2, v, the factor and the product
                    norm += std::pow(p.weight.at(i, j), 2), plain_norm += std::pow(plain.weight.at(i, j), 2);
                }
            }
            CHECK(norm == Approx(plain_norm).epsilon(1e-5));
        }
        // The same weights turned in memory: the same rows are balanced.
        muon_problem<> q(keel::plan_muon(1, r, c, {}, unit));
        guarded_matrix<float> w(c, r), m(c, r), g(c, r), second(1, r);
        for (int64_t i = 0; i < r; ++i)
            for (int64_t j = 0; j < c; ++j) w.set(j, i, q.weight.get(i, j)), g.set(j, i, q.gradient.get(i, j));
        keel::muon_parameter<> const turned[] = {{.plan = q.plan, .gradient = keel::stacked(transposed(g.view())),
                                                  .weight = keel::stacked(transposed(w.view())), .momentum = keel::stacked(transposed(m.view())),
                                                  .second_moment = second.view()}};
        scratch memory(keel::muon_step_workspace(be, keel::vec(turned, 1)));
        keel::muon_step(be, keel::vec(turned, 1), open, {}, memory.get()).or_throw();
        q.balanced = true;
        q.step(be, open, {}).or_throw();
        for (int64_t i = 0; i < r; ++i) {
            CHECK(second.at(0, i) == Approx(q.second.at(0, i)).epsilon(1e-4)); // O's small singular values, lost to fp32 in part
            for (int64_t j = 0; j < c; ++j) CHECK(std::abs(w.at(j, i) - q.weight.at(i, j)) < 1e-6);
        }
    }
}

TEST_CASE("a row without a gradient stays where it is, balanced or not") {
    muon_problem<> p(keel::plan_muon(1, 6, 9));
    for (int64_t j = 0; j < 9; ++j) p.gradient.set(2, j, 0.0f);
    p.balanced = true;
    auto const before = p.weight;
    for (int t = 0; t < 3; ++t) p.step(be, open, {}).or_throw();
    for (int64_t j = 0; j < 9; ++j) {
        CHECK(p.weight.get(2, j) == before.get(2, j));
        CHECK(p.weight.get(1, j) != before.get(1, j));
    }
    CHECK(p.second.get(0, 2) == 0.0f);
    // A direction of zeros: the second moment fades, nothing else moves.
    p.gradient = guarded_matrix<float>(6, 9, 3);
    p.momentum = momentum_memory<float>(6, 9);
    auto const weight = p.weight.contents();
    float const was = p.second.get(0, 1);
    p.step(be, open, {.beta2 = 0.5f}).or_throw();
    CHECK(p.second.get(0, 1) == 0.5f * was);
    CHECK(p.weight.contents() == weight);
}

TEST_CASE("cautious decay takes from those weights that the step takes towards zero, and from no other") {
    keel::muon_options options{.learning_rate = 0.01f, .weight_decay = 0.5f};
    muon_problem<> plain(keel::plan_muon(1, 16, 24)), decoupled = plain, cautious = plain;
    for (auto* p : {&plain, &decoupled, &cautious}) p->weight.set(3, 3, 0.0f);
    auto const start = plain.weight;
    plain.step(be, open, {.learning_rate = 0.01f}).or_throw();
    decoupled.step(be, open, options).or_throw();
    options.decay = keel::decay_rule::cautious;
    cautious.step(be, open, options).or_throw();
    int64_t decayed = 0;
    for (int64_t i = 0; i < 16; ++i)
        for (int64_t j = 0; j < 24; ++j) {
            double const direction = start.at(i, j) - plain.weight.at(i, j); // of the step, before its sign
            bool const agrees = direction * start.at(i, j) >= 0;
            decayed += agrees;
            CHECK(cautious.weight.get(i, j) == (agrees ? decoupled : plain).weight.get(i, j));
        }
    CHECK(decayed > 16 * 24 / 4);
    CHECK(decayed < 16 * 24 * 3 / 4);
}

TEST_CASE("all kinds of state: the same bits on every backend and for threads, and none moves in a skipped step") {
    auto const plan = keel::plan_muon(3, 24, 40, {{"q", 16, 2, 0, 8, 12}, {"k", 8, 1, 8, 4, 12}});
    keel::muon_options const options{.learning_rate = 0.01f, .weight_decay = 0.1f, .decay = keel::decay_rule::cautious};
    keel::thread_pool const three(3);
    auto const all = [&]<class Problem>(Problem const&, bool compensated) {
        auto const make = [&] {
            Problem p(plan);
            p.balanced = true, p.compensated = compensated;
            return p;
        };
        Problem want = make();
        for (int t = 0; t < 2; ++t) want.step(keel::reference{}, open, options).or_throw();
        auto const same = [&](auto const& backend) {
            Problem p = make();
            for (int t = 0; t < 2; ++t) p.step(backend, open, options).or_throw();
            CHECK(p.bits() == want.bits());
            CHECK(std::memcmp(&p.change, &want.change, sizeof p.change) == 0);
            CHECK(p.untouched());
        };
        for_main_backends([&](std::string const& name, auto const& backend) {
            INFO(name);
            same(backend);
        });
        same(keel::cpu(three));
        auto const bits = want.bits();
        want.gradient.set(3, 3, std::nanf(""));
        want.step(be, keel::step_gate{}, options).or_throw();
        CHECK(want.bits() == bits);
        CHECK(want.change.ratio() == 0.0);
        CHECK(want.step(be, open, options).code == keel::status_code::non_finite); // past an open gate it is found before a write
        CHECK(want.bits() == bits);
    };
    all(in_codes(plan), true);
    all(in_codes(plan), false);
    all(in_halves(plan), false);
}

TEST_CASE("muon_step says what is wrong with state and weights of fewer bits") {
    in_codes p(keel::plan_muon(2, 10, 40));
    auto const bits = p.bits();
    auto const refused = [&](auto change) {
        in_codes::parameter_type q[] = {p.get()};
        change(q[0]);
        scratch memory(keel::muon_step_workspace(be, keel::vec(q, 1)));
        return keel::muon_step(be, keel::vec(q, 1), open, {}, memory.get());
    };
    using keel::status_code;
    CHECK(refused([](auto& q) { q.applied = nullptr; }).message() ==
          "muon_step: applied, wanted data, not null, where something is rounded by chance (bad_pointer)");
    CHECK(refused([](auto& q) { q.momentum.scales.extent[1] = 1; }).message() == "muon_step: momentum.scales has columns = 1, wanted 2 (bad_shape)");
    CHECK(refused([](auto& q) { q.momentum.codes.extent[0] = 19; }).code == status_code::bad_shape);
    CHECK(refused([](auto& q) { q.compensation = q.weight; }).code == status_code::overlap);
    CHECK(refused([&](auto& q) { q.shadow = p.cube(p.shadow); }).message() == "muon_step: shadow has parameter = 0, wanted none beside weights of 16 bits (unsupported)");
    CHECK(refused([&](auto& q) { q.second_moment = p.second.view(), q.second_moment.extent[1] = 9; }).code == status_code::bad_shape);
    CHECK(refused([](auto& q) { q.second_moment = keel::rows(reinterpret_cast<float*>(q.weight.data), 2, 10); }).code == status_code::overlap);
    int64_t negative = -1;
    CHECK(refused([&](auto& q) { q.applied = &negative; }).code == status_code::bad_state);
    muon_problem<> fp32(keel::plan_muon(1, 4, 4));
    fp32.compensated = true;
    CHECK(fp32.step(be, open, {}).code == status_code::unsupported);
    CHECK(fp32.step(be, open, {.beta2 = 1.0f}).code == status_code::bad_option);
    CHECK(p.bits() == bits);
}
