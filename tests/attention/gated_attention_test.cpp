// gated_attention against its formula in double: shapes, gates, formats, telemetry, awkward numbers, bad calls.
#include <attention/attention_case.hpp>
#include <keel/backend/cpu/cpu.hpp>
#include <keel/backend/cpu/matmul.hpp>
#include <support/backends.hpp>
#include <support/catch.hpp>

using namespace keel_test;

namespace {

template <class T> void check_forward(attention_setup const& setup) {
    INFO("heads " << setup.heads << "/" << setup.kv_heads << " head_dim " << setup.head_dim << " gate "
                  << setup.gate_dim << " " << name_of(setup.kind) << " first document " << setup.lengths[0]);
    attention_case<T> c(setup);
    c.forward(keel::cpu{});
    CHECK(c.untouched());
    auto const want = oracle_of(c);
    CHECK(outside(c.y, want.y) == 0);
    int64_t bad_lse = 0;
    for (int64_t t = 0; t < setup.tokens(); ++t)
        for (int64_t h = 0; h < setup.heads; ++h) {
            double const w = want.lse[static_cast<std::size_t>(t * setup.heads + h)];
            if (!(std::abs(c.lse.at(t, h) - w) <= 1e-5 + std::abs(w) * 0x1p-20)) ++bad_lse; // fp32 scores of O(10)
        }
    CHECK(bad_lse == 0);
    for (int64_t h = 0; h < setup.heads; ++h) {
        auto const e = static_cast<std::size_t>(h);
        // A logit is a chain of head_dim roundings of numbers of O(1).
        CHECK(c.max_logit.at(0, h) ==
              Approx(want.max_logit[e]).epsilon(1e-6).margin(1e-6 + static_cast<double>(setup.head_dim) * 0x1p-24));
        CHECK(c.first_token.at(0, h) == Approx(want.first_token[e]).epsilon(1e-5));
        CHECK(c.entropy.at(0, h) == Approx(want.entropy[e]).epsilon(1e-5).margin(1e-4));
    }
}

float const infinity = std::numeric_limits<float>::infinity(), not_a_number = std::numeric_limits<float>::quiet_NaN();

} // namespace

TEST_CASE("gated_attention matches its formula in double, for every head size, gate and document layout") {
    for (int64_t d : {1, 5, 17, 64, 80})
        for (int64_t gate : {int64_t{0}, int64_t{1}, d}) {
            if (!every_case && d != 5 && !(d == 64 && gate == 1)) continue;
            check_forward<float>(
                {.lengths = {67, 1, 0, 64, 13}, .heads = 4, .kv_heads = 2, .head_dim = d, .gate_dim = gate});
            check_forward<keel::bf16>(
                {.lengths = {67, 1, 0, 64, 13}, .heads = 4, .kv_heads = 2, .head_dim = d, .gate_dim = gate});
        }
    for (int64_t heads : {1, 3, 12})
        check_forward<float>({.lengths = {70}, .heads = heads, .kv_heads = 1, .head_dim = 8, .gate_dim = 1});
    check_forward<float>(
        {.lengths = {70}, .heads = 3, .kv_heads = 3, .head_dim = 8, .scale = -0.7f}); // the maximum is of scaled scores
    // Several key tiles, online.
    check_forward<float>({.lengths = {every_case ? 1100 : 530, every_case ? 513 : 40}, .heads = 2, .kv_heads = 1, .head_dim = 16, .gate_dim = 1});
    check_forward<keel::bf16>({.lengths = {every_case ? 1100 : 530, every_case ? 513 : 40}, .heads = 2, .kv_heads = 1, .head_dim = 16, .gate_dim = 16});
    for (data_kind kind : {data_kind::outlier, data_kind::zeros, data_kind::equal})
        check_forward<float>(
            {.lengths = {40, every_case ? 600 : 520}, .heads = 2, .kv_heads = 2, .head_dim = 8, .gate_dim = 8, .kind = kind});
}

TEST_CASE("one document needs no list of documents") {
    attention_case<float> a({.lengths = {100}, .heads = 2, .kv_heads = 1, .head_dim = 12}), b(a.setup);
    a.forward(keel::cpu{});
    scratch ws(keel::gated_attention_workspace<float>(keel::cpu{}, b.setup.shape()));
    keel::gated_attention(keel::cpu{}, heads_of(b.q, 2, 12), heads_of(b.k, 1, 12), heads_of(b.v, 1, 12), {}, {},
                          heads_of(b.y, 2, 12), {}, {}, {}, ws.get())
        .or_throw();
    CHECK(a.y.contents() == b.y.contents());
}

TEST_CASE("heads 0 and 1 of four read kv head 0 of two") { // onnx #7274: tile or interleave
    attention_case<float> grouped({.lengths = {90}, .heads = 4, .kv_heads = 2, .head_dim = 10}),
        copied({.lengths = {90}, .heads = 4, .kv_heads = 4, .head_dim = 10});
    for (int64_t t = 0; t < 90; ++t)
        for (int64_t h = 0; h < 4; ++h)
            for (int64_t j = 0; j < 10; ++j) {
                copied.k.set(t, h * 10 + j, grouped.k.get(t, h / 2 * 10 + j));
                copied.v.set(t, h * 10 + j, grouped.v.get(t, h / 2 * 10 + j));
            }
    grouped.forward(keel::cpu{});
    copied.forward(keel::cpu{});
    CHECK(grouped.y.contents() == copied.y.contents());
    CHECK(grouped.lse.contents() == copied.lse.contents());
}

TEST_CASE("scores of about -200 in every key do not vanish") { // flash-attention #2082, pytorch #196678
    for (int64_t length : {88, 600}) {
        attention_case<float> c({.lengths = {length}, .heads = 1, .kv_heads = 1, .head_dim = 4});
        for (int64_t t = 0; t < length; ++t)
            for (int64_t j = 0; j < 4; ++j) {
                c.q.set(t, j, 10.0f + 0.01f * static_cast<float>(t % 7));
                c.k.set(t, j, -10.0f - 0.02f * static_cast<float>(t % 5));
            }
        c.forward(keel::cpu{});
        c.backward(keel::cpu{});
        auto const want = oracle_of(c);
        CHECK(c.max_logit.at(0, 0) < -190);
        // Scores of 200 carry an error of 200 * 2^-23 into e^s: some 2^-15 of the values.
        for (int64_t t = 0; t < length; ++t)
            for (int64_t j = 0; j < 4; ++j) {
                auto const e = static_cast<std::size_t>(t * 4 + j);
                CHECK(std::abs(c.y.at(t, j) - want.y.value[e]) <= 0x1p-13 * want.y.magnitude[e]);
                CHECK(std::abs(c.dq.at(t, j) - want.dq.value[e]) <= 0x1p-12 * want.dq.magnitude[e]);
            }
    }
}

TEST_CASE("NaN and Inf reach those who see them, and nobody else") { // pytorch #141128, #101967
    for (int64_t length : {70, 600}) { // the second has 600 - 512 = 88 keys in its last tile
        INFO("length " << length);
        int64_t const bad = length - 40;
        auto const nan_rows = [&](attention_case<float>& c) {
            c.forward(keel::cpu{});
            std::vector<int64_t> rows;
            for (int64_t t = 0; t < length; ++t)
                if (std::isnan(c.y.at(t, 0))) rows.push_back(t);
            return rows;
        };
        attention_setup const setup{.lengths = {length}, .heads = 1, .kv_heads = 1, .head_dim = 3, .gate_dim = 1};
        std::vector<int64_t> from_bad;
        for (int64_t t = bad; t < length; ++t) from_bad.push_back(t);
        attention_case<float> query(setup), key(setup), value(setup), gate(setup), wide(setup), low(setup);
        query.q.set(bad, 1, not_a_number);
        CHECK(nan_rows(query) == std::vector<int64_t>{bad});
        CHECK(std::isnan(query.lse.at(bad, 0)));
        CHECK(std::isnan(query.max_logit.at(0, 0)));
        key.k.set(bad, 0, not_a_number);
        CHECK(nan_rows(key) == from_bad);
        value.v.set(bad, 0, not_a_number);
        CHECK(nan_rows(value) == from_bad);
        CHECK(!std::isnan(value.lse.at(length - 1, 0)));
        CHECK(!std::isnan(value.y.at(length - 1, 1)));
        gate.gate.set(bad, 0, not_a_number);
        CHECK(nan_rows(gate) == std::vector<int64_t>{bad});
        // An Inf among the values stays an Inf for whoever weighs it.
        wide.v.set(bad, 2, infinity);
        CHECK(nan_rows(wide).empty());
        CHECK(std::isinf(wide.y.at(bad, 2)));
        CHECK(!std::isinf(wide.y.at(bad - 1, 2)));
        // A score that overflows to -Inf has probability 0 beside finite ones.
        for (int64_t j = 0; j < 3; ++j) low.k.set(bad, j, j == 0 ? -3e38f : 0.0f);
        for (int64_t t = 0; t < length; ++t) low.q.set(t, 0, 1e3f);
        auto const rows = nan_rows(low);
        CHECK(rows.empty());
        CHECK(!std::isinf(low.lse.at(bad, 0)));
    }
    // Only scores of -Inf: undefined, and said so.
    attention_case<float> c({.lengths = {2}, .heads = 1, .kv_heads = 1, .head_dim = 1});
    c.q.set(0, 0, 3e38f), c.k.set(0, 0, -3e38f);
    c.forward(keel::cpu{});
    CHECK(std::isnan(c.y.at(0, 0)));
    CHECK(c.lse.at(0, 0) == -std::numeric_limits<double>::infinity());
    CHECK(!std::isnan(c.y.at(1, 0)));
}

TEST_CASE("a value that nobody sees leaves no sign of itself") {
    // Query 1 weighs a value of -1e-45 by less than a half: its sum underflows to -0, which the unseen value's zero would turn into +0.
    for (float unseen : {1.0f, not_a_number}) {
        attention_case<float> c({.lengths = {3}, .heads = 1, .kv_heads = 1, .head_dim = 1});
        for (int64_t t = 0; t < 3; ++t) c.q.set(t, 0, 1.0f), c.k.set(t, 0, t == 0 ? -2.0f : 0.0f), c.dy.set(t, 0, 1.0f);
        c.v.set(0, 0, -0x1p-149f), c.v.set(1, 0, -0.0f), c.v.set(2, 0, unseen);
        c.forward(keel::cpu{});
        CHECK(keel::bits(c.y.get(1, 0)) == 0u);
    }
}

TEST_CASE("the largest logit, lse and the entropy of finite scores are finite, however far they lie apart") {
    attention_case<float> c({.lengths = {600}, .heads = 1, .kv_heads = 1, .head_dim = 1});
    for (int64_t t = 0; t < 600; ++t) c.q.set(t, 0, 1.0f), c.k.set(t, 0, t < 512 ? -2.5e38f : 2.5e38f);
    c.forward(keel::cpu{});
    double want = 0; // ln of the number of keys that share the largest score
    for (int64_t t = 0; t < 600; ++t) want += std::log(static_cast<double>(t < 512 ? t + 1 : t - 511));
    CHECK(c.max_logit.at(0, 0) == Approx(2.5e38));
    CHECK(c.entropy.at(0, 0) == Approx(want).epsilon(1e-5));
}

TEST_CASE("every query block of every document is one task, and few tasks are empty") {
    uint64_t state = 5;
    for (int64_t size : {1, 64}) {
        std::vector<int64_t> offsets{0};
        for (int i = 0; i < 300; ++i) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            int64_t const draw = static_cast<int64_t>(state >> 56);
            offsets.push_back(offsets.back() + (draw % 5 == 0 ? 0 : draw % 7 == 0 ? 100 * draw : draw % 70));
        }
        int64_t const count = static_cast<int64_t>(offsets.size());
        keel::document_list const list{keel::vec(static_cast<int64_t const*>(offsets.data()), count), offsets.back()};
        int64_t next = 0, document = 0, empty = 0; // the block that must come next
        for (int64_t number = 0; number < list.numbers(size); ++number) {
            int64_t const d = list.document_of(number, size), block = number - list.first_number(d, size);
            if (block * size >= list.length(d)) {
                ++empty;
                continue;
            }
            while (next * size >= list.length(document)) ++document, next = 0;
            REQUIRE((d == document && block == next));
            ++next;
        }
        while (document < list.count() && next * size >= list.length(document)) ++document, next = 0;
        CHECK(document == list.count());
        CHECK(empty <= list.count());
    }
}

TEST_CASE("heads of more than a thousand elements") { // the product's depth-block changes with the shape; so does its workspace
    // More than 256 keys, and a last block of fewer rows: its product with the values is cut along the keys, the full blocks' is not.
    // Values of 1 have outputs of 1, however the scores are.
    int64_t const heads = every_case ? 8 : 1;
    attention_case<float> c({.lengths = {300}, .heads = heads, .kv_heads = 1, .head_dim = 1030});
    for (int64_t t = 0; t < 300; ++t)
        for (int64_t j = 0; j < 1030; ++j) c.v.set(t, j, 1.0f);
    c.forward(keel::cpu{});
    int64_t far = 0;
    for (int64_t t = 0; t < 300; ++t)
        for (int64_t j = 0; j < heads * 1030; ++j) far += !(std::abs(c.y.at(t, j) - 1) <= 300 * 0x1p-23); // sums of up to 300 terms
    CHECK(far == 0);
    check_forward<keel::bf16>({.lengths = {20, 3}, .heads = heads, .kv_heads = 1, .head_dim = 1025, .gate_dim = 1});
}

TEST_CASE("an empty first tile of -Inf scores does not poison the second") {
    attention_case<float> c({.lengths = {600}, .heads = 1, .kv_heads = 1, .head_dim = 1});
    for (int64_t t = 0; t < 600; ++t) c.q.set(t, 0, 3e38f), c.k.set(t, 0, t < 512 ? -1e5f : 0.0f);
    c.forward(keel::cpu{});
    double mean = 0;
    for (int64_t t = 512; t < 600; ++t) mean += c.v.at(t, 0) / 88;
    CHECK(c.y.at(599, 0) == Approx(mean).epsilon(1e-5));
    CHECK(c.lse.at(599, 0) == Approx(std::log(88.0)).epsilon(1e-6));
}

TEST_CASE("the telemetry's baseline is what even attention gives") {
    attention_case<float> c({.lengths = {256, 3}, .heads = 2, .kv_heads = 1, .head_dim = 4, .kind = data_kind::zeros});
    c.forward(keel::cpu{});
    double const even = keel::uniform_first_token_sum(c.documents(), 259);
    CHECK(even == Approx(6.1243 + 1 + 0.5 + 1.0 / 3).epsilon(1e-4)); // H_256 + H_3
    CHECK(keel::uniform_first_token_sum({}, 256) / 256 == Approx(0.0239).epsilon(5e-3));
    for (int64_t h = 0; h < 2; ++h) {
        CHECK(c.first_token.at(0, h) == Approx(even).epsilon(1e-6));
        CHECK(c.max_logit.at(0, h) == 0);
    }
    attention_case<float> none({.lengths = {0, 0}, .heads = 2, .kv_heads = 1, .head_dim = 4});
    none.first_token.set(0, 1, 7.0f);
    none.forward(keel::cpu{});
    CHECK(none.max_logit.at(0, 1) == -std::numeric_limits<double>::infinity());
    CHECK(none.first_token.at(0, 1) == 0);
    none.backward(keel::cpu{});
}

TEST_CASE(
    "a gate between the queries' heads and a fused projection are views") { // Megatron #4731: the gate block forgotten
    int64_t const tokens = 70, heads = 4, kv = 2, d = 8;
    attention_case<keel::bf16> c({.lengths = {tokens}, .heads = heads, .kv_heads = kv, .head_dim = d, .gate_dim = d});
    c.forward(keel::cpu{});
    // [q_0 z_0 q_1 z_1 ... | k | v] in one row
    int64_t const width = 2 * heads * d + 2 * kv * d;
    guarded_matrix<keel::bf16> fused(tokens, width), y(tokens, heads * d);
    for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t h = 0; h < heads; ++h)
            for (int64_t j = 0; j < d; ++j)
                fused.set(t, 2 * h * d + j, c.q.get(t, h * d + j)),
                    fused.set(t, (2 * h + 1) * d + j, c.gate.get(t, h * d + j));
        for (int64_t j = 0; j < kv * d; ++j)
            fused.set(t, 2 * heads * d + j, c.k.get(t, j)), fused.set(t, (2 * heads + kv) * d + j, c.v.get(t, j));
    }
    auto* const at = fused.view().data;
    keel::view<keel::bf16, 3> const q{at, {tokens, heads, d}, {width, 2 * d, 1}},
        z{at + d, {tokens, heads, d}, {width, 2 * d, 1}};
    auto const k = heads_of(fused, kv, d, 2 * heads * d), v = heads_of(fused, kv, d, (2 * heads + kv) * d);
    scratch ws(keel::gated_attention_workspace<keel::bf16>(keel::cpu{}, c.setup.shape()));
    keel::gated_attention(keel::cpu{}, q, k, v, z, {}, heads_of(y, heads, d), {}, {}, {}, ws.get()).or_throw();
    CHECK(y.contents() == c.y.contents());
}

TEST_CASE("a bad call of gated_attention names the argument and writes nothing") {
    attention_case<float> c({.lengths = {4, 2}, .heads = 4, .kv_heads = 2, .head_dim = 3, .gate_dim = 1});
    keel::cpu be;
    scratch ws(keel::gated_attention_workspace<float>(be, c.setup.shape()));
    auto const q = heads_of(c.q, 4, 3), k = heads_of(c.k, 2, 3), v = heads_of(c.v, 2, 3), y = heads_of(c.y, 4, 3);
    auto const gate = heads_of(c.gate, 4, 1);
    auto const before = c.y.contents();
    using keel::status_code;
    auto const call = [&](auto qv, auto kv, auto vv, auto gv, auto docs, auto yv,
                          keel::attention_options options = {}) {
        return keel::gated_attention(be, qv, kv, vv, gv, docs, yv, {}, {}, options, ws.get());
    };
    keel::view<int64_t const, 1> const docs = c.documents();
    CHECK(call(q, heads_of(c.k, 3, 2), v, gate, docs, y).code == status_code::bad_shape);
    CHECK(call(q, keel::view<float, 3>{k.data, {6, 3, 2}, {8, 2, 1}}, v, gate, docs, y).code == status_code::bad_shape);
    CHECK(call(heads_of(c.q, 3, 3), k, v, keel::view<float, 3>{}, docs, heads_of(c.y, 3, 3)).message() ==
          "gated_attention: k has heads = 2, wanted a divisor of q's heads (bad_shape)");
    CHECK(call(q, k, v, heads_of(c.q, 4, 2), docs, y).message() ==
          "gated_attention: gate has dimension 2 = 2, wanted 1 (a gate for each head) or head_dim (one for each "
          "element) (bad_shape)");
    CHECK(call(q, k, v, gate, docs, heads_of(c.y, 4, 2)).code == status_code::bad_shape);
    CHECK(call(q, k, v, gate, docs, q).code == status_code::overlap);
    CHECK(call(q, keel::view<float, 3>{k.data, {6, 2, 3}, {7, 3, 0}}, v, gate, docs, y).code ==
          status_code::bad_stride);
    CHECK(call(q, k, v, gate, docs, y, {.scale = infinity}).code == status_code::bad_option);
    int64_t const late[] = {1, 4, 6}, falling[] = {0, 5, 4, 6}, brief[] = {0, 4};
    CHECK(call(q, k, v, gate, keel::vec(&late[0], 3), y).code == status_code::bad_option);
    CHECK(call(q, k, v, gate, keel::vec(&falling[0], 4), y).code == status_code::bad_option);
    CHECK(call(q, k, v, gate, keel::vec(&brief[0], 2), y).message() ==
          "gated_attention: documents has last entry = 4, wanted 6 (bad_option)");
    CHECK(keel::gated_attention(be, q, k, v, gate, docs, y).code == status_code::small_workspace);
    CHECK(keel::gated_attention(be, q, k, v, gate, docs, y, {.lse = keel::rows(c.lse.view().data, 6, 3)}, {}, {},
                                ws.get())
              .code == status_code::bad_shape);
    auto const saving = [&](keel::attention_saved saved, keel::attention_telemetry telemetry) {
        return keel::gated_attention(be, q, k, v, gate, docs, y, saved, telemetry, {}, ws.get()).code;
    };
    CHECK(saving({.lse = keel::rows(q.data, 6, 4)}, {}) == status_code::overlap);
    CHECK(saving({}, {.max_logit = keel::vec(v.data, 4)}) == status_code::overlap);
    CHECK(saving({.lse = keel::rows(gate.data, 6, 4)}, {}) == status_code::overlap);
    CHECK(saving({.lse = keel::rows(y.data, 6, 4)}, {}) == status_code::overlap);
    CHECK(saving({}, {.entropy_sum = keel::vec(gate.data, 4)}) == status_code::overlap);
    guarded_matrix<float> wide(6, 4 * 3);
    CHECK(call(q, k, v, heads_of(wide, 4, 3), docs, heads_of(wide, 4, 3)).code == status_code::overlap);
    guarded_matrix<float> heads(1, 4);
    CHECK(saving({}, {.max_logit = heads.vec(), .entropy_sum = heads.vec()}) == status_code::overlap);
    CHECK(c.y.contents() == before);
    // No heads, no tokens: nothing to do.
    keel::view<float, 3> const no_heads{nullptr, {6, 0, 3}, {0, 3, 1}};
    CHECK(keel::gated_attention(be, no_heads, no_heads, no_heads, {}, {}, no_heads, {}, {}, {}, ws.get()).ok());
}
