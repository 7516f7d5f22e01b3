// top_k on every backend against a stable sort: few and many elements, ties of the first word and of both, orders that leave every
// element a candidate.
#include <algorithm>
#include <numeric>

#include <keel/backend/top_k.hpp>
#include <support/backends.hpp>
#include <support/catch.hpp>
#include <support/data.hpp>

using namespace keel_test;

namespace {

/// Elements of two numbers.
struct pair_keys {
    float const *first, *second;
    bool one_word;
    template <class G> auto of(G const& g, auto at) const {
        auto const primary = keel::ordered_word(g.load(first, at));
        return keel::arg_max_keys<typename G::words>{primary, one_word ? primary : keel::ordered_word(g.load(second, at))};
    }
    keel::arg_max_keys<uint32_t> of_element(int64_t i) const {
        uint32_t const primary = keel::ordered_word(first[i]);
        return {primary, one_word ? primary : keel::ordered_word(second[i])};
    }
};

struct top_k_row {
    pair_keys keys;
    int64_t n, k;
    int32_t* first;
    uint32_t* scratch;
    template <class G> void operator()(G const& g, int64_t) const { keel::top_k(g, n, k, keys, first, scratch); }
};

std::vector<int32_t> by_sorting(pair_keys const& keys, int64_t n, int64_t k) {
    std::vector<int32_t> all(static_cast<std::size_t>(n));
    std::iota(all.begin(), all.end(), 0);
    std::stable_sort(all.begin(), all.end(), [&](int32_t a, int32_t b) {
        auto const x = keys.of_element(a), y = keys.of_element(b);
        return x.primary != y.primary ? x.primary > y.primary : x.secondary > y.secondary;
    });
    all.resize(static_cast<std::size_t>(k));
    return all;
}

/// n numbers of `kinds` different values (0: all different, mostly), or rising or falling.
std::vector<float> numbers(int64_t n, int kinds, uint64_t seed) {
    std::vector<float> x = floats(data_kind::uniform, n, seed);
    for (std::size_t i = 0; i < x.size(); ++i) {
        if (kinds > 0) x[i] = std::floor(x[i] * static_cast<float>(kinds));
        if (kinds == -1) x[i] = static_cast<float>(i);
        if (kinds == -2) x[i] = -static_cast<float>(i);
    }
    return x;
}

} // namespace

TEST_CASE("top_k is the head of a stable sort") {
    for (int64_t n : {1, 2, 5, 15, 16, 17, 33, 64, 67, 160, 256, 300, 896})
        for (int kinds : {0, 1, 2, 7, 40, -1, -2})
            for (bool one_word : {false, true}) {
                if (!every_case && (n > 100 || kinds == 2)) continue;
                auto const first = numbers(n, kinds, 3), second = numbers(n, 5, 4);
                pair_keys const keys{first.data(), second.data(), one_word};
                for (int64_t k : {1, 2, 3, 7, 8, 9, 10, 15, 16, 17, 33}) {
                    if (k > n) break;
                    INFO("n " << n << " k " << k << " kinds " << kinds << " one word " << one_word);
                    auto const want = by_sorting(keys, n, k);
                    for_each_backend([&](std::string const& name, auto const& be) {
                        INFO(name);
                        std::vector<int32_t> got(static_cast<std::size_t>(k) + 1, -7);
                        std::vector<uint32_t> scratch(static_cast<std::size_t>(n) + 1, 7u);
                        be.for_rows(1, n, top_k_row{keys, n, k, got.data(), scratch.data()});
                        CHECK(got.back() == -7);
                        CHECK(scratch.back() == 7u);
                        got.pop_back();
                        CHECK(got == want);
                    });
                }
            }
}
