// The gradients of gated_attention against finite differences of the formula, and against textbook gradients in double.
#include <attention/attention_case.hpp>
#include <keel/backend/cpu/cpu.hpp>
#include <keel/backend/cpu/matmul.hpp>
#include <support/backends.hpp>
#include <support/catch.hpp>

using namespace keel_test;

namespace {

template <class T> void check_backward(attention_setup const& setup) {
    INFO("heads " << setup.heads << "/" << setup.kv_heads << " head_dim " << setup.head_dim << " gate "
                  << setup.gate_dim << " " << name_of(setup.kind) << " first document " << setup.lengths[0]);
    attention_case<T> c(setup);
    c.forward(keel::cpu{});
    c.backward(keel::cpu{});
    CHECK(c.untouched());
    auto const want = oracle_of(c);
    CHECK(outside(c.dq, want.dq) == 0);
    CHECK(outside(c.dk, want.dk) == 0);
    CHECK(outside(c.dv, want.dv) == 0);
    CHECK(outside(c.dgate, want.dgate) == 0);
}

struct loose_values {
    std::vector<double> q, k, v, gate;
};
template <class T> std::vector<double> flat(guarded_matrix<T> const& m) {
    std::vector<double> x;
    for (int64_t i = 0; i < m.rows(); ++i)
        for (int64_t j = 0; j < m.columns(); ++j) x.push_back(m.at(i, j));
    return x;
}

} // namespace

TEST_CASE("gated_attention's gradients match finite differences of the formula in double") {
    // L = sum(dy * y). Central differences, step 1e-4, error about 1e-8; fp32 arithmetic of O(1) values leaves 1e-5.
    for (int64_t gate : {0, 1, 5}) {
        attention_setup const s{.lengths = {5, 3, 1}, .heads = 4, .kv_heads = 2, .head_dim = 5, .gate_dim = gate};
        attention_case<float> c(s);
        c.forward(keel::cpu{});
        c.backward(keel::cpu{});
        loose_values x{flat(c.q), flat(c.k), flat(c.v), flat(c.gate)};
        auto const reader = [](std::vector<double> const& values, int64_t width) {
            return [&values, width](int64_t i, int64_t j) { return values[static_cast<std::size_t>(i * width + j)]; };
        };
        auto const dy = flat(c.dy);
        auto const loss = [&] {
            attention_oracle const o(s, reader(x.q, 20), reader(x.k, 10), reader(x.v, 10), reader(x.gate, 4 * gate),
                                     reader(dy, 20));
            double total = 0;
            for (std::size_t i = 0; i < dy.size(); ++i) total += dy[i] * o.y.value[i];
            return total;
        };
        auto const check = [&](char const* name, std::vector<double>& values, guarded_matrix<float> const& gradient) {
            INFO(name << " gate " << gate);
            auto const got = flat(gradient);
            for (std::size_t i = 0; i < values.size(); ++i) {
                double const keep = values[i], h = 1e-4;
                values[i] = keep + h;
                double const up = loss();
                values[i] = keep - h;
                double const down = loss();
                values[i] = keep;
                CHECK(got[i] == Approx((up - down) / (2 * h)).margin(1e-5).epsilon(1e-5));
            }
        };
        check("dq", x.q, c.dq);
        check("dk", x.k, c.dk);
        check("dv", x.v, c.dv);
        check("dgate", x.gate, c.dgate);
    }
}

TEST_CASE("gated_attention's gradients match textbook gradients from the ungated output, in both formats") {
    for (int64_t d : {1, 5, 17, 64, 80})
        for (int64_t gate : {int64_t{0}, int64_t{1}, d}) {
            if (!every_case && d != 5 && !(d == 64 && gate == 1)) continue;
            check_backward<float>(
                {.lengths = {67, 1, 0, 64, 13}, .heads = 4, .kv_heads = 2, .head_dim = d, .gate_dim = gate});
            check_backward<keel::bf16>(
                {.lengths = {67, 1, 0, 64, 13}, .heads = 4, .kv_heads = 2, .head_dim = d, .gate_dim = gate});
        }
    for (int64_t heads : {1, 3, 12})
        check_backward<float>({.lengths = {70, 66}, .heads = heads, .kv_heads = 1, .head_dim = 8, .gate_dim = 1});
    check_backward<float>({.lengths = {70}, .heads = 3, .kv_heads = 3, .head_dim = 8, .scale = -0.7f});
    // Several key tiles.
    check_backward<float>({.lengths = {every_case ? 1100 : 530, every_case ? 513 : 40}, .heads = 2, .kv_heads = 1, .head_dim = 16, .gate_dim = 1});
    check_backward<keel::bf16>({.lengths = {every_case ? 1100 : 530, every_case ? 513 : 40}, .heads = 2, .kv_heads = 1, .head_dim = 16, .gate_dim = 16});
    for (data_kind kind : {data_kind::outlier, data_kind::zeros, data_kind::equal})
        check_backward<float>(
            {.lengths = {40, every_case ? 600 : 520}, .heads = 2, .kv_heads = 2, .head_dim = 8, .gate_dim = 8, .kind = kind});
}

TEST_CASE("an open gate keeps its gradient in bf16") { // sigmoid(8) rounds to 1 in bf16, but 1 - sigmoid(8) = 3.35e-4
    for (int64_t gate : {1, 4}) {
        attention_case<keel::bf16> c({.lengths = {20}, .heads = 1, .kv_heads = 1, .head_dim = 4, .gate_dim = gate});
        for (int64_t t = 0; t < 20; ++t)
            for (int64_t j = 0; j < gate; ++j) c.gate.set(t, j, to_format<keel::bf16>(8.0f));
        c.forward(keel::cpu{});
        c.backward(keel::cpu{});
        auto const want = oracle_of(c);
        CHECK(outside(c.dgate, want.dgate) == 0);
        for (int64_t t = 0; t < 20; ++t) CHECK(c.dgate.at(t, 0) != 0);
    }
}

TEST_CASE("gradients that are not wanted change nothing in the others") {
    attention_setup const s{.lengths = {600, 30}, .heads = 4, .kv_heads = 2, .head_dim = 6, .gate_dim = 1};
    attention_case<float> all(s), one(s);
    all.forward(keel::cpu{});
    all.backward(keel::cpu{});
    one.forward(keel::cpu{});
    one.backward(keel::cpu{}, {.dq = heads_of(one.dq, 4, 6)});
    CHECK(one.dq.contents() == all.dq.contents());
    one.backward(keel::cpu{}, {.dk = heads_of(one.dk, 2, 6)});
    CHECK(one.dk.contents() == all.dk.contents());
    one.backward(keel::cpu{}, {.dv = heads_of(one.dv, 2, 6)});
    CHECK(one.dv.contents() == all.dv.contents());
    one.backward(keel::cpu{}, {.dgate = heads_of(one.dgate, 4, 1)});
    CHECK(one.dgate.contents() == all.dgate.contents());
}

TEST_CASE("dy may be a broadcast row, and the gradients parts of one buffer") { // pytorch #133671, quack #88
    int64_t const tokens = 70, heads = 4, kv = 2, d = 8, width = 2 * heads * d + 2 * kv * d;
    attention_setup const s{.lengths = {tokens}, .heads = heads, .kv_heads = kv, .head_dim = d, .gate_dim = d};
    attention_case<float> c(s);
    for (int64_t t = 1; t < tokens; ++t)
        for (int64_t j = 0; j < heads * d; ++j) c.dy.set(t, j, c.dy.get(0, j));
    c.forward(keel::cpu{});
    c.backward(keel::cpu{});
    guarded_matrix<float> fused(tokens, width, 1);
    auto* const at = fused.view().data;
    int64_t const pitch = width + 1;
    // [dq_0 dz_0 dq_1 dz_1 ... | dk | dv]
    keel::attention_gradients<float> const out{{at, {tokens, heads, d}, {pitch, 2 * d, 1}},
                                               heads_of(fused, kv, d, 2 * heads * d),
                                               heads_of(fused, kv, d, (2 * heads + kv) * d),
                                               {at + d, {tokens, heads, d}, {pitch, 2 * d, 1}}};
    scratch ws(keel::gated_attention_backward_workspace<float>(keel::cpu{}, s.shape()));
    auto const backward = [&](keel::view<float, 3> dy, keel::attention_gradients<float> to) {
        return keel::gated_attention_backward(keel::cpu{}, dy, heads_of(c.q, heads, d), heads_of(c.k, kv, d),
                                              heads_of(c.v, kv, d), c.gate_view(), {}, heads_of(c.y, heads, d),
                                              {.lse = c.lse.view()}, to, {}, ws.get());
    };
    backward({c.dy.view().data, {tokens, heads, d}, {0, d, 1}}, out).or_throw();
    CHECK(fused.untouched());
    int64_t wrong = 0;
    for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t j = 0; j < heads * d; ++j) {
            wrong += fused.get(t, j / d * 2 * d + j % d) != c.dq.get(t, j);
            wrong += fused.get(t, (j / d * 2 + 1) * d + j % d) != c.dgate.get(t, j);
        }
        for (int64_t j = 0; j < kv * d; ++j) {
            wrong += fused.get(t, 2 * heads * d + j) != c.dk.get(t, j);
            wrong += fused.get(t, (2 * heads + kv) * d + j) != c.dv.get(t, j);
        }
    }
    CHECK(wrong == 0);
    // Parts that do overlap are refused.
    using keel::status_code;
    auto shifted = out;
    shifted.dk.data -= 1;
    CHECK(backward(heads_of(c.dy, heads, d), shifted).code == status_code::overlap);
    shifted = out;
    shifted.dgate.data -= 1;
    CHECK(backward(heads_of(c.dy, heads, d), shifted).code == status_code::overlap);
    shifted = out;
    shifted.dv = shifted.dk;
    CHECK(backward(heads_of(c.dy, heads, d), shifted).code == status_code::overlap);
    shifted = out; // dv's last columns are the next token's first, which are dq's
    shifted.dv.data += 1 + d;
    CHECK(backward(heads_of(c.dy, heads, d), shifted).code == status_code::overlap);
    shifted = out; // dgate's stretch juts over the head's
    shifted.dgate.data += 1;
    CHECK(backward(heads_of(c.dy, heads, d), shifted).code == status_code::overlap);
}

TEST_CASE("gradients of heads of more than a thousand elements") {
    if (!every_case) return; // four billion operations
    // Values of 1: the scores do not matter, so dq is nothing, and dv of all keys together is dy of all queries.
    attention_case<float> c({.lengths = {300}, .heads = 8, .kv_heads = 1, .head_dim = 1030});
    for (int64_t t = 0; t < 300; ++t)
        for (int64_t j = 0; j < 1030; ++j) c.v.set(t, j, 1.0f);
    c.forward(keel::cpu{});
    c.backward(keel::cpu{});
    int64_t far = 0;
    for (int64_t j = 0; j < 1030; ++j) {
        double dv = 0, dy = 0, size = 0;
        for (int64_t t = 0; t < 300; ++t) {
            dv += c.dv.at(t, j);
            for (int64_t h = 0; h < 8; ++h) dy += c.dy.at(t, h * 1030 + j), size += std::abs(c.dy.at(t, h * 1030 + j));
            for (int64_t h = 0; h < 8; ++h) far += !(std::abs(c.dq.at(t, h * 1030 + j)) <= 1e-3); // D is of O(30), its error 2^-18
        }
        far += !(std::abs(dv - dy) <= 2400 * 0x1p-24 * size);
    }
    CHECK(far == 0);
    check_backward<keel::bf16>({.lengths = {20, 3}, .heads = 8, .kv_heads = 1, .head_dim = 1025, .gate_dim = 1});
}

TEST_CASE("logits of a million keep the digits of their gradients where lse_rest is saved") {
    // Scores are whole numbers, exact in fp32: what is lost is lse's alone, 2^-5 at 1e6.
    attention_case<float> c({.lengths = {600}, .heads = 2, .kv_heads = 1, .head_dim = 1, .gate_dim = 1, .scale = 1.0f});
    for (int64_t t = 0; t < 600; ++t) {
        for (int64_t h = 0; h < 2; ++h) c.q.set(t, h, 1.0f);
        c.k.set(t, 0, 1e6f + static_cast<float>(t % 4));
    }
    guarded_matrix<float> rest(600, 2, 1);
    scratch ws(keel::gated_attention_workspace<float>(keel::cpu{}, c.setup.shape())),
        more(keel::gated_attention_backward_workspace<float>(keel::cpu{}, c.setup.shape()));
    auto const q = heads_of(c.q, 2, 1), k = heads_of(c.k, 1, 1), v = heads_of(c.v, 1, 1), y = heads_of(c.y, 2, 1);
    auto const run = [&](keel::attention_saved saved) {
        keel::gated_attention(keel::cpu{}, q, k, v, c.gate_view(), {}, y, saved, {}, {.scale = 1.0f}, ws.get()).or_throw();
        keel::gated_attention_backward(keel::cpu{}, heads_of(c.dy, 2, 1), q, k, v, c.gate_view(), {}, y, saved,
                                       {.dk = heads_of(c.dk, 1, 1), .dv = heads_of(c.dv, 1, 1)}, {.scale = 1.0f}, more.get())
            .or_throw();
    };
    auto const want = oracle_of(c);
    run({.lse = c.lse.view(), .lse_rest = rest.view()});
    CHECK(rest.untouched());
    int64_t wrong = 0;
    auto const far = [&](double got, measured const& w, int64_t t, double bound) {
        auto const e = static_cast<std::size_t>(t);
        return !(std::abs(got - w.value[e]) <= bound * w.magnitude[e]);
    };
    for (int64_t t = 0; t < 600; ++t) wrong += far(c.dv.at(t, 0), want.dv, t, 0x1p-18); // sums of up to 1200 terms
    CHECK(wrong == 0);
    run({.lse = c.lse.view()}); // without it they are lost
    for (int64_t t = 0; t < 600; ++t) wrong += far(c.dv.at(t, 0), want.dv, t, 0x1p-10);
    CHECK(wrong > 100);
    CHECK(keel::gated_attention(keel::cpu{}, q, k, v, c.gate_view(), {}, y,
                                {.lse = c.lse.view(), .lse_rest = c.lse.view()}, {}, {}, ws.get())
              .code == keel::status_code::overlap);
}

TEST_CASE("keys that no head reads have gradients of zero") {
    attention_case<float> c({.lengths = {6}, .heads = 0, .kv_heads = 2, .head_dim = 3});
    for (int64_t t = 0; t < 6; ++t)
        for (int64_t j = 0; j < 6; ++j) c.dk.set(t, j, 7.0f), c.dv.set(t, j, 7.0f);
    c.forward(keel::cpu{});
    c.backward(keel::cpu{});
    for (int64_t t = 0; t < 6; ++t)
        for (int64_t j = 0; j < 6; ++j) CHECK((c.dk.at(t, j) == 0 && c.dv.at(t, j) == 0));
    CHECK(c.untouched());
}

TEST_CASE("gradients that underflow are +0, masked or not") {
    // ds of query 1 and key 0 is negative and times 2^-149 rounds to -0; an unseen NaN key has the product made row by row.
    for (float unseen : {1.0f, std::numeric_limits<float>::quiet_NaN()}) {
        attention_case<float> c({.lengths = {3}, .heads = 1, .kv_heads = 1, .head_dim = 1});
        for (int64_t t = 0; t < 3; ++t) c.q.set(t, 0, 0.0f), c.k.set(t, 0, 0x1p-149f), c.v.set(t, 0, t == 0 ? -1.0f : 1.0f);
        c.k.set(1, 0, -0.0f), c.k.set(2, 0, unseen);
        c.dy.set(0, 0, 0.0f), c.dy.set(1, 0, 0.5f), c.dy.set(2, 0, 0.0f);
        c.forward(keel::cpu{});
        c.backward(keel::cpu{});
        CHECK(keel::bits(c.dq.get(1, 0)) == 0u);
    }
}

TEST_CASE("a bad call of gated_attention_backward names the argument") {
    attention_case<float> c({.lengths = {6}, .heads = 4, .kv_heads = 2, .head_dim = 3});
    scratch ws(keel::gated_attention_backward_workspace<float>(keel::cpu{}, c.setup.shape()));
    auto const call = [&](keel::attention_saved saved, keel::attention_gradients<float> out, keel::workspace room) {
        return keel::gated_attention_backward(keel::cpu{}, heads_of(c.dy, 4, 3), heads_of(c.q, 4, 3),
                                              heads_of(c.k, 2, 3), heads_of(c.v, 2, 3), {}, {}, heads_of(c.y, 4, 3),
                                              saved, out, {}, room);
    };
    using keel::status_code;
    auto const dq = heads_of(c.dq, 4, 3);
    CHECK(call({}, {.dq = dq}, ws.get()).message() ==
          "gated_attention_backward: saved.lse has rows = 0, wanted 6 (bad_shape)");
    CHECK(call({.lse = c.lse.view()}, {.dk = dq}, ws.get()).code == status_code::bad_shape);
    CHECK(call({.lse = c.lse.view()}, {.dq = heads_of(c.y, 4, 3)}, ws.get()).code == status_code::overlap);
    CHECK(call({.lse = c.lse.view()}, {.dq = dq, .dgate = heads_of(c.dgate, 4, 0)}, ws.get()).code ==
          status_code::bad_shape);
    CHECK(call({.lse = c.lse.view()}, {.dq = dq}, {}).code == status_code::small_workspace);
}
