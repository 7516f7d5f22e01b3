// Philox against the published vectors, the layout of element indices, and the distributions made of its words.
#include <cmath>
#include <set>
#include <vector>

#include <keel/core/random.hpp>

#include "support/catch.hpp"

namespace {

struct known_answer {
    uint32_t counter[4], key[2], word[4];
};
// Random123, tests/kat_vectors, philox4x32 with 10 rounds.
constexpr known_answer answers[] = {
    {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
    {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
     {0xffffffff, 0xffffffff},
     {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
    {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
     {0xa4093822, 0x299f31d0},
     {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
};
constexpr bool holds(known_answer const& a) {
    auto const b = keel::philox4x32(a.counter[0], a.counter[1], a.counter[2], a.counter[3], a.key[0], a.key[1]);
    for (int i = 0; i < 4; ++i)
        if (b.word[i] != a.word[i]) return false;
    return true;
}
static_assert(holds(answers[0]) && holds(answers[1]) && holds(answers[2]), "philox4x32 at compile time");

constexpr keel::random_key key{.seed = 42, .step = 3, .tensor = 5};

} // namespace

TEST_CASE("Philox gives the published words") {
    for (auto const& a : answers) CHECK(holds(a));
}

TEST_CASE("an element's word comes from the documented counter") {
    for (uint64_t const i : {uint64_t{0}, uint64_t{31}, uint64_t{32}, uint64_t{127}, uint64_t{128},
                             uint64_t{1000000007}, (uint64_t{1} << 50) + 77}) {
        uint64_t const block = 32 * (i / 128) + i % 32;
        auto const b =
            keel::philox4x32(static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32), key.tensor, key.step,
                             static_cast<uint32_t>(key.seed), static_cast<uint32_t>(key.seed >> 32));
        CHECK(keel::random_word(key, i) == b.word[i % 128 / 32]);
    }
}

TEST_CASE("no two elements share a word's place, and every part of the key matters") {
    std::set<std::pair<uint64_t, uint64_t>> places;
    for (uint64_t i = 0; i < 4096; ++i) places.insert({32 * (i / 128) + i % 32, i % 128 / 32});
    CHECK(places.size() == 4096);

    auto const differs = [](keel::random_key const& other) {
        int equal = 0;
        for (uint64_t i = 0; i < 1000; ++i) equal += keel::random_word(key, i) == keel::random_word(other, i) ? 1 : 0;
        return equal == 0; // by chance once in four million
    };
    CHECK(differs({.seed = 43, .step = 3, .tensor = 5}));
    CHECK(differs({.seed = 42 + (uint64_t{1} << 32), .step = 3, .tensor = 5}));
    CHECK(differs({.seed = 42, .step = 4, .tensor = 5}));
    CHECK(differs({.seed = 42, .step = 3, .tensor = 6}));
}

TEST_CASE("an element's own block comes from first + offset * step, past 32 bits too") {
    for (uint64_t first : {uint64_t{0}, uint64_t{0xfffffff0u}, uint64_t{0x123456789abcdefu}})
        for (uint32_t offset : {0u, 15u, 0xffffffffu})
            for (uint32_t step : {1u, 3u, 0xfffffffbu}) {
                uint64_t const block = first + uint64_t{offset} * step;
                auto const got = keel::random_block_of(key, first, offset, step);
                auto const want = keel::philox4x32(static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32), key.tensor, key.step, 42u, 0u);
                for (int w = 0; w < 4; ++w) CHECK(got.word[w] == want.word[w]);
            }
}

TEST_CASE("uniform floats are the word's upper 24 bits, in [0, 1)") {
    for (uint32_t const word :
         {0u, 0xffu, 0x100u, 0xffffu, 0x10000u, 0x12345678u, 0x80000000u, 0xffffff00u, 0xffffffffu})
        CHECK(static_cast<double>(keel::uniform_from(word)) == static_cast<double>(word >> 8) * 0x1p-24);
}

TEST_CASE("uniform numbers fill their interval evenly") {
    constexpr int cells = 64, draws = 200000;
    std::vector<int> count(cells);
    for (uint64_t i = 0; i < draws; ++i) ++count[static_cast<std::size_t>(keel::random_uniform(key, i) * cells)];
    double chi = 0;
    double const mean = static_cast<double>(draws) / cells;
    for (int const c : count) chi += (c - mean) * (c - mean) / mean;
    // chi^2 with 63 degrees of freedom: mean 63, deviation 11.2. The stream is fixed: no failures by chance later.
    CHECK(chi < 63 + 4 * 11.2);
    CHECK(chi > 63 - 4 * 11.2);
}

TEST_CASE("normal numbers have the moments, the tails and the independence of a normal law") {
    constexpr int n = 400000;
    double sum = 0, squares = 0, cubes = 0, fourths = 0, products = 0;
    int beyond_two = 0, beyond_four = 0;
    for (uint64_t i = 0; i < n; ++i) {
        auto const x = static_cast<double>(keel::random_normal(key, i));
        auto const partner = static_cast<double>(keel::random_normal(key, i ^ 32)); // the other one of its pair
        sum += x;
        squares += x * x;
        cubes += x * x * x;
        fourths += x * x * x * x;
        products += x * partner;
        beyond_two += std::fabs(x) > 2 ? 1 : 0;
        beyond_four += std::fabs(x) > 4 ? 1 : 0;
    }
    double const root = std::sqrt(static_cast<double>(n)); // four standard errors each
    CHECK(std::fabs(sum / n) < 4 / root);
    CHECK(std::fabs(squares / n - 1) < 4 * std::sqrt(2.0) / root);
    CHECK(std::fabs(cubes / n) < 4 * std::sqrt(15.0) / root);
    CHECK(std::fabs(fourths / n - 3) < 4 * std::sqrt(96.0) / root);
    CHECK(std::fabs(products / n) < 4 * std::sqrt(2.0) / root); // every product counts twice
    CHECK(std::fabs(beyond_two / static_cast<double>(n) - 0.0455003) < 4 * 0.2084 / root);
    CHECK(beyond_four > 5); // expected: 25
    CHECK(beyond_four < 50);
}

TEST_CASE("normal numbers are finite at the ends of the words, and follow the formula") {
    for (uint32_t const first : {0u, 1u, 0xffffu, 0x10000u, 0x7fffffffu, 0xffffff00u, 0xffffffffu})
        for (uint32_t const second : {0u, 0x3fffffffu, 0x80000000u, 0xc0000100u, 0xffffffffu}) {
            float x, y;
            keel::normal_pair_from(first, second, x, y);
            double const u = (static_cast<double>(first) + 1) * 0x1p-32;
            double const radius = std::sqrt(-2 * std::log(static_cast<double>(static_cast<float>(u))));
            double const angle = 2 * 3.14159265358979323846 * static_cast<double>(second >> 8) * 0x1p-24;
            // Five roundings of half an ulp each, on values up to 6.7.
            CHECK(std::fabs(static_cast<double>(x) - radius * std::cos(angle)) < 2e-6);
            CHECK(std::fabs(static_cast<double>(y) - radius * std::sin(angle)) < 2e-6);
        }
}
