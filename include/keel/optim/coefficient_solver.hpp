// Coefficients made to measure: for so many steps, the smallest singular value that matters and a storage type, the composition of
// quintics that brings [smallest, 1] closest to 1, as the published Polar Express sets were made.
//
//     coefficients<solved_set<bf16, 6, 10000>, bf16>()      6 steps, singular values from 1/10000 on
//
// Step by step: where the singular values lie in [l, u], the odd quintic nearest to 1 there is the one whose error takes its largest
// size four times with alternating signs (Chebyshev); it maps them into [1 - E, 1 + E], where the next step starts. Greedy is optimal
// (Amsel et al., theorem 3.1). Two departures, both theirs, keep it safe where numbers are rounded:
//
//     cushion   no step is solved for an l below cushion * u: steeper maps come close to 0 inside [l, u]
//     safety    each step but the last takes X / safety, so that singular values of up to u * safety stay on its safe side
//
// A solved set passes the same certificate as a published one, or does not compile: 5 steps take 1 / 1000 to 0.88, but 1 / 10000 only to
// 0.22, with an image up to 1.78. Of [1 / 1000, 1] in fp32: 5 steps [0.876, 1.124], 6 [0.999, 1.001]; in bf16 [0.860, 1.140] and
// [0.998, 1.002].
#pragma once

#include <keel/optim/coefficients.hpp>

namespace keel {

/// The cushion of the published set (Amsel et al., listing 1).
inline constexpr double polar_express_cushion = 0.02407327424182761;

struct composition_options {
    double smallest = 1e-3; ///< singular value that the first step has to reach, in (0, 1)
    double safety = 1.0;    ///< 1 or more
    double cushion = polar_express_cushion;
};

/// The odd quintic nearest to 1 on [low, high], 0 < low < high: Remez' exchange, which settles in some five rounds. p(low) = 1 - E and
/// p(high) = 1 + E are its ends, the extrema between them 1 + E and 1 - E.
KEEL_HOST constexpr newton_schulz_term equioscillating_quintic(double low, double high) {
    newton_schulz_term const flat{1.875 / high, -1.25 / (high * high * high), 0.375 / (high * high * high * high * high)};
    if (low / high >= 1.0 - 5e-6) return flat; // E is below a double's last bits: the classic quintic is the limit
    newton_schulz_term p = flat;
    double inner[2] = {0.25 * (3.0 * low + high), 0.25 * (low + 3.0 * high)}, error = 1.0;
    for (int round = 0; round < 50; ++round) {
        // a s + b s^3 + c s^5 + sign E = 1 at four points: Gauss with the largest pivot of each column.
        double m[4][5] = {};
        double const at[4] = {low, inner[0], inner[1], high};
        for (int i = 0; i < 4; ++i) {
            double const s = at[i], t = s * s;
            m[i][0] = s, m[i][1] = s * t, m[i][2] = s * t * t, m[i][3] = i % 2 == 0 ? 1.0 : -1.0, m[i][4] = 1.0;
        }
        for (int i = 0; i < 4; ++i) {
            int pivot = i;
            auto const size = [](double x) { return x < 0.0 ? -x : x; };
            for (int k = i + 1; k < 4; ++k) pivot = size(m[k][i]) > size(m[pivot][i]) ? k : pivot;
            for (int j = 0; j < 5; ++j) {
                double const t = m[i][j];
                m[i][j] = m[pivot][j], m[pivot][j] = t;
            }
            for (int k = 0; k < 4; ++k) {
                if (k == i) continue;
                double const f = m[k][i] / m[i][i];
                for (int j = i; j < 5; ++j) m[k][j] -= f * m[i][j];
            }
        }
        p = {m[0][4] / m[0][0], m[1][4] / m[1][1], m[2][4] / m[2][2]};
        double const last = error, moved = (error = m[3][4] / m[3][3]) - last;
        if (moved <= 1e-15 && moved >= -1e-15) break;
        double const discriminant = 9.0 * p.b * p.b - 20.0 * p.a * p.c;
        if (!(p.c > 0.0 && discriminant > 0.0)) return flat; // [low, high] so short that the points have met
        double const root = constant_root(discriminant);
        inner[0] = constant_root((-3.0 * p.b - root) / (10.0 * p.c));
        inner[1] = constant_root((-3.0 * p.b + root) / (10.0 * p.c));
    }
    return p;
}

template <int Steps> struct newton_schulz_terms {
    newton_schulz_term term[std::size_t{Steps}];
};
/// The composition for options.smallest. Its steps are to be used as they are: safety is in them.
template <int Steps> KEEL_HOST constexpr newton_schulz_terms<Steps> solve_composition(composition_options options) {
    newton_schulz_terms<Steps> out{};
    double low = options.smallest, high = 1.0;
    auto const value = [](newton_schulz_term const& p, double s) { return s * (p.a + s * s * (p.b + s * s * p.c)); };
    for (int t = 0; t < Steps; ++t) {
        double const floor = options.cushion * high;
        newton_schulz_term p = equioscillating_quintic(low > floor ? low : floor, high);
        double scale = 1.0;
        if (low < floor) scale = 2.0 / (value(p, low) + value(p, high)); // so that what low maps to is as far below 1 as the top above
        double const s = t + 1 < Steps ? 1.0 / options.safety : 1.0;
        p = {p.a * scale * s, p.b * scale * s * s * s, p.c * scale * s * s * s * s * s};
        out.term[t] = p;
        low = value(p, low);
        high = 2.0 - low;
    }
    return out;
}

/// Room for rounding before it meets the steep side of a step: twice what a type's rounding may carry a singular value by.
template <scalar_format T> inline constexpr double solver_safety = 1.0 + 2.0 * rounding_margin<T>;

/// A set of `Steps` steps for products whose operands are T and singular values of 1 / Ratio of the norm and more.
template <scalar_format T, int Steps, int64_t Ratio = 1000> struct solved_set {
    static_assert(Steps > 0, "at least one step");
    static_assert(Ratio > 1, "the smallest singular value is 1 / Ratio of the norm");
    static constexpr char const *name = "solved_set", *source = "Amsel et al. 2025, arXiv:2505.16932, algorithm 1, solved by keel";
    static constexpr newton_schulz_terms<Steps> solution =
        solve_composition<Steps>({.smallest = 1.0 / static_cast<double>(Ratio), .safety = solver_safety<T>});
    static constexpr auto& listed = solution.term;
    static constexpr int default_steps = Steps;
    static constexpr int64_t ratio = Ratio;
    static constexpr longer_run more = longer_run::repeat_last;
};

/// Where a set takes the singular values of [smallest, 1], in exact arithmetic.
struct map_range {
    double low = 0.0, high = 0.0;
};
KEEL_HOST constexpr map_range range_of(newton_schulz_step const* steps, int count, double smallest) {
    map_range r{smallest, 1.0};
    for (int i = 0; i < count; ++i) {
        newton_schulz_step const& p = steps[i];
        double const a = static_cast<double>(p.a), b = static_cast<double>(p.b), c = static_cast<double>(p.c);
        double least = scalar_step(p, r.low), most = least;
        auto const consider = [&](double s) {
            if (!(s >= r.low && s <= r.high)) return;
            double const v = scalar_step(p, s);
            least = v < least ? v : least, most = v > most ? v : most;
        };
        consider(r.high);
        double const discriminant = 9.0 * b * b - 20.0 * a * c;
        if (c != 0.0 && discriminant > 0.0) {
            consider(constant_root((-3.0 * b + constant_root(discriminant)) / (10.0 * c)));
            consider(constant_root((-3.0 * b - constant_root(discriminant)) / (10.0 * c)));
        } else if (c == 0.0 && b != 0.0) {
            consider(constant_root(-a / (3.0 * b)));
        }
        r = {least, most};
    }
    return r;
}
template <coefficient_set Set, int Steps = Set::default_steps>
KEEL_HOST constexpr map_range range_of(double smallest) {
    return range_of(unrolled<Set, Steps>.step, Steps, smallest);
}

} // namespace keel
