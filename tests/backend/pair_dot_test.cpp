// Products whose k goes by pairs have the bits of two fma a pair, also where hardware has a dot for them that flushes subnormals.
#include <cmath>
#include <vector>

#include <backend/matmul_case.hpp>
#include <keel/backend/cpu/matmul.hpp>
#include <keel/backend/matmul.hpp>
#include <keel/backend/reference_matmul.hpp>
#include <keel/format/fp8.hpp>
#include <support/backends.hpp>
#include <support/catch.hpp>

using namespace keel;
using namespace keel_test;

namespace {

/// Elements of biased exponents `first` and `last` by turns, with random fractions and signs, so that sums cancel.
std::vector<float> of_exponents(int first, int last, int64_t n, uint32_t seed) {
    std::vector<float> x(static_cast<std::size_t>(n));
    uint32_t state = seed;
    for (std::size_t i = 0; i < x.size(); ++i) {
        state = state * 1664525u + 1013904223u;
        auto const exponent = static_cast<uint32_t>(i % 2 == 0 ? first : last);
        x[i] = as_float((state & 0x807f0000u) | exponent << 23);
    }
    return x;
}

void check_product(shape s, std::vector<float> const& left, std::vector<float> const& right) {
    guarded_matrix<bf16> const a(s.m, s.k, 1, left), b(s.k, s.n, 2, right);
    guarded_matrix<float> want(s.m, s.n, 0);
    for (int64_t i = 0; i < s.m; ++i)
        for (int64_t j = 0; j < s.n; ++j) want.set(i, j, keel::canonical(chain_of(a, b, i, j, 0, s.k)));
    for_each_backend([&](std::string const& name, auto const& be) {
        CAPTURE(name);
        guarded_matrix<float> c(s.m, s.n, 0);
        scratch ws(matmul_workspace(be, s.m, s.n, s.k));
        guarded_matrix<bf16> x = a, y = b;
        matmul(be, x.view(), y.view(), c.view(), {}, ws.get()).or_throw();
        CHECK(differences(c.view(), want.view()) == 0);
    });
}

} // namespace

TEST_CASE("pairs: elements at the ends of what the hardware's dot may take, and one step past them") {
    shape const s{13, 35, 71};
    // Least exponents that add to 142 keep every sum normal or zero; greatest ones that add to 380 every product below 2^128.
    for (int sum : {142, 141, 140, 128})
        for (int least : {1, 15, 71, sum - 1}) {
            CAPTURE(sum, least);
            check_product(s, of_exponents(least, least + 3, s.m * s.k, 1), of_exponents(sum - least, sum - least + 1, s.k * s.n, 2));
        }
    for (int sum : {380, 381, 400})
        for (int greatest : {190, 254, 230}) {
            CAPTURE(sum, greatest);
            check_product(s, of_exponents(greatest - 1, greatest, s.m * s.k, 3),
                          of_exponents(sum - greatest - 2, sum - greatest, s.k * s.n, 4));
        }
}

TEST_CASE("pairs: one element that is subnormal, Inf, NaN or zero among moderate ones, in every place of a pair and strip") {
    shape const s{14, 34, 9};
    for (float odd_one : {0x1p-130f, -0x1p-133f, INFINITY, -INFINITY, NAN, 0.0f, -0.0f, 0x1p-126f, 0x1.fep127f})
        for (int64_t at : {0, 1, 8, 12 * 9 + 4, 13 * 9 + 8}) {
            CAPTURE(odd_one, at);
            std::vector<float> left = of_exponents(120, 127, s.m * s.k, 5), right = of_exponents(118, 126, s.k * s.n, 6);
            left[static_cast<std::size_t>(at)] = odd_one;
            check_product(s, left, right);
            left[static_cast<std::size_t>(at)] = 1.0f;
            right[static_cast<std::size_t>(at + 33)] = odd_one;
            check_product(s, left, right);
        }
}

TEST_CASE("pairs: a sum that an early depth-block left subnormal lives on in a moderate one") {
    shape const s{3, 5, 4100}; // longer than one depth-block of any plan
    std::vector<float> left(static_cast<std::size_t>(s.m * s.k), 0.0f), right(static_cast<std::size_t>(s.k * s.n), 0.0f);
    for (int64_t i = 0; i < s.m; ++i) left[static_cast<std::size_t>(i * s.k)] = 0x1p-70f;
    for (int64_t j = 0; j < s.n; ++j) right[static_cast<std::size_t>(j)] = 0x1p-70f; // k = 0: the sum is 2^-140
    check_product(s, left, right);
    left.back() = 1.0f, right.back() = 0.0f; // a moderate block at the end, whose products are zero
    right[right.size() - 2] = 1.0f, left[left.size() - 2] = 1.0f;
    check_product(s, left, right);
}

TEST_CASE("moderate: what it says of ranges") {
    using keel::detail::exponent_range, keel::detail::moderate;
    CHECK(moderate({127, 127}, {127, 127}));
    CHECK(moderate({}, {127, 127})); // nothing but zeros
    CHECK(moderate({}, {}));
    CHECK(moderate({1, 200}, {141, 180}));
    CHECK_FALSE(moderate({1, 200}, {140, 180}));
    CHECK_FALSE(moderate({1, 200}, {141, 181}));
    CHECK_FALSE(moderate({0, 127}, {200, 200})); // subnormal
    CHECK_FALSE(moderate({127, 255}, {100, 100})); // Inf
    CHECK(exponent_range{100, 120}.with({90, 110}).least == 90);
    CHECK(exponent_range{100, 120}.with({90, 110}).greatest == 120);
    CHECK(exponent_range{}.with({90, 110}).least == 90);
}

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
TEST_CASE("packing measures the exponents of a strip, whatever the strides") {
    int64_t const lines = 12, depth = 37;
    for (float smallest : {0x1p-20f, 0x1p-130f, 0x1p-126f}) {
        std::vector<float> values = of_exponents(120, 130, lines * depth, 7);
        values[25] = smallest, values[77] = 0x1p50f, values[78] = 0.0f;
        guarded_matrix<bf16> plain(lines, depth, 3, values), turned(depth, lines, 5), spread(lines, 2 * depth, 1);
        for (int64_t i = 0; i < lines; ++i)
            for (int64_t k = 0; k < depth; ++k) turned.set(k, i, plain.get(i, k)), spread.set(i, 2 * k, plain.get(i, k));
        std::vector<float> strip(static_cast<std::size_t>(12 * (depth / 2 + 1) + 16));
        int const least = smallest < 0x1p-126f ? 0 : static_cast<int>(bits(smallest) >> 23);
        for (auto const& from : {keel::detail::operand_block{plain.view().data, plain.view().stride[0], 1, lines, lines, depth},
                                 keel::detail::operand_block{turned.view().data, 1, turned.view().stride[0], lines, lines, depth},
                                 keel::detail::operand_block{spread.view().data, spread.view().stride[0], 2, lines, lines, depth}}) {
            auto const range = keel::detail::pack_pair_strip<arch::avx512bf16, bf16, 12>(from, strip.data());
            CHECK(range.least == least);
            CHECK(range.greatest == 127 + 50);
        }
    }
}

namespace {
template <class T> void check_packed_codes() {
    using lanes = keel::detail::pair_words<arch::avx512bf16, T>;
    T code[32];
    uint32_t along[16], across[16];
    for (uint32_t first = 0; first < 256; ++first) {
        for (uint32_t i = 0; i < 32; ++i) code[i] = from_word<T>((first + 37 * i) % 256);
        store_words(&along[0], lanes{}.along(&code[0]));
        store_words(&across[0], lanes{}.across(&code[0], &code[16]));
        auto const upper = [&](uint32_t i) { return bits(decode(code[i])) >> 16; };
        for (uint32_t i = 0; i < 16; ++i) {
            REQUIRE(along[i] == (upper(2 * i) | upper(2 * i + 1) << 16));
            REQUIRE(across[i] == (upper(i) | upper(i + 16) << 16));
        }
    }
}
} // namespace

TEST_CASE("every code of eight bits is packed as the bf16 of its value") {
    check_packed_codes<e4m3>();
    check_packed_codes<e5m2>();
    check_packed_codes<minifloat<4, 3, 8, specials::fnuz>>(); // has no -0: the long way
}
#endif
