// Operands that the products read from where they lie: no byte past them is read, at every tail, whatever their strides, alignment and values.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include <backend/matmul_case.hpp>
#include <keel/backend/cpu/matmul.hpp>
#include <keel/backend/matmul.hpp>
#include <keel/backend/reference_matmul.hpp>
#include <support/backends.hpp>
#include <support/catch.hpp>
#include <support/fenced.hpp>

using namespace keel;
using namespace keel_test;

namespace {

template <class T> std::vector<T> in_format(std::vector<float> const& values) {
    std::vector<T> stored;
    for (float const v : values) stored.push_back(to_format<T>(v));
    return stored;
}

/// How A's rows lie: next to each other, as columns, or a page apart, where they would push each other out of the cache.
enum class rows_of_a { near, turned, a_page_apart };

template <class T> struct lying {
    shape s;
    int64_t stride;
    rows_of_a how;
    fenced<T> memory;

    lying(shape sizes, rows_of_a how_they_lie, std::vector<float> const& values, bool at_end)
        : s(sizes), stride(how_they_lie == rows_of_a::a_page_apart ? std::max<int64_t>(s.k, 4096 / static_cast<int64_t>(sizeof(T))) : s.k), how(how_they_lie),
          memory(how == rows_of_a::turned ? s.m * s.k : (s.m - 1) * stride + s.k, at_end) {
        for (int64_t i = 0; i < s.m; ++i)
            for (int64_t j = 0; j < s.k; ++j) view()(i, j) = to_format<T>(values[static_cast<std::size_t>(i * s.k + j)]);
    }
    keel::view<T, 2> view() {
        if (how == rows_of_a::turned) return transposed(rows(memory.data(), s.k, s.m));
        return rows(memory.data(), s.m, s.k, stride);
    }
};

/// Numbers of a kind times a power of two.
struct numbers {
    data_kind kind;
    float scale = 1.0f;
    std::vector<float> of(int64_t n, uint64_t seed) const {
        auto all = floats(kind, n, seed);
        for (float& v : all) v *= scale;
        return all;
    }
};

template <class T, class C> void check_bounds(shape s, rows_of_a how, numbers left, numbers right_ones, bool at_end) {
    CAPTURE(s.m, s.n, s.k, static_cast<int>(how), keel_test::name_of(left.kind), left.scale, right_ones.scale, at_end, sizeof(T), sizeof(C));
    lying<T> a(s, how, left.of(s.m * s.k, 1), at_end);
    fenced<T> const b(in_format<T>(right_ones.of(s.k * s.n, 2)), at_end);
    fenced<C> const want(s.m * s.n, at_end), c(s.m * s.n, at_end);
    for (bool const columns : {false, true}) {
        auto const right = columns ? transposed(rows(b.data(), s.n, s.k)) : rows(b.data(), s.k, s.n);
        REQUIRE(matmul(reference{}, a.view(), right, rows(want.data(), s.m, s.n)).ok());
        keel_test::for_each_cpu([&](std::string const& name, auto const& be) {
            CAPTURE(name, columns);
            scratch ws(matmul_workspace(be, s.m, s.n, s.k));
            CHECK(matmul(be, a.view(), right, rows(c.data(), s.m, s.n), {}, ws.get()).ok());
            CHECK(differences(rows(c.data(), s.m, s.n), rows(want.data(), s.m, s.n)) == 0);
        });
    }
}

template <class T, class C> void check_bounds(shape s, rows_of_a how, data_kind kind, bool at_end) {
    check_bounds<T, C>(s, how, {kind}, {kind}, at_end);
}

} // namespace

TEST_CASE("no byte past an operand is read: every tail of rows, columns and k") {
    for (int64_t m : {1, 3, 7, 12, 13, 23, 28})
        for (int64_t n : {1, 16, 31, 33, 64})
            for (int64_t k : {1, 2, 16, 31, 32, 34, 66}) {
                if (!keel_test::every_case && (m + n + k) % 3 != 0) continue;
                for (bool at_end : {true, false}) {
                    check_bounds<float, float>({m, n, k}, rows_of_a::near, data_kind::normal, at_end);
                    check_bounds<bf16, bf16>({m, n, k}, rows_of_a::near, data_kind::normal, at_end);
                }
            }
}

TEST_CASE("rows as columns and a page apart, several blocks of k, and many columns") {
    for (shape s : {shape{13, 40, 34}, shape{25, 300, 600}, shape{7, 70, 1100}})
        for (rows_of_a how : {rows_of_a::near, rows_of_a::turned, rows_of_a::a_page_apart}) {
            check_bounds<float, bf16>(s, how, data_kind::normal, true);
            check_bounds<bf16, float>(s, how, data_kind::normal, true);
        }
}

TEST_CASE("NaN, Inf and subnormals where they lie, and in what the last step rounds to bf16") {
    for (data_kind kind : all_kinds)
        for (shape s : {shape{13, 64, 32}, shape{24, 96, 62}}) {
            check_bounds<bf16, bf16>(s, rows_of_a::near, kind, true);
            check_bounds<float, bf16>(s, rows_of_a::near, kind, true);
        }
    // What one operand or the result alone has of subnormals, and of products past the largest float.
    for (auto const& [left, right] : {std::pair{0x1p-128f, 0x1p6f}, {0x1p6f, 0x1p-128f}, {0x1p-66f, 0x1p-66f}, {0x1p-60f, 0x1p-72f}, {0x1p120f, 0x1p20f}})
        for (shape s : {shape{13, 64, 32}, shape{24, 96, 62}}) {
            check_bounds<bf16, bf16>(s, rows_of_a::near, {data_kind::normal, left}, {data_kind::normal, right}, true);
            check_bounds<float, bf16>(s, rows_of_a::near, {data_kind::normal, left}, {data_kind::normal, right}, true);
        }
}
