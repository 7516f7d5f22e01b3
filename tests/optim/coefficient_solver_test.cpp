// Solved coefficients: the published sets come out of the solver, the errors alternate, and every solved set is certified.
#include <algorithm>
#include <cmath>

#include <keel/format/bf16.hpp>
#include <keel/format/f16.hpp>
#include <keel/format/float32.hpp>
#include <keel/optim/coefficient_solver.hpp>
#include <support/catch.hpp>

using keel::bf16;
using keel::f16;

namespace {

template <int N, class Listed> double largest_difference(keel::newton_schulz_terms<N> const& got, Listed const& want) {
    double most = 0;
    for (int t = 0; t < N; ++t)
        most = std::max({most, std::abs(got.term[t].a - want[t].a), std::abs(got.term[t].b - want[t].b), std::abs(got.term[t].c - want[t].c)});
    return most;
}
double value(keel::newton_schulz_term const& p, double s) { return p.a * s + p.b * std::pow(s, 3) + p.c * std::pow(s, 5); }

/// Steps that suffice, more of them, and more than the set lists.
template <class T> constexpr bool certified_for = keel::certified_set<keel::solved_set<T, 1, 2>, T> && keel::certified_set<keel::solved_set<T, 3, 10>, T> &&
                                                  keel::certified_set<keel::solved_set<T, 5, 100>, T> && keel::certified_set<keel::solved_set<T, 5>, T> &&
                                                  keel::certified_set<keel::solved_set<T, 8, 100000>, T> && keel::certified_set<keel::solved_set<T, 12>, T> &&
                                                  keel::certified_set<keel::solved_set<T, 8>, T, 12>;
static_assert(certified_for<float> && certified_for<f16> && certified_for<bf16>);
// Too few steps for so small a singular value: 0.22 to 1.78 is no result, and does not compile.
static_assert(!keel::certified_set<keel::solved_set<float, 5, 10000>, float>);

} // namespace

TEST_CASE("the published sets come out of the solver") {
    // Amsel et al.'s eight, whose last two were solved where doubles hardly tell E from 0: 1e-8, as printed by their program.
    auto const paper = keel::solve_composition<8>({});
    for (int t = 0; t < 6; ++t) {
        INFO(t);
        CHECK(paper.term[t].a == Approx(keel::polar_express_terms[t].a).epsilon(1e-11));
        CHECK(paper.term[t].b == Approx(keel::polar_express_terms[t].b).epsilon(1e-11));
        CHECK(paper.term[t].c == Approx(keel::polar_express_terms[t].c).epsilon(1e-11));
    }
    CHECK(largest_difference(paper, keel::polar_express_terms) < 1e-7);
    // dion's: a cushion of 0.02 and a safety of 1.02 on all steps but the last.
    CHECK(largest_difference(keel::solve_composition<5>({.safety = 1.02, .cushion = 0.02}), keel::polar_express_2_percent::listed) < 1e-11);
    // CANS: no safety, no cushion, four digits printed.
    CHECK(largest_difference(keel::solve_composition<5>({.cushion = 0.0}), keel::cans::listed) < 6e-4);
}

TEST_CASE("a step's error alternates four times, so no other odd quintic comes closer") {
    for (double low : {1e-3, 0.03, 0.3, 0.9, 0.999}) {
        INFO(low);
        auto const p = keel::equioscillating_quintic(low, 2 - low);
        double const error = 1 - value(p, low);
        CHECK(error > 0);
        CHECK(value(p, 2 - low) == Approx(1 + error).margin(1e-12));
        int turns = 0, side = -1;
        for (int i = 0; i <= 20000; ++i) {
            double const away = value(p, low + (2 - 2 * low) * i / 20000) - 1;
            CHECK_FALSE(std::abs(away) > error + 1e-12);
            // A step of the grid past an extremum misses it by its curvature: far below one hundredth of E.
            if (std::abs(away) > 0.99 * error && (away > 0 ? 1 : -1) != side) ++turns, side = -side;
        }
        CHECK(turns == 3);
    }
    // Where the interval is a point the classic quintic is what remains.
    CHECK(keel::equioscillating_quintic(1 - 1e-6, 1 + 1e-6).a == Approx(1.875).epsilon(1e-5));
}

TEST_CASE("a solved set takes every singular value that it was made for near to 1") {
    auto const check = [](auto set, double least, double most) {
        using Set = decltype(set);
        double const smallest = 1.0 / static_cast<double>(Set::ratio);
        keel::map_range const found = keel::range_of<Set>(smallest);
        double low = 1e300, high = 0;
        for (int i = 0; i <= 20000; ++i) {
            double s = std::pow(smallest, i / 20000.0);
            for (auto const& p : Set::listed) s = value(p, s);
            low = std::min(low, s), high = std::max(high, s);
        }
        INFO(Set::default_steps << " steps, 1 / " << Set::ratio << ": " << low << " to " << high);
        CHECK(found.low == Approx(low).margin(1e-4));
        CHECK(found.high == Approx(high).margin(1e-4));
        CHECK(low >= least);
        CHECK(high <= most);
    };
    // What an independent program in double finds, to the digit below.
    check(keel::solved_set<float, 3, 100>{}, .726, 1.274);
    check(keel::solved_set<float, 5>{}, .876, 1.124); // the published set divided by 1.01 has .846
    check(keel::solved_set<float, 6>{}, .998, 1.002);
    check(keel::solved_set<float, 8, 100000>{}, .792, 1.208);
    check(keel::solved_set<f16, 5>{}, .874, 1.126);
    check(keel::solved_set<bf16, 5>{}, .860, 1.140);
    check(keel::solved_set<bf16, 6>{}, .997, 1.003);
    CHECK(keel::range_of<keel::solved_set<float, 5>>(1e-3).low > keel::range_of<keel::polar_express>(1e-3).low + 0.02);
}
