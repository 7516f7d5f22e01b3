// The matrix service: the bits are those of the plain chain over k, on every backend, for every stride and batching.
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <backend/matmul_case.hpp>
#include <keel/backend/cpu/matmul.hpp>
#include <keel/backend/matmul.hpp>
#include <keel/backend/reference_matmul.hpp>
#include <keel/format/f16.hpp>
#include <keel/format/fp8.hpp>
#include <support/backends.hpp>
#include <support/catch.hpp>

using namespace keel;
using namespace keel_test;

namespace {

/// Every CPU backend against the reference backend, for one problem.
template <class A, class B, class C>
void check_all_backends(shape s, data_kind kind, layout how_a, layout how_b, layout how_c, matmul_options options) {
    CAPTURE(s.m, s.n, s.k, keel_test::name_of(kind), static_cast<int>(how_a), static_cast<int>(how_b),
            static_cast<int>(how_c), options.alpha, options.beta);
    laid_out<A> a(s.m, s.k, how_a, floats(kind, s.m * s.k, 1));
    laid_out<B> b(s.k, s.n, how_b, floats(kind, s.k * s.n, 2));
    auto const old = floats(data_kind::normal, s.m * s.n, 3);
    laid_out<C> want(s.m, s.n, layout::plain, old);
    REQUIRE(matmul(reference{}, a.view(), b.view(), want.view(), options).ok());
    keel_test::for_each_cpu([&](std::string const& name, auto const& be) {
        CAPTURE(name);
        laid_out<C> c(s.m, s.n, how_c, old);
        scratch ws(matmul_workspace(be, s.m, s.n, s.k));
        CHECK(matmul(be, a.view(), b.view(), c.view(), options, ws.get()).ok());
        CHECK(differences(c.view(), want.view()) == 0);
        CHECK(c.untouched());
    });
}

} // namespace

TEMPLATE_TEST_CASE("the reference is the chain over k that the contract states", "", float, bf16, e4m3) {
    using T = TestType;
    matmul_options const options{.alpha = 0.7f, .beta = -1.3f};
    for (shape s : edge_shapes) {
        if (s.m * s.n * s.k > 40000) continue; // the oracle is slow, and larger shapes take the same path
        CAPTURE(s.m, s.n, s.k);
        guarded_matrix<T> a(s.m, s.k, 1, floats(data_kind::normal, s.m * s.k, 1));
        guarded_matrix<T> b(s.k, s.n, 2, floats(data_kind::normal, s.k * s.n, 2));
        guarded_matrix<float> c(s.m, s.n, 3, floats(data_kind::normal, s.m * s.n, 3)), old = c;
        REQUIRE(matmul(reference{}, a.view(), b.view(), c.view(), options).ok());
        int64_t wrong = 0;
        for (int64_t i = 0; i < s.m; ++i)
            for (int64_t j = 0; j < s.n; ++j) {
                float const acc = chain_of(a, b, i, j, 0, s.k);
                wrong += bits(c.get(i, j)) !=
                         bits(keel::detail::exact_fma(options.alpha, acc, options.beta * old.get(i, j)));
            }
        CHECK(wrong == 0);
        CHECK(c.untouched());
    }
}

TEST_CASE("the sum is within the error bound of a chain, measured in double") {
    // |error| <= k * u * sum|a b| with u = 2^-24: the standard bound of k roundings (Higham 2002, eq. 3.5, first order; the
    // second-order term is below 1e-4 of it here).
    shape const s{50, 70, 900};
    guarded_matrix<float> a(s.m, s.k, 0, floats(data_kind::mixed_scales, s.m * s.k, 1));
    guarded_matrix<float> b(s.k, s.n, 0, floats(data_kind::mixed_scales, s.k * s.n, 2));
    guarded_matrix<float> c(s.m, s.n, 0);
    cpu<> const be;
    scratch ws(matmul_workspace(be, s.m, s.n, s.k));
    REQUIRE(matmul(be, a.view(), b.view(), c.view(), {}, ws.get()).ok());
    double worst = 0;
    for (int64_t i = 0; i < s.m; ++i)
        for (int64_t j = 0; j < s.n; ++j) {
            double sum = 0, size = 0;
            for (int64_t p = 0; p < s.k; ++p) sum += a.at(i, p) * b.at(p, j), size += std::abs(a.at(i, p) * b.at(p, j));
            worst = std::max(worst, std::abs(c.at(i, j) - sum) / (static_cast<double>(s.k) * 0x1p-24 * size));
        }
    CHECK(worst <= 1.0);
    CHECK(worst > 0.0);
}

TEST_CASE("every backend has the reference's bits: shapes and strides") {
    int turn = 0;
    for (shape s : edge_shapes)
        for (int repeat = 0; repeat < 3; ++repeat, ++turn) { // all layouts and step kinds come round
            layout const x = layouts[turn % 3], y = layouts[turn / 3 % 3], z = layouts[turn / 2 % 3];
            matmul_options const options{.alpha = turn % 4 == 0 ? 1.0f : 0.3f, .beta = turn % 5 < 2 ? 0.0f : 0.9f};
            check_all_backends<float, float, float>(s, data_kind::normal, x, y, z, options);
            check_all_backends<bf16, bf16, bf16>(s, data_kind::normal, y, z, x, options);
        }
}

TEST_CASE("every backend has the reference's bits: formats") {
    for (shape s : {shape{1, 1, 7}, shape{13, 35, 67}, shape{26, 17, 140}})
        for (layout x : layouts) {
            matmul_options const options{.alpha = 1.1f, .beta = 0.5f};
            check_all_backends<bf16, bf16, float>(s, data_kind::normal, x, x, layout::plain, options);
            check_all_backends<float, bf16, float>(s, data_kind::normal, x, x, layout::plain, options);
            check_all_backends<f16, f16, f16>(s, data_kind::normal, x, layout::turned, layout::plain, options);
            check_all_backends<e4m3, e5m2, bf16>(s, data_kind::normal, x, layout::plain, layout::turned, options);
        }
}

TEST_CASE("every backend has the reference's bits: NaN, Inf, subnormals, overflow") {
    for (data_kind kind : keel_test::all_kinds) {
        check_all_backends<float, float, float>({13, 35, 40}, kind, layout::plain, layout::turned, layout::plain,
                                                {.alpha = 2.0f, .beta = 1.0f});
        check_all_backends<float, float, bf16>({13, 35, 40}, kind, layout::turned, layout::plain, layout::plain, {});
        check_all_backends<bf16, bf16, float>({13, 35, 41}, kind, layout::plain, layout::plain, layout::plain, {});
    }
}

TEST_CASE("shapes larger than the outer blocks") {
    for (shape s : {shape{2200, 40, 20}, shape{30, 2300, 20}, shape{2130, 2140, 3}})
        for (layout how : {layout::plain, layout::turned})
            if (keel_test::every_case || (s.m * s.n < 1 << 20 && (s.m < 2000) == (how == layout::turned)))
                check_all_backends<float, float, float>(s, data_kind::normal, layout::plain, layout::plain, how, {});
}

TEST_CASE("with beta = 0 the old C is not read, and -0 counts as 0") {
    shape const s{13, 35, 20};
    float const nan = std::numeric_limits<float>::quiet_NaN();
    guarded_matrix<float> a(s.m, s.k, 0, floats(data_kind::normal, s.m * s.k, 1)),
        b(s.k, s.n, 0, floats(data_kind::normal, s.k * s.n, 2));
    for (float beta : {0.0f, -0.0f})
        keel_test::for_each_backend([&](std::string const& name, auto const& be) {
            CAPTURE(name, beta);
            guarded_matrix<float> c(s.m, s.n, 0, std::vector<float>(static_cast<std::size_t>(s.m * s.n), nan));
            scratch ws(matmul_workspace(be, s.m, s.n, s.k));
            REQUIRE(matmul(be, a.view(), b.view(), c.view(), {.beta = beta}, ws.get()).ok());
            for (int64_t i = 0; i < s.m; ++i)
                for (int64_t j = 0; j < s.n; ++j) CHECK_FALSE(std::isnan(c.get(i, j)));
        });
}

TEMPLATE_TEST_CASE("beta * D with a D of its own is beta * C after a copy", "", float, bf16) {
    using T = TestType;
    for (shape s : {shape{13, 35, 20}, {1, 1, 3}, {40, 7, 300}, {25, 25, 0}, {29, 29, 700}})
        for (layout how_c : layouts)
            for (layout how_d : layouts)
                for (product_form form : {product_form::full, product_form::symmetric}) {
                    if (form == product_form::symmetric && s.m != s.n) continue;
                    CAPTURE(s.m, s.n, s.k, static_cast<int>(how_c), static_cast<int>(how_d), static_cast<int>(form));
                    laid_out<T> a(s.m, s.k, layout::plain, floats(data_kind::normal, s.m * s.k, 1));
                    laid_out<T> b(s.k, s.n, layout::turned, floats(data_kind::normal, s.k * s.n, 2));
                    auto const added = floats(data_kind::normal, s.m * s.n, 3);
                    laid_out<T> d(s.m, s.n, how_d, added), want(s.m, s.n, layout::plain, added);
                    matmul_options const options{.alpha = 0.7f, .beta = -1.3f, .form = form};
                    REQUIRE(matmul(reference{}, a.view(), b.view(), want.view(), options).ok());
                    keel_test::for_each_backend([&](std::string const& name, auto const& be) {
                        CAPTURE(name);
                        laid_out<T> c(s.m, s.n, how_c, floats(data_kind::with_nan, s.m * s.n, 4)), same(s.m, s.n, how_d, added);
                        scratch ws(matmul_workspace(be, s.m, s.n, s.k));
                        CHECK(matmul(be, a.view(), b.view(), d.view(), c.view(), options, ws.get()).ok());
                        CHECK(differences(c.view(), want.view()) == 0);
                        CHECK(c.untouched());
                        CHECK(matmul(be, a.view(), b.view(), same.view(), same.view(), options, ws.get()).ok()); // D may be C
                        CHECK(differences(same.view(), want.view()) == 0);
                    });
                }
    // ... and D may be an operand, as in X = Q X + a X.
    laid_out<T> q(9, 9, layout::plain, floats(data_kind::normal, 81, 1)), x(9, 20, layout::plain, floats(data_kind::normal, 180, 2));
    laid_out<T> y(9, 20, layout::plain, floats(data_kind::normal, 180, 3)), want(9, 20, layout::plain, floats(data_kind::normal, 180, 2));
    scratch ws(matmul_workspace(cpu<>{}, 9, 20, 9));
    REQUIRE(matmul(reference{}, q.view(), x.view(), x.view(), y.view(), {.beta = 2.0f}).ok());
    REQUIRE(matmul(cpu<>{}, q.view(), x.view(), x.view(), want.view(), {.beta = 2.0f}, ws.get()).ok());
    CHECK(differences(y.view(), want.view()) == 0);
}

TEMPLATE_TEST_CASE("the symmetric form computes the lower triangle and mirrors it", "", float, bf16) {
    using T = TestType;
    for (int64_t n : {0, 1, 2, 15, 16, 17, 33, 64, 100, 131, 270, 545}) // the last two are mirrored while they are computed
        for (layout how : layouts) {
            int64_t const k = n > 200 ? 5 : 37;
            CAPTURE(n, static_cast<int>(how));
            laid_out<T> x(n, k, layout::plain, floats(data_kind::normal, n * k, 1));
            laid_out<T> y(k, n, layout::plain,
                          floats(data_kind::normal, n * k, 2)); // x * y is not symmetric: the contract shows
            auto const old = floats(data_kind::normal, n * n, 3);
            laid_out<T> full(n, n, layout::plain, old), want(n, n, layout::plain, old);
            matmul_options options{.alpha = 0.5f, .beta = 0.25f};
            REQUIRE(matmul(reference{}, x.view(), y.view(), full.view(), options).ok());
            options.form = product_form::symmetric;
            REQUIRE(matmul(reference{}, x.view(), y.view(), want.view(), options).ok());
            int64_t wrong = 0;
            for (int64_t i = 0; i < n; ++i)
                for (int64_t j = 0; j < n; ++j)
                    wrong += std::memcmp(want.view().at(i, j), full.view().at(i >= j ? i : j, i >= j ? j : i),
                                         sizeof(T)) != 0;
            CHECK(wrong == 0);
            keel_test::for_each_cpu([&](std::string const& name, auto const& be) {
                CAPTURE(name);
                laid_out<T> c(n, n, how, old);
                scratch ws(matmul_workspace(be, n, n, k));
                CHECK(matmul(be, x.view(), y.view(), c.view(), options, ws.get()).ok());
                CHECK(differences(c.view(), want.view()) == 0);
                CHECK(c.untouched());
            });
        }
}

TEST_CASE("A * A^T is symmetric by itself") {
    int64_t const n = 67, k = 129;
    guarded_matrix<bf16> a(n, k, 0, floats(data_kind::normal, n * k, 1));
    guarded_matrix<float> full(n, n, 0), half(n, n, 0);
    cpu<> const be;
    scratch ws(matmul_workspace(be, n, n, k));
    REQUIRE(matmul(be, a.view(), transposed(a.view()), full.view(), {}, ws.get()).ok());
    REQUIRE(matmul(be, a.view(), transposed(a.view()), half.view(), {.form = product_form::symmetric}, ws.get()).ok());
    CHECK(differences(full.view(), half.view()) == 0);
}

TEST_CASE("a batch has the bits of its items") {
    for (shape s : {shape{5, 7, 9}, shape{64, 64, 64}, shape{130, 40, 300}})
        for (int64_t batch : {0, 1, 3, 70}) {
            if (batch * s.m * s.n * s.k > 8'000'000) continue;
            CAPTURE(s.m, s.n, s.k, batch);
            auto const x = floats(data_kind::normal, batch * s.m * s.k, 1), y = floats(data_kind::normal, s.n * s.k, 2);
            std::vector<float> want(static_cast<std::size_t>(batch * s.m * s.n));
            view<float const, 3> const a = cube(x.data(), batch, s.m, s.k);
            view<float const, 3> const shared{y.data(), {batch, s.k, s.n}, {0, 1, s.k}}; // one matrix, read transposed
            for (int64_t i = 0; i < batch; ++i)
                REQUIRE(
                    matmul(reference{}, part(a, i), part(shared, i), part(cube(want.data(), batch, s.m, s.n), i)).ok());
            keel_test::for_each_backend([&](std::string const& name, auto const& be) {
                CAPTURE(name);
                std::vector<float> c(want.size(), 5.0f);
                scratch ws(matmul_workspace(be, s.m, s.n, s.k, batch));
                CHECK(matmul(be, a, shared, cube(c.data(), batch, s.m, s.n), {}, ws.get()).ok());
                CHECK(keel_test::equal_bits(c, want));
            });
        }
}

TEST_CASE("small products of floats are read where they lie: every tail of rows and columns, batches, groups and threads") {
    struct sizes {
        int64_t batch, m, n, k;
    };
    for (sizes s : {sizes{9, 64, 64, 64}, {3, 23, 16, 5}, {1, 1, 40, 3}, {2, 50, 33, 0}, {300, 12, 20, 7}, {1, 61, 200, 190}, {2, 7, 97, 1030}}) {
        CAPTURE(s.batch, s.m, s.n, s.k);
        auto const x = floats(data_kind::normal, s.batch * s.m * s.k, 1), y = floats(data_kind::normal, s.batch * s.k * s.n, 2);
        auto const old = floats(data_kind::normal, s.batch * s.m * s.n, 3);
        std::vector<float> want = old;
        for (int64_t i = 0; i < s.batch; ++i)
            REQUIRE(matmul(reference{}, part(cube(x.data(), s.batch, s.m, s.k), i), part(cube(y.data(), s.batch, s.k, s.n), i),
                           part(cube(want.data(), s.batch, s.m, s.n), i), {.alpha = 0.5f, .beta = 0.25f}).ok());
        std::vector<int64_t> offsets;
        for (int64_t i = 0; i <= s.batch; ++i) offsets.push_back(i * s.m);
        keel_test::for_each_cpu([&](std::string const& name, auto const& be) {
            CAPTURE(name);
            std::vector<float> c = old, grouped = old;
            scratch ws(matmul_workspace(be, s.batch * s.m, s.n, s.k, s.batch));
            auto const b = cube(y.data(), s.batch, s.k, s.n);
            CHECK(matmul(be, cube(x.data(), s.batch, s.m, s.k), b, cube(c.data(), s.batch, s.m, s.n), {.alpha = 0.5f, .beta = 0.25f}, ws.get()).ok());
            CHECK(keel_test::equal_bits(c, want));
            CHECK(grouped_matmul(be, rows(x.data(), s.batch * s.m, s.k), b, rows(grouped.data(), s.batch * s.m, s.n),
                                 vec(offsets.data(), s.batch + 1), {.alpha = 0.5f, .beta = 0.25f}, ws.get()).ok());
            CHECK(keel_test::equal_bits(grouped, want));
        });
    }
}

TEST_CASE("groups of rows: each row has the bits of matmul with its group's matrix") {
    int64_t const rows_ = 150, n = 45, k = 70;
    std::vector<int64_t> const offsets = {3, 3, 20, 21, 21, 140, 140}; // empty groups, rows before and after all groups
    int64_t const groups = static_cast<int64_t>(offsets.size()) - 1;
    auto const x = floats(data_kind::normal, rows_ * k, 1), w = floats(data_kind::normal, groups * k * n, 2);
    view<float const, 2> const a = rows(x.data(), rows_, k);
    view<float const, 3> const b{w.data(), {groups, k, n}, {k * n, 1, k}};
    std::vector<float> want(static_cast<std::size_t>(rows_ * n), 7.0f);
    for (int64_t g = 0; g < groups; ++g) {
        int64_t const first = offsets[static_cast<std::size_t>(g)],
                      count = offsets[static_cast<std::size_t>(g) + 1] - first;
        REQUIRE(matmul(reference{}, slice(a, first, count), part(b, g),
                       slice(rows(want.data(), rows_, n), first, count), {.beta = 0.5f})
                    .ok());
    }
    keel_test::for_each_backend([&](std::string const& name, auto const& be) {
        CAPTURE(name);
        std::vector<float> c(want.size(), 7.0f), turned(want.size(), 7.0f);
        scratch ws(matmul_workspace(be, rows_, n, k, groups));
        view<int64_t const, 1> const cuts = vec(offsets.data(), groups + 1);
        CHECK(grouped_matmul(be, a, b, rows(c.data(), rows_, n), cuts, {.beta = 0.5f}, ws.get()).ok());
        CHECK(keel_test::equal_bits(c, want));
        view<float, 2> const column_major = transposed(rows(turned.data(), n, rows_));
        CHECK(grouped_matmul(be, a, b, column_major, cuts, {.beta = 0.5f}, ws.get()).ok());
        CHECK(differences(column_major, rows(want.data(), rows_, n)) == 0);
    });
}

TEST_CASE("groups of the sum: each group's matrix has the bits of matmul on its rows") {
    int64_t const rows_ = 1500, m = 37, n = 45;
    std::vector<int64_t> const offsets = {0, 0, 1, 700, 701, 1500, 1500};
    int64_t const groups = static_cast<int64_t>(offsets.size()) - 1;
    guarded_matrix<bf16> x(rows_, m, 0, floats(data_kind::normal, rows_ * m, 1)),
        dy(rows_, n, 0, floats(data_kind::normal, rows_ * n, 2));
    std::vector<float> want(static_cast<std::size_t>(groups * m * n), 7.0f);
    for (int64_t g = 0; g < groups; ++g) {
        int64_t const first = offsets[static_cast<std::size_t>(g)],
                      count = offsets[static_cast<std::size_t>(g) + 1] - first;
        REQUIRE(matmul(reference{}, transposed(slice(x.view(), first, count)), slice(dy.view(), first, count),
                       part(cube(want.data(), groups, m, n), g))
                    .ok());
    }
    CHECK(want[0] == 0.0f); // an empty group sums to zero
    keel_test::for_each_backend([&](std::string const& name, auto const& be) {
        CAPTURE(name);
        std::vector<float> c(want.size(), 7.0f);
        scratch ws(matmul_workspace(be, m, n, rows_, groups));
        CHECK(grouped_matmul(be, transposed(x.view()), dy.view(), cube(c.data(), groups, m, n),
                             vec(offsets.data(), groups + 1), {}, ws.get())
                  .ok());
        CHECK(keel_test::equal_bits(c, want));
    });
}

TEST_CASE("wrong arguments come back as a status, and nothing is written") {
    cpu<> const be;
    std::vector<float> x(64, 1.0f), y(64, 2.0f), z(64, 3.0f);
    auto const a = rows(x.data(), 4, 6);
    auto const b = rows(y.data(), 6, 5);
    auto const c = rows(z.data(), 4, 5);
    scratch memory(matmul_workspace(be, 4, 5, 6, 4));
    workspace const ws = memory.get();
    CHECK(matmul(be, a, rows(y.data(), 5, 5), c, {}, ws).code == status_code::bad_shape);
    CHECK(matmul(be, a, b, rows(z.data(), 5, 5), {}, ws).code == status_code::bad_shape);
    CHECK(matmul(be, a, b, c, {.form = product_form::symmetric}, ws).code == status_code::bad_shape);
    CHECK(matmul(be, a, b, rows(static_cast<float*>(nullptr), 4, 5), {}, ws).code == status_code::bad_pointer);
    CHECK(matmul(be, a, b, rows(z.data(), 4, 5, 3), {}, ws).code == status_code::bad_stride);
    CHECK(matmul(be, a, b, rows(x.data() + 20, 4, 5), {}, ws).code == status_code::overlap);
    CHECK(matmul(be, a, b, rows(y.data(), 4, 4), c, {}, ws).message() == "matmul: d has columns = 4, wanted 5 (bad_shape)");
    CHECK(matmul(be, a, b, rows(z.data() + 1, 4, 5), c, {}, ws).code == status_code::overlap);
    CHECK(matmul(be, a, b, c, {}, {}).code == status_code::small_workspace);
    CHECK(matmul(be, a, b, c, {}, {}).message() == "matmul: workspace has bytes = 0, wanted " +
                                                       std::to_string(matmul_workspace(be, 4, 5, 6)) +
                                                       " (small_workspace)");
    std::vector<int64_t> offsets = {0, 3, 2};
    auto const experts = cube(y.data(), 2, 6, 5);
    CHECK(grouped_matmul(be, a, experts, c, vec(offsets.data(), 3), {}, ws).code == status_code::bad_option);
    offsets = {0, 3, 5};
    CHECK(grouped_matmul(be, a, experts, c, vec(offsets.data(), 3), {}, ws).code == status_code::bad_option);
    offsets = {-1, 3, 4};
    CHECK(grouped_matmul(be, a, experts, c, vec(offsets.data(), 3), {}, ws).code == status_code::bad_option);
    CHECK(grouped_matmul(be, a, experts, c, vec(offsets.data(), 2), {}, ws).code == status_code::bad_shape);
    CHECK(z == std::vector<float>(64, 3.0f));
    offsets = {0, 3, 4};
    CHECK(grouped_matmul(be, a, experts, c, vec(offsets.data(), 3), {}, ws).ok());
    CHECK(z[0] == 12.0f);
}
