// Embedding: the rows that were asked for, and a gradient that adds repeated tokens in order.
#include <keel/format/bf16.hpp>
#include <keel/format/float32.hpp>
#include <keel/nn/embedding.hpp>
#include <support/backends.hpp>
#include <support/catch.hpp>
#include <support/data.hpp>

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
