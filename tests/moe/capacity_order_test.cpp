// Drop orders and rerouting against a plain simulation with sorted queues: who is kept, where it lies, who goes elsewhere.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include <keel/moe/capacity.hpp>
#include <moe/router.hpp>
#include <support/backends.hpp>
#include <support/catch.hpp>

using namespace keel_test;
using keel::capacity_limit;
using keel::drop_order;

namespace {

constexpr drop_order all_orders[] = {drop_order::position, drop_order::choice_major, drop_order::weight, drop_order::batch_prioritised};

/// Choices of k experts and `spare` next ones a token, some tokens padding, some with fewer spare ones; weights with ties and a NaN.
struct batch {
    int64_t tokens, experts, k, spare;
    guarded_matrix<int32_t> choices;
    guarded_matrix<float> weights;
    std::vector<int64_t> counts;
    keel::demand_counts demand;

    batch(int64_t t, int64_t e, int64_t chosen, int64_t next, uint64_t seed)
        : tokens(t), experts(e), k(chosen), spare(next), choices(t, chosen + next, 1), weights(t, chosen, 2), counts(static_cast<std::size_t>(e)) {
        std::mt19937_64 engine(seed);
        std::vector<int32_t> order(static_cast<std::size_t>(e));
        int64_t routed_tokens = 0;
        for (int64_t i = 0; i < t; ++i) {
            bool const padding = i % 7 == 3;
            for (int64_t j = 0; j < e; ++j) order[static_cast<std::size_t>(j)] = static_cast<int32_t>(j);
            for (std::size_t j = 0; j + 1 < order.size(); ++j) // experts of low index come early in most tokens
                if (engine() % 3 == 0) std::swap(order[j], order[j + engine() % (order.size() - j)]);
            for (int64_t j = 0; j < k + spare; ++j)
                choices.set(i, j, padding || (j > k && i % 5 == 0) ? -1 : order[static_cast<std::size_t>(j)]);
            for (int64_t j = 0; j < k; ++j) {
                weights.set(i, j, padding ? 0.0f : static_cast<float>(engine() % 16) * 0.0625f);
                if (!padding) ++counts[static_cast<std::size_t>(choices.get(i, j))];
            }
            routed_tokens += padding ? 0 : 1;
        }
        weights.set(0, 0, std::numeric_limits<float>::quiet_NaN());
        for (int64_t i = 1; i < t; i += 2) // zeros of either sign are equal
            if (weights.get(i, 0) == 0.0f) weights.set(i, 0, -0.0f);
        keel::demand_from_counts(keel::vec(counts.data(), e), routed_tokens, k, demand).or_throw();
    }
};

struct outcome {
    std::vector<int64_t> ids, slots, offsets, served, overflow, received;
    bool operator==(outcome const&) const = default;
};

/// Expert by expert, round by round, with sorted queues.
outcome simulate(batch const& b, int64_t capacity, drop_order order) {
    auto const index = [](int64_t i) { return static_cast<std::size_t>(i); };
    auto const falling = [](double w) { return std::isnan(w) ? std::numeric_limits<double>::infinity() : -w; };
    struct asking {
        int64_t t, j;
    };
    auto const before = [&](asking const& x, asking const& y) {
        double first[2] = {};
        for (int i = 0; i < 2; ++i) {
            first[i] = std::numeric_limits<double>::infinity();
            for (int64_t j = 0; j < b.k; ++j) first[i] = std::min(first[i], falling(b.weights.at(i == 0 ? x.t : y.t, j)));
        }
        if (order == drop_order::choice_major) return x.j < y.j;
        if (order == drop_order::weight) return falling(b.weights.at(x.t, x.j)) < falling(b.weights.at(y.t, y.j));
        if (order == drop_order::batch_prioritised) return x.j != y.j ? x.j < y.j : first[0] < first[1];
        return false; // stable: by position
    };
    outcome o;
    o.served.assign(index(b.experts), 0), o.overflow = o.received = o.served;
    for (int64_t i = 0; i < b.tokens * b.k; ++i) o.ids.push_back(b.choices.get(i / b.k, i % b.k));
    std::vector<bool> kept(o.ids.size());
    std::vector<int64_t> used(index(b.tokens)), asks = o.ids;
    for (int64_t round = 0; round <= b.spare; ++round) {
        std::vector<std::vector<asking>> queues(index(b.experts));
        for (int64_t i = 0; i < b.tokens * b.k; ++i)
            if (asks[index(i)] >= 0) queues[index(asks[index(i)])].push_back({i / b.k, i % b.k});
        for (int64_t e = 0; e < b.experts; ++e) {
            auto& queue = queues[index(e)];
            std::stable_sort(queue.begin(), queue.end(), before);
            for (auto const& a : queue) {
                std::size_t const i = index(a.t * b.k + a.j);
                if (o.served[index(e)] == capacity) {
                    if (round == 0) ++o.overflow[index(e)];
                    continue;
                }
                ++o.served[index(e)];
                if (round > 0) ++o.received[index(e)];
                kept[i] = true, o.ids[i] = e, asks[i] = -1;
            }
        }
        for (int64_t i = 0; i < b.tokens * b.k; ++i) { // the rest asks the next
            if (asks[index(i)] < 0) continue;
            int64_t& next = used[index(i / b.k)];
            asks[index(i)] = next < b.spare ? b.choices.get(i / b.k, b.k + next) : -1;
            if (asks[index(i)] >= 0) ++next;
        }
    }
    o.slots.assign(o.ids.size(), -1), o.offsets = {0};
    for (int64_t e = 0; e < b.experts; ++e) {
        int64_t row = o.offsets.back();
        for (std::size_t i = 0; i < o.ids.size(); ++i)
            if (kept[i] && o.ids[i] == e) o.slots[i] = row++;
        o.offsets.push_back(row);
    }
    return o;
}

/// The same by the library.
template <class B> outcome serve(B const& be, batch& b, capacity_limit limit, drop_order order) {
    guarded_matrix<int32_t> ids(b.tokens, b.k, 2);
    guarded_matrix<int64_t> slots(b.tokens, b.k, 1), offsets(1, b.experts + 1), counted(3, b.experts);
    keel::served_counts served(keel::part(counted.view(), 0));
    keel::capacity_saved const saved{keel::part(counted.view(), 1), keel::part(counted.view(), 2)};
    scratch ws(keel::reroute_overflow_workspace(b.tokens, b.experts, b.k, b.spare)), less(keel::apply_capacity_workspace(b.tokens, b.experts, b.k, order));
    for (keel::workspace memory : {ws.get(), less.get()}) std::memset(memory.data, 0xa5, static_cast<std::size_t>(memory.size)); // of another call
    if (b.spare == 0) {
        keel::apply_capacity(be, b.choices.view(), b.weights.view(), b.demand, {slots.view(), offsets.vec()}, served, saved, {limit, order}, less.get()).or_throw();
        for (int64_t i = 0; i < b.tokens * b.k; ++i) ids.set(i / b.k, i % b.k, b.choices.get(i / b.k, i % b.k));
    } else {
        keel::reroute_overflow(be, b.choices.view(), b.weights.view(), b.demand, ids.view(), {slots.view(), offsets.vec()}, served, saved, {limit, order}, ws.get())
            .or_throw();
    }
    outcome o;
    for (int64_t i = 0; i < b.tokens * b.k; ++i) o.ids.push_back(ids.get(i / b.k, i % b.k)), o.slots.push_back(slots.get(i / b.k, i % b.k));
    int64_t moved = 0;
    for (int64_t e = 0; e <= b.experts; ++e) o.offsets.push_back(offsets.get(0, e));
    for (int64_t e = 0; e < b.experts; ++e) {
        o.served.push_back(counted.get(0, e)), o.overflow.push_back(counted.get(1, e)), o.received.push_back(counted.get(2, e));
        moved += o.received.back();
    }
    CHECK(served.rerouted() == moved);
    CHECK(served.total() == o.offsets.back());
    CHECK(served.tokens() == b.demand.tokens());
    CHECK(slots.untouched());
    CHECK(ids.untouched());
    return o;
}

} // namespace

TEST_CASE("every drop order, with and without next choices, keeps what a sorted queue would keep, on every backend") {
    for (auto const& [tokens, experts, k] : {std::array<int64_t, 3>{600, 9, 3}, {40, 5, 2}, {70, 12, 1}})
        for (int64_t spare : {0, 1, 2})
            for (drop_order order : all_orders)
                for (int numerator : {2, 4, 5}) {
                    batch b(tokens, experts, k, spare, static_cast<uint64_t>(tokens + spare));
                    auto const limit = capacity_limit::factor(numerator, 4);
                    outcome const want = simulate(b, limit.tokens_an_expert(b.demand.tokens(), k, experts), order);
                    for_each_backend([&](std::string const& name, auto const& be) {
                        INFO(name << " order " << static_cast<int>(order) << " spare " << spare << " factor " << numerator << "/4, k " << b.k);
                        CHECK(serve(be, b, limit, order) == want);
                    });
                }
}

TEST_CASE("dropless: no order changes anything, and nothing is rerouted") {
    for (int64_t spare : {0, 2}) {
        batch b(50, 6, 2, spare, 9);
        outcome const want = serve(keel::cpu{}, b, capacity_limit::dropless(), drop_order::position);
        CHECK(want.overflow == std::vector<int64_t>(6, 0));
        for (drop_order order : all_orders) CHECK(serve(keel::cpu{}, b, capacity_limit::dropless(), order) == want);
    }
}

TEST_CASE("rerouting serves where there is room, keeps a token's experts distinct, and leaves the demand as it was") {
    batch b(400, 8, 2, 4, 2);
    auto const demand = b.counts;
    auto const limit = capacity_limit::factor(1, 1);
    outcome const o = serve(keel::cpu{}, b, limit, drop_order::weight);
    CHECK(b.counts == demand);
    int64_t received = 0, served = 0;
    for (std::size_t e = 0; e < 8; ++e) received += o.received[e], served += o.served[e];
    CHECK(received > 0);
    batch only(400, 8, 2, 0, 2);
    for (int64_t i = 0; i < 800; ++i) only.choices.set(i / 2, i % 2, b.choices.get(i / 2, i % 2)), only.weights.set(i / 2, i % 2, b.weights.get(i / 2, i % 2));
    only.counts = demand;
    keel::demand_from_counts(keel::vec(only.counts.data(), 8), b.demand.tokens(), 2, only.demand).or_throw();
    outcome const dropping = serve(keel::cpu{}, only, limit, drop_order::weight);
    CHECK(served - dropping.offsets.back() == received); // exactly what was dropped before
    for (std::size_t t = 0; t < 400; ++t)
        if (o.ids[2 * t] >= 0) CHECK(o.ids[2 * t] != o.ids[2 * t + 1]);
}

TEST_CASE("batch-prioritised by hand: the token that is surest of its first choice keeps it") {
    // Two tokens want expert 0, whose room is 1; the later one has the larger weight.
    guarded_matrix<int32_t> ids(2, 1);
    guarded_matrix<float> weights(2, 1, 0, {0.25f, 0.75f});
    std::vector<int64_t> asked{2, 0}, given(2);
    keel::demand_counts demand;
    keel::demand_from_counts(keel::vec(asked.data(), 2), 2, 1, demand).or_throw();
    keel::served_counts served(keel::vec(given.data(), 2));
    guarded_matrix<int64_t> slots(2, 1), offsets(1, 3);
    scratch ws(keel::apply_capacity_workspace(2, 2, 1, drop_order::weight));
    auto const run = [&](drop_order order) {
        keel::apply_capacity(keel::cpu{}, ids.view(), weights.view(), demand, {slots.view(), offsets.vec()}, served, {}, {capacity_limit::factor(1, 1), order}, ws.get())
            .or_throw();
        return slots.get(0, 0) == 0 && slots.get(1, 0) == -1 ? 0 : slots.get(0, 0) == -1 && slots.get(1, 0) == 0 ? 1 : -1;
    };
    CHECK(run(drop_order::position) == 0);
    CHECK(run(drop_order::choice_major) == 0);
    CHECK(run(drop_order::weight) == 1);
    CHECK(run(drop_order::batch_prioritised) == 1);
}

TEST_CASE("a bad call of reroute_overflow names the argument and writes nothing") {
    batch b(20, 6, 2, 2, 1);
    guarded_matrix<int32_t> ids(20, 2);
    guarded_matrix<int64_t> slots(20, 2), offsets(1, 7), counted(2, 6);
    keel::served_counts served(keel::part(counted.view(), 0));
    scratch ws(keel::reroute_overflow_workspace(20, 6, 2, 2));
    keel::workspace memory = ws.get();
    auto const call = [&](keel::view<float, 2> weights, keel::view<int32_t, 2> out, drop_order order, capacity_limit limit = capacity_limit::factor(1, 1)) {
        return keel::reroute_overflow(keel::cpu{}, b.choices.view(), weights, b.demand, out, {slots.view(), offsets.vec()}, served, {}, {limit, order}, memory);
    };
    auto const before = ids.contents();
    using keel::status_code;
    CHECK(call({}, ids.view(), drop_order::weight).code == status_code::bad_shape);
    CHECK(call(b.weights.view(), {}, drop_order::weight).code == status_code::bad_pointer);
    CHECK(call(b.weights.view(), keel::columns(b.choices.view(), 2, 2), drop_order::weight).code == status_code::overlap);
    CHECK(call(b.weights.view(), ids.view(), static_cast<drop_order>(4)).message() ==
          "reroute_overflow: options.order has value = 4, wanted position, choice_major, weight or batch_prioritised (bad_option)");
    CHECK(call(b.weights.view(), ids.view(), drop_order::weight, capacity_limit::factor(1, 1).multiple_of(0)).code == status_code::bad_option);
    int32_t const right = b.choices.get(4, 3);
    for (int32_t wrong : {6, -2}) { // a spare expert that is none
        b.choices.set(4, 3, wrong);
        CHECK(call(b.weights.view(), ids.view(), drop_order::weight).code == status_code::bad_option);
    }
    b.choices.set(4, 3, right);
    memory.size -= 8;
    CHECK(call(b.weights.view(), ids.view(), drop_order::weight).code == status_code::small_workspace);
    memory.size += 8;
    CHECK(ids.contents() == before);
    CHECK_FALSE(served.filled());
    CHECK(call({}, ids.view(), drop_order::position).ok());
}
