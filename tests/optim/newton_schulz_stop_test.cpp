// Newton-Schulz that stops: when, with which bits, and what the measures say of each matrix.
#include <limits>
#include <tuple>

#include <keel/backend/cpu/cpu.hpp>
#include <keel/backend/cpu/matmul.hpp>
#include <keel/optim/newton_schulz.hpp>
#include <optim/matrices.hpp>
#include <support/backends.hpp>
#include <support/catch.hpp>

using namespace keel_test;
using keel::bf16;
using form = keel::newton_schulz_form;

namespace {

keel::cpu<> const be;

struct outcome {
    matrix o;
    float error = -1, entering = -1;
    int64_t steps = -1;
};
template <class T> outcome orthogonalised(matrix const& u, keel::newton_schulz_options<T> options) {
    auto in = to_storage<float>(u);
    guarded_matrix<float> out(u.rows(), u.cols());
    scratch memory(keel::newton_schulz_workspace<T>(be, u.rows(), u.cols(), 1, options));
    outcome r;
    keel::newton_schulz<T>(be, in.view(), out.view(),
                           {.orthogonality_error = keel::vec(&r.error, 1), .entering_error = keel::vec(&r.entering, 1), .steps = keel::vec(&r.steps, 1)},
                           options, memory.get())
        .or_throw();
    r.o = to_matrix(out);
    return r;
}
double orthogonality_error(matrix const& o) {
    matrix const gram = o.rows() <= o.cols() ? matrix(o * o.transpose()) : matrix(o.transpose() * o);
    return (gram - matrix::Identity(gram.rows(), gram.rows())).norm() / std::sqrt(static_cast<double>(gram.rows()));
}

/// classic_quintic cut to `steps` steps.
template <class T> keel::newton_schulz_coefficients<T> cut(int64_t steps) {
    switch (steps) {
    case 4: return keel::coefficients<keel::classic_quintic, T, 4>();
    case 5: return keel::coefficients<keel::classic_quintic, T, 5>();
    case 6: return keel::coefficients<keel::classic_quintic, T, 6>();
    case 7: return keel::coefficients<keel::classic_quintic, T, 7>();
    case 8: return keel::coefficients<keel::classic_quintic, T, 8>();
    default: return {};
    }
}

} // namespace

TEST_CASE("a run stops at the first iterate that is orthogonal enough, with the bits of a run of so many steps") {
    auto const check = [](auto type, float wanted, double exact) {
        using T = decltype(type);
        for (auto [r, c, least] : {std::tuple<int64_t, int64_t, double>{12, 30, 0.4}, {20, 20, 0.1}, {40, 9, 0.2}, {16, 60, 0.02}})
            for (form f : {form::plain, form::symmetric, form::gram}) {
                INFO(r << "x" << c << " " << name_of(f));
                matrix const u = with_singular_values(r, c, log_spaced(std::min(r, c), least), 3);
                outcome const got = orthogonalised<T>(u, {.coefficients = keel::coefficients<keel::classic_quintic, T>(), .form = f, .wanted_error = wanted});
                REQUIRE(cut<T>(got.steps).count == got.steps);
                CHECK(got.error < wanted);
                CHECK(got.entering == got.error); // the one that was looked at
                CHECK(static_cast<double>(got.error) == Approx(orthogonality_error(got.o)).margin(exact));
                outcome const same = orthogonalised<T>(u, {.coefficients = cut<T>(got.steps), .form = f});
                CHECK(got.o == same.o);
                CHECK(same.steps == got.steps);
                CHECK(same.entering >= wanted); // one step earlier it was not enough
            }
    };
    check(0.0f, 1e-2f, 1e-5);
    check(bf16{}, 5e-2f, 1e-2); // plain and symmetric look at a Gram matrix in bf16: 2^-8 an element beside 1
}

TEST_CASE("Gram may stop where a run has just begun anew, and has nothing left to multiply by") {
    auto const check = [](auto type) {
        using T = decltype(type);
        auto const set = keel::coefficients<keel::polar_express, T, 8>();
        REQUIRE(keel::plan_newton_schulz<T>(12, 40, set, form::gram).restarts_after(4));
        matrix const u = with_singular_values(12, 40, log_spaced(12, 0.01), 3);
        outcome const five = orthogonalised<T>(u, {.coefficients = keel::coefficients<keel::polar_express, T, 5>(), .form = form::gram});
        outcome const got = orthogonalised<T>(u, {.coefficients = set, .form = form::gram, .wanted_error = 1.2f * five.error});
        CHECK(got.steps == 5);
        CHECK(got.o == five.o);
        CHECK(got.error == five.error); // both measured in fp32 of the same X
    };
    check(0.0f);
    check(bf16{});
}

TEST_CASE("without a wanted error all steps are taken, and what entered the last is known") {
    matrix const u = with_singular_values(14, 33, log_spaced(14, 0.2), 5);
    for (form f : {form::plain, form::symmetric, form::gram}) {
        auto const all = orthogonalised<float>(u, {.coefficients = cut<float>(6), .form = f});
        auto const one_less = orthogonalised<float>(u, {.coefficients = cut<float>(5), .form = f});
        CHECK(all.steps == 6);
        CHECK(static_cast<double>(all.entering) == Approx(static_cast<double>(one_less.error)).epsilon(1e-3));
        CHECK(static_cast<double>(all.error) == Approx(orthogonality_error(all.o)).margin(1e-5));
    }
    // A set that never comes so close.
    auto const keller = orthogonalised<float>(u, {.coefficients = keel::coefficients<keel::keller, float, 7>(), .wanted_error = 1e-3f});
    CHECK(keller.steps == 7);
    CHECK(static_cast<double>(keller.error) == Approx(orthogonality_error(keller.o)).margin(1e-5));
}

TEST_CASE("one row, one column and one element are orthogonal when normalised; zero never is") {
    for (auto [r, c] : {std::pair<int64_t, int64_t>{1, 1}, {1, 17}, {23, 1}}) {
        matrix const u = random_matrix(r, c, 7);
        auto const got = orthogonalised<float>(u, {.wanted_error = 1e-3f});
        CHECK(got.steps == 0);
        CHECK((got.o - u / u.norm()).cwiseAbs().maxCoeff() < 1e-6);
        auto const zero = orthogonalised<float>(matrix(0 * u), {.wanted_error = 1e-3f});
        CHECK(zero.steps == 0);
        CHECK(zero.error == 1.0f);
        CHECK(zero.entering == 1.0f);
        CHECK(zero.o == matrix(0 * u));
    }
}

TEST_CASE("each matrix of a batch stops where it would alone, on any number of threads") {
    int64_t const batch = 5, r = 10, c = 16;
    std::vector<float> u, alone(static_cast<std::size_t>(batch * r * c)), all(alone.size());
    for (int64_t i = 0; i < batch; ++i) {
        matrix const m = with_singular_values(r, c, log_spaced(r, std::pow(0.5, static_cast<double>(2 * i))), 9);
        for (int64_t k = 0; k < r * c; ++k) u.push_back(static_cast<float>(m(k / c, k % c)));
    }
    keel::newton_schulz_options<float> const options{.coefficients = keel::coefficients<keel::classic_quintic>(), .wanted_error = 0.02f};
    std::vector<float> error(5), errors(5), entering(5), enterings(5);
    std::vector<int64_t> steps(5), taken(5);
    for (int64_t i = 0; i < batch; ++i) {
        auto const k = static_cast<std::size_t>(i);
        scratch memory(keel::newton_schulz_workspace(be, r, c, 1, options));
        keel::newton_schulz(be, keel::rows(u.data() + i * r * c, r, c), keel::rows(alone.data() + i * r * c, r, c),
                            {keel::vec(&error[k], 1), keel::vec(&entering[k], 1), keel::vec(&steps[k], 1)}, options, memory.get())
            .or_throw();
    }
    CHECK(steps[0] < steps[2]);
    CHECK(steps[2] < steps[4]);
    for (int64_t threads : {1, 2, 16}) {
        keel::thread_pool const pool(threads);
        one_or_two_threads const executor{&pool};
        keel::cpu const backend(executor);
        scratch memory(keel::newton_schulz_workspace(backend, r, c, batch, options));
        keel::newton_schulz(backend, keel::cube(u.data(), batch, r, c), keel::cube(all.data(), batch, r, c),
                            {keel::vec(errors.data(), batch), keel::vec(enterings.data(), batch), keel::vec(taken.data(), batch)}, options, memory.get())
            .or_throw();
        CHECK(all == alone);
        CHECK(errors == error);
        CHECK(enterings == entering);
        CHECK(taken == steps);
    }
}

TEST_CASE("a wanted error that is no size, and measures in each other's memory, are refused with nothing written") {
    std::vector<float> const u = floats(data_kind::normal, 24, 3);
    std::vector<float> o(24, 7.0f);
    float error = 5.0f;
    scratch memory(keel::newton_schulz_workspace(be, 4, 6));
    auto const call = [&](keel::newton_schulz_measures measures, float wanted) {
        return keel::newton_schulz(be, keel::rows(u.data(), 4, 6), keel::rows(o.data(), 4, 6), measures, {.wanted_error = wanted}, memory.get());
    };
    for (float wanted : {-1e-3f, std::numeric_limits<float>::quiet_NaN()}) {
        auto const s = call({.orthogonality_error = keel::vec(&error, 1)}, wanted);
        CHECK(s.code == keel::status_code::bad_option);
        CHECK(std::string(s.argument) == "options.wanted_error");
    }
    CHECK(call({.orthogonality_error = keel::vec(&error, 1), .entering_error = keel::vec(&error, 1)}, 0.0f).code == keel::status_code::overlap);
    CHECK(call({.entering_error = keel::vec(o.data(), 1)}, 0.0f).code == keel::status_code::overlap);
    CHECK(call({.steps = keel::vec(reinterpret_cast<int64_t*>(o.data()), 2)}, 0.0f).code == keel::status_code::bad_shape);
    CHECK(o == std::vector<float>(24, 7.0f));
    CHECK(error == 5.0f);
}
