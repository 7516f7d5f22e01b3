// What the balance functions refuse: stale demand, ledgers and counts that were written over, late commits, bad calls.
#include <limits>
#include <string>

#include <keel/backend/cpu/cpu.hpp>
#include <keel/moe/balance.hpp>
#include <moe/balance_layer.hpp>
#include <support/catch.hpp>
#include <support/data.hpp>

using namespace keel_test;
using keel::balance_rule;

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
