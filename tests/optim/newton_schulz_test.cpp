// Newton-Schulz against the SVD in double: the map it applies to singular values, and the properties an optimiser relies on.
#include <bit>
#include <limits>

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

template <class T, class U, class O>
keel::status orthogonalise(keel::view<U, 2> u, keel::view<O, 2> o, keel::newton_schulz_options<T> options = {}, float* error = nullptr) {
    scratch memory(keel::newton_schulz_workspace<T>(be, u.extent[0], u.extent[1], 1, options));
    return keel::newton_schulz<T>(be, u, o, {.orthogonality_error = keel::vec(error, error == nullptr ? 0 : 1)}, options, memory.get());
}
template <class T = float> matrix orthogonalised(matrix const& u, keel::newton_schulz_options<T> options = {}) {
    auto in = to_storage<float>(u);
    guarded_matrix<float> out(u.rows(), u.cols());
    orthogonalise<T>(in.view(), out.view(), options).or_throw();
    return to_matrix(out);
}

/// fp32: each of `count` products perturbs X by about 2^-24 a row of n terms; early perturbations grow by the slope at 0.
template <class T> double tolerance(keel::newton_schulz_coefficients<T> const& set, int64_t n) {
    return 4 * std::sqrt(static_cast<double>(n)) * slope_at_zero(set) * 0x1p-24 + 1e-5;
}

struct shape {
    int64_t rows, columns;
};

/// A set that overflows: s -> 6 s and more.
struct diverging {
    static constexpr char const *name = "diverging", *source = "this test";
    static constexpr keel::newton_schulz_term listed[] = {{3.0, 2.0, 1.0}};
    static constexpr int default_steps = 5;
    static constexpr keel::longer_run more = keel::longer_run::cycle;
};

} // namespace

TEST_CASE("every set and form applies the set's map to the singular values") {
    auto const check = [](auto const& set) {
        for (shape s : {shape{1, 1}, {1, 9}, {9, 1}, {2, 2}, {7, 13}, {31, 17}, {40, 40}, {24, 90}})
            for (form f : {form::automatic, form::plain, form::symmetric, form::gram}) {
                INFO(set.name << " " << s.rows << "x" << s.columns << " " << name_of(f));
                matrix const u = random_matrix(s.rows, s.columns, 3);
                matrix const o = orthogonalised<float>(u, {.coefficients = set, .form = f});
                CHECK((o - mapped(u, set)).cwiseAbs().maxCoeff() <= tolerance(set, std::min(s.rows, s.columns)));
            }
    };
    check(keel::coefficients<keel::keller>());
    check(keel::coefficients<keel::polar_express>());
    check(keel::coefficients<keel::polar_express_1_05>());
    check(keel::coefficients<keel::polar_express_2_percent>());
    check(keel::coefficients<keel::you_jiacheng>());
    check(keel::coefficients<keel::turbo_aol>());
    check(keel::coefficients<keel::cubic_relaxed>());
    check(keel::coefficients<keel::classic_quintic, float, 5>());
}

TEST_CASE("converging sets reach the polar factor") {
    for (shape s : {shape{12, 12}, {16, 40}, {37, 19}}) {
        matrix const u = with_singular_values(s.rows, s.columns, log_spaced(std::min(s.rows, s.columns), 0.05), 5);
        matrix const want = polar_factor(u);
        auto const error = [&](auto const& set) { return (orthogonalised<float>(u, {.coefficients = set}) - want).cwiseAbs().maxCoeff(); };
        // At the fixed point each of up to 20 steps still turns the result by some roundings: 20 * 16 * 2^-24.
        CHECK(error(keel::coefficients<keel::classic_quintic>()) < 2e-5);
        CHECK(error(keel::coefficients<keel::classic_cubic>()) < 2e-5);
        CHECK(error(keel::coefficients<keel::polar_express, float, 9>()) < 1e-3); // its safety holds early steps below
        CHECK(error(keel::coefficients<keel::deepseek_v4>()) < 2e-3);             // published range 1.000 to 1.001
    }
}

TEST_CASE("long runs in Gram form are restarted and stay within the certified bound") { // T = 10 explodes without
    auto const check = [](auto const& set) {
        for (double least : {1e-1, 1e-3, 1e-5, 1e-8})
            for (shape s : {shape{32, 128}, {40, 40}}) {
                INFO(set.name << " " << set.count << " down to " << least << ", " << s.rows << "x" << s.columns);
                auto const plan = keel::plan_newton_schulz<float>(s.rows, s.columns, set, form::gram);
                CHECK((set.count <= 5) == (plan.restart_count() == 0));
                matrix const u = with_singular_values(s.rows, s.columns, log_spaced(s.rows, least), 7);
                double const most = largest_singular(orthogonalised<float>(u, {.coefficients = set, .form = form::gram}));
                CHECK(most <= set.bounds.upper + 2e-3);
                // and it is the map: where sigma is not lost in rounding, against plain
                CHECK(std::abs(most - largest_singular(orthogonalised<float>(u, {.coefficients = set, .form = form::plain}))) <= 5e-3);
            }
    };
    check(keel::coefficients<keel::polar_express>());
    check(keel::coefficients<keel::keller>());
    check(keel::coefficients<keel::you_jiacheng>());
    check(keel::coefficients<keel::polar_express, float, 8>());
    check(keel::coefficients<keel::keller, float, 8>());
    check(keel::coefficients<keel::deepseek_v4>());
    check(keel::coefficients<keel::deepseek_v4, float, 16>());
}

TEST_CASE("more than 64 steps are never taken in Gram form, which could not be restarted") { // 80 of keller: singular values of 2500
    auto const check = [](auto const& set) {
        INFO(set.name << " " << set.count);
        matrix const u = random_matrix(8, 64, 3);
        auto const plan = keel::plan_newton_schulz<float>(8, 64, set);
        CHECK((plan.form == form::gram) == (set.count <= 64));
        CHECK(plan.valid());
        CHECK(singular_values(orthogonalised<float>(u, {.coefficients = set}))(0) <= set.bounds.upper + 2e-3);
        CHECK(keel::plan_newton_schulz<float>(8, 64, set, form::gram).valid() == (set.count <= 64));
        auto in = to_storage<float>(u);
        guarded_matrix<float> out(8, 64);
        auto const s = orthogonalise<float>(in.view(), out.view(), {.coefficients = set, .form = form::gram});
        CHECK(s.code == (set.count <= 64 ? keel::status_code::ok : keel::status_code::bad_option));
        if (s.ok()) CHECK(singular_values(to_matrix(out))(0) <= set.bounds.upper + 2e-3);
        else CHECK(out.contents() == guarded_matrix<float>(8, 64).contents());
    };
    check(keel::coefficients<keel::keller, float, 64>());
    check(keel::coefficients<keel::keller, float, 65>());
    check(keel::coefficients<keel::keller, float, 120>());
    check(keel::coefficients<keel::deepseek_v4, float, 100>());
    check(keel::coefficients<keel::classic_cubic, float, 100>());
}

TEST_CASE("bf16 operands keep well-conditioned input in the set's range") {
    // Rounding to bf16 moves singular values by about 2^-8 a step; measured over these shapes at most 0.03.
    for (shape s : {shape{16, 16}, {24, 64}, {70, 33}}) {
        matrix const u = with_singular_values(s.rows, s.columns, log_spaced(std::min(s.rows, s.columns), 0.2), 9);
        auto const check = [&](auto const& set, double low, double high) {
            INFO(set.name << " " << s.rows << "x" << s.columns);
            auto const sigma = singular_values(orthogonalised<bf16>(u, {.coefficients = set}));
            CHECK(sigma(0) <= high + 0.03);
            CHECK(sigma(sigma.size() - 1) >= low - 0.03);
        };
        check(keel::coefficients<keel::polar_express, bf16>(), .870, 1.124);
        check(keel::coefficients<keel::keller, bf16>(), .682, 1.134);
    }
}

TEST_CASE("O(cU) = O(U) bit for bit for c = 2^-60 ... 2^60, and beyond") { // EO #229, #238: no epsilon, no lost norm
    for (auto [r, c] : {std::pair<int64_t, int64_t>{6, 11}, {20, 20}, {33, 8}}) {
        auto u = to_storage<float>(random_matrix(r, c, 11));
        guarded_matrix<float> want(r, c), got(r, c);
        orthogonalise<float>(u.view(), want.view()).or_throw();
        guarded_matrix<float> want_bf16(r, c);
        orthogonalise<bf16>(u.view(), want_bf16.view()).or_throw();
        for (int power : {-110, -60, -1, 1, 60, 120}) {
            INFO(r << "x" << c << " 2^" << power);
            auto scaled = u;
            for (int64_t i = 0; i < r; ++i)
                for (int64_t j = 0; j < c; ++j) scaled.set(i, j, std::ldexp(u.get(i, j), power));
            orthogonalise<float>(scaled.view(), got.view()).or_throw();
            CHECK(got.contents() == want.contents());
            orthogonalise<bf16>(scaled.view(), got.view()).or_throw();
            CHECK(got.contents() == want_bf16.contents());
        }
    }
}

TEST_CASE("neither huge nor subnormal input is a silent no-op") { // 4096 entries of 1e18: fp32 norm = inf, X = 0
    for (float v : {1e18f, 3.4e38f, 1e-23f, 1e-44f, 1.4e-45f}) {
        INFO(v);
        auto u = guarded_matrix<float>(64, 64, 0, std::vector<float>(4096, v));
        guarded_matrix<float> o(64, 64);
        orthogonalise<float>(u.view(), o.view()).or_throw();
        // rank 1: the singular value 1 maps to p(1), spread over 64 x 64 equal entries
        double const want = scalar_map(keel::coefficients<keel::polar_express>(), 1.0) / 64;
        CHECK(o.at(0, 0) == Approx(want).epsilon(1e-4));
        CHECK(o.at(63, 17) == Approx(want).epsilon(1e-4));
    }
    guarded_matrix<float> mixed(2, 2, 0, {3e38f, 0.0f, 0.0f, 3e38f}), o(2, 2);
    orthogonalise<float>(mixed.view(), o.view()).or_throw();
    CHECK(o.at(0, 0) == o.at(1, 1));
    CHECK(o.at(0, 0) > 0.85);
}

TEST_CASE("zero in, zero out") { // EO #254: 0/0
    for (float zero : {0.0f, -0.0f}) {
        guarded_matrix<float> u(5, 7, 0, std::vector<float>(35, zero)), o(5, 7, 2, std::vector<float>(35, 9.0f));
        float error = 0;
        orthogonalise<float>(u.view(), o.view(), {}, &error).or_throw();
        CHECK(o.contents() == guarded_matrix<float>(5, 7).contents());
        CHECK(error == 1.0f);
    }
}

TEST_CASE("input that is not finite gives a status and writes nothing") {
    for (float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
        std::vector<float> u(3 * 20, 1.0f), o(3 * 20, 7.0f), error(3, 5.0f);
        u[45] = bad;
        scratch memory(keel::newton_schulz_workspace(be, 4, 5, 3));
        auto const s = keel::newton_schulz(be, keel::cube(u.data(), 3, 4, 5), keel::cube(o.data(), 3, 4, 5),
                                           {.orthogonality_error = keel::vec(error.data(), 3)}, {}, memory.get());
        CHECK(s.code == keel::status_code::non_finite);
        CHECK(s.got == 2);
        CHECK(o == std::vector<float>(60, 7.0f));
        CHECK(error == std::vector<float>(3, 5.0f));
    }
}

TEST_CASE("the result is odd, follows transposition and permutation, and never points uphill") {
    for (shape s : {shape{1, 6}, {9, 9}, {13, 29}, {41, 23}}) {
        INFO(s.rows << "x" << s.columns);
        matrix const u = random_matrix(s.rows, s.columns, 13);
        matrix const o = orthogonalised(u);
        CHECK(orthogonalised(-u) == -o);
        CHECK((o.cwiseProduct(u)).sum() > 0);
        double const close = tolerance(keel::coefficients<keel::polar_express>(), std::min(s.rows, s.columns));
        CHECK((orthogonalised(u.transpose()) - o.transpose()).cwiseAbs().maxCoeff() <= close);
        CHECK((orthogonalised(u.colwise().reverse()) - o.colwise().reverse()).cwiseAbs().maxCoeff() <= close);
        // A transposed view of the same memory: the same bits.
        auto in = to_storage<float>(u, 3);
        guarded_matrix<float> turned(s.columns, s.rows, 1), straight(s.rows, s.columns);
        orthogonalise<float>(transposed(in.view()), turned.view()).or_throw();
        orthogonalise<float>(in.view(), straight.view()).or_throw();
        CHECK(to_matrix(turned) == to_matrix(straight).transpose());
        CHECK(turned.untouched());
    }
}

TEST_CASE("a view and its transpose are one computation, whatever the strides; a column is worked on as a row") {
    for (int64_t r : {1, 2, 5, 13, 41, 300})
        for (int64_t c : {1, 3, 9, 29})
            for (auto [down, right] : {std::pair<int64_t, int64_t>{2 * c + 20, 2}, {3, 3 * r + 1}, {1, r}, {c, 1}, {-c, 1}, {5 * c, -5}}) {
                INFO(r << "x" << c << " strides " << down << ", " << right);
                std::vector<float> const x = floats(data_kind::normal, 1 + (r - 1) * std::abs(down) + (c - 1) * std::abs(right), 31);
                auto const at = [](auto* p, int64_t rows, int64_t columns, int64_t i, int64_t j) {
                    return keel::view<std::remove_pointer_t<decltype(p)>, 2>{p + (i < 0 ? -i * (rows - 1) : 0) + (j < 0 ? -j * (columns - 1) : 0),
                                                                             {rows, columns}, {i, j}};
                };
                auto const u = at(x.data(), r, c, down, right);
                guarded_matrix<float> straight(r, c), turned(c, r, 2);
                orthogonalise<float>(u, straight.view()).or_throw();
                orthogonalise<float>(transposed(u), turned.view()).or_throw();
                CHECK(to_matrix(turned) == to_matrix(straight).transpose());
            }
}

TEST_CASE("odd but for zeros, which are +0 either way") {
    std::vector<float> const u{1, 0, 2, 0, 0, 3};
    std::vector<float> minus, o(6), p(6);
    for (float v : u) minus.push_back(-v);
    orthogonalise<float>(keel::rows(u.data(), 2, 3), keel::rows(o.data(), 2, 3)).or_throw();
    orthogonalise<float>(keel::rows(minus.data(), 2, 3), keel::rows(p.data(), 2, 3)).or_throw();
    int zeros = 0;
    for (std::size_t i = 0; i < 6; ++i) {
        bool const zero = o[i] == 0.0f;
        zeros += zero ? 1 : 0;
        CHECK(std::bit_cast<uint32_t>(p[i]) == std::bit_cast<uint32_t>(zero ? 0.0f : -o[i]));
        if (zero) CHECK(std::bit_cast<uint32_t>(o[i]) == 0);
    }
    CHECK(zeros == 2);
}

TEST_CASE("a batch is its matrices one by one, on any number of threads") { // a norm without keepdim: batch = rows hides it
    for (auto [batch, r, c] : {std::tuple<int64_t, int64_t, int64_t>{6, 6, 9}, {5, 20, 11}, {3, 1, 4}}) {
        std::vector<float> u = floats(data_kind::normal, batch * r * c, 23), one(u.size()), all(u.size()), error(6), errors(6);
        for (std::size_t i = 0; i < u.size(); ++i) u[i] *= std::pow(10.0f, static_cast<float>(i / static_cast<std::size_t>(r * c)));
        for (int64_t i = 0; i < batch; ++i)
            orthogonalise<float>(keel::rows(u.data() + i * r * c, r, c), keel::rows(one.data() + i * r * c, r, c), {}, &error[static_cast<std::size_t>(i)])
                .or_throw();
        for (int64_t threads : {1, 2, 16}) {
            INFO(batch << " of " << r << "x" << c << " on " << threads);
            keel::thread_pool const pool(threads);
            one_or_two_threads const executor{&pool};
            keel::cpu const backend(executor);
            scratch memory(keel::newton_schulz_workspace(backend, r, c, batch));
            keel::newton_schulz(backend, keel::cube(u.data(), batch, r, c), keel::cube(all.data(), batch, r, c),
                                {.orthogonality_error = keel::vec(errors.data(), batch)}, {}, memory.get())
                .or_throw();
            CHECK(all == one);
            CHECK(errors == error);
        }
    }
}

TEST_CASE("rank-1 input stays a step downhill in every certified set and type") { // AOL: gain -0.99; cubic in bf16: wrong sign
    auto const gains = [](auto const& set, auto type) {
        using T = decltype(type);
        double least = 1e300, most = -1e300;
        for (uint64_t draw = 0; draw < 40; ++draw) {
            matrix const u = random_matrix(12, 1, 100 + draw) * random_matrix(1, 20, 200 + draw);
            matrix const o = orthogonalised<T>(u, {.coefficients = set});
            double const gain = o.cwiseProduct(u).sum() / u.norm();
            least = std::min(least, gain), most = std::max(most, gain);
        }
        INFO(set.name);
        CHECK(least > 0.6);
        CHECK(most <= set.bounds.upper + 0.02);
        return least;
    };
    gains(keel::coefficients<keel::polar_express>(), 0.0f);
    gains(keel::coefficients<keel::polar_express, bf16>(), bf16{});
    gains(keel::coefficients<keel::keller, bf16>(), bf16{});
    gains(keel::coefficients<keel::turbo_aol, bf16>(), bf16{});
    gains(keel::coefficients<keel::cubic_relaxed>(), 0.0f);
    // What the certificate is for: the early AOL set climbs.
    matrix const u = random_matrix(12, 1, 1) * random_matrix(1, 20, 2);
    matrix const o = orthogonalised<float>(u, {.coefficients = keel::unsafe_coefficients<keel::turbo_aol_early>()});
    CHECK(o.cwiseProduct(u).sum() / u.norm() < -0.9);
}

// A gradient of rank one whose inputs are all as large: every product of two rows' elements is the same number, and in one chain of m of
// them each rounding of a binade goes the same way. The null space of X X^T is lifted by that, or sinks below 0, and Gram squares it away.
TEST_CASE("rank one over a long side of equal magnitudes keeps the certified bound") {
    float const c[] = {1.0f, .7f, .3f, .9f, .55f, .81f, .43f, .62f};
    for (auto [n, m] : {std::pair<int64_t, int64_t>{2, 4096}, {4, 16384}, {8, 16384}, {8, 65536}, {16, 4096}, {64, 4096}}) {
        if (!every_case && n * m > 40000) continue;
        guarded_matrix<float> u(n, m), o(n, m);
        for (int64_t i = 0; i < n; ++i)
            for (int64_t k = 0; k < m; ++k) u.set(i, k, c[i % 8] * (1.0f + 0.01f * static_cast<float>(i / 8)) * (k % 2 == 0 ? 1.0f : -1.0f));
        for (form f : {form::automatic, form::symmetric, form::gram}) {
            auto const set = keel::coefficients<keel::polar_express>();
            INFO(n << "x" << m << " " << name_of(f));
            orthogonalise<float>(u.view(), o.view(), {.coefficients = set, .form = f}).or_throw();
            matrix const x = to_matrix(o);
            double const largest = std::sqrt((x * x.transpose()).eval().selfadjointView<Eigen::Lower>().eigenvalues().maxCoeff());
            CHECK(largest <= set.bounds.upper + 2e-3);
            // Gram's squared slopes carry a drift of up to 2^-17 of R into the fourth digit here.
            CHECK(x.cwiseProduct(to_matrix(u)).sum() / to_matrix(u).norm() == Approx(scalar_map(set, 1.0)).epsilon(4e-3));
        }
    }
}

TEST_CASE("a set that overflows is told, and writes nothing") {
    auto const set = keel::unsafe_coefficients<diverging>();
    for (form f : {form::plain, form::symmetric, form::gram}) {
        std::vector<float> const u = floats(data_kind::normal, 2 * 6 * 9, 3);
        std::vector<float> o(u.size(), 7.0f);
        keel::newton_schulz_options<float> const options{.coefficients = set, .form = f};
        scratch memory(keel::newton_schulz_workspace<float>(be, 6, 9, 2, options));
        auto const s = keel::newton_schulz<float>(be, keel::cube(u.data(), 2, 6, 9), keel::cube(o.data(), 2, 6, 9), {}, options, memory.get());
        CHECK(s.code == keel::status_code::non_finite);
        CHECK(std::string(s.argument) == "options.coefficients");
        CHECK(s.got == 0);
        CHECK(o == std::vector<float>(u.size(), 7.0f));
    }
}

TEST_CASE("any strides, in place, and other formats") {
    matrix const u = random_matrix(11, 18, 17);
    auto dense = to_storage<float>(u);
    guarded_matrix<float> want(11, 18);
    orthogonalise<float>(dense.view(), want.view()).or_throw();
    // Every second element of a wider matrix, in and out.
    guarded_matrix<float> sparse(11, 36, 1), out(11, 36, 2);
    auto const half = [](keel::view<float, 2> v) { return keel::view<float, 2>{v.data, {11, 18}, {v.stride[0], 2}}; };
    for (int64_t i = 0; i < 11; ++i)
        for (int64_t j = 0; j < 18; ++j) half(sparse.view())(i, j) = dense.get(i, j);
    orthogonalise<float>(half(sparse.view()), half(out.view())).or_throw();
    for (int64_t i = 0; i < 11; ++i)
        for (int64_t j = 0; j < 36; ++j) CHECK(out.at(i, j) == (j % 2 == 0 ? want.at(i, j / 2) : 0.0));
    CHECK(out.untouched());
    orthogonalise<float>(dense.view(), dense.view()).or_throw();
    CHECK(dense.contents() == want.contents());
    auto in = to_storage<bf16>(u);
    guarded_matrix<bf16> o(11, 18);
    orthogonalise<float>(in.view(), o.view()).or_throw();
    CHECK((to_matrix(o) - mapped(to_matrix(in), keel::coefficients<keel::polar_express>())).cwiseAbs().maxCoeff() < 0x1p-8);
    CHECK(o.untouched());
}

TEST_CASE("the orthogonality error is that of the result") {
    for (shape s : {shape{8, 20}, {21, 21}, {30, 5}}) {
        auto in = to_storage<float>(with_singular_values(s.rows, s.columns, log_spaced(std::min(s.rows, s.columns), 0.01), 19));
        guarded_matrix<float> out(s.rows, s.columns);
        float error = 0;
        orthogonalise<float>(in.view(), out.view(), {}, &error).or_throw();
        matrix const o = to_matrix(out);
        matrix const gram = s.rows <= s.columns ? matrix(o * o.transpose()) : matrix(o.transpose() * o);
        double const want = (gram - matrix::Identity(gram.rows(), gram.rows())).norm() / std::sqrt(static_cast<double>(gram.rows()));
        CHECK(static_cast<double>(error) == Approx(want).epsilon(1e-4));
    }
}

TEST_CASE("plans depend on the shape, and say what they are") {
    auto const set = keel::coefficients<keel::polar_express>();
    CHECK(keel::plan_newton_schulz<float>(1024, 4096, set).form == form::gram);
    CHECK(keel::plan_newton_schulz<float>(4096, 1024, set).form == form::gram);
    CHECK(keel::plan_newton_schulz<float>(1024, 1024, set).form == form::symmetric);
    CHECK(keel::plan_newton_schulz<float>(64, 64, set).form == form::symmetric);
    CHECK(keel::plan_newton_schulz<float>(32, 32, set).form == form::plain);
    // Where Gram pays: fp32 from 1.44 short sides on, f16 from 1.19, bf16 from 3.2.
    auto const half = keel::coefficients<keel::polar_express, bf16>();
    auto const f16_set = keel::coefficients<keel::polar_express, keel::f16>();
    CHECK(keel::plan_newton_schulz<float>(100, 144, set).form == form::symmetric);
    CHECK(keel::plan_newton_schulz<float>(100, 145, set).form == form::gram);
    CHECK(keel::plan_newton_schulz<keel::f16>(100, 119, f16_set).form == form::symmetric);
    CHECK(keel::plan_newton_schulz<keel::f16>(100, 120, f16_set).form == form::gram);
    CHECK(keel::plan_newton_schulz<bf16>(100, 320, half).form == form::symmetric);
    CHECK(keel::plan_newton_schulz<bf16>(330, 100, half).form == form::gram);
    auto const plan = keel::plan_newton_schulz<float>(1024, 4096, set);
    CHECK(plan.flops() == 29.0 * 1024 * 1024 * 1024); // 17 + 3 * 4
    CHECK(plan.text() == "1024 x 4096: gram, 5 steps of polar_express, no restart, 31138 Mflop");
    CHECK(keel::plan_newton_schulz(1024, 4096).text() == plan.text()); // the default options
    CHECK(keel::plan_newton_schulz(8, 8, keel::newton_schulz_options<>{.form = form::plain}).text() == "8 x 8: plain, 5 steps of polar_express, 15 kflop");
    CHECK(keel::plan_newton_schulz<float>(8, 8, set, form::plain).flops() == 30.0 * 512);
    CHECK(keel::plan_newton_schulz<float>(8, 8, set, form::symmetric).flops() == 20.0 * 512);
}

TEST_CASE("newton_schulz says what is wrong and writes nothing") {
    guarded_matrix<float> u(4, 6, 0, floats(data_kind::normal, 24)), o(4, 6), small(4, 5);
    auto const before = o.contents();
    using keel::status_code;
    CHECK(orthogonalise<float>(u.view(), small.view()).code == status_code::bad_shape);
    CHECK(orthogonalise<float>(u.view(), keel::rows(o.view().data, 4, 6, 0)).code == status_code::bad_stride);
    CHECK(orthogonalise<float>(u.view(), keel::rows(u.view().data + 1, 3, 6)).code == status_code::bad_shape);
    CHECK(orthogonalise<float>(slice(u.view(), 0, 3), slice(u.view(), 1, 3)).code == status_code::overlap);
    CHECK(orthogonalise<float>(u.view(), o.view(), {.coefficients = {}}).code == status_code::bad_option);

    CHECK(keel::newton_schulz(be, u.view(), o.view()).code == status_code::small_workspace);
    CHECK(o.contents() == before);
    CHECK(keel::newton_schulz(be, keel::cube(u.view().data, 0, 4, 6), keel::cube(o.view().data, 0, 4, 6), {}, {},
                              scratch(256).get()).ok());
    CHECK(orthogonalise<float>(keel::rows(static_cast<float*>(nullptr), 0, 6), keel::rows(static_cast<float*>(nullptr), 0, 6)).ok());
}
