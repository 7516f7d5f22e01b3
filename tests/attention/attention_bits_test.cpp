// What gated_attention promises about bits beside those of backends: packed or not, whatever comes later, on two threads.
#include <attention/attention_case.hpp>
#include <keel/backend/cpu/matmul.hpp>
#include <keel/backend/cpu/thread_pool.hpp>
#include <keel/backend/reference_matmul.hpp>
#include <support/backends.hpp>
#include <support/catch.hpp>

using namespace keel_test;

namespace {

/// Rows [first, first + count) of a matrix, as they lie in memory.
template <class T> std::vector<T> rows_of(guarded_matrix<T> const& m, int64_t first, int64_t count) {
    std::vector<T> x;
    for (int64_t i = first; i < first + count; ++i)
        for (int64_t j = 0; j < m.columns(); ++j) x.push_back(m.get(i, j));
    return x;
}
template <class T> void copy_rows(guarded_matrix<T> const& from, int64_t first, guarded_matrix<T>& to) {
    for (int64_t i = 0; i < to.rows(); ++i)
        for (int64_t j = 0; j < to.columns(); ++j) to.set(i, j, from.get(first + i, j));
}

} // namespace

TEST_CASE("gated_attention has the reference's bits on a lockstep warp, and on any data") {
    attention_setup const s{.lengths = {70, 1, 530}, .heads = 3, .kv_heads = 1, .head_dim = 20, .gate_dim = 20};
    if (every_case) CHECK(attention_result<keel::bf16>(s, keel::simt<32>{}) == attention_result<keel::bf16>(s, keel::reference{}));
    for (data_kind kind : {data_kind::normal, data_kind::with_nan, data_kind::with_inf, data_kind::mixed_scales,
                           data_kind::any_bits, data_kind::tiny})
        for (int64_t gate : {0, 1}) {
            if (!every_case && (kind == data_kind::mixed_scales || kind == data_kind::tiny || gate == 1)) continue;
            attention_setup const f{
                .lengths = {130, 20}, .heads = 4, .kv_heads = 2, .head_dim = 9, .gate_dim = gate, .kind = kind};
            INFO(name_of(kind) << " gate " << gate);
            CHECK(attention_result<float>(f, keel::cpu{}) == attention_result<float>(f, keel::reference{}));
        }
}

TEST_CASE("packed documents have the bits of documents alone") { // transformers #46634, nanoVLM #204
    attention_setup const s{.lengths = {70, 1, 0, 600, 64}, .heads = 4, .kv_heads = 2, .head_dim = 12, .gate_dim = 1};
    attention_case<keel::bf16> packed(s);
    packed.forward(keel::cpu{});
    packed.backward(keel::cpu{});
    for (std::size_t d = 0; d < s.lengths.size(); ++d) {
        INFO("document " << d);
        int64_t const first = packed.offsets[d], length = s.lengths[d];
        attention_setup one = s;
        one.lengths = {length};
        attention_case<keel::bf16> alone(one);
        copy_rows(packed.q, first, alone.q), copy_rows(packed.k, first, alone.k), copy_rows(packed.v, first, alone.v);
        copy_rows(packed.gate, first, alone.gate), copy_rows(packed.dy, first, alone.dy);
        alone.forward(keel::cpu{});
        alone.backward(keel::cpu{});
        CHECK(equal_bits(rows_of(packed.y, first, length), rows_of(alone.y, 0, length)));
        CHECK(equal_bits(rows_of(packed.lse, first, length), rows_of(alone.lse, 0, length)));
        CHECK(equal_bits(rows_of(packed.dq, first, length), rows_of(alone.dq, 0, length)));
        CHECK(equal_bits(rows_of(packed.dk, first, length), rows_of(alone.dk, 0, length)));
        CHECK(equal_bits(rows_of(packed.dv, first, length), rows_of(alone.dv, 0, length)));
        CHECK(equal_bits(rows_of(packed.dgate, first, length), rows_of(alone.dgate, 0, length)));
    }
}

TEST_CASE("a token's outputs and dq do not change when a later token does, be it to NaN or Inf") { // FA #1025
    attention_setup const s{.lengths = {600}, .heads = 4, .kv_heads = 2, .head_dim = 10, .gate_dim = 10};
    attention_case<float> before(s);
    before.forward(keel::cpu{});
    before.backward(keel::cpu{});
    for (float poison : {3.5f, -1e30f, std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()})
        for (int64_t changed : {1, 37, 64, 511, 512, 555, 599}) {
            if (!every_case && (std::isinf(poison) || poison < 0 || (changed != 37 && changed != 512))) continue;
            INFO("token " << changed << " set to " << poison);
            attention_case<float> after(s);
            for (int64_t j = 0; j < 40; ++j)
                after.q.set(changed, j, poison), after.gate.set(changed, j, poison), after.dy.set(changed, j, poison);
            for (int64_t j = 0; j < 20; ++j) after.k.set(changed, j, poison), after.v.set(changed, j, poison);
            after.forward(keel::cpu{});
            after.backward(keel::cpu{});
            CHECK(equal_bits(rows_of(after.y, 0, changed), rows_of(before.y, 0, changed)));
            CHECK(equal_bits(rows_of(after.lse, 0, changed), rows_of(before.lse, 0, changed)));
            CHECK(equal_bits(rows_of(after.dq, 0, changed), rows_of(before.dq, 0, changed)));
            CHECK(equal_bits(rows_of(after.dgate, 0, changed), rows_of(before.dgate, 0, changed)));
        }
}

TEST_CASE("dk and dv of a key do not change when an earlier query does, be it to NaN or Inf") {
    attention_setup const s{.lengths = {600}, .heads = 4, .kv_heads = 2, .head_dim = 10};
    attention_case<float> before(s);
    before.forward(keel::cpu{});
    before.backward(keel::cpu{});
    for (float poison : {3.5f, std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()})
        for (int64_t changed : {0, 37, 511, 512, 598}) {
            if (!every_case && (std::isinf(poison) || (changed != 37 && changed != 512))) continue;
            INFO("query " << changed << " set to " << poison);
            attention_case<float> after(s);
            for (int64_t j = 0; j < 40; ++j) after.q.set(changed, j, poison), after.dy.set(changed, j, poison);
            after.forward(keel::cpu{});
            after.backward(keel::cpu{});
            int64_t const first = changed + 1, count = 600 - first;
            CHECK(equal_bits(rows_of(after.dk, first, count), rows_of(before.dk, first, count)));
            CHECK(equal_bits(rows_of(after.dv, first, count), rows_of(before.dv, first, count)));
            CHECK(!equal_bits(rows_of(after.dv, changed, 1), rows_of(before.dv, changed, 1)));
        }
}

TEST_CASE("many runs on two threads give one result") { // FA #2244
    attention_setup const s{.lengths = {130, 75, 64}, .heads = 6, .kv_heads = 2, .head_dim = 16, .gate_dim = 1};
    keel::thread_pool const pool(2);
    keel::cpu const be(pool);
    auto const expected = attention_result<float>(s, keel::cpu{});
    for (int run = 0; run < (every_case ? 30 : 10); ++run) CHECK(attention_result<float>(s, be) == expected);
}
