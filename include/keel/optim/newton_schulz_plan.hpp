// How a matrix is orthogonalised: which form of the iteration, chosen from its shape, the coefficients and the storage type
// alone, so that neither the plan nor a bit depends on threads. n is the short side, m the long one.
//
//   plain      A = X X^T; X = a X + (b A + c A^2) X                               2 steps (2 m + n) n^2 flops
//   symmetric  the same bits; A and its polynomial computed as lower triangles    steps (3 m + n) n^2
//   gram       R = X X^T once, then only n x n products: Z = c R^2 + b R; Q = Q Z + a Q; R = Z (R Z + a R) + a (R Z + a R);
//              at last Q X. All symmetric.                                        (3 m + (4 steps - 3) n) n^2
//
// Plain and symmetric round A, its polynomial and X to T each step. Gram keeps its n x n matrices in fp32 whatever T, and rounds X alone,
// at first, after a restart and at last: in bf16 and f16 its result is three to four times as close to the exact map (in half
// precision R would get negative eigenvalues that the steps blow up: singular values up to 1.9 with a restart, 1e5 without).
//
// Gram squares the condition number once and multiplies R's rounding error by a^2 in each step but the last, so a run
// whose slopes grow too far is restarted: X = Q X, R = X X^T. One restart costs 3 (m - n) n^2. Restarts are a word of bits, so Gram
// takes up to 64 steps: a step that none could follow would let the error grow without bound.
#pragma once

#include <string>

#include <keel/core/view.hpp>
#include <keel/optim/coefficients.hpp>

namespace keel {

enum class newton_schulz_form : uint8_t { automatic, plain, symmetric, gram };

KEEL_HOST constexpr char const* name_of(newton_schulz_form form) {
    switch (form) {
    case newton_schulz_form::automatic: return "automatic";
    case newton_schulz_form::plain: return "plain";
    case newton_schulz_form::symmetric: return "symmetric";
    case newton_schulz_form::gram: return "gram";
    }
    return "unknown";
}

/// Steps that Gram takes: as many as `restarts` has bits. Longer sets take the symmetric form, or the plain one.
inline constexpr int most_gram_steps = 64;

struct newton_schulz_plan {
    int64_t rows = 0, columns = 0;
    newton_schulz_form form = newton_schulz_form::plain;
    int steps = 0;
    uint64_t restarts = 0; ///< gram: bit t set: a new run begins after step t (counted from 0)
    char const* coefficients = "";

    /// A form that this many steps can take; newton_schulz and muon_step refuse any other.
    KEEL_HOST constexpr bool valid() const { return form != newton_schulz_form::gram || steps <= most_gram_steps; }
    KEEL_HOST constexpr int64_t short_side() const { return rows < columns ? rows : columns; }
    KEEL_HOST constexpr int64_t long_side() const { return rows < columns ? columns : rows; }
    KEEL_HOST constexpr bool restarts_after(int step) const { return step < 64 && (restarts >> step & 1) != 0; }
    KEEL_HOST constexpr int restart_count() const {
        int n = 0;
        for (int t = 0; t < 64; ++t) n += restarts_after(t) ? 1 : 0;
        return n;
    }
    /// Multiply and add count as two.
    KEEL_HOST constexpr double flops() const {
        auto const n = static_cast<double>(short_side()), m = static_cast<double>(long_side()), t = static_cast<double>(steps);
        auto const r = static_cast<double>(restart_count());
        switch (form) {
        case newton_schulz_form::gram: return (3 * m + (4 * t - 3) * n + 3 * r * (m - n)) * n * n;
        case newton_schulz_form::symmetric: return t * (3 * m + n) * n * n;
        default: return 2 * t * (2 * m + n) * n * n;
        }
    }
    KEEL_HOST std::string text() const {
        std::string s = std::to_string(rows) + " x " + std::to_string(columns) + ": " + name_of(form) + ", " + std::to_string(steps) +
                        " steps of " + coefficients;
        if (form == newton_schulz_form::gram)
            s += restart_count() == 0 ? ", no restart" : ", " + std::to_string(restart_count()) + " restarted";
        bool const few = flops() < 1e7;
        return s + ", " + std::to_string(static_cast<int64_t>(flops() / (few ? 1e3 : 1e6))) + (few ? " kflop" : " Mflop");
    }
};

/// Where Gram runs end: a run's slopes, its last step's aside, multiply to at most this. R's rounding error, about 2^-24, then
/// grows to at most 2^-24 * 512^2 = 2^-6, which moves no singular value visibly. (That R's error is no larger on long sides is the work
/// of gram_slice, newton_schulz_iteration.hpp.)
inline constexpr double gram_slope_limit = 512.0;

/// Gram is taken where its flops are at most this share of symmetric's: its products are smaller and it has more of them. Measured with 5
/// steps on one thread of Zen 5, gram's time over symmetric's at long sides of
///
///            1           1.25   1.5          2            3      4 short ones
///     fp32   1.05-1.16   0.99   0.82-0.89    0.72-0.85    0.55   0.47-0.53
///     f16    0.87-1.04   0.85   0.74-0.82    0.64-0.68    0.58   0.44-0.49    symmetric decodes f16 more often
///     bf16   1.64-2.15    1.52   1.40-1.65    1.18-1.34    1.06   0.81-0.90    products by the hardware's dot of pairs
///
/// The limits are long sides of 1.44, 1.19 and 3.2 short ones for 5 steps. bf16's is the one for hardware dots everywhere, since the plan,
/// on which bits depend, must not differ between machines.
template <scalar_format T>
inline constexpr double largest_gram_share = format_traits<T>::mantissa_bits >= 16 ? 0.8 : format_traits<T>::mantissa_bits >= 10 ? 0.9 : 0.5;

/// Up to this short side the plain form is taken: half a product is no less than a whole one (1.04 times its time at 32, 0.91 at 64,
/// 0.75 at 512).
inline constexpr int64_t largest_plain = 32;

KEEL_HOST constexpr uint64_t gram_restarts(newton_schulz_step const* step, int count) {
    uint64_t restarts = 0;
    double slope = 1.0;
    for (int t = 0; t + 1 < count && t < most_gram_steps; ++t) {
        slope *= static_cast<double>(step[t].a);
        if (slope <= gram_slope_limit) continue;
        restarts |= uint64_t{1} << t;
        slope = 1.0;
    }
    return restarts;
}

/// The plan for one matrix whose products take operands of type T.
///
/// Gram where it saves enough (largest_gram_share), up to most_gram_steps; else symmetric, or plain where the short side is small.
/// Forcing Gram on more steps gives a plan that is not valid().
template <scalar_format T>
KEEL_HOST constexpr newton_schulz_plan plan_newton_schulz(int64_t row_count, int64_t column_count, newton_schulz_coefficients<T> const& set,
                                                        newton_schulz_form form = newton_schulz_form::automatic) {
    newton_schulz_plan plan{row_count, column_count, form, set.count, 0, set.name};
    int64_t const n = plan.short_side();
    if (form == newton_schulz_form::automatic) {
        plan.form = n <= largest_plain ? newton_schulz_form::plain : newton_schulz_form::symmetric;
        if (set.count <= most_gram_steps) {
            newton_schulz_plan symmetric = plan, gram = plan;
            symmetric.form = newton_schulz_form::symmetric;
            gram.form = newton_schulz_form::gram;
            gram.restarts = gram_restarts(set.step, set.count);
            if (gram.flops() <= largest_gram_share<T> * symmetric.flops()) plan = gram;
        }
    } else if (form == newton_schulz_form::gram) {
        plan.restarts = gram_restarts(set.step, set.count);
    }
    return plan;
}

} // namespace keel
