// State that goes through bytes steps on as if it had not; bytes that are not it are refused before a write.
#include <keel/backend/cpu/cpu.hpp>
#include <keel/optim/saved_state.hpp>
#include <optim/muon_problem.hpp>
#include <support/catch.hpp>

using namespace keel_test;
using keel::bf16;
using keel::e4m3;
using keel::momentum_rule;
using keel::status_code;

namespace {

keel::cpu<> const be;
constexpr keel::step_gate open{.apply = 1, .clip = 1.0f};
keel::muon_options const options{.learning_rate = 0.01f, .weight_decay = 0.1f};

using codes = keel::block_scaled<e4m3, keel::e8m0_scale, 1, 32>;
using in_codes = muon_problem<codes, bf16>;

using memory = std::vector<std::byte>;
keel::view<std::byte, 1> out(memory& m) { return keel::vec(m.data(), static_cast<int64_t>(m.size())); }
keel::view<std::byte const, 1> in(memory const& m) { return keel::vec(m.data(), static_cast<int64_t>(m.size())); }

template <class Problem> memory saved(Problem& p, momentum_rule rule = momentum_rule::ema) {
    memory bytes(static_cast<std::size_t>(keel::muon_state_bytes(p.get())));
    keel::save_muon_state(p.get(), rule, out(bytes)).or_throw();
    return bytes;
}
template <class Problem> Problem moved(keel::muon_plan<> const& plan, bool compensated) {
    Problem p(plan);
    p.balanced = true, p.compensated = compensated;
    for (int t = 0; t < 2; ++t) p.step(be, open, options).or_throw();
    return p;
}

} // namespace

TEST_CASE("muon's state goes through bytes and steps on, bit for bit, in another layout and another cut too") { // Megatron #6920; NorMuon #7: resume
    auto const plan = keel::plan_muon(2, 12, 40, {{"a", 8}, {"b", 4}});
    auto const round_trip = [&]<class Problem>(Problem const&, bool compensated) {
        auto p = moved<Problem>(plan, compensated);
        auto const bytes = saved(p);
        Problem q(plan);
        q.balanced = true, q.compensated = compensated;
        q.weight = p.weight;
        keel::load_muon_state(q.get(), momentum_rule::ema, in(bytes)).or_throw();
        CHECK(q.bits() == p.bits());
        CHECK(saved(q) == bytes);
        p.step(be, open, options).or_throw(), q.step(be, open, options).or_throw();
        CHECK(q.bits() == p.bits());
        CHECK(q.untouched());
    };
    round_trip(in_codes(plan), true);
    round_trip(in_codes(plan), false);
    round_trip(muon_problem<>(plan), false);
    // fp32 momentum that lies in columns takes what one in rows had.
    auto p = moved<muon_problem<>>(plan, false);
    auto q = p.get();
    guarded_matrix<float> turned(40, 12 * 2);
    q.plan = keel::plan_muon(2, 12, 40);
    q.momentum = {turned.view().data, {2, 12, 40}, {12, 1, turned.view().stride[0]}};
    keel::load_muon_state(q, momentum_rule::ema, in(saved(p))).or_throw();
    for (int64_t i = 0; i < 24; ++i)
        for (int64_t j = 0; j < 40; ++j) CHECK(turned.get(j, i) == p.momentum.values.get(i, j));
}

TEST_CASE("adamw's state goes through bytes and steps on, bit for bit") {
    int64_t const n = 300;
    guarded_matrix<float> g(1, n, 0, floats(data_kind::normal, n));
    struct one {
        guarded_matrix<bf16> w, c;
        guarded_matrix<e4m3> m;
        guarded_matrix<float> scales, v;
        int64_t applied = 0;
        explicit one(int64_t size) : w(1, size, 0, floats(data_kind::normal, size)), c(1, size), m(1, size), scales(1, (size + 127) / 128), v(1, size) {}
        keel::kahan_weights<> weights() { return {w.vec(), c.vec()}; }
        keel::adamw_state_of<keel::row_blocks<e4m3>, float> state() { return {{m.view(), scales.view()}, v.vec(), &applied}; }
        uint64_t bits() const {
            digest d;
            d.add(w), d.add(c), d.add(m), d.add(scales), d.add(v), d.add(&applied, sizeof applied);
            return d.value();
        }
    };
    one p(n), q(n);
    for (int t = 0; t < 3; ++t) keel::adamw_step(be, g.vec(), p.weights(), p.state(), open).or_throw();
    memory bytes(static_cast<std::size_t>(keel::adamw_state_bytes(p.weights(), p.state())));
    CHECK(bytes.size() == 128 + 300 * (2 + 1 + 4) + 3 * 4);
    keel::save_adamw_state(p.weights(), p.state(), out(bytes)).or_throw();
    q.w = p.w;
    keel::load_adamw_state(q.weights(), q.state(), in(bytes)).or_throw();
    CHECK(q.bits() == p.bits());
    keel::adamw_step(be, g.vec(), p.weights(), p.state(), open).or_throw();
    keel::adamw_step(be, g.vec(), q.weights(), q.state(), open).or_throw();
    CHECK(q.bits() == p.bits());

    one other(n + 1);
    auto const before = other.bits();
    CHECK(keel::load_adamw_state(other.weights(), other.state(), in(bytes)).message() ==
          "load_adamw_state: in has columns = 300, wanted 301 (bad_state)");
    CHECK(keel::load_adamw_state(keel::stochastic_weights<>{q.w.vec()}, q.state(), in(bytes)).property == std::string("format of the compensation"));
    auto m = guarded_matrix<float>(1, n);
    CHECK(keel::load_adamw_state(q.weights(), keel::adamw_state{m.vec(), q.v.vec(), &q.applied}, in(bytes)).code == status_code::bad_state);
    CHECK(keel::load_adamw_state(q.weights(), keel::adamw_state_of<keel::row_blocks<e4m3>, float>{q.state().m, q.v.vec(), nullptr}, in(bytes)).code ==
          status_code::bad_pointer);
    CHECK(other.bits() == before);
    CHECK(q.bits() == p.bits());
}

TEST_CASE("bytes that are not this state are refused before a write") {
    auto const plan = keel::plan_muon(1, 12, 40);
    auto p = moved<in_codes>(plan, true);
    auto const bytes = saved(p, momentum_rule::heavy_ball);
    in_codes q(plan);
    q.balanced = true, q.compensated = true;
    auto const before = q.bits();
    auto const load = [&](memory const& m, momentum_rule rule = momentum_rule::heavy_ball) { return keel::load_muon_state(q.get(), rule, in(m)); };
    auto const changed = [&](std::size_t at) {
        memory m = bytes;
        m[at] ^= std::byte{4};
        return m;
    };
    CHECK(load(bytes, momentum_rule::ema).message() ==
          "load_muon_state: in has momentum rule = 1, wanted momentum of the rule that the call names (0: ema, 1: heavy_ball) (bad_state)");
    CHECK(load(changed(0)).message() == "load_muon_state: in, wanted bytes that keel saved, in this machine's byte order (bad_state)");
    CHECK(load(changed(8)).message() == "load_muon_state: in has version = 5, wanted 1 (bad_state)");
    // Any byte at all.
    for (std::size_t at = 0; at < bytes.size(); ++at) {
        INFO(at);
        CHECK(load(changed(at)).code == status_code::bad_state);
    }
    for (std::size_t length : {std::size_t{0}, std::size_t{127}, std::size_t{128}, bytes.size() - 1, bytes.size() + 1}) {
        memory m = bytes;
        m.resize(length);
        CHECK(load(m).code == status_code::bad_shape);
    }
    q.balanced = false; // no second moment to put it
    CHECK(load(bytes).property == std::string("format of the second moment"));
    q.balanced = true, q.compensated = false;
    CHECK(load(bytes).property == std::string("format of the compensation"));
    q.compensated = true;
    memory adamw = bytes;
    adamw[12] = std::byte{2};
    CHECK(load(adamw).property == std::string("kind"));
    CHECK(q.bits() == before);
    memory small(bytes.size() - 1);
    CHECK(keel::save_muon_state(p.get(), momentum_rule::ema, out(small)).code == status_code::bad_shape);
    keel::muon_parameter<float, float, bf16, codes, bf16> wrong = p.get();
    wrong.momentum.codes.extent[1] = 39;
    CHECK(keel::save_muon_state(wrong, momentum_rule::ema, out(small)).code == status_code::bad_shape);
    CHECK(load(bytes).ok());
    p.weight = q.weight;
    CHECK(q.bits() == p.bits());
}
