// Embedding: the rows that were asked for, and a gradient that adds repeated tokens in order.
#include <keel/format/bf16.hpp>
#include <keel/format/float32.hpp>
#include <keel/nn/embedding.hpp>
#include <support/backends.hpp>
#include <support/catch.hpp>
#include <support/data.hpp>
#include <support/fenced.hpp>

using namespace keel_test;

TEST_CASE("embedding gathers rows; its gradient sums each id's tokens in ascending order") {
    int64_t const tokens = 97, vocabulary = 11, width = 35;
    guarded_matrix<keel::bf16> table(vocabulary, width, 2, floats(data_kind::normal, vocabulary * width)), y(tokens, width, 1);
    guarded_matrix<keel::bf16> dy(tokens, width, 0, floats(data_kind::normal, tokens * width, 5));
    std::vector<int32_t> ids(tokens);
    for (std::size_t t = 0; t < ids.size(); ++t) ids[t] = static_cast<int32_t>((t * t + 3 * t) % 10); // id 10 never occurs
    auto const i = keel::vec(ids.data(), tokens);
    scratch ws(keel::embedding_backward_workspace(tokens, vocabulary));
    std::vector<float> want(static_cast<std::size_t>(vocabulary * width));
    for (std::size_t t = 0; t < ids.size(); ++t) // fp32, token order
        for (std::size_t j = 0; j < 35; ++j) want[static_cast<std::size_t>(ids[t]) * 35 + j] += static_cast<float>(dy.at(static_cast<int64_t>(t), static_cast<int64_t>(j)));
    for_each_backend([&](std::string const& name, auto const& be) {
        INFO(name);
        guarded_matrix<float> d(vocabulary, width, 4, std::vector<float>(want.size(), 9.0f)), twice(vocabulary, width);
        keel::embedding(be, table.view(), i, y.view()).or_throw();
        keel::embedding_backward(be, dy.view(), i, d.view(), {}, ws.get()).or_throw();
        keel::embedding_backward(be, dy.view(), i, twice.view(), {}, ws.get()).or_throw();
        keel::embedding_backward(be, dy.view(), i, twice.view(), {.grad = keel::accumulate}, ws.get()).or_throw();
        for (int64_t t = 0; t < tokens; ++t)
            for (int64_t j = 0; j < width; ++j) CHECK(y.at(t, j) == table.at(ids[static_cast<std::size_t>(t)], j));
        for (int64_t v = 0; v < vocabulary; ++v)
            for (int64_t j = 0; j < width; ++j) {
                CHECK(d.get(v, j) == want[static_cast<std::size_t>(v * width + j)]);
                CHECK(twice.get(v, j) == 2 * d.get(v, j));
            }
        CHECK((d.untouched() && y.untouched()));
    });
}

TEST_CASE("embedding refuses ids outside the table and small workspaces") {
    guarded_matrix<float> table(4, 8), y(2, 8, 0, std::vector<float>(16, 5.0f)), d(4, 8);
    std::vector<int32_t> const ids = {1, 4};
    CHECK(keel::embedding(keel::cpu{}, table.view(), keel::vec(ids.data(), 2), y.view()).code == keel::status_code::bad_option);
    CHECK(y.at(0, 0) == 5.0);
    CHECK(keel::embedding_backward(keel::cpu{}, y.view(), keel::vec(ids.data(), 2), d.view()).code == keel::status_code::small_workspace);
    CHECK(keel::embedding(keel::cpu{}, table.view(), keel::vec(ids.data(), 0), keel::rows(static_cast<float*>(nullptr), 0, 8)).ok());
}

TEST_CASE("embedding and its gradient do not write over the ids that they read") {
    guarded_matrix<float> table(4, 8, 0, floats(data_kind::normal, 32)), dy(2, 8);
    std::vector<float> y(20);
    auto* const ids = reinterpret_cast<int32_t*>(y.data());
    ids[0] = 1, ids[1] = 2;
    std::vector<float> const before = y;
    CHECK(keel::embedding(keel::cpu{}, table.view(), keel::vec(ids, 2), keel::rows(y.data(), 2, 8)).message() ==
          "embedding: y, wanted memory of its own (overlap)");
    scratch ws(keel::embedding_backward_workspace(2, 2));
    CHECK(keel::embedding_backward(keel::cpu{}, dy.view(), keel::vec(ids, 2), keel::rows(y.data(), 2, 8), {}, ws.get()).code ==
          keel::status_code::overlap);
    CHECK(equal_bits(y, before));
    ids[0] = -1;
    CHECK(keel::embedding(keel::cpu{}, table.view(), keel::vec(ids, 2), keel::rows(y.data() + 4, 2, 8)).message() ==
          "embedding: ids has value = -1, wanted an index in [0, vocabulary) (bad_option)");
}

TEST_CASE("embedding's gradient in strips of columns: the order of a plain loop, and accumulate touches no other row") {
    int64_t const tokens = 40, vocabulary = 5, width = 2 * keel::embedding_strip + 37;
    guarded_matrix<keel::bf16> dy(tokens, width, 3, floats(data_kind::normal, tokens * width, 8));
    std::vector<int32_t> ids(static_cast<std::size_t>(tokens));
    for (std::size_t t = 0; t < ids.size(); ++t) ids[t] = t == 7 ? 4 : t % 3 == 0 ? 2 : 0; // 1 and 3 never occur
    scratch ws(keel::embedding_backward_workspace(tokens, vocabulary));
    auto const old = floats(data_kind::normal, vocabulary * width, 9);
    for_each_backend([&](std::string const& name, auto const& be) {
        INFO(name);
        guarded_matrix<float> set(vocabulary, width, 5), added(vocabulary, width, 5, old);
        for (int64_t j = 0; j < width; ++j) added.set(1, j, -0.0f), added.set(3, j, std::bit_cast<float>(0x7fc12345u));
        keel::embedding_backward(be, dy.view(), keel::vec(ids.data(), tokens), set.view(), {}, ws.get()).or_throw();
        keel::embedding_backward(be, dy.view(), keel::vec(ids.data(), tokens), added.view(), {.grad = keel::accumulate}, ws.get()).or_throw();
        int64_t wrong = 0;
        for (int64_t v = 0; v < vocabulary; ++v)
            for (int64_t j = 0; j < width; ++j) {
                float sum = 0;
                for (int64_t t = 0; t < tokens; ++t)
                    if (ids[static_cast<std::size_t>(t)] == v) sum += keel::decode(dy.get(t, j));
                wrong += std::bit_cast<uint32_t>(set.get(v, j)) != std::bit_cast<uint32_t>(sum);
                float const want = v == 1   ? -0.0f
                                   : v == 3 ? std::bit_cast<float>(0x7fc12345u)
                                            : old[static_cast<std::size_t>(v * width + j)] + sum;
                wrong += std::bit_cast<uint32_t>(added.get(v, j)) != std::bit_cast<uint32_t>(want);
            }
        CHECK(wrong == 0);
        CHECK((set.untouched() && added.untouched()));
    });
}

TEST_CASE("a table's rows may lie further apart than a 32-bit index reaches; a workspace one byte short is refused") {
    int64_t const width = 37, tokens = 3;
    sparse<float> table(3 * far_stride);
    if (table.data() == nullptr) {
        WARN("no address space: skipped");
        return;
    }
    auto const T = keel::rows(table.data(), 3, width, far_stride);
    guarded_matrix<float> dy(tokens, width, 0, floats(data_kind::normal, tokens * width)), y(tokens, width), near(3, width);
    std::vector<int32_t> const ids = {2, 0, 2};
    auto const i = keel::vec(ids.data(), tokens);
    scratch ws(keel::embedding_backward_workspace(tokens, 3)), less(keel::embedding_backward_workspace(tokens, 3) - 1);
    CHECK(keel::embedding_backward(keel::cpu{}, dy.view(), i, T, {}, less.get()).code == keel::status_code::small_workspace);
    CHECK(T(2, 0) == 0.0f);
    keel::embedding_backward(keel::cpu{}, dy.view(), i, T, {}, ws.get()).or_throw();
    keel::embedding_backward(keel::cpu{}, dy.view(), i, near.view(), {}, ws.get()).or_throw();
    keel::embedding(keel::cpu{}, T, i, y.view()).or_throw();
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t j = 0; j < width; ++j) CHECK(y.get(t, j) == near.get(ids[static_cast<std::size_t>(t)], j));
}
