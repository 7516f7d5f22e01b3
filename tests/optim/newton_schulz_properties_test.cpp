// What an optimiser relies on, for float, bf16 and f16 operands and at every size: free of scale, odd, equivariant, downhill, and as close to
// the SVD's polar factor as the set's range says.
#include <algorithm>
#include <limits>
#include <numeric>

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

template <class T> keel::status orthogonalise(keel::view<float, 2> u, keel::view<float, 2> o, keel::newton_schulz_options<T> options = {}) {
    scratch memory(keel::newton_schulz_workspace<T>(be, u.extent[0], u.extent[1], 1, options));
    return keel::newton_schulz<T>(be, u, o, {}, options, memory.get());
}
template <class T> matrix orthogonalised(matrix const& u, keel::newton_schulz_options<T> options = {}) {
    auto in = to_storage<float>(u);
    guarded_matrix<float> out(u.rows(), u.cols());
    orthogonalise<T>(in.view(), out.view(), options).or_throw();
    return to_matrix(out);
}
template <class Check> void in_every_type(Check const& check) { check(0.0f), check(bf16{}), check(f16{}); }

struct shape {
    int64_t rows, columns;
};
/// One element, rows and columns, primes, square, tall and wide.
constexpr shape shapes[] = {{1, 1}, {1, 9}, {9, 1}, {2, 2}, {3, 41}, {7, 13}, {23, 23}, {29, 11}, {16, 64}, {53, 17}};

/// What rounding may move an element by. fp32: 2^-24 for each of 5 steps' products, times a slope at 0 of up to 1000. Else half a unit, which
/// the steps magnify where their maps are steep: at singular values near to 1, as of 2 x 2 matrices, measured up to 14 times.
template <class T> double close(int64_t n) { return (std::is_same_v<T, float> ? 2e-4 : 20 * keel::rounding_margin<T>) * std::sqrt(static_cast<double>(n)); }

} // namespace

TEST_CASE("the polar factor is as near as the range of the set says, in every type and size") {
    auto const check = [](auto type, auto const& set) {
        using T = decltype(type);
        for (shape s : shapes) {
            int64_t const n = std::min(s.rows, s.columns);
            INFO(set.name << " " << set.count << " " << keel::rounding_margin<T> << " " << s.rows << "x" << s.columns);
            matrix const u = with_singular_values(s.rows, s.columns, log_spaced(n, 0.1), 31);
            keel::map_range const range = keel::range_of(set.step, set.count, 0.1 / u.norm());
            // The difference has the singular vectors of u, and |map(s) - 1| for singular values; rounding adds its own.
            double const furthest = std::max(range.high - 1, 1 - range.low);
            CHECK(singular_values(orthogonalised<T>(u, {.coefficients = set}) - polar_factor(u))(0) <= furthest + close<T>(n));
        }
    };
    in_every_type([&](auto type) {
        using T = decltype(type);
        check(type, keel::coefficients<keel::keller, T>());
        check(type, keel::coefficients<keel::you_jiacheng, T>());
        check(type, keel::coefficients<keel::polar_express, T>());
        check(type, keel::coefficients<keel::polar_express_1_05, T>());
        check(type, keel::coefficients<keel::polar_express_2_percent, T>());
        check(type, keel::coefficients<keel::turbo_aol, T>());
        check(type, keel::coefficients<keel::deepseek_v4, T>());
        check(type, keel::coefficients<keel::classic_cubic, T>());
        check(type, keel::coefficients<keel::solved_set<T, 6>, T>());
    });
}

TEST_CASE("O(cU) = O(U) bit for bit for every power of two from 2^-60 to 2^60, in every type and form") {
    in_every_type([](auto type) {
        using T = decltype(type);
        for (auto [r, c, f] : {std::tuple<int64_t, int64_t, form>{5, 11, form::gram}, {4, 4, form::symmetric}, {7, 3, form::plain}}) {
            auto u = to_storage<float>(random_matrix(r, c, 11));
            guarded_matrix<float> want(r, c), got(r, c), scaled(r, c);
            orthogonalise<T>(u.view(), want.view(), {.form = f}).or_throw();
            for (int power = -60; power <= 60; ++power) {
                INFO(r << "x" << c << " 2^" << power);
                for (int64_t i = 0; i < r; ++i)
                    for (int64_t j = 0; j < c; ++j) scaled.set(i, j, std::ldexp(u.get(i, j), power));
                orthogonalise<T>(scaled.view(), got.view(), {.form = f}).or_throw();
                CHECK(got.contents() == want.contents());
            }
        }
    });
}

TEST_CASE("odd, equivariant under transposition and permutation, and downhill, in every type and size") {
    in_every_type([](auto type) {
        using T = decltype(type);
        for (shape s : shapes) {
            INFO(keel::rounding_margin<T> << " " << s.rows << "x" << s.columns);
            // Singular values from 0.1 of the largest, so that no null space magnifies a last bit.
            matrix const u = with_singular_values(s.rows, s.columns, log_spaced(std::min(s.rows, s.columns), 0.1), 13);
            matrix const o = orthogonalised<T>(u);
            double const tolerance = close<T>(1);
            CHECK(orthogonalised<T>(-u) == -o);
            CHECK(o.cwiseProduct(u).sum() > 0.8 * u.norm()); // the sum of map(s) s, each map(s) above 0.8 here: more than 0.8 |u|
            CHECK((orthogonalised<T>(u.transpose()) - o.transpose()).cwiseAbs().maxCoeff() <= tolerance);
            // Rows and columns both rearranged: row i of the new one is row (7 i + 3) of the old one.
            matrix moved(s.rows, s.columns), want(s.rows, s.columns);
            auto const from = [](int64_t i, int64_t n) { return std::gcd(n, int64_t{7}) == 1 ? (7 * i + 3) % n : n - 1 - i; };
            for (int64_t i = 0; i < s.rows; ++i)
                for (int64_t j = 0; j < s.columns; ++j)
                    moved(i, j) = u(from(i, s.rows), from(j, s.columns)), want(i, j) = o(from(i, s.rows), from(j, s.columns));
            CHECK((orthogonalised<T>(moved) - want).cwiseAbs().maxCoeff() <= tolerance);
        }
    });
}

TEST_CASE("a null space stays one: rank 3 of 20 x 31 gives rank 3") {
    matrix const u = random_matrix(20, 3, 41) * random_matrix(3, 31, 43), o = orthogonalised<float>(u);
    Eigen::JacobiSVD<matrix> const svd(u, Eigen::ComputeThinU | Eigen::ComputeThinV);
    CHECK((o - mapped(u, keel::coefficients<keel::polar_express>())).cwiseAbs().maxCoeff() < 2e-3); // 2^-24 of rounding times a slope of 1000
    CHECK(singular_values(o)(2) > 0.8);
    CHECK(singular_values(o)(3) < 2e-3);
    // In half precision rounding fills the null space, by unit / 4 a row at most, which the slope lifts; it stays in the certified range.
    CHECK(singular_values(orthogonalised<bf16>(u))(0) <= keel::certificate<keel::polar_express, bf16>.upper);
}

TEST_CASE("input that is not finite is told and nothing is written, in every type") {
    in_every_type([](auto type) {
        using T = decltype(type);
        for (float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity()})
            for (int64_t at : {0, 17, 34}) {
                auto u = guarded_matrix<float>(5, 7, 0, floats(data_kind::normal, 35, 3));
                u.set(at / 7, at % 7, bad);
                guarded_matrix<float> o(5, 7, 3, std::vector<float>(35, 9.0f));
                auto const before = o.contents();
                auto const s = orthogonalise<T>(u.view(), o.view());
                CHECK(s.code == keel::status_code::non_finite);
                CHECK(std::string(s.argument) == "u");
                CHECK(o.contents() == before);
            }
    });
}

TEST_CASE("o may be u, and no other memory that overlaps it") {
    std::vector<float> const x = floats(data_kind::normal, 81, 3);
    auto const fresh = [&](auto const& call) {
        std::vector<float> memory = x;
        keel::status const s = call(memory.data());
        return std::pair(s, memory);
    };
    std::vector<float> want(81);
    orthogonalise<float>(keel::rows(std::vector<float>(x).data(), 9, 9), keel::rows(want.data(), 9, 9)).or_throw();
    auto const [in_place, result] = fresh([](float* p) { return orthogonalise<float>(keel::rows(p, 9, 9), keel::rows(p, 9, 9)); });
    CHECK(in_place.ok());
    CHECK(result == want);
    auto const refused = [&](auto const& call) {
        auto const [s, memory] = fresh(call);
        CHECK(s.code == keel::status_code::overlap);
        CHECK(memory == x);
    };
    refused([](float* p) { return orthogonalise<float>(keel::rows(p, 9, 9), transposed(keel::rows(p, 9, 9))); });
    refused([](float* p) { return orthogonalise<float>(keel::rows(p, 8, 9), keel::rows(p + 9, 8, 9)); });
    refused([](float* p) { return orthogonalise<float>(keel::rows(p, 4, 9, 18), keel::rows(p + 1, 4, 9, 18)); });
    refused([](float* p) { // the same bytes in another format
        scratch memory(keel::newton_schulz_workspace(be, 9, 9));
        return keel::newton_schulz(be, keel::rows(p, 9, 9), keel::rows(reinterpret_cast<bf16*>(p), 9, 9), {}, {}, memory.get());
    });
}
