// What reaches the bias and the line, from a router's call to the update: demand of tokens that train, each once, over all ranks.
#include <cmath>
#include <string>

#include <keel/backend/cpu/cpu.hpp>
#include <keel/moe/health.hpp>
#include <moe/balance_layer.hpp>
#include <moe/router.hpp>
#include <support/catch.hpp>

using namespace keel_test;
using keel::balance_rule;

namespace {

/// Logits with a taste for the last experts.
std::vector<float> tasted(int64_t tokens, int64_t experts, uint64_t seed) {
    std::vector<float> z = floats(data_kind::normal, tokens * experts, seed);
    for (std::size_t i = 0; i < z.size(); ++i) z[i] += 1.5f * static_cast<float>(i % static_cast<std::size_t>(experts)) / static_cast<float>(experts);
    return z;
}

} // namespace

TEST_CASE("evaluation, generation and a forward that is computed again change no byte of the state") { // torchtitan #4148, vLLM #57151
    int64_t const tokens = 64, experts = 8, k = 2;
    guarded_matrix<float> train(tokens, experts, 0, tasted(tokens, experts, 1)), held_out(tokens, experts, 0, tasted(tokens, experts, 2));
    layer l(experts), plain(experts);
    for (int64_t step = 0; step < 3; ++step) {
        routed<> r(tokens, experts, k), other(tokens, experts, k);
        r.run(keel::cpu{}, train.view(), {.bias = l.state().bias}).or_throw();
        keel::commit(keel::cpu{}, l.state(), r.demand, {.step = step}).or_throw();
        keel::commit(keel::cpu{}, plain.state(), r.demand, {.step = step}).or_throw();
        layer const before = l;
        other.run(keel::cpu{}, held_out.view(), {.bias = l.state().bias}).or_throw(); // evaluation: nobody commits
        other.run(keel::cpu{}, train.view(), {.bias = l.state().bias}).or_throw();    // recomputation: the same key
        keel::commit(keel::cpu{}, l.state(), other.demand, {.step = step}).or_throw();
        CHECK(other.counts == r.counts);
        CHECK(l.same(before));
        update(l, keel::open_gate(), {.rule = balance_rule::proportional, .rate = 0.5f}).or_throw(); // a rule that would feel a double
        update(plain, keel::open_gate(), {.rule = balance_rule::proportional, .rate = 0.5f}).or_throw();
        CHECK(l.same(plain));
    }
}

TEST_CASE("padding reaches neither bias nor line: a padded batch moves both as the tokens alone") { // HF #28505, Megatron #2121, vLLM #38128
    int64_t const tokens = 40, padding = 88, experts = 8, k = 2;
    std::vector<float> const alone = tasted(tokens, experts, 3);
    guarded_matrix<float> tight(tokens, experts, 0, alone), padded(tokens + padding, experts);
    bool valid[tokens + padding];
    for (int64_t t = 0, real = 0; t < tokens + padding; ++t) {
        valid[t] = real < tokens && t % 3 != 1;
        // what stands in padding would all go to expert 0
        for (int64_t e = 0; e < experts; ++e) padded.set(t, e, valid[t] ? tight.get(real, e) : e == 0 ? 50.0f : -50.0f);
        real += valid[t] ? 1 : 0;
    }
    keel::balance_line lines[2];
    layer layers[2] = {layer(experts), layer(experts)};
    for (bool pad : {false, true}) {
        guarded_matrix<float>& z = pad ? padded : tight;
        layer& l = layers[pad ? 1 : 0];
        routed<> r(z.rows(), experts, k);
        r.run(keel::cpu{}, z.view(), {.valid = pad ? keel::vec<bool const>(valid, tokens + padding) : keel::view<bool const, 1>{}}).or_throw();
        CHECK(r.demand.tokens() == tokens);
        list given(static_cast<std::size_t>(experts));
        guarded_matrix<int64_t> slots(z.rows(), k), offsets(1, experts + 1);
        keel::served_counts served(keel::vec(given.data(), experts));
        scratch ws(keel::apply_capacity_workspace(z.rows(), experts));
        keel::apply_capacity(keel::cpu{}, r.ids.view(), r.demand, {slots.view(), offsets.vec()}, served, {.limit = keel::capacity_limit::factor(1, 1)}, ws.get()).or_throw();
        keel::commit(keel::cpu{}, l.state(), r.demand, {}).or_throw();
        update(l, keel::open_gate(), {.rule = balance_rule::proportional, .rate = 1.0f}).or_throw();
        keel::measure_balance(r.demand, served, l.state(), lines[pad ? 1 : 0]).or_throw();
    }
    CHECK(layers[0].same(layers[1]));
    CHECK(lines[0].demand_max == lines[1].demand_max);
    CHECK(lines[0].dropped == lines[1].dropped);
    CHECK(lines[0].dropped > 0);
}

TEST_CASE("the sign of a sum is not the sum of signs: ranks add counts, and so do micro-batches") { // MaxText, Megatron #7197
    // The first two experts are hot in turn, one on each rank: signs added up would leave them at 0 and send the others up twice.
    list here{30, 0, 8, 10}, there{0, 34, 6, 8};
    layer l(4);
    keel::commit(keel::cpu{}, l.state(), demand_of(here, 48, 1), {.micro_batch = 0}).or_throw();
    keel::commit(keel::cpu{}, l.state(), demand_of(there, 48, 1), {.micro_batch = 1}).or_throw();
    CHECK(l.pending == list{30, 34, 14, 18});
    update(l, keel::open_gate(), {.rule = balance_rule::sign, .rate = 0.5f}).or_throw();
    CHECK(l.bias == std::vector<float>{-0.5f, -0.5f, 0.5f, 0.5f});
    // Micro-batches of unequal size weigh by their tokens, not alike: shares of 3/4 of 4 tokens and 1/4 of 400.
    layer uneven(2);
    list small{3, 1}, large{100, 300};
    keel::commit(keel::cpu{}, uneven.state(), demand_of(small, 4, 1), {.micro_batch = 0}).or_throw();
    keel::commit(keel::cpu{}, uneven.state(), demand_of(large, 400, 1), {.micro_batch = 1}).or_throw();
    update(uneven, keel::open_gate(), {.rule = balance_rule::proportional, .rate = 1.0f}).or_throw();
    CHECK(uneven.bias[0] == Approx(0.5 - 103.0 / 404).epsilon(0x1p-23));
}

TEST_CASE("any number of experts, each in its own right: 160, 257, 896") { // vLLM #50982, kekzl/imp #2056
    for (int64_t experts : {160, 257, 896}) {
        int64_t const tokens = 2000, k = 8;
        guarded_matrix<float> z(tokens, experts, 0, tasted(tokens, experts, 4));
        routed<> r(tokens, experts, k);
        r.run(keel::cpu{}, z.view()).or_throw();
        layer l(experts);
        keel::commit(keel::cpu{}, l.state(), r.demand, {}).or_throw();
        update(l, keel::open_gate(), {.rule = balance_rule::sign, .rate = 1.0f}).or_throw();
        int64_t wrong = 0, top = 0;
        for (int64_t e = 0; e < experts; ++e) {
            int64_t count = 0;
            for (int64_t t = 0; t < tokens; ++t)
                for (int64_t j = 0; j < k; ++j) count += r.id(t, j) == e ? 1 : 0;
            int64_t const missing = tokens * k - experts * count;
            float const wanted = missing > 0 ? 1.0f : missing < 0 ? -1.0f : 0.0f;
            wrong += l.bias[static_cast<std::size_t>(e)] != wanted || r.demand[e] != count ? 1 : 0;
            top = count > top ? count : top;
        }
        CHECK(wrong == 0);
        // The busiest expert is in the ratio: none is left out of it as an outlier (prime-rl #1332).
        CHECK(keel::max_over_mean(r.demand) == Approx(static_cast<double>(top * experts) / static_cast<double>(tokens * k)));
    }
}

TEST_CASE("a bias of half moves by a thousandth and keeps it, step after step") { // Megatron #1482: in bf16 it would stay at 0.5
    layer l(2);
    l.bias = {0.5f, 0.5f};
    list counts{3, 1};
    for (int64_t s = 0; s < 10; ++s) {
        keel::commit(keel::cpu{}, l.state(), demand_of(counts, 4, 1), {.step = s}).or_throw();
        update(l, keel::open_gate(), {.rule = balance_rule::sign, .rate = 1e-3f}).or_throw();
    }
    CHECK(l.bias[0] == Approx(0.49).epsilon(10 * 0x1p-24)); // ten roundings
    CHECK(l.bias[1] == Approx(0.51).epsilon(10 * 0x1p-24));
}
