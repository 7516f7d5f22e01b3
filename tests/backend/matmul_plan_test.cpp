// How a product is cut and where its scratch lies changes no bit: plans, workspaces, scale blocks of any length.
#include <algorithm>
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

/// A scale a line and block, from a table.
struct table_scales {
    float const* data;
    int64_t blocks, lines_a_scale;
    KEEL_FN float operator()(int64_t, int64_t line, int64_t block) const {
        return data[line / lines_a_scale * blocks + block];
    }
};

/// fn(backend) with two threads.
template <class Fn> void on_two_threads(Fn fn) {
    static thread_pool const pool(2);
    fn(cpu(pool));
}

} // namespace

TEST_CASE("a plan changes no bit") {
    shape const s{75, 110, 517};
    using service = keel::detail::cpu_matmul_service;
    matmul_plan const usual = plan_matmul<native_arch>(s.m, s.n, s.k);
    guarded_matrix<bf16> a(s.m, s.k, 0, floats(data_kind::normal, s.m * s.k, 1)),
        b(s.k, s.n, 0, floats(data_kind::normal, s.k * s.n, 2));
    guarded_matrix<float> want(s.m, s.n, 0);
    REQUIRE(matmul(reference{}, a.view(), b.view(), want.view(), {}).ok());
    for (int64_t depth : {128, 256, 384, 640})
        for (int64_t rows : {1, 3, 100})
            for (int64_t outer : {1, 2, 50})
                for (bool shared : {false, true}) {
                    matmul_plan plan = usual;
                    plan.depth = depth, plan.shared = shared;
                    plan.block_rows = rows * plan.tile_rows, plan.block_columns = plan.tile_columns;
                    plan.outer_rows = outer * plan.block_rows, plan.outer_columns = outer * plan.block_columns;
                    CAPTURE(plan.text());
                    on_two_threads([&](auto const& be) {
                        guarded_matrix<float> c(s.m, s.n, 0);
                        scratch ws(matmul_plan_bytes(plan, s.m, s.n, s.k));
                        product_set const set{layout_of(a.view()), layout_of(b.view()), layout_of(c.view()), 1, s.m, s.n, s.k};
                        service::run_planned<bf16, bf16, float>(be, set, plan, keel::detail::no_promotion{}, ws.get());
                        CHECK(differences(c.view(), want.view()) == 0);
                    });
                }
    // Small products are not worth a thread; a batch of them may be.
    CHECK_FALSE(plan_matmul<native_arch>(64, 64, 64).shared);
    CHECK(plan_matmul<native_arch>(64, 64, 64, 64).shared);
    CHECK(plan_matmul<native_arch>(512, 512, 512).shared);
    CHECK(plan_matmul<native_arch>(300, 200, 100).text() == plan_matmul<native_arch>(300, 200, 100).text());
}

TEST_CASE("the workspace of a shape is enough for every smaller one") {
    auto const bytes = [](int64_t m, int64_t n, int64_t k, int64_t batch, int64_t length) {
        return most_matmul_bytes<native_arch>(m, n, k, batch, length);
    };
    int64_t const sides[] = {0, 1, 7, 33, 512, 513, 1024, 1025, 2112, 5000},
                  depths[] = {0, 1, 127, 128, 129, 255, 256, 257, 384, 511, 512, 513, 640, 1025, 3000},
                  batches[] = {1, 2, 31, 40};
    int64_t less = 0, too_little = 0;
    for (int64_t length : {0, 1, 96, 128, 300, 4096})
        for (int64_t m : sides)
            for (int64_t n : sides)
                for (std::size_t d = 0; d < std::size(depths); ++d)
                    for (std::size_t b = 0; b < (length == 0 ? std::size(batches) : 1); ++b) {
                        int64_t const k = depths[d], all = bytes(m, n, k, batches[b], length);
                        if (d > 0) less += all < bytes(m, n, depths[d - 1], batches[b], length);
                        if (b > 0) less += all < bytes(m, n, k, batches[b - 1], length);
                        if (m > 0) less += all < bytes(m - 1, n, k, batches[b], length);
                        if (n > 0) less += all < bytes(m, n / 2, k, batches[b], length);
                        matmul_plan plan = plan_matmul<native_arch>(m, n, k);
                        if (length > 0) plan = for_scale_blocks(plan, length);
                        if (m > 0 && n > 0) too_little += all < matmul_plan_bytes(plan, m, n, k);
                    }
    CHECK(less == 0);
    CHECK(too_little == 0);
    CHECK(matmul_workspace(cpu<>{}, 0, 5, 5) == 0);
}

TEST_CASE("promoted products: each block sums from zero and is scaled once into the total") {
    for (shape s : {shape{29, 67, 300}, shape{29, 67, 1153}, shape{3, 2, 128}, shape{13, 40, 45}}) // the last: one block of an odd length
        for (int64_t length : {7, 32, 45, 100, 128, 300, 4097}) { // of 7, more blocks than are fetched at once
            int64_t const blocks = (s.k + length - 1) / length;
            if (!keel_test::every_case && (s.k == 300 || length == 32 || length == 128)) continue;
            CAPTURE(s.m, s.n, s.k, length);
            guarded_matrix<e4m3> a(s.m, s.k, 0, floats(data_kind::normal, s.m * s.k, 1)),
                b(s.n, s.k, 0, floats(data_kind::normal, s.k * s.n, 2));
            auto const scale_a = floats(data_kind::uniform, s.m * blocks, 3),
                       scale_b = floats(data_kind::uniform, (s.n / 128 + 1) * blocks, 4);
            promotion<table_scales, table_scales> const scales{
                length, {scale_a.data(), blocks, 1}, {scale_b.data(), blocks, 128}};
            guarded_matrix<e4m3> bt(s.k, s.n, 0);
            for (int64_t i = 0; i < s.k; ++i)
                for (int64_t j = 0; j < s.n; ++j) bt.set(i, j, b.get(j, i));

            guarded_matrix<float> want(s.m, s.n, 0);
            for (int64_t i = 0; i < s.m; ++i)
                for (int64_t j = 0; j < s.n; ++j) {
                    float total = 0.0f;
                    for (int64_t q = 0; q < blocks; ++q) {
                        bool const pairs = length % 2 == 0 || length >= s.k; // else some pair would lie across two blocks
                        float const block = chain_of(a, bt, i, j, q * length, std::min(s.k, (q + 1) * length), pairs);
                        total =
                            keel::detail::exact_fma(block, scales.scale_a(0, i, q) * scales.scale_b(0, j, q), total);
                    }
                    want.set(i, j, 0.5f * total);
                }
            keel_test::for_each_backend([&](std::string const& name, auto const& be) {
                CAPTURE(name);
                guarded_matrix<float> c(s.m, s.n, 0), turned(s.n, s.m, 0);
                scratch ws(matmul_promoted_workspace(be, s.m, s.n, s.k, length));
                product_set set{
                    layout_of(a.view()), layout_of(transposed(b.view())), layout_of(c.view()), 1, s.m, s.n, s.k};
                set.options.alpha = 0.5f;
                matmul_promoted<e4m3, e4m3, float>(be, set, scales, ws.get()).or_throw();
                CHECK(differences(c.view(), want.view()) == 0);
                set.c = layout_of(transposed(turned.view()));
                matmul_promoted<e4m3, e4m3, float>(be, set, scales, ws.get()).or_throw();
                CHECK(differences(transposed(turned.view()), want.view()) == 0);
                if (ws.get().size > 0) {
                    workspace const brief{ws.get().data, ws.get().size - 1};
                    CHECK(matmul_promoted<e4m3, e4m3, float>(be, set, scales, brief).code == status_code::small_workspace);
                }
            });
        }
}

TEST_CASE("promoted products of bf16 pairs and of symmetric form: A A^T in slices") {
    auto const check = [](auto format, int64_t n, int64_t k, int64_t length) {
        using T = decltype(format);
        CAPTURE(n, k, length, sizeof(T));
        guarded_matrix<T> a(n, k, 1, floats(data_kind::normal, n * k, 1)), at(k, n, 0);
        for (int64_t i = 0; i < n; ++i)
            for (int64_t j = 0; j < k; ++j) at.set(j, i, a.get(i, j));
        auto const one = [](int64_t, int64_t, int64_t) { return 1.0f; };
        promotion<decltype(one), decltype(one)> const scales{length, one, one};
        promotion<unit_scale, unit_scale> const unscaled{length, {}, {}};
        guarded_matrix<float> want(n, n, 0);
        for (int64_t i = 0; i < n; ++i)
            for (int64_t j = 0; j < n; ++j) {
                float total = 0.0f;
                bool const pairs = length % 2 == 0 || length >= k;
                for (int64_t first = 0; first < k; first += length) total += chain_of(a, at, i, j, first, std::min(k, first + length), pairs);
                want.set(i, j, total);
            }
        keel_test::for_each_backend([&](std::string const& name, auto const& be) {
            CAPTURE(name);
            for (product_form form : {product_form::full, product_form::symmetric}) {
                guarded_matrix<float> c(n, n, 0);
                product_set set{layout_of(a.view()), layout_of(transposed(a.view())), layout_of(c.view()), 1, n, n, k};
                set.options.form = form;
                scratch ws(matmul_promoted_workspace(be, n, n, k, length));
                matmul_promoted<T, T, float>(be, set, scales, ws.get()).or_throw();
                CHECK(differences(c.view(), want.view()) == 0);
                guarded_matrix<float> sums(n, n, 0);
                set.c = layout_of(sums.view());
                matmul_promoted<T, T, float>(be, set, unscaled, ws.get()).or_throw();
                CHECK(differences(sums.view(), want.view()) == 0);
            }
        });
    };
    check(1.0f, 37, 701, 128);
    check(bf16{}, 37, 701, 128);
    check(bf16{}, 5, 33, 6);
    check(1.0f, 5, 33, 3);
    check(bf16{}, 5, 33, 3);
    check(bf16{}, 14, 333, 333);
}
