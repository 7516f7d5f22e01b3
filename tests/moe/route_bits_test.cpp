// The router gives the same bits on every backend, whatever the data, and breaks ties the same way.
#include <cmath>

#include <moe/router.hpp>
#include <support/backends.hpp>
#include <support/catch.hpp>

using namespace keel_test;
using keel::score_function;
using keel::weight_rule;

TEST_CASE("route keeps its bits on every backend, any data, one thread or two") {
    for (data_kind kind : all_kinds)
        for (score_function s : all_scores) {
            if (!every_case && kind != data_kind::any_bits && (kind != data_kind::normal || s != score_function::sigmoid)) continue;
            INFO(name_of(kind) << " score " << static_cast<int>(s));
            int64_t const tokens = 193, experts = 67, k = 5; // 4 tiles of tokens, a tail in each pack
            guarded_matrix<float> z(tokens, experts, 1, floats(kind, tokens * experts, 21)), bias(1, experts, 0, floats(data_kind::uniform, experts));
            weight_rule const rule = kind == data_kind::uniform ? weight_rule::scores : weight_rule::normalised;
            routed<> want(tokens, experts, k);
            want.run(keel::reference{}, z.view(), {.bias = bias.vec()}, {.score = s, .weight = rule}).or_throw();
            CHECK(want.demand.total() == tokens * k);
            for_each_backend([&](std::string const& name, auto const& be) {
                INFO(name);
                routed<> got(tokens, experts, k);
                got.run(be, z.view(), {.bias = bias.vec()}, {.score = s, .weight = rule}).or_throw();
                CHECK(got.same(want));
                CHECK(got.untouched());
            });
        }
}

TEST_CASE("ties go to the larger logit, then to the lower index") {
    auto const ids = [](std::vector<float> const& row, int64_t k, score_function s, std::vector<float> const& bias = {}) {
        auto const n = static_cast<int64_t>(row.size());
        guarded_matrix<float> z(1, n, 0, row), b(1, n, 0, bias.empty() ? std::vector<float>(row.size()) : bias);
        std::vector<int64_t> out;
        std::vector<int64_t> first;
        for_each_backend([&](std::string const& name, auto const& be) {
            INFO(name);
            routed<> r(1, n, k);
            r.run(be, z.view(), {.bias = b.vec()}, {.score = s}).or_throw();
            out.clear();
            for (int64_t j = 0; j < k; ++j) out.push_back(r.id(0, j));
            if (first.empty()) first = out;
            CHECK(out == first);
        });
        return out;
    };
    using list = std::vector<int64_t>;
    for (score_function s : all_scores) {
        CHECK(ids(std::vector<float>(37, 0.25f), 4, s) == list{0, 1, 2, 3}); // kept apart by the index alone
        CHECK(ids({0.0f, -0.0f, 0.0f, -0.0f}, 3, s) == list{0, 1, 2});       // -0 is 0
        // More equals than a candidate list holds, and more choices than one register: each has a path of its own.
        CHECK(ids(std::vector<float>(700, -1.5f), 4, s) == list{0, 1, 2, 3});
        list first(17);
        for (std::size_t i = 0; i < first.size(); ++i) first[i] = static_cast<int64_t>(i);
        CHECK(ids(std::vector<float>(300, 0.25f), 17, s) == first);
    }
    // sigmoid rounds to 1 from 17.4 on: the logit decides, by as little as one ulp (SGLang #31768 added 3e-7 * index instead).
    std::vector<float> high(70, 18.0f);
    high[66] = 40.0f, high[3] = 25.0f, high[69] = std::nextafter(18.0f, 19.0f);
    CHECK(ids(high, 4, score_function::sigmoid) == list{66, 3, 69, 0});
    // ... and a bias that swallows the score does not hide the logit either.
    CHECK(ids({-3.0f, -1.0f, -2.0f, 9.0f}, 3, score_function::sigmoid, {1e9f, 1e9f, 1e9f, -1e9f}) == list{1, 2, 0});
    // The bias selects, by the biased score.
    CHECK(ids({2.0f, 1.0f, 0.0f}, 1, score_function::sigmoid, {0.0f, 0.0f, 0.5f}) == list{2});
}
