// Tokens side by side (moe/route_lanes.hpp) are routed as one by one: every size at which the way forks, and the rows that fall out of it.
#include <limits>

#include <keel/backend/cpu/cpu.hpp>
#include <keel/backend/reference.hpp>
#include <moe/router.hpp>
#include <support/catch.hpp>

using namespace keel_test;

TEST_CASE("tokens that are routed side by side get what each gets alone") {
    struct shape {
        int64_t experts, k;
    };
    int which = 0;
    for (shape const s : {shape{31, 4}, shape{32, 1}, shape{64, 8}, shape{67, 9}, shape{96, 16}, shape{300, 12}, shape{1040, 8}, shape{2100, 16}, shape{4097, 2}})
        for (keel::score_function score : all_scores)
            for (bool biased : {true, false}) {
                int64_t const experts = s.experts, k = s.k;
                keel::weight_rule const rule = both_rules[++which % 2];
                INFO(experts << " experts, " << k << " a token, score " << static_cast<int>(score) << ", bias " << biased << ", case " << which);
                int64_t const tokens = 75; // a whole tile and a part
                std::vector<float> values = floats(data_kind::normal, tokens * experts, static_cast<uint64_t>(which)), bias(static_cast<std::size_t>(experts));
                auto const at = [&](int64_t t, int64_t e) -> float& { return values[static_cast<std::size_t>(t * experts + e)]; };
                for (int64_t e = 0; e < experts; ++e) {
                    bias[static_cast<std::size_t>(e)] = static_cast<float>(e % 5) / 64.0f - 0.03f; // many are equal
                    at(20, e) = 0.25f;                                                             // more candidates than are held
                    at(21, e) = e % 9 == 0 ? 1.0f : -0.0f;
                    at(22, e) = e % 9 != 0 ? -1.0f - static_cast<float>(e) : e % 2 == 0 ? -0.0f : 0.0f; // zeros of either sign tie
                    at(33, e) = 18.0f + static_cast<float>(e % 7); // sigmoid is 1: the logit decides
                    at(34, e) = e % 2 == 0 ? 3e38f : -3e38f;
                    at(35, e) = -200.0f - static_cast<float>(e);
                }
                at(3, 5) = std::numeric_limits<float>::quiet_NaN(), at(17, 0) = std::numeric_limits<float>::infinity(), at(18, experts - 1) = -std::numeric_limits<float>::infinity();
                guarded_matrix<float> z(tokens, experts, 2, values);
                guarded_matrix<float> b(1, experts, 0, bias);
                guarded_matrix<bool> valid(1, tokens);
                for (int64_t t = 0; t < tokens; ++t) valid.vec()(t) = t % 11 != 6;
                keel::route_inputs const in{.bias = biased ? keel::view<float const, 1>(b.vec()) : keel::view<float const, 1>{}, .valid = valid.vec()};
                routed<> want(tokens, experts, k), got(tokens, experts, k);
                want.run(keel::reference{}, z.view(), in, {.score = score, .weight = rule, .scaling = 2.5f}).or_throw();
                got.run(keel::cpu<>{}, z.view(), in, {.score = score, .weight = rule, .scaling = 2.5f}).or_throw();
                CHECK(got.same(want));
                CHECK(got.untouched());
            }
}

TEST_CASE("what does not fit side by side goes one by one: infinite biases, groups, next choices") {
    int64_t const tokens = 20, experts = 40, k = 4;
    float const inf = std::numeric_limits<float>::infinity();
    guarded_matrix<float> z(tokens, experts, 0, floats(data_kind::normal, tokens * experts, 5));
    guarded_matrix<float> b(1, experts);
    struct way {
        float most, one;
        keel::route_options options;
    };
    for (way const& w : {way{-inf, 0.5f, {}}, way{0.0f, inf, {}}, way{0.0f, std::numeric_limits<float>::quiet_NaN(), {}},
                         way{0.0f, 0.25f, {.groups = 8, .top_groups = 2}}, way{0.0f, 0.25f, {.spare = 3}}}) {
        for (int64_t e = 0; e < experts; ++e) b.set(0, e, e % 20 == 7 ? w.one : w.most);
        routed<> want(tokens, experts, k, w.options.spare), got(tokens, experts, k, w.options.spare);
        want.run(keel::reference{}, z.view(), {.bias = b.vec()}, w.options).or_throw();
        got.run(keel::cpu<>{}, z.view(), {.bias = b.vec()}, w.options).or_throw();
        INFO("most " << w.most << " one " << w.one << " groups " << w.options.groups << " spare " << w.options.spare);
        CHECK(got.same(want));
        CHECK(got.untouched());
    }
}

TEST_CASE("the last place of a full sorting network: of two equal sums the larger logit, though both come after all others") {
    int64_t const tokens = 3, experts = 40;
    for (int64_t k : {8, 16}) {
        guarded_matrix<float> z(tokens, experts), b(1, experts);
        for (int64_t e = 0; e < experts; ++e) {
            b.set(0, e, e < k - 1 ? 1.0f + static_cast<float>(e) / 8.0f : e == 30 || e == 35 ? 0.5f : 0.0f);
            for (int64_t t = 0; t < tokens; ++t) z.set(t, e, e < k - 1 || e == 30 ? 20.0f : e == 35 ? 21.0f : -30.0f - static_cast<float>(e)); // sigmoid(20) is 1
        }
        routed<> got(tokens, experts, k);
        got.run(keel::cpu<>{}, z.view(), {.bias = b.vec()}).or_throw();
        for (int64_t t = 0; t < tokens; ++t) CHECK(got.id(t, k - 1) == 35);
    }
}
