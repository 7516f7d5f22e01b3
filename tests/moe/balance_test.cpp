// The balancing bias: demand moves it, once a step, and nothing else can.
#include <cmath>
#include <limits>

#include <keel/backend/cpu/cpu.hpp>
#include <keel/moe/health.hpp>
#include <moe/router.hpp>
#include <support/backends.hpp>
#include <support/catch.hpp>
#include <support/data.hpp>

using namespace keel_test;
using keel::balance_rule;
using list = std::vector<int64_t>;

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

/// One layer's state over bytes that can be compared.
struct layer {
    std::vector<float> bias;
    list pending, ledger;
    explicit layer(int64_t experts, int64_t micro_batches = 4)
        : bias(static_cast<std::size_t>(experts)), pending(bias.size()),
          ledger(static_cast<std::size_t>(keel::balance_ledger_size(micro_batches))) {}
    keel::balance_state state() {
        return {keel::vec(bias.data(), static_cast<int64_t>(bias.size())), keel::vec(pending.data(), static_cast<int64_t>(pending.size())),
                keel::vec(ledger.data(), static_cast<int64_t>(ledger.size()))};
    }
    bool same(layer const& o) const {
        return keel_test::equal_bits(bias, o.bias) && pending == o.pending && ledger == o.ledger;
    }
};

keel::demand_counts demand_of(list& counts, int64_t tokens, int64_t k) {
    keel::demand_counts d;
    keel::demand_from_counts(keel::vec(counts.data(), static_cast<int64_t>(counts.size())), tokens, k, d).or_throw();
    return d;
}

keel::status update(layer& l, keel::step_gate const& gate = keel::open_gate(), keel::balance_options options = {}) {
    keel::demand_counts pending;
    keel::status const s = keel::pending_demand(l.state(), pending);
    return s.ok() ? keel::update_balance(keel::cpu{}, l.state(), keel::reduced_over_ranks(pending), gate, options) : s;
}

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
    keel::commit(keel::cpu{}, still.state(), demand_of(flat, 24, 1), {}).or_throw();
    update(still, keel::open_gate(), {.rule = balance_rule::sign, .rate = 0.5f}).or_throw();
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
    keel::measure_balance(demand, counts, still.state(), line).or_throw();
    CHECK(line.bias_moved == 0);
    CHECK(line.concealed());
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
    CHECK(untouched.dead == 77);
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
    list here{10, 6, 5, 3}, there{0, 1, 5, 6}, later{2, 2, 0, 0}; // 12 + 6 + 2 tokens, k = 2
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

TEST_CASE("demand that was looked at before a further commit is stale, and is refused") {
    keel::cpu be;
    layer l(4);
    list a{10, 6, 5, 3}, b{0, 4, 4, 4};
    keel::commit(be, l.state(), demand_of(a, 12, 2), {.micro_batch = 0}).or_throw();
    keel::demand_counts pending;
    keel::pending_demand(l.state(), pending).or_throw();
    keel::commit(be, l.state(), demand_of(b, 6, 2), {.micro_batch = 1}).or_throw();
    layer const before = l;
    auto const s = keel::update_balance(be, l.state(), keel::reduced_over_ranks(pending), keel::open_gate());
    CHECK(s.code == keel::status_code::bad_state);
    CHECK(std::string(s.property) == "sum");
    CHECK(s.got == 36);
    CHECK(s.wanted == 24);
    CHECK(l.same(before));
    update(l, keel::open_gate(), {.rule = balance_rule::sign, .rate = 1.0f}).or_throw();
    CHECK(l.bias == std::vector<float>{-1.0f, -1.0f, 0.0f, 1.0f});
}

TEST_CASE("a ledger that commit never wrote is not trusted") {
    keel::cpu be;
    list a{10, 6, 5, 3};
    auto const demand = demand_of(a, 12, 2);
    for (int64_t count : {int64_t{-1}, int64_t{5}, int64_t{1000}, std::numeric_limits<int64_t>::max()}) {
        layer l(4, 4);
        l.ledger[6] = count, l.ledger[4] = 2;
        layer const before = l;
        keel::demand_counts pending;
        CHECK(keel::commit(be, l.state(), demand, {.micro_batch = 5}).code == keel::status_code::bad_state);
        CHECK(keel::pending_demand(l.state(), pending).code == keel::status_code::bad_state);
        CHECK(keel::update_balance(be, l.state(), keel::reduced_over_ranks(demand), keel::open_gate()).code == keel::status_code::bad_state);
        CHECK(l.same(before));
    }
    layer l(4);
    l.ledger[3] = -12;
    CHECK(std::string(keel::commit(be, l.state(), demand, {}).property) == "tokens");
}

TEST_CASE("counts that something wrote over are refused before they are added") {
    keel::cpu be;
    int64_t const most = std::numeric_limits<int64_t>::max();
    layer l(4);
    list a{10, 6, 5, 3};
    keel::demand_counts const demand = demand_of(a, 12, 2);
    a[0] = 1, a[2] = most; // the view is of this memory
    layer const before = l;
    CHECK(keel::commit(be, l.state(), demand, {}).code == keel::status_code::bad_state);
    CHECK(l.same(before));
    CHECK(keel::demand_from_counts(keel::vec(a.data(), 4), 12, 2, const_cast<keel::demand_counts&>(demand)).code ==
          keel::status_code::bad_state);
    a = {10, 6, 5, 3};
    keel::commit(be, l.state(), demand, {}).or_throw();
    for (int64_t bad : {most, int64_t{13}, int64_t{-1}}) {
        l.state().pending(1) = bad;
        CHECK(keel::commit(be, l.state(), demand, {.micro_batch = 1}).code == keel::status_code::bad_state);
    }
}

TEST_CASE("one k a step, and 2^42 assignments") {
    keel::cpu be;
    layer l(4);
    list two{10, 6, 5, 3}, one{6, 2, 2, 2};
    keel::commit(be, l.state(), demand_of(two, 12, 2), {.micro_batch = 0}).or_throw();
    layer const before = l;
    auto s = keel::commit(be, l.state(), demand_of(one, 12, 1), {.micro_batch = 1});
    CHECK(s.code == keel::status_code::bad_state);
    CHECK(std::string(s.property) == "experts a token");
    list many{40, 40, 40, 40};
    s = keel::update_balance(be, l.state(), keel::reduced_over_ranks(demand_of(many, 160, 1)), keel::open_gate());
    CHECK(s.code == keel::status_code::bad_state);
    CHECK(std::string(s.property) == "experts a token");
    CHECK(l.same(before));

    int64_t const half = int64_t{1} << 41; // tokens of k = 1: 2^41 twice is the limit, one more is beyond it
    list large{half, 0, 0, 0}, small{1, 0, 0, 0};
    layer full(4);
    keel::commit(be, full.state(), demand_of(large, half, 1), {.micro_batch = 0}).or_throw();
    keel::commit(be, full.state(), demand_of(large, half, 1), {.micro_batch = 1}).or_throw();
    layer const reached = full;
    s = keel::commit(be, full.state(), demand_of(small, 1, 1), {.micro_batch = 2});
    CHECK(s.code == keel::status_code::bad_state);
    CHECK(std::string(s.property) == "tokens");
    CHECK(full.same(reached));
    update(full, keel::open_gate(), {.rule = balance_rule::proportional, .rate = 1.0f}).or_throw(); // exact at the limit
    CHECK(full.bias == std::vector<float>{-0.75f, 0.25f, 0.25f, 0.25f});
}

TEST_CASE("a late commit of a skipped attempt is seen by the next attempt, and a closed gate clears it") {
    keel::cpu be;
    layer l(4);
    list a{10, 6, 5, 3};
    auto const demand = demand_of(a, 12, 2);
    keel::commit(be, l.state(), demand, {.step = 1}).or_throw();
    update(l, keel::step_gate{}).or_throw();
    keel::commit(be, l.state(), demand, {.step = 1}).or_throw(); // late
    auto const s = keel::commit(be, l.state(), demand, {.step = 1, .attempt = 1});
    CHECK(s.code == keel::status_code::bad_state);
    CHECK(std::string(s.argument) == "key.attempt");
    update(l, keel::step_gate{}).or_throw();
    CHECK(l.same(layer(4)));
    keel::commit(be, l.state(), demand, {.step = 1, .attempt = 1}).or_throw();
    CHECK(l.pending == a);
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

TEST_CASE("a bad call of the balance functions names the argument and changes nothing") {
    keel::cpu be;
    layer l(4, 2);
    list a{10, 6, 5, 3};
    auto const demand = demand_of(a, 12, 2);
    CHECK(update(l).code == keel::status_code::bad_state);
    CHECK(keel::commit(be, l.state(), keel::demand_counts(keel::vec(a.data(), 4)), {}).code == keel::status_code::bad_state);
    keel::balance_state s = l.state();
    s.ledger.extent[0] = keel::balance_ledger_size(0);
    CHECK(keel::commit(be, s, demand, {}).code == keel::status_code::bad_shape);
    keel::commit(be, l.state(), demand, {.micro_batch = 1}).or_throw();
    keel::commit(be, l.state(), demand, {.micro_batch = 2}).or_throw();
    layer const before = l;
    CHECK(keel::commit(be, l.state(), demand, {.micro_batch = 3}).code == keel::status_code::bad_state); // the ledger is full
    list other{6, 2, 2, 2};
    CHECK(keel::commit(be, l.state(), demand_of(other, 12, 1), {.micro_batch = 3}).code == keel::status_code::bad_state); // another k
    for (float rate : {-1.0f, std::numeric_limits<float>::infinity(), std::nanf("")})
        CHECK(update(l, keel::open_gate(), {.rate = rate}).code == keel::status_code::bad_option);
    CHECK(keel::commit(be, l.state(), demand, {.step = -1}).code == keel::status_code::bad_option);
    // Outputs inside the state that share memory.
    using keel::status_code;
    auto const with = [&](keel::balance_state t) { return keel::commit(be, t, demand, {.micro_batch = 3}).code; };
    auto const memory = l.state();
    CHECK(with({keel::vec(reinterpret_cast<float*>(l.pending.data()), 4), memory.pending, memory.ledger}) == status_code::overlap);
    CHECK(with({memory.bias, keel::vec(l.ledger.data() + 12, 4), memory.ledger}) == status_code::overlap);
    CHECK(with({keel::vec(reinterpret_cast<float*>(l.ledger.data() + 8), 4), memory.pending, memory.ledger}) == status_code::overlap);
    CHECK(with({memory.bias, keel::vec(a.data(), 4), memory.ledger}) == status_code::overlap); // the state over the demand
    CHECK(with({keel::vec(reinterpret_cast<float*>(a.data()), 4), memory.pending, memory.ledger}) == status_code::overlap);
    list within(static_cast<std::size_t>(keel::balance_ledger_size(2) + 4)); // a fresh ledger that ends in demand
    keel::view<int64_t, 1> const tail = keel::vec(within.data() + keel::balance_ledger_size(2) - 1, 4);
    for (int64_t e = 0; e < 4; ++e) tail(e) = 6;
    keel::demand_counts last;
    keel::demand_from_counts(tail, 12, 2, last).or_throw();
    CHECK(keel::commit(be, {memory.bias, memory.pending, keel::vec(within.data(), keel::balance_ledger_size(2))}, last, {}).code ==
          status_code::overlap);
    list shifted{6, 6, 6, 6, 0}; // demand that lies over part of the pending counts
    keel::balance_state moved = memory;
    moved.pending = keel::vec(shifted.data() + 1, 4);
    keel::demand_counts over;
    keel::demand_from_counts(keel::vec(shifted.data(), 4), 12, 2, over).or_throw();
    CHECK(keel::update_balance(be, moved, keel::reduced_over_ranks(over), keel::open_gate()).code == status_code::overlap);
    CHECK(l.same(before));
    for (list const& overwritten : {list{11, 6, 5, 3}, list{-1, 12, 10, 3}, list{13, 6, 5, 0}}) { // since route filled them
        layer fresh(4, 2);
        layer const start = fresh;
        a = overwritten;
        auto const said = keel::commit(be, fresh.state(), demand, {});
        CHECK(said.code == keel::status_code::bad_state);
        CHECK(std::string(said.argument) == "demand");
        CHECK(fresh.same(start));
    }
    update(l).or_throw();
    CHECK(l.pending == list(4, 0));
}
