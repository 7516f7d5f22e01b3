// The balancing bias: demand moves it, once a step, and nothing else can.
#include <cmath>
#include <limits>

#include <keel/backend/cpu/cpu.hpp>
#include <keel/moe/health.hpp>
#include <moe/balance_layer.hpp>
#include <moe/router.hpp>
#include <support/backends.hpp>
#include <support/catch.hpp>
#include <support/data.hpp>

using namespace keel_test;
using keel::balance_rule;

namespace {

template <class Counts>
concept can_commit = requires(keel::cpu<> be, keel::balance_state s, Counts c) { keel::commit(be, s, c, keel::balance_key{}); };
template <class Counts>
concept can_update = requires(keel::cpu<> be, keel::balance_state s, Counts c) { keel::update_balance(be, s, c, keel::step_gate{}); };

// The fault that this library exists to prevent does not compile.
static_assert(can_commit<keel::demand_counts>);
static_assert(!can_commit<keel::served_counts>);
static_assert(!can_commit<keel::view<int64_t, 1>>);
static_assert(can_update<keel::reduced_demand>);
static_assert(!can_update<keel::served_counts>);
static_assert(!can_update<keel::demand_counts>); // one rank's share is not the demand
static_assert(!std::is_constructible_v<keel::demand_counts, keel::served_counts>);
static_assert(!std::is_constructible_v<keel::reduced_demand, keel::served_counts>);
static_assert(!std::is_assignable_v<keel::demand_counts&, keel::served_counts>);

} // namespace

TEST_CASE("commit counts each micro-batch once, whatever is recomputed") { // torchtitan #1593, #4148
    keel::cpu be;
    layer l(4);
    list a{10, 6, 5, 3}, b{1, 2, 3, 6};
    auto const first = demand_of(a, 12, 2), second = demand_of(b, 6, 2);
    keel::commit(be, l.state(), first, {.step = 3, .micro_batch = 0}).or_throw();
    keel::commit(be, l.state(), second, {.step = 3, .micro_batch = 1}).or_throw();
    layer const before = l;
    keel::commit(be, l.state(), first, {.step = 3, .micro_batch = 0}).or_throw();  // a recomputed forward
    keel::commit(be, l.state(), second, {.step = 3, .micro_batch = 1}).or_throw();
    CHECK(l.same(before));
    CHECK(l.pending == list{11, 8, 8, 9});
    keel::demand_counts pending;
    keel::pending_demand(l.state(), pending).or_throw();
    CHECK(pending.tokens() == 18); // unequal micro-batches: the mean is over all their tokens (Megatron #7197)
    CHECK(pending.total() == 36);
    update(l).or_throw();
    CHECK(l.pending == list(4, 0));
    layer const after = l;
    keel::commit(be, l.state(), first, {.step = 3, .micro_batch = 0}).or_throw(); // late: the step is done
    CHECK(l.same(after));
    CHECK(update(l).code == keel::status_code::bad_state); // once a step
    CHECK(l.same(after));
    keel::commit(be, l.state(), first, {.step = 4, .micro_batch = 0}).or_throw();
    CHECK(l.pending == a);
}

TEST_CASE("a skipped step leaves every byte as it was before the step") {
    keel::cpu be;
    layer l(4);
    list a{10, 6, 5, 3};
    auto const demand = demand_of(a, 12, 2);
    keel::commit(be, l.state(), demand, {.step = 0}).or_throw();
    update(l).or_throw();
    layer const before = l;
    for (int64_t m = 0; m < 4; ++m) keel::commit(be, l.state(), demand, {.step = 1, .micro_batch = m + 7}).or_throw();
    CHECK_FALSE(l.same(before));
    update(l, keel::step_gate{}).or_throw(); // a closed gate
    CHECK(l.same(before));
    // It can be tried again, and attempts do not mix.
    keel::commit(be, l.state(), demand, {.step = 1, .micro_batch = 7, .attempt = 1}).or_throw();
    CHECK(keel::commit(be, l.state(), demand, {.step = 1, .micro_batch = 8, .attempt = 0}).code == keel::status_code::bad_state);
    CHECK(keel::commit(be, l.state(), demand, {.step = 2, .micro_batch = 8, .attempt = 1}).code == keel::status_code::bad_state);
    CHECK(l.pending == a);
    update(l).or_throw();
    CHECK_FALSE(l.same(before));
}

TEST_CASE("the self-concealing router: by demand the bias corrects, by served counts two of four signs are wrong") {
    list asked{10, 6, 5, 3}, given(4);
    auto const demand = demand_of(asked, 24, 1);
    // Capacity 6 = the mean. What an honest step does:
    layer honest(4);
    keel::commit(keel::cpu{}, honest.state(), demand, {}).or_throw();
    update(honest, keel::open_gate(), {.rule = balance_rule::sign, .rate = 0.5f}).or_throw();
    CHECK(honest.bias == std::vector<float>{-0.5f, 0.0f, 0.5f, 0.5f});
    // The same counts after the drop, smuggled in by hand: [6, 6, 5, 3], mean 5. The library cannot tell that these are no demand,
    // only make it a lie that has to be told aloud.
    list served{6, 6, 5, 3};
    layer fooled(4);
    keel::commit(keel::cpu{}, fooled.state(), demand_of(served, 20, 1), {}).or_throw();
    update(fooled, keel::open_gate(), {.rule = balance_rule::sign, .rate = 0.5f}).or_throw();
    CHECK(fooled.bias == std::vector<float>{-0.5f, -0.5f, 0.0f, 0.5f});
    // Every expert saturated: the served counts are equal, the bias is still for ever.
    list flat{6, 6, 6, 6};
    layer still(4);
    auto const feed = [&](list& counts, int64_t step) {
        keel::commit(keel::cpu{}, still.state(), demand_of(counts, 24, 1), {.step = step}).or_throw();
        update(still, keel::open_gate(), {.rule = balance_rule::sign, .rate = 0.5f}).or_throw();
    };
    feed(flat, 0);
    CHECK(still.bias == std::vector<float>(4, 0.0f));

    // The health line prints both, and the alarm rings where the bias is still.
    guarded_matrix<int32_t> ids(24, 1);
    for (int32_t t = 0, e = 0; e < 4; ++e)
        for (int64_t i = 0; i < asked[static_cast<std::size_t>(e)]; ++i) ids.set(t++, 0, e);
    guarded_matrix<int64_t> slots(24, 1), offsets(1, 5);
    keel::served_counts counts(keel::vec(given.data(), 4));
    scratch ws(keel::apply_capacity_workspace(24, 4));
    keel::apply_capacity(keel::cpu{}, ids.view(), demand, {slots.view(), offsets.vec()}, counts, {.limit = keel::capacity_limit::factor(1, 1)}, ws.get()).or_throw();
    CHECK(given == served);
    keel::balance_line line;
    keel::measure_balance(demand, counts, honest.state(), line).or_throw();
    CHECK(line.demand_max == Approx(10.0 / 6));
    CHECK(line.served_max == Approx(1.2)); // MaxVio 0.20 in the log against a true 0.67
    CHECK(line.dropped == Approx(4.0 / 24));
    CHECK(line.dead == 0);
    CHECK(line.bias_spread == 1.0f);
    CHECK(line.bias_moved == 3);
    CHECK_FALSE(line.concealed());
    CHECK(line.demand_min == Approx(3.0 / 6));
    CHECK(line.served_min == Approx(3.0 / 5));
    CHECK(line.demand_entropy < line.served_entropy);
    layer const fresh(4); // before the first update nothing is known of the bias
    keel::measure_balance(demand, counts, layer(fresh).state(), line).or_throw();
    CHECK_FALSE(line.concealed());
    keel::measure_balance(demand, counts, still.state(), line).or_throw(); // one still update: that demand may have been even
    CHECK(line.bias_moved == 0);
    CHECK(line.still_updates == 1);
    CHECK_FALSE(line.concealed());
    feed(flat, 1);
    keel::measure_balance(demand, counts, still.state(), line).or_throw();
    CHECK(line.still_updates == 2);
    CHECK(line.concealed());
    layer moving = still; // and the first honest update ends it
    keel::commit(keel::cpu{}, moving.state(), demand, {.step = 2}).or_throw();
    update(moving).or_throw();
    keel::measure_balance(demand, counts, moving.state(), line).or_throw();
    CHECK(line.still_updates == 0);
    CHECK_FALSE(line.concealed());
    // Dropless: demand and served agree, nothing is concealed however skewed it is.
    keel::apply_capacity(keel::cpu{}, ids.view(), demand, {slots.view(), offsets.vec()}, counts, {.limit = keel::capacity_limit::dropless()}, ws.get()).or_throw();
    keel::measure_balance(demand, counts, still.state(), line).or_throw();
    CHECK_FALSE(line.concealed());
    // Counts of two calls do not make one line: more was served than this demand asked for.
    keel::balance_line untouched{.dead = 77};
    auto const other = keel::measure_balance(demand_of(flat, 24, 1), counts, still.state(), untouched);
    CHECK(other.code == keel::status_code::bad_state);
    CHECK(std::string(other.argument) == "served");
    CHECK(keel::measure_balance(demand, counts, layer(5).state(), untouched).code == keel::status_code::bad_shape);
    CHECK(keel::measure_balance(demand, keel::served_counts(keel::vec(given.data(), 4)), still.state(), untouched).code == keel::status_code::bad_state);
    // ... or the counts of one micro-batch beside the pending demand of two.
    list twice{20, 12, 10, 6};
    CHECK(keel::measure_balance(demand_of(twice, 48, 1), counts, still.state(), untouched).code == keel::status_code::bad_state);
    CHECK(untouched.dead == 77);
}

TEST_CASE("counts of the same stage add up to a step's line") {
    list a{3, 1, 0, 2}, b{5, 3, 4, 0}, memory(4, -7); // not {4, 4, 4, 0}: g++ 12 with AVX-512VL at -O2 stores that as four 4s
    keel::demand_counts sum(keel::vec(memory.data(), 4));
    keel::add_counts(sum, demand_of(a, 3, 2)).or_throw();
    CHECK(memory == a);
    keel::add_counts(sum, demand_of(b, 6, 2)).or_throw();
    CHECK(memory == list{8, 4, 4, 2});
    CHECK(sum.tokens() == 9);
    CHECK(sum.total() == 18);
    list other{1, 0, 0, 0};
    CHECK(keel::add_counts(sum, demand_of(other, 1, 1)).code == keel::status_code::bad_state); // of another k
    CHECK(keel::add_counts(sum, keel::demand_counts(keel::vec(other.data(), 4))).code == keel::status_code::bad_state);
    CHECK(keel::add_counts(sum, sum).code == keel::status_code::overlap);
    CHECK(memory == list{8, 4, 4, 2});
}

TEST_CASE("the line of all ranks: served counts come back from a sum, and only as they can be of that demand") {
    list asked{9, 1, 2, 0}, given{5, 1, 3, 1}; // two ranks' sums: 4 did not fit, 2 of them found room elsewhere
    auto const demand = demand_of(asked, 12, 1);
    keel::served_counts served;
    auto const build = [&](int64_t rerouted) { return keel::served_from_counts(keel::vec(given), demand, rerouted, served); };
    build(2).or_throw();
    CHECK((served.total() == 10 && served.rerouted() == 2 && served.tokens() == 12 && served.per_token() == 1));
    layer l(4);
    keel::balance_line line;
    keel::measure_balance(demand, served, l.state(), line).or_throw();
    CHECK(line.served_max == 2.0);
    CHECK(line.dropped == Approx(2.0 / 12));
    CHECK(build(1).message() == "served_from_counts: counts has sum beyond the demand of each = 2, wanted no more than was rerouted (bad_state)");
    CHECK(build(-1).code == keel::status_code::bad_option);
    given[0] = 8;
    CHECK(build(2).message() == "served_from_counts: counts has sum = 13, wanted no more than the demand (bad_state)");
    given[0] = -1;
    CHECK(build(2).code == keel::status_code::bad_state);
    CHECK(keel::served_from_counts(keel::vec(asked), demand, 0, served).code == keel::status_code::overlap);
    CHECK(keel::served_from_counts(keel::vec(given.data(), 3), demand, 2, served).code == keel::status_code::bad_shape);
    CHECK(keel::served_from_counts(keel::vec(given), {}, 2, served).code == keel::status_code::bad_state);
    CHECK(served.total() == 10); // what is refused leaves it as it was
}

TEST_CASE("dead experts are counted exactly, however many experts and tokens there are") {
    int64_t const experts = 1 << 17, most = int64_t{1} << 42; // 100 * experts * most is past int64
    list c(static_cast<std::size_t>(experts), most / experts);
    c[0] -= 7, c[1] += 7;
    CHECK(keel::dead_experts(demand_of(c, most, 1)) == 0);
    int64_t const hundredth = most / experts / 100; // rounded down: below 1%
    c[1] += c[2] - hundredth, c[2] = hundredth;
    CHECK(keel::dead_experts(demand_of(c, most, 1)) == 1);
    c[2] += 1, c[1] -= 1;
    CHECK(keel::dead_experts(demand_of(c, most, 1)) == 0);
}

TEST_CASE("a NaN in the bias is refused, not kept: its expert would come last for ever") {
    list a{10, 6, 5, 3};
    layer l(4);
    keel::commit(keel::cpu{}, l.state(), demand_of(a, 12, 2), {}).or_throw();
    l.bias[2] = std::numeric_limits<float>::quiet_NaN();
    layer const before = l;
    auto const s = update(l);
    CHECK(s.message() == "update_balance: state.bias has NaN at expert = 2, wanted none (bad_state)");
    CHECK(l.same(before));
    list given = a;
    guarded_matrix<int32_t> ids(12, 2);
    for (int64_t i = 0, e = 0, used = 0; i < 24; ++i) {
        while (used == a[static_cast<std::size_t>(e)]) ++e, used = 0;
        ids.set(i % 12, i / 12, static_cast<int32_t>(e)), ++used;
    }
    guarded_matrix<int64_t> slots(12, 2), offsets(1, 5);
    keel::served_counts served(keel::vec(given.data(), 4));
    scratch ws(keel::apply_capacity_workspace(12, 4));
    keel::apply_capacity(keel::cpu{}, ids.view(), demand_of(a, 12, 2), {slots.view(), offsets.vec()}, served, {keel::capacity_limit::dropless()}, ws.get()).or_throw();
    keel::balance_line line;
    keel::measure_balance(demand_of(a, 12, 2), served, l.state(), line).or_throw();
    CHECK(line.bias_nan == 1);
}

TEST_CASE("the rules are their formulas") {
    int64_t const experts = 7;
    list a{40, 3, 17, 20, 0, 31, 29};
    auto const demand = demand_of(a, 70, 2);
    for (balance_rule rule : {balance_rule::sign, balance_rule::centred_sign, balance_rule::proportional}) {
        layer l(experts);
        for (int64_t e = 0; e < experts; ++e) l.bias[static_cast<std::size_t>(e)] = static_cast<float>(e) * 0.125f;
        layer const start = l;
        keel::commit(keel::cpu{}, l.state(), demand, {}).or_throw();
        update(l, keel::open_gate(), {.rule = rule, .rate = 0.01f}).or_throw();
        double signs = 0, mean_move = 0;
        for (int64_t e = 0; e < experts; ++e) signs += a[static_cast<std::size_t>(e)] < 20 ? 1 : a[static_cast<std::size_t>(e)] > 20 ? -1 : 0;
        for (int64_t e = 0; e < experts; ++e) {
            auto const count = a[static_cast<std::size_t>(e)];
            double move = count < 20 ? 1 : count > 20 ? -1 : 0;
            if (rule == balance_rule::centred_sign) move -= signs / 7;
            if (rule == balance_rule::proportional) move = 1.0 / 7 - static_cast<double>(count) / 140;
            double const old = static_cast<double>(start.bias[static_cast<std::size_t>(e)]), now = static_cast<double>(l.bias[static_cast<std::size_t>(e)]);
            CHECK(now == Approx(old + static_cast<double>(0.01f) * move).epsilon(0x1p-23).margin(1e-9)); // one rounding of the sum
            mean_move += now - old;
        }
        if (rule != balance_rule::sign) CHECK(std::abs(mean_move) < 1e-7 * 7);
        // A bias of 34.5 still moves by a thousandth: it is fp32 (Megatron #1482).
        layer high(experts);
        for (float& b : high.bias) b = 34.5f;
        keel::commit(keel::cpu{}, high.state(), demand, {}).or_throw();
        update(high, keel::open_gate(), {.rule = rule, .rate = 1e-3f}).or_throw();
        CHECK(high.bias[0] < 34.5f);
        CHECK(high.bias[4] > 34.5f);
        // The same on every backend.
        for_each_backend([&](std::string const& name, auto const& be) {
            INFO(name);
            layer other = start;
            keel::commit(be, other.state(), demand, {}).or_throw();
            keel::demand_counts pending;
            keel::pending_demand(other.state(), pending).or_throw();
            keel::update_balance(be, other.state(), keel::reduced_over_ranks(pending), keel::open_gate(), {.rule = rule, .rate = 0.01f}).or_throw();
            CHECK(other.same(l));
        });
    }
}

TEST_CASE("counts of two ranks add as integers before any sign is taken") { // Megatron #7081, #7481
    keel::cpu be;
    list one{40840, 1, 0, 40839}, two{3, 40838, 40838, 1};
    layer l(4);
    keel::commit(be, l.state(), demand_of(one, 40840, 2), {}).or_throw();
    list sum(4);
    for (std::size_t e = 0; e < 4; ++e) sum[e] = one[e] + two[e]; // what an all-reduce does
    keel::demand_counts both;
    keel::demand_from_counts(keel::vec(sum.data(), 4), 40840 + 40840, 2, both).or_throw();
    CHECK(l.pending == one); // the local count stays local
    keel::update_balance(be, l.state(), keel::reduced_over_ranks(both), keel::open_gate(), {.rule = balance_rule::sign, .rate = 1.0f}).or_throw();
    CHECK(l.bias == std::vector<float>{-1.0f, 1.0f, 1.0f, 0.0f}); // sums 40843, 40839, 40838, 40840 about a mean of 40840
    // Demand that is less than what is pending here is another layer's, or was not reduced.
    keel::commit(be, l.state(), demand_of(one, 40840, 2), {.step = 1}).or_throw();
    layer const before = l;
    CHECK(keel::update_balance(be, l.state(), keel::reduced_over_ranks(demand_of(two, 40840, 2)), keel::open_gate()).code == keel::status_code::bad_state);
    CHECK(l.same(before));
}

TEST_CASE("two ranks that sum counts and tokens in place move the bias as one rank that saw everything") {
    keel::cpu be;
    // Not {2, 2, 0, 0}: gcc 12.2 -O2 for x86-64-v4 stores that constant as {2, 2, 2, 2}, a broadcast to the wrong width.
    list here{10, 6, 5, 3}, there{0, 1, 5, 6}, later{2, 0, 1, 1}; // 12 + 6 + 2 tokens, k = 2
    layer one(4), left(4), right(4);
    for (list* a : {&here, &there, &later}) {
        int64_t const tokens = a == &here ? 12 : a == &there ? 6 : 2, m = a == &here ? 0 : a == &there ? 1 : 2;
        keel::commit(be, one.state(), demand_of(*a, tokens, 2), {.step = 5, .micro_batch = m}).or_throw();
        keel::commit(be, (a == &here ? left : right).state(), demand_of(*a, tokens, 2), {.step = 5, .micro_batch = m}).or_throw();
    }
    for (std::size_t e = 0; e < 4; ++e) left.pending[e] = right.pending[e] = left.pending[e] + right.pending[e]; // an all-reduce
    keel::demand_counts pending;
    auto const forgotten = keel::pending_demand(left.state(), pending); // the tokens were not summed
    CHECK(forgotten.code == keel::status_code::bad_state);
    CHECK_FALSE(pending.filled());
    int64_t const tokens = keel::pending_tokens(left.state())(0) + keel::pending_tokens(right.state())(0);
    CHECK(tokens == 20);
    for (layer* l : {&left, &right}) keel::pending_tokens(l->state())(0) = tokens;
    layer const skipped = left;
    for (layer* l : {&one, &left, &right}) update(*l, keel::open_gate(), {.rule = balance_rule::proportional, .rate = 0.1f}).or_throw();
    CHECK(left.bias == one.bias);
    CHECK(left.same(one));
    CHECK(left.same(right));
    CHECK(one.bias[0] == Approx(0.1 * (0.25 - 12.0 / 40)).epsilon(1e-6));
    layer closed = skipped; // a skip forgets the sums as well
    update(closed, keel::step_gate{}).or_throw();
    CHECK(closed.same(layer(4)));
}

TEST_CASE("a step of no tokens moves no bias under any rule") {
    for (balance_rule rule : {balance_rule::sign, balance_rule::centred_sign, balance_rule::proportional}) {
        layer l(4);
        l.bias = {0.5f, -0.25f, 0.0f, 1.0f};
        auto const bias = l.bias;
        list none(4);
        keel::commit(keel::cpu{}, l.state(), demand_of(none, 0, 2), {}).or_throw();
        update(l, keel::open_gate(), {.rule = rule, .rate = 0.5f}).or_throw();
        CHECK(equal_bits(l.bias, bias));
        CHECK(l.ledger[0] == 1); // the step counts as done
    }
}

TEST_CASE("a controller fed with demand balances a skewed router") {
    int64_t const tokens = 2048, experts = 16, k = 2;
    std::vector<float> z = floats(data_kind::normal, tokens * experts, 77);
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t e = 0; e < experts; ++e) z[static_cast<std::size_t>(t * experts + e)] += 0.15f * static_cast<float>(e);
    guarded_matrix<float> logits(tokens, experts, 0, z);
    layer l(experts);
    routed<> r(tokens, experts, k);
    double first = 0;
    for (int64_t step = 0; step < 300; ++step) {
        r.run(keel::cpu{}, logits.view(), {.bias = l.state().bias}).or_throw();
        if (step == 0) first = keel::max_over_mean(r.demand);
        keel::commit(keel::cpu{}, l.state(), r.demand, {.step = step}).or_throw();
        update(l, keel::open_gate(), {.rule = balance_rule::centred_sign, .rate = 2e-3f}).or_throw();
    }
    CHECK(first > 2.5);
    // A sign rule ends in an oscillation of about one step: 2e-3 of score is 0.02 of logit here, or some 3% of an expert's tokens a
    // step of its own and of those that it trades with.
    CHECK(keel::max_over_mean(r.demand) < 1.1);
}
