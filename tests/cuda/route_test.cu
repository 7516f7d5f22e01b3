// The router instantiated for CUDA: compiled wherever nvcc is; where there is a GPU it runs against the reference, bit for bit.
// Calls that read counts on the host run their kernels over memory that both see. One format of logits each: the kernels are large.
#include <keel/format/bf16.hpp>
#include <keel/moe/load_balance.hpp>
#include <keel/moe/route_weights.hpp>
#include <keel/moe/router_init.hpp>
#include <keel/moe/thresholds.hpp>
#include <support/catch.hpp>
#include <support/device_twins.hpp>

using namespace keel_test;

namespace {

constexpr int64_t tokens = 131, most_chosen = 5;
constexpr keel::score_function all_scores[] = {keel::score_function::softmax, keel::score_function::sigmoid, keel::score_function::sqrt_softplus};

/// Rows with ties, masks, saturated scores and numbers that are not finite among ordinary ones.
template <class L> std::vector<L> logits_of(int64_t experts) {
    float const infinity = keel::as_float(keel::infinity_bits), nan = keel::as_float(keel::nan_bits);
    std::vector<L> z = values<L>(tokens * experts, 1);
    auto const put = [&](int64_t t, int64_t first, int64_t step, float v) {
        for (int64_t e = first; e < experts; e += step) keel::store_element(&z[static_cast<std::size_t>(t * experts + e)], v);
    };
    put(1, 0, 1, 0.25f), put(2, 0, 2, 20.0f + 0.5f), put(3, 1, 3, -infinity), put(4, 0, 1, -infinity), put(5, 1, experts, nan);
    put(6, 0, 1, nan), put(7, 2, experts, infinity), put(8, 0, 2, -200.0f), put(9, 0, 3, 3e38f);
    return z;
}
std::vector<std::byte> flags() {
    std::vector<std::byte> valid(std::size_t{tokens}, std::byte{1});
    for (std::size_t t : {0, 64, 130}) valid[t] = std::byte{0};
    return valid;
}
template <class D> keel::view<bool const, 1> valid_of(std::byte const* memory, D) {
    return keel::vec(reinterpret_cast<bool const*>(memory), tokens);
}

template <class L> void check_route(int64_t experts, bool biased, keel::route_options options) {
    int64_t const k = experts < most_chosen ? experts : most_chosen, listed = k + options.spare;
    unified_twins<L> logits(logits_of<L>(experts));
    unified_twins<float> bias(values<float>(experts, 2)), weights(tokens * k), log_sum(tokens);
    unified_twins<std::byte> valid(flags()), memory(keel::route_workspace(tokens, experts));
    unified_twins<int32_t> ids(tokens * listed);
    unified_twins<int64_t> counts(experts);
    unified_twins<keel::report> events(1);
    CHECK(on_both<unified>([&](auto be) {
        keel::demand_counts demand(keel::vec(counts.on(be), experts));
        keel::route_inputs in{.valid = valid_of(valid.on(be), be)};
        if (biased) in.bias = keel::vec<float const>(bias.on(be), experts);
        keel::route(be, keel::rows(logits.on(be), tokens, experts), in, keel::rows(ids.on(be), tokens, listed), keel::rows(weights.on(be), tokens, k),
                    demand, {keel::vec(log_sum.on(be), tokens)}, options, {memory.on(be), static_cast<int64_t>(memory.host.size())}, events.on(be))
            .or_throw();
    }));
    CHECK((ids.equal() && weights.equal() && log_sum.equal() && counts.equal() && events.equal()));
}

template <class L> void check_thresholds(int64_t experts, keel::route_options options) {
    int64_t const k = 3, bins = 50;
    unified_twins<L> logits(logits_of<L>(experts));
    unified_twins<float> bias(values<float>(experts, 2));
    unified_twins<std::byte> valid(flags()), memory(keel::count_thresholds_workspace(tokens, experts, k, options));
    unified_twins<int64_t> counts(experts * bins);
    CHECK(on_both<unified>([&](auto be) {
        keel::threshold_counts thresholds(keel::rows(counts.on(be), experts, bins));
        keel::count_thresholds(be, keel::rows(logits.on(be), tokens, experts), keel::vec<float const>(bias.on(be), experts), k, thresholds,
                               options, {memory.on(be), static_cast<int64_t>(memory.host.size())}, valid_of(valid.on(be), be))
            .or_throw();
    }));
    CHECK(counts.equal());
}

/// Weights after a drop, losses and the gradient: calls that take device memory as they are.
template <class L> void check_gradient(int64_t experts, keel::route_options options) {
    int64_t const k = 3;
    std::vector<int32_t> chosen(static_cast<std::size_t>(tokens * k));
    std::vector<int64_t> places(chosen.size());
    for (std::size_t i = 0; i < chosen.size(); ++i) {
        chosen[i] = i / 3 % 20 == 7 ? -1 : static_cast<int32_t>((i / 3 * 7 + i % 3) % static_cast<std::size_t>(experts));
        places[i] = chosen[i] < 0 || i % 4 == 1 ? -1 : static_cast<int64_t>(i);
    }
    twins<L> logits(logits_of<L>(experts)), dlogits(tokens * experts);
    twins<int32_t> ids(chosen);
    twins<int64_t> slots(places), documents(std::vector<int64_t>{0, 40, 40, tokens});
    twins<float> weights(tokens * k), dweights(values<float>(tokens * k, 4)), factors(values<float>(3 * experts, 5)), losses(2);
    twins<std::byte> valid(flags()), memory(keel::load_balance_loss_workspace(tokens));
    CHECK(on_both([&](auto be) {
        auto const z = keel::rows(logits.on(be), tokens, experts);
        auto const id = keel::rows(ids.on(be), tokens, k);
        auto const w = keel::rows(weights.on(be), tokens, k);
        auto const factor = keel::rows<float const>(factors.on(be), 3, experts);
        auto const starts = keel::vec<int64_t const>(documents.on(be), 4);
        keel::route_weights(be, z, id, keel::rows(slots.on(be), tokens, k), w, {keel::normalise_over::served}, options).or_throw();
        keel::load_balance_loss(be, z, factor, {valid_of(valid.on(be), be), starts}, losses.on(be), options,
                                {memory.on(be), static_cast<int64_t>(memory.host.size())})
            .or_throw();
        keel::router_z_loss(be, keel::vec(dweights.on(be), tokens), losses.on(be) + 1).or_throw();
        keel::route_backward(be, keel::rows(dweights.on(be), tokens, k), z, id, w, keel::rows(dlogits.on(be), tokens, experts), options,
                             {.z_loss = 0.01f, .factors = factor, .documents = starts})
            .or_throw();
    }));
    CHECK((weights.equal() && losses.equal() && dlogits.equal()));
}

} // namespace

TEST_CASE("CUDA gives the reference's bits: route, its weights and counts, groups and next choices") {
    for (keel::score_function score : all_scores)
        for (bool biased : {false, true}) {
            check_route<float>(3, biased, {.score = score});
            check_route<float>(300, biased, {.score = score, .weight = keel::weight_rule::scores, .scaling = 2.5f, .spare = 2});
            check_route<float>(64, biased, {.score = score, .groups = 8, .top_groups = 3, .spare = 2});
            check_route<float>(64, biased, {.score = score, .groups = 8, .top_groups = 3, .by = keel::group_score::best});
        }
}

TEST_CASE("CUDA gives the reference's bits: thresholds") {
    for (keel::score_function score : all_scores) {
        check_thresholds<float>(300, {.score = score});
        check_thresholds<float>(70, {.score = score, .groups = 7, .top_groups = 2});
        check_thresholds<float>(70, {.score = score, .groups = 7, .top_groups = 2, .by = keel::group_score::best});
    }
}

TEST_CASE("CUDA gives the reference's bits: weights over what serves, losses of the logits and the router's gradient") {
    for (keel::score_function score : all_scores)
        for (keel::weight_rule rule : {keel::weight_rule::normalised, keel::weight_rule::scores}) {
            check_gradient<keel::bf16>(70, {.score = score, .weight = rule, .scaling = 2.5f});
            check_gradient<keel::bf16>(300, {.score = score, .weight = rule});
        }
}

TEST_CASE("CUDA gives the reference's bits: a fresh router") {
    int64_t const experts = 10, width = 277;
    twins<float> weights(experts * width), mean(values<float>(width, 6));
    CHECK(on_both([&](auto be) {
        keel::router_init(be, keel::rows(weights.on(be), experts, width), {.seed = 11}, {.norm = 0.5f, .orthogonal = true},
                          keel::vec<float const>(mean.on(be), width))
            .or_throw();
    }));
    CHECK(weights.equal());
}
