// Newton-Schulz coefficients: the published sets, and the proof that a set is safe in a storage type.
//
// A step maps every singular value s of X to p(s) = s (a + b t + c t^2), t = s^2. Normalised input has all s in [0, 1], up
// to rounding; a set is certified for a storage type T if, from [0, 1 + margin<T>] on and with every step's image widened by
// that margin, each step is positive and the last image stays below 1.6. Three published sets fail in every type: they turn
// descent into ascent, or overflow. Only the scalar map is certified; what the rounding of whole matrices adds is measured: the
// largest singular value of 64 results from 12 x 20 to 96 x 384 (rank one, Gaussian, singular values down to 1e-5 and to 0.05 of the
// largest), beside the certified bound. In no set did a matrix leave the bound of its type (tests/optim/newton_schulz_types_test.cpp), nor did
// 768 x 3072 ones of Polar Express and DeepSeek-V4 with these spectra, of equal elements, and of equal elements with alternating signs.
//
//                                    fp32            bf16                      f16
//     set, steps                 bound  gram    bound  symm.  gram      bound  symm.  gram
//     keller 5                   1.202  1.202   1.212  1.202  1.202     1.204  1.202  1.202
//     you_jiacheng 5             1.145  1.145   1.154  1.145  1.145     1.146  1.145  1.145
//     polar_express 5            1.124  1.124   1.132  1.125  1.124     1.125  1.124  1.124
//     polar_express 8            1.000  1.000   1.008  1.005  1.002     1.001  1.001  1.000
//     polar_express_1_05 5       1.124  1.124   1.132  1.125  1.124     1.125  1.124  1.124
//     polar_express_2_percent 5  1.141  1.142   1.162  1.143  1.142     1.142  1.141  1.142
//     turbo_aol 4                1.050  1.050   1.274  1.078  1.051     1.065  1.050  1.050
//     deepseek_v4 10             1.002  1.002   1.011  1.006  1.003     1.003  1.002  1.002
//     cubic_relaxed 5            1.300  1.300   unsafe                  1.301  1.300  1.300
//     classic_quintic 15         1.000  1.000   1.008  1.005  1.002     1.001  1.001  1.000
//     solved_set 5 (1 / 1000)    1.124  1.124   1.165  1.141  1.142     1.128  1.126  1.127
//     solved_set 6               1.001  1.001   1.010  1.005  1.003     1.002  1.002  1.001
//
// Whole results differ from the exact map of well-conditioned input (0.05 to 1), in Frobenius norm and as a share of it, by 0.009 to 0.030
// with bf16 in symmetric form and 0.005 to 0.008 in Gram form, by 0.001 to 0.011 and 0.001 with f16.
//
//     coefficients<polar_express>()                  certified for float, 5 steps
//     coefficients<deepseek_v4, bf16, 10>()          another type or step count is another certificate
//     unsafe_coefficients<cans>()                    does not pass for certified; says so where it is used
#pragma once

#include <keel/format/format.hpp>

namespace keel {

struct newton_schulz_term {
    double a, b, c;
};

/// What follows when more steps are asked for than a set lists.
enum class longer_run : uint8_t { repeat_last, cycle };

// --- the published sets: `listed` as printed by the source, divided by `safety` at use: a/s, b/s^3, c/s^5 ------------------

/// Keller Jordan 2024: steep at 0, does not converge to 1 but to [0.68, 1.13].
struct keller {
    static constexpr char const *name = "keller", *source = "Jordan 2024, Muon";
    static constexpr newton_schulz_term listed[] = {{3.4445, -4.7750, 2.0315}};
    static constexpr int default_steps = 5;
    static constexpr longer_run more = longer_run::cycle;
};
struct you_jiacheng {
    static constexpr char const *name = "you_jiacheng", *source = "You 2024, modded-nanogpt";
    static constexpr newton_schulz_term listed[] = {{4.0848, -6.8946, 2.9270}, {3.9505, -6.3029, 2.6377}, {3.7418, -5.5913, 2.3037},
                                                    {2.8769, -3.1427, 1.2046}, {2.8366, -3.0525, 1.2012}};
    static constexpr int default_steps = 5;
    static constexpr longer_run more = longer_run::cycle;
};

/// Amsel et al. 2025, as printed; the last step has converged.
inline constexpr newton_schulz_term polar_express_terms[] = {
    {8.28721201814563, -23.595886519098837, 17.300387312530933},  {4.107059111542203, -2.9478499167379106, 0.5448431082926601},
    {3.9486908534822946, -2.908902115962949, 0.5518191394370137}, {3.3184196573706015, -2.488488024314874, 0.51004894012372},
    {2.300652019954817, -1.6689039845747493, 0.4188073119525673}, {1.891301407787398, -1.2679958271945868, 0.37680408948524835},
    {1.8750014808534479, -1.2500016453999487, 0.3750001645474248}, {1.875, -1.25, 0.375}};

/// Every step but the converged eighth has room for rounding. The default: 0.87 to 1.12 for s >= 1e-2.
struct polar_express {
    static constexpr char const *name = "polar_express", *source = "Amsel et al. 2025, arXiv:2505.16932, safety 1.01";
    static constexpr auto& listed = polar_express_terms;
    static constexpr int default_steps = 5;
    static constexpr longer_run more = longer_run::repeat_last;
    KEEL_HOST static constexpr double safety(int listed_step) { return listed_step < 7 ? 1.01 : 1.0; }
};
struct polar_express_1_05 {
    static constexpr char const *name = "polar_express_1_05", *source = "Gram Newton-Schulz, safety 1.05 on every step";
    static constexpr auto& listed = polar_express_terms;
    static constexpr int default_steps = 5;
    static constexpr longer_run more = longer_run::repeat_last;
    KEEL_HOST static constexpr double safety(int) { return 1.05; }
};
/// Without a safety factor: explodes on an input whose largest singular value is 1 + 2^-16. Not certified in any type.
struct polar_express_raw {
    static constexpr char const *name = "polar_express_raw", *source = "Amsel et al. 2025, arXiv:2505.16932";
    static constexpr auto& listed = polar_express_terms;
    static constexpr int default_steps = 5;
    static constexpr longer_run more = longer_run::repeat_last;
};
struct polar_express_2_percent {
    static constexpr char const *name = "polar_express_2_percent", *source = "dion, modded-nanogpt, nanochat: solved with a cushion of 0.02";
    static constexpr newton_schulz_term listed[] = {{8.156554524902461, -22.48329292557795, 15.878769915207462},
                                                    {4.042929935166739, -2.808917465908714, 0.5000178451051316},
                                                    {3.8916678022926607, -2.772484153217685, 0.5060648178503393},
                                                    {3.285753657755655, -2.3681294933425376, 0.46449024233003106},
                                                    {2.3465413258596377, -1.7097828382687081, 0.42323551169305323}};
    static constexpr int default_steps = 5;
    static constexpr longer_run more = longer_run::repeat_last;
};
/// Optimal on [l, 1] exactly: explodes just above 1. Not certified in any type.
struct cans {
    static constexpr char const *name = "cans", *source = "Grishina et al. 2025, arXiv:2506.10935";
    static constexpr newton_schulz_term listed[] = {{8.4703, -25.1081, 18.6293}, {4.1828, -3.1087, 0.5806}, {3.9619, -2.9541, 0.5630},
                                                    {3.2866, -2.4647, 0.5074}, {2.2737, -1.6447, 0.4162}};
    static constexpr int default_steps = 5;
    static constexpr longer_run more = longer_run::repeat_last;
};
/// For AOL-preconditioned input.
struct turbo_aol {
    static constexpr char const *name = "turbo_aol", *source = "Turbo-Muon 2025, arXiv:2512.04632, repository";
    static constexpr newton_schulz_term listed[] = {
        {4.6051, -9.6552, 5.6769}, {4.7505, -6.0861, 2.1790}, {2.7763, -2.3190, 0.5523}, {2.4231, -2.2861, 0.8193}};
    static constexpr int default_steps = 4;
    static constexpr longer_run more = longer_run::repeat_last;
};
/// An earlier form, still in use: negative for s > 0.884, so a rank-1 gradient is ascended. Not certified in any type.
struct turbo_aol_early {
    static constexpr char const *name = "turbo_aol_early", *source = "Emerging-Optimizers, TransformerEngine: \"aol\"";
    static constexpr newton_schulz_term listed[] = {
        {4.0098, -7.0585, 2.4635}, {3.4585, -5.5479, 2.5959}, {2.7573, -3.2939, 1.4254}, {2.7215, -3.0494, 1.3169}};
    static constexpr int default_steps = 4;
    static constexpr longer_run more = longer_run::repeat_last;
};
/// Eight of Keller Jordan's steps, two that converge: 1.000 to 1.001.
struct deepseek_v4 {
    static constexpr char const *name = "deepseek_v4", *source = "DeepSeek-V4";
    static constexpr newton_schulz_term listed[] = {
        {3.4445, -4.7750, 2.0315}, {3.4445, -4.7750, 2.0315}, {3.4445, -4.7750, 2.0315}, {3.4445, -4.7750, 2.0315}, {3.4445, -4.7750, 2.0315},
        {3.4445, -4.7750, 2.0315}, {3.4445, -4.7750, 2.0315}, {3.4445, -4.7750, 2.0315}, {2.0, -1.5, 0.5},          {2.0, -1.5, 0.5}};
    static constexpr int default_steps = 10;
    static constexpr longer_run more = longer_run::repeat_last;
};
/// Wrong sign in bf16. Certified for float and f16.
struct cubic_relaxed {
    static constexpr char const *name = "cubic_relaxed", *source = "five-step relaxed cubic";
    static constexpr newton_schulz_term listed[] = {{3.3656576, -3.3420992, 0.0}, {2.5744352, -1.4957376, 0.0}, {2.5368962, -1.4312570, 0.0},
                                                    {2.4418906, -1.2764040, 0.0}, {2.2230472, -0.9630650, 0.0}};
    static constexpr int default_steps = 5;
    static constexpr longer_run more = longer_run::repeat_last;
};
/// Quadratic convergence to 1 from (0, sqrt 3); some 20 steps lift s = 1e-3 to 0.95.
struct classic_cubic {
    static constexpr char const *name = "classic_cubic", *source = "Higham 2008, Functions of Matrices, eq. 8.20";
    static constexpr newton_schulz_term listed[] = {{1.5, -0.5, 0.0}};
    static constexpr int default_steps = 20;
    static constexpr longer_run more = longer_run::repeat_last;
};
struct classic_quintic {
    static constexpr char const *name = "classic_quintic", *source = "Pade [2/0] of the sign function, Higham 2008, table 5.1";
    static constexpr newton_schulz_term listed[] = {{1.875, -1.25, 0.375}};
    static constexpr int default_steps = 15;
    static constexpr longer_run more = longer_run::repeat_last;
};

/// A set of one's own is a struct with these members, and `safety(step)` where factors apply.
template <class S>
concept coefficient_set = requires {
    { S::name } -> std::convertible_to<char const*>;
    { S::source } -> std::convertible_to<char const*>;
    { S::listed[0] } -> std::convertible_to<newton_schulz_term>;
    { S::default_steps } -> std::convertible_to<int>;
    { S::more } -> std::convertible_to<longer_run>;
};

// --- what runs: the set unrolled to `Steps` steps, rounded to float ----------------------------------------------------------

struct newton_schulz_step {
    float a = 0.0f, b = 0.0f, c = 0.0f;
};
template <int Steps> struct newton_schulz_steps {
    newton_schulz_step step[std::size_t{Steps}];
};

template <coefficient_set Set, int Steps> consteval newton_schulz_steps<Steps> unroll() {
    static_assert(Steps > 0, "at least one step");
    constexpr int count = static_cast<int>(sizeof(Set::listed) / sizeof(newton_schulz_term));
    newton_schulz_steps<Steps> out{};
    for (int t = 0; t < Steps; ++t) {
        int const i = t < count ? t : Set::more == longer_run::cycle ? t % count : count - 1;
        double s = 1.0;
        if constexpr (requires { Set::safety(0); }) s = Set::safety(i);
        newton_schulz_term const& p = Set::listed[i];
        out.step[t] = {static_cast<float>(p.a / s), static_cast<float>(p.b / (s * s * s)), static_cast<float>(p.c / (s * s * s * s * s))};
    }
    return out;
}
template <coefficient_set Set, int Steps> inline constexpr newton_schulz_steps<Steps> unrolled = unroll<Set, Steps>();

// --- the certificate ---------------------------------------------------------------------------------------------------------

/// How far rounding may carry a singular value: an ulp of T, and for float what the norm's sum may lose.
template <scalar_format T>
inline constexpr double rounding_margin = format_traits<T>::mantissa_bits < 16 ? 1.0 / (1 << format_traits<T>::mantissa_bits) : 0x1p-16;

/// The largest image that counts as bounded.
inline constexpr double largest_certified = 1.6;

struct map_bounds {
    bool positive = true; ///< every step keeps the sign of every singular value
    double upper = 0.0;   ///< no singular value of the result exceeds this
    KEEL_HOST constexpr bool safe() const { return positive && upper <= largest_certified; }
};

/// sqrt(x) for constant expressions: Newton's iteration from above, which falls until it is there.
KEEL_HOST constexpr double constant_root(double x) {
    if (!(x > 0.0)) return 0.0;
    double r = x < 1.0 ? 1.0 : x;
    for (double next = 0.5 * (r + x / r); next < r; next = 0.5 * (r + x / r)) r = next;
    return r;
}
/// s (a + b s^2 + c s^4).
KEEL_HOST constexpr double scalar_step(newton_schulz_step const& p, double s) {
    double const t = s * s;
    return s * (static_cast<double>(p.a) + t * (static_cast<double>(p.b) + t * static_cast<double>(p.c)));
}

/// Interval propagation from [0, 1 + margin], each image widened by the margin. A step's map s q(s^2) is positive where the
/// quadratic q is, whose minimum lies at an end or at its vertex; its maximum lies at the end or where 5c t^2 + 3b t + a = 0.
/// q = a + B with B = b t + c t^2 stored in T: where the two nearly cancel, B's rounding, half a margin of its largest magnitude, has
/// to leave q above 0 as well. Worked in double, whose own error of some 1e-15 a step vanishes beside the margin of 2^-16 or more.
KEEL_HOST constexpr map_bounds bounds_of(newton_schulz_step const* steps, int count, double margin) {
    map_bounds out;
    double high = 1.0 + margin;
    for (int i = 0; i < count; ++i) {
        newton_schulz_step const& p = steps[i];
        double const a = static_cast<double>(p.a), b = static_cast<double>(p.b), c = static_cast<double>(p.c), end = high * high;
        double least = a < a + end * (b + end * c) ? a : a + end * (b + end * c);
        if (c > 0.0 && b < 0.0 && -b < 2.0 * c * end) least = least < a - b * b / (4.0 * c) ? least : a - b * b / (4.0 * c);
        double const below = a - least, at_end = end * (b + end * c); // B's extremes are at 0, at the end and at the vertex
        double const stored = below > at_end ? below : at_end;
        out.positive = out.positive && least > 0.5 * margin * stored;

        double most = scalar_step(p, high);
        auto const consider = [&](double t) {
            if (t > 0.0 && t < end && scalar_step(p, constant_root(t)) > most) most = scalar_step(p, constant_root(t));
        };
        double const discriminant = 9.0 * b * b - 20.0 * a * c;
        if (c != 0.0 && discriminant >= 0.0) {
            consider((-3.0 * b + constant_root(discriminant)) / (10.0 * c));
            consider((-3.0 * b - constant_root(discriminant)) / (10.0 * c));
        } else if (c == 0.0 && b != 0.0) {
            consider(-a / (3.0 * b));
        }
        high = most * (1.0 + margin);
        if (!(high < 1e6)) break; // far beyond any use, and before a constant expression overflows
    }
    out.upper = high;
    return out;
}

template <coefficient_set Set, scalar_format T, int Steps = Set::default_steps>
inline constexpr map_bounds certificate = bounds_of(unrolled<Set, Steps>.step, Steps, rounding_margin<T>);

template <class Set, class T, int Steps = Set::default_steps>
concept certified_set = coefficient_set<Set> && certificate<Set, T, Steps>.safe();

// --- the value that options carry -----------------------------------------------------------------------------------------

namespace detail {
struct coefficients_access;
}

/// Steps for products whose operands are stored as T. Made by coefficients<Set, T>(), or by unsafe_coefficients<Set, T>(), together with
/// the certificate of their set; read them, do not write them.
template <scalar_format T> struct newton_schulz_coefficients {
    newton_schulz_step const* step = nullptr;
    int count = 0;
    char const* name = "none";
    char const* source = "";
    map_bounds bounds = {};

    constexpr newton_schulz_coefficients() = default;

  private:
    friend struct detail::coefficients_access;
    KEEL_HOST constexpr newton_schulz_coefficients(newton_schulz_step const* steps, int n, char const* set, char const* from, map_bounds b)
        : step(steps), count(n), name(set), source(from), bounds(b) {}
};

namespace detail {
struct coefficients_access {
    template <coefficient_set Set, scalar_format T, int Steps> KEEL_HOST static constexpr newton_schulz_coefficients<T> make() {
        return {unrolled<Set, Steps>.step, Steps, Set::name, Set::source, certificate<Set, T, Steps>};
    }
};
} // namespace detail

template <coefficient_set Set, scalar_format T = float, int Steps = Set::default_steps>
    requires certified_set<Set, T, Steps>
KEEL_HOST constexpr newton_schulz_coefficients<T> coefficients() {
    return detail::coefficients_access::make<Set, T, Steps>();
}
/// For experiments: the map may change signs or overflow on legal input.
template <coefficient_set Set, scalar_format T = float, int Steps = Set::default_steps>
KEEL_HOST constexpr newton_schulz_coefficients<T> unsafe_coefficients() {
    return detail::coefficients_access::make<Set, T, Steps>();
}

} // namespace keel
