// Small products whose strips of B are packed on the stack: batches and groups in which one item's numbers are not the dot of pairs' to take,
// B in rows and in columns, every tail, and both ways in which sums enter C.
#include <algorithm>
#include <string>
#include <vector>

#include <backend/matmul_case.hpp>
#include <keel/backend/cpu/matmul.hpp>
#include <keel/backend/matmul.hpp>
#include <keel/backend/reference_matmul.hpp>
#include <support/backends.hpp>
#include <support/catch.hpp>

using namespace keel;
using namespace keel_test;

namespace {

template <class T> std::vector<T> in_format(std::vector<float> const& values) {
    std::vector<T> stored;
    for (float const v : values) stored.push_back(to_format<T>(v));
    return stored;
}

struct sizes {
    int64_t batch, m, n, k;
    int64_t rows() const { return batch * m; }
};

/// Items of moderate numbers but the second, which is tiny, and the last, which is random bits.
template <class T> std::vector<T> items(int64_t batch, int64_t each, uint64_t seed) {
    auto values = floats(data_kind::normal, batch * each, seed);
    auto const wild = floats(data_kind::any_bits, each, seed + 1);
    for (int64_t i = 0; i < each && batch > 1; ++i) values[static_cast<std::size_t>(each + i)] *= 0x1p-70f;
    if (batch > 2) std::copy(wild.begin(), wild.end(), values.end() - each);
    return in_format<T>(values);
}

template <class T, class C> void check(sizes s, bool columns, matmul_options options) {
    CAPTURE(s.batch, s.m, s.n, s.k, columns, options.alpha, options.beta, sizeof(T), sizeof(C));
    auto const a = items<T>(s.batch, s.m * s.k, 1), b = items<T>(s.batch, s.k * s.n, 2);
    auto const old = in_format<C>(floats(data_kind::normal, s.rows() * s.n, 3));
    auto const right = columns ? transposed(cube(b.data(), s.batch, s.n, s.k)) : cube(b.data(), s.batch, s.k, s.n);
    // Groups as unequal as can be: none, all rows but one, none, one.
    std::vector<int64_t> cuts(static_cast<std::size_t>(s.batch) + 1, s.rows());
    cuts[0] = 0, cuts[1] = s.batch > 2 ? 0 : s.rows() - 1;
    if (s.batch > 3) cuts[2] = cuts[3] = s.rows() - 1;
    view<int64_t const, 1> const groups = vec(cuts.data(), s.batch + 1);
    auto want = old, want_of_groups = old;
    REQUIRE(matmul(reference{}, cube(a.data(), s.batch, s.m, s.k), right, cube(want.data(), s.batch, s.m, s.n), options).ok());
    REQUIRE(grouped_matmul(reference{}, rows(a.data(), s.rows(), s.k), right, rows(want_of_groups.data(), s.rows(), s.n), groups, options).ok());
    for_each_cpu([&](std::string const& name, auto const& be) {
        CAPTURE(name);
        auto c = old, of_groups = old;
        scratch ws(matmul_workspace(be, s.rows(), s.n, s.k, s.batch));
        CHECK(matmul(be, cube(a.data(), s.batch, s.m, s.k), right, cube(c.data(), s.batch, s.m, s.n), options, ws.get()).ok());
        CHECK(keel_test::equal_bits(c, want));
        CHECK(grouped_matmul(be, rows(a.data(), s.rows(), s.k), right, rows(of_groups.data(), s.rows(), s.n), groups, options, ws.get()).ok());
        CHECK(keel_test::equal_bits(of_groups, want_of_groups));
    });
}

} // namespace

TEST_CASE("small products strip by strip: batches and groups, moderate and not") {
    for (sizes s : {sizes{1, 64, 64, 64}, {5, 16, 16, 16}, {4, 13, 33, 2}, {9, 23, 40, 62}, {3, 1, 17, 254}, {2, 40, 70, 256}, {70, 12, 32, 8}, {1, 128, 96, 128}})
        for (bool const columns : {false, true}) {
            check<bf16, bf16>(s, columns, {});
            check<bf16, float>(s, columns, {.alpha = -0.75f, .beta = 0.5f});
            check<float, float>(s, columns, {.alpha = 0.5f});
        }
}
