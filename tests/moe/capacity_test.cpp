// Demand, served and capacity: exact integers, against brute force.
#include <algorithm>
#include <cmath>
#include <random>

#include <keel/backend/cpu/cpu.hpp>
#include <keel/moe/capacity.hpp>
#include <moe/router.hpp>
#include <support/backends.hpp>
#include <support/catch.hpp>

using namespace keel_test;
using keel::capacity_limit;

namespace {

/// ceil of a product of rationals, by counting up.
int64_t capacity_by_hand(int64_t tokens, int64_t k, int64_t experts, int64_t numerator, int64_t denominator, int64_t minimum, int64_t multiple = 1) {
    int64_t c = 0;
    while (c * experts * denominator < tokens * k * numerator || c < minimum || c % multiple != 0) ++c;
    return std::min(c, tokens);
}

/// Ids without going through route: k distinct experts a token, skewed; every `gap`-th token is padding.
struct assignments {
    guarded_matrix<int32_t> ids;
    std::vector<int64_t> counts;
    keel::demand_counts demand;

    assignments(int64_t tokens, int64_t experts, int64_t k, int64_t gap, uint64_t seed)
        : ids(tokens, k, 2), counts(static_cast<std::size_t>(experts)) {
        std::mt19937_64 engine(seed);
        int64_t routed_tokens = 0;
        for (int64_t t = 0; t < tokens; ++t) {
            bool const padding = gap > 0 && t % gap == 1;
            routed_tokens += padding ? 0 : 1;
            for (int64_t j = 0; j < k; ++j) {
                int64_t e = -1;
                auto const taken = [&] {
                    for (int64_t i = 0; i < j; ++i)
                        if (ids.get(t, i) == e) return true;
                    return false;
                };
                if (!padding) do e = static_cast<int64_t>(engine() % static_cast<uint64_t>(1 + engine() % static_cast<uint64_t>(experts)));
                    while (taken());
                ids.set(t, j, static_cast<int32_t>(e));
                if (!padding) ++counts[static_cast<std::size_t>(e)];
            }
        }
        keel::demand_from_counts(keel::vec(counts.data(), experts), routed_tokens, k, demand).or_throw();
    }
};

} // namespace

TEST_CASE("capacity is the ceiling of a ratio of integers") {
    std::mt19937_64 engine(3);
    for (int i = 0; i < 3000; ++i) {
        auto const pick = [&](uint64_t n) { return static_cast<int64_t>(engine() % n); };
        int64_t const tokens = pick(300), k = 1 + pick(4), experts = k + pick(20), numerator = 1 + pick(30), denominator = 1 + pick(20), minimum = pick(3) == 0 ? pick(20) : 0;
        CHECK(capacity_limit::factor(numerator, denominator).at_least(minimum).tokens_an_expert(tokens, k, experts) ==
              capacity_by_hand(tokens, k, experts, numerator, denominator, minimum));
        int64_t const multiple = 1 + pick(9);
        CHECK(capacity_limit::factor(numerator, denominator).at_least(minimum).multiple_of(multiple).tokens_an_expert(tokens, k, experts) ==
              capacity_by_hand(tokens, k, experts, numerator, denominator, minimum, multiple));
    }
    CHECK(capacity_limit::factor(5, 4).multiple_of(8).tokens_an_expert(1000, 2, 16) == 160); // 156.25, 157, 160
    CHECK(capacity_limit::factor(11, 10).tokens_an_expert(100, 1, 1) == 100);                // never more than there are tokens
    CHECK(capacity_limit::factor(11, 10).tokens_an_expert(1000, 1, 10) == 110);              // 111 when computed as 100 * 1.1 in fp64
    CHECK(capacity_limit::factor(6, 5).tokens_an_expert(500, 1, 10) == 60);                  // 61 in fp32
    CHECK(capacity_limit::factor(9, 1).tokens_an_expert(10, 4, 8) == 10);                    // factor * k > experts: DeepSpeed #5353
    CHECK(capacity_limit::factor(1 << 20, 1).tokens_an_expert(int64_t{1} << 30, 1 << 12, 1 << 13) == int64_t{1} << 30); // 2^62 is exact
    CHECK(capacity_limit::dropless().tokens_an_expert(77, 2, 4) == 77);
    CHECK(capacity_limit::factor(1, 1).at_least(8).tokens_an_expert(0, 2, 4) == 0);
}

TEST_CASE("apply_capacity serves the first C of each queue, in the order of tokens, on every backend") {
    for (int64_t gap : {0, 5})
        for (int numerator : {1, 3, 8, 0}) { // 0: dropless
            int64_t const tokens = 700, experts = 11, k = 3; // 3 tiles
            assignments a(tokens, experts, k, gap, 5);
            capacity_limit const limit = numerator == 0 ? capacity_limit::dropless() : capacity_limit::factor(numerator, 4);
            int64_t const capacity = limit.tokens_an_expert(a.demand.tokens(), k, experts);
            // Brute force: walk the assignments expert by expert.
            std::vector<int64_t> slots(static_cast<std::size_t>(tokens * k), -1), offsets{0}, served;
            for (int64_t e = 0; e < experts; ++e) {
                int64_t in_queue = 0;
                for (int64_t i = 0; i < tokens * k; ++i)
                    if (a.ids.get(i / k, i % k) == e && in_queue < capacity) slots[static_cast<std::size_t>(i)] = offsets.back() + in_queue++;
                served.push_back(in_queue);
                offsets.push_back(offsets.back() + in_queue);
            }
            for_each_backend([&](std::string const& name, auto const& be) {
                INFO(name);
                guarded_matrix<int64_t> out(tokens, k, 1), bounds(1, experts + 1);
                std::vector<int64_t> memory(static_cast<std::size_t>(experts));
                keel::served_counts counts(keel::vec(memory.data(), experts));
                scratch ws(keel::apply_capacity_workspace(tokens, experts));
                keel::apply_capacity(be, a.ids.view(), a.demand, {out.view(), bounds.vec()}, counts, {.limit = limit}, ws.get()).or_throw();
                for (int64_t i = 0; i < tokens * k; ++i)
                    if (out.get(i / k, i % k) != slots[static_cast<std::size_t>(i)]) FAIL_CHECK("assignment " << i);
                for (int64_t e = 0; e <= experts; ++e) CHECK(bounds.get(0, e) == offsets[static_cast<std::size_t>(e)]);
                CHECK(memory == served);
                CHECK(counts.total() == offsets.back());
                CHECK(counts.tokens() == a.demand.tokens()); // padding is no token
                CHECK((gap == 0) == (counts.tokens() == tokens));
                CHECK(out.untouched());
                CHECK(bounds.untouched());
                if (numerator == 0) CHECK(keel::dropped_share(a.demand, counts) == 0.0);
                if (numerator == 1) CHECK(keel::dropped_share(a.demand, counts) > 0.5);
            });
        }
}

TEST_CASE("five tokens for one expert of capacity four: exactly one is dropped, the last") { // DeepSpeed #1658
    guarded_matrix<int32_t> ids(5, 1);
    std::vector<int64_t> asked{5, 0}, given(2);
    keel::demand_counts demand;
    keel::demand_from_counts(keel::vec(asked.data(), 2), 5, 1, demand).or_throw();
    keel::served_counts served(keel::vec(given.data(), 2));
    guarded_matrix<int64_t> slots(5, 1), offsets(1, 3);
    scratch ws(keel::apply_capacity_workspace(5, 2));
    keel::apply_capacity(keel::cpu{}, ids.view(), demand, {slots.view(), offsets.vec()}, served, {.limit = capacity_limit::factor(8, 5)}, ws.get()).or_throw();
    CHECK(given == std::vector<int64_t>{4, 0});
    CHECK(slots.get(3, 0) == 3);
    CHECK(slots.get(4, 0) == -1);
    CHECK(keel::dropped_share(demand, served) == Approx(0.2));
    // Pad-to-capacity would show two equal experts; demand shows the truth: Megatron #1617.
    CHECK(keel::max_over_mean(demand) == 2.0);
    CHECK(keel::dead_experts(demand) == 1);
}

TEST_CASE("demand rebuilt from bare counts must sum to k * tokens, and no expert may exceed tokens") {
    std::vector<int64_t> counts{6, 2, 4};
    keel::demand_counts demand;
    auto const build = [&](int64_t tokens, int64_t k) { return keel::demand_from_counts(keel::vec(counts.data(), 3), tokens, k, demand); };
    CHECK(build(6, 2).ok());
    CHECK(demand.total() == 12);
    CHECK(build(6, 3).code == keel::status_code::bad_state);
    CHECK(build(4, 3).code == keel::status_code::bad_state); // 12 = 3 * 4, but 6 > 4
    CHECK(build(12, 1).ok());
    CHECK(build(3, 4).code == keel::status_code::bad_option);
    CHECK(build(6, 0).code == keel::status_code::bad_option);
    CHECK(build(int64_t{1} << 42, 2).code == keel::status_code::bad_option);
    counts[0] = -6;
    CHECK(build(6, 2).code == keel::status_code::bad_state);
}

TEST_CASE("ratios of the load") {
    std::vector<int64_t> counts{10, 6, 5, 3};
    keel::demand_counts d;
    keel::demand_from_counts(keel::vec(counts.data(), 4), 12, 2, d).or_throw();
    CHECK(keel::max_over_mean(d) == Approx(10.0 / 6));
    CHECK(keel::min_over_mean(d) == 0.5);
    double entropy = 0;
    for (int64_t c : counts) entropy -= static_cast<double>(c) / 24 * std::log(static_cast<double>(c) / 24);
    CHECK(keel::load_entropy(d) == Approx(entropy / std::log(4.0)).epsilon(1e-6)); // fp32 logarithms
    std::vector<int64_t> uneven{1000, 1000, 6, 0};
    keel::demand_from_counts(keel::vec(uneven.data(), 4), 1003, 2, d).or_throw();
    CHECK(keel::dead_experts(d) == 1); // a mean of 501.5: 6 is above 1% of it
    std::vector<int64_t> one{5};
    keel::demand_from_counts(keel::vec(one.data(), 1), 5, 1, d).or_throw();
    CHECK(keel::load_entropy(d) == 1.0);
    CHECK(keel::max_over_mean(d) == 1.0);
}

TEST_CASE("a bad call of apply_capacity names the argument and writes nothing") {
    assignments a(20, 4, 2, 0, 1);
    guarded_matrix<int64_t> slots(20, 2), offsets(1, 5);
    std::vector<int64_t> memory(4, -3);
    keel::served_counts served(keel::vec(memory.data(), 4));
    scratch ws(keel::apply_capacity_workspace(20, 4));
    auto const call = [&](keel::demand_counts const& d, capacity_limit limit) {
        return keel::apply_capacity(keel::cpu{}, a.ids.view(), d, {slots.view(), offsets.vec()}, served, {.limit = limit}, ws.get()).code;
    };
    CHECK(call(a.demand, capacity_limit::factor(0, 1)) == keel::status_code::bad_option);
    CHECK(call(a.demand, capacity_limit::factor(5, 0)) == keel::status_code::bad_option);
    CHECK(call(a.demand, capacity_limit::factor((1 << 20) + 1, 1)) == keel::status_code::bad_option);
    CHECK(call(a.demand, capacity_limit::factor(5, 4).at_least(-1)) == keel::status_code::bad_option);
    CHECK(call(a.demand, capacity_limit::factor(5, 4).multiple_of(0)) == keel::status_code::bad_option);
    assignments other(20, 4, 2, 0, 2); // the demand of another layer
    CHECK(call(other.demand, capacity_limit::dropless()) == keel::status_code::bad_state);
    CHECK(call(keel::demand_counts(keel::vec(a.counts.data(), 4)), capacity_limit::dropless()) == keel::status_code::bad_state);
    for (int32_t wrong : {4, -2, -100}) {
        int32_t const right = a.ids.get(7, 1);
        a.ids.set(7, 1, wrong);
        CHECK(call(a.demand, capacity_limit::dropless()) == keel::status_code::bad_option);
        a.ids.set(7, 1, right);
    }
    // Demand of another k whose counts are those of these ids, so that nothing but k can tell.
    keel::demand_counts once;
    keel::demand_from_counts(keel::vec(a.counts.data(), 4), 40, 1, once).or_throw();
    CHECK(call(once, capacity_limit::dropless()) == keel::status_code::bad_state);
    // Outputs over the ids, over each other and over the demand.
    std::vector<int64_t> wide(40), spare(64, -3);
    for (int64_t i = 0; i < 40; ++i) wide[static_cast<std::size_t>(i)] = a.ids.get(i / 2, i % 2);
    auto const ids = keel::rows(wide.data(), 20, 2);
    auto const lay = [&](keel::view<int64_t, 2> slot_view, keel::view<int64_t, 1> offset_view, keel::view<int64_t, 1> count_view) {
        keel::served_counts out(count_view);
        return keel::apply_capacity(keel::cpu{}, ids, a.demand, {slot_view, offset_view}, out, {.limit = capacity_limit::dropless()}, ws.get()).code;
    };
    auto const s = slots.view();
    auto const o = offsets.vec(), c = keel::vec(memory.data(), 4);
    using keel::status_code;
    CHECK(lay(ids, o, c) == status_code::overlap);
    CHECK(lay(s, keel::vec(wide.data() + 3, 5), c) == status_code::overlap);
    CHECK(lay(s, o, keel::vec(wide.data() + 36, 4)) == status_code::overlap);
    CHECK(lay(s, keel::vec(spare.data(), 5), keel::vec(spare.data() + 4, 4)) == status_code::overlap);
    CHECK(lay(keel::rows(spare.data(), 20, 2), keel::vec(spare.data() + 39, 5), c) == status_code::overlap);
    CHECK(lay(keel::rows(spare.data(), 20, 2), o, keel::vec(spare.data() + 39, 4)) == status_code::overlap);
    CHECK(lay(s, o, keel::vec(a.counts.data(), 4)) == status_code::overlap);
    CHECK(spare == std::vector<int64_t>(64, -3));
    CHECK(memory == std::vector<int64_t>(4, -3));
    CHECK(slots.get(0, 0) == 0);
    CHECK_FALSE(served.filled());
}
