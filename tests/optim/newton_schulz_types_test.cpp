// Newton-Schulz with bf16 and f16 operands: the matrices stay where the scalar certificate puts them, in each form, and close to the exact map.
#include <keel/backend/cpu/cpu.hpp>
#include <keel/backend/cpu/matmul.hpp>
#include <keel/optim/coefficient_solver.hpp>
#include <keel/optim/newton_schulz.hpp>
#include <optim/matrices.hpp>
#include <support/catch.hpp>

using namespace keel_test;
using keel::bf16;
using keel::f16;
using form = keel::newton_schulz_form;

namespace {

keel::cpu<> const be;

template <class T> matrix orthogonalised(matrix const& u, keel::newton_schulz_options<T> options = {}, float* error = nullptr) {
    auto in = to_storage<float>(u);
    guarded_matrix<float> out(u.rows(), u.cols());
    scratch memory(keel::newton_schulz_workspace<T>(be, u.rows(), u.cols(), 1, options));
    keel::newton_schulz<T>(be, in.view(), out.view(), {.orthogonality_error = keel::vec(error, error == nullptr ? 0 : 1)}, options, memory.get())
        .or_throw();
    CHECK(out.untouched());
    return to_matrix(out);
}

struct shape {
    int64_t rows, columns;
};
template <class T> constexpr double unit = keel::rounding_margin<T>;

/// Every set that is certified for T, by default or as told.
template <class T, class Check> void for_each_set(Check const& check) {
    check(keel::coefficients<keel::keller, T>());
    check(keel::coefficients<keel::you_jiacheng, T>());
    check(keel::coefficients<keel::polar_express, T>());
    check(keel::coefficients<keel::polar_express, T, 8>());
    check(keel::coefficients<keel::polar_express_1_05, T>());
    check(keel::coefficients<keel::polar_express_2_percent, T>());
    check(keel::coefficients<keel::turbo_aol, T>());
    check(keel::coefficients<keel::deepseek_v4, T>());
    check(keel::coefficients<keel::classic_quintic, T>());
    check(keel::coefficients<keel::solved_set<T, 5>, T>());
    check(keel::coefficients<keel::solved_set<T, 6>, T>());
    if constexpr (keel::certified_set<keel::cubic_relaxed, T>) check(keel::coefficients<keel::cubic_relaxed, T>());
}

template <class T> void within_bounds() {
    for (shape s : {shape{12, 20}, {36, 24}, {24, 96}})
        for (int kind = 0; kind < 4; ++kind) {
            matrix const u = kind == 0   ? matrix(random_matrix(s.rows, 1, 5) * random_matrix(1, s.columns, 6))
                             : kind == 1 ? random_matrix(s.rows, s.columns, 7)
                                         : with_singular_values(s.rows, s.columns, log_spaced(std::min(s.rows, s.columns), kind == 2 ? 1e-5 : 0.05), 8);
            for_each_set<T>([&](auto const& set) {
                for (form f : {form::symmetric, form::gram}) {
                    INFO(set.name << " " << set.count << " " << s.rows << "x" << s.columns << " " << name_of(f) << " kind " << kind);
                    matrix const o = orthogonalised<T>(u, {.coefficients = set, .form = f});
                    CHECK(largest_singular(o) <= set.bounds.upper + 2e-3); // no margin of the type's: the certificate has it
                    CHECK(o.cwiseProduct(u).sum() > 0);
                    if (kind != 3) continue;
                    // Gram rounds X to T once, at the start, which moves it by unit / 4 of its norm, and the map magnifies that no more
                    // than 8 times from 0.05 on. Symmetric rounds every step, also singular values at the steep end of one: 6 units,
                    // and 10 for solved sets, which leave little room there, as measured; twice that is too much.
                    matrix const want = mapped(u, set);
                    CHECK((o - want).norm() <= (f == form::gram ? 2 : 12) * unit<T> * want.norm());
                }
            });
        }
}
template <class T> void near_the_polar_factor() {
    // Singular values from 0.1 of the largest, none below 1e-2 of the norm: 8 steps of Polar Express take them to 1.
    for (shape s : {shape{1, 1}, {1, 7}, {7, 1}, {2, 3}, {13, 13}, {17, 31}, {37, 19}, {33, 80}})
        for (form f : {form::automatic, form::symmetric, form::gram}) {
            INFO(s.rows << "x" << s.columns << " " << name_of(f));
            int64_t const n = std::min(s.rows, s.columns);
            matrix const u = with_singular_values(s.rows, s.columns, log_spaced(n, 0.1), 11), want = polar_factor(u);
            float error = 0;
            matrix const o = orthogonalised<T>(u, {.coefficients = keel::coefficients<keel::polar_express, T, 8>(), .form = f}, &error);
            double const norm = std::sqrt(static_cast<double>(n));
            CHECK((o - want).norm() <= 4 * unit<T> * norm); // each of few roundings that count: unit / 2 of every element, at most
            CHECK(static_cast<double>(error) <= 4 * unit<T>);
            matrix const gram = s.rows <= s.columns ? matrix(o * o.transpose()) : matrix(o.transpose() * o);
            CHECK(static_cast<double>(error) == Approx((gram - matrix::Identity(n, n)).norm() / norm).margin(1e-5)); // in fp32, whatever T
        }
}

} // namespace

TEST_CASE("bf16 matrices stay within the certified bound of every set, in both forms") { within_bounds<bf16>(); }
TEST_CASE("f16 matrices stay within the certified bound of every set, in both forms") { within_bounds<f16>(); }

TEST_CASE("bf16 and f16 operands reach the polar factor to their own precision at every size") {
    near_the_polar_factor<bf16>();
    near_the_polar_factor<f16>();
}

TEST_CASE("Gram in half precision is closer to the exact map than symmetric: its n x n matrices are fp32") { // GNS: 1e5 without restart
    auto const errors = [](auto const& set, auto type) {
        using T = decltype(type);
        matrix const u = with_singular_values(32, 128, log_spaced(32, 0.05), 3);
        auto in = to_storage<float>(u / u.norm());
        matrix const want = mapped(to_matrix(in), set);
        auto const error = [&](form f) { return (orthogonalised<T>(to_matrix(in), {.coefficients = set, .form = f}) - want).norm(); };
        CHECK(error(form::gram) < 0.75 * error(form::symmetric));
    };
    errors(keel::coefficients<keel::polar_express, bf16>(), bf16{});
    errors(keel::coefficients<keel::deepseek_v4, bf16>(), bf16{});
    errors(keel::coefficients<keel::polar_express, f16>(), f16{});
}

TEST_CASE("f16 results do not depend on a power of two") {
    matrix const u = random_matrix(9, 14, 21);
    matrix const want = orthogonalised<f16>(u);
    for (int power : {-60, -20, 20, 60}) CHECK(orthogonalised<f16>(u * std::ldexp(1.0, power)) == want);
}

TEST_CASE("half-precision input and output") {
    auto in = to_storage<f16>(random_matrix(11, 18, 17));
    guarded_matrix<f16> out(11, 18, 1);
    scratch memory(keel::newton_schulz_workspace<f16>(be, 11, 18));
    keel::newton_schulz<f16>(be, in.view(), out.view(), {}, {}, memory.get()).or_throw();
    CHECK((to_matrix(out) - mapped(to_matrix(in), keel::coefficients<keel::polar_express>())).cwiseAbs().maxCoeff() < 4 * unit<f16>);
    CHECK(out.untouched());
}
