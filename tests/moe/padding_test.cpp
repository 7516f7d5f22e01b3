// A padding mask from the selection to the losses: a batch with padding does what its tokens alone do, in every order of dropping; and
// rows that no 32-bit index reaches.
#include <vector>

#include <keel/backend/cpu/cpu.hpp>
#include <keel/moe/dispatch.hpp>
#include <keel/moe/load_balance.hpp>
#include <keel/moe/route_weights.hpp>
#include <moe/router.hpp>
#include <support/catch.hpp>
#include <support/fenced.hpp>

using namespace keel_test;

namespace {

constexpr int64_t experts = 8, k = 2, spare = 2, width = 5;
constexpr keel::score_function score = keel::score_function::softmax;

/// A layer's step up to the gradient of its logits, with a document in the middle.
struct step {
    int64_t tokens;
    routed<> r;
    guarded_matrix<int32_t> ids;
    guarded_matrix<int64_t> slots, offsets;
    guarded_matrix<float> weights, rows, y, dweights, dlogits, factors, losses;
    std::vector<int64_t> given;
    keel::served_counts served;

    explicit step(int64_t n)
        : tokens(n), r(n, experts, k, spare), ids(n, k), slots(n, k), offsets(1, experts + 1), weights(n, k), rows(n * k, width), y(n, width), dweights(n, k),
          dlogits(n, experts), factors(2, experts), losses(1, 2), given(std::size_t{experts}), served(keel::vec(given.data(), experts)) {}

    void run(guarded_matrix<float>& z, guarded_matrix<float>& x, int64_t middle, keel::view<bool const, 1> valid, keel::drop_order order) {
        keel::cpu const be;
        keel::route_options const options{.score = score, .spare = spare};
        std::vector<int64_t> const starts{0, middle, tokens};
        auto const documents = keel::vec(starts.data(), 3);
        keel::expert_slots const where{slots.view(), offsets.vec()};
        r.run(be, z.view(), {.valid = valid}, options).or_throw();
        scratch ws(keel::reroute_overflow_workspace(tokens, experts, k, spare)), of_documents(keel::sequence_balance_factors_workspace(2, experts)),
            of_tokens(keel::load_balance_loss_workspace(tokens));
        keel::reroute_overflow(be, r.ids.view(), r.weights.view(), r.demand, ids.view(), where, served, {}, {keel::capacity_limit::factor(3, 4), order}, ws.get())
            .or_throw();
        keel::route_weights(be, z.view(), ids.view(), slots.view(), weights.view(), {keel::normalise_over::served}, options).or_throw();
        auto const taken = keel::slice(rows.view(), 0, served.total());
        keel::dispatch(be, x.view(), where, taken).or_throw();
        keel::combine(be, taken, where, weights.view(), keel::view<float, 2>{}, y.view()).or_throw();
        keel::combine_backward(be, x.view(), taken, where, weights.view(), {.dweights = dweights.view()}).or_throw();
        keel::sequence_balance_factors(be, r.ids.view(), documents, r.demand, factors.view(), {}, of_documents.get()).or_throw();
        keel::load_balance_loss(be, z.view(), factors.view(), {valid, documents}, losses.view().data, options, of_tokens.get()).or_throw();
        keel::router_z_loss(be, r.log_sum.vec(), losses.view().data + 1).or_throw();
        keel::route_backward(be, dweights.view(), z.view(), ids.view(), weights.view(), dlogits.view(), options,
                             {.z_loss = 0.01f, .factors = factors.view(), .documents = documents})
            .or_throw();
    }
};

} // namespace

TEST_CASE("a padded batch does what its tokens alone do: slots, outputs, losses, gradients") { // HF #28505, Megatron #2121, #5542, #6114
    int64_t const real = 40, all = 100, middle = 17;
    guarded_matrix<float> z(real, experts, 0, floats(data_kind::normal, real * experts, 3)), x(real, width, 0, floats(data_kind::normal, real * width, 4));
    for (int64_t t = 0; t < real; ++t) z.set(t, 5, z.get(t, 5) + 1.5f); // one that many want
    // What stands in padding would all go to that expert, and first of all.
    guarded_matrix<float> padded(all, experts, 0, std::vector<float>(std::size_t{all * experts}, -9.0f)), in(all, width);
    bool valid[all] = {};
    std::vector<int64_t> at;
    for (int64_t t = 0; t < all; ++t) {
        auto const next = static_cast<int64_t>(at.size());
        valid[t] = t % 5 == 1 || t % 5 == 2;
        padded.set(t, 5, 50.0f);
        if (!valid[t]) continue;
        for (int64_t e = 0; e < experts; ++e) padded.set(t, e, z.get(next, e));
        for (int64_t j = 0; j < width; ++j) in.set(t, j, x.get(next, j));
        at.push_back(t);
    }
    REQUIRE(static_cast<int64_t>(at.size()) == real);
    for (int order = 0; order < 4; ++order) {
        INFO("order " << order);
        step alone(real), with(all);
        alone.run(z, x, middle, {}, static_cast<keel::drop_order>(order));
        with.run(padded, in, at[std::size_t{middle}], keel::vec<bool const>(valid, all), static_cast<keel::drop_order>(order));
        CHECK(alone.served.total() < alone.r.demand.total()); // some are dropped
        CHECK(alone.served.rerouted() > 0);
        CHECK(with.r.counts == alone.r.counts);
        CHECK(with.given == alone.given);
        CHECK(with.offsets.contents() == alone.offsets.contents());
        CHECK(with.factors.contents() == alone.factors.contents());
        int64_t wrong = 0;
        for (int64_t t = 0, next = 0; t < all; ++t) {
            int64_t const own = valid[t] ? next++ : -1;
            for (int64_t j = 0; j < k; ++j) {
                wrong += with.ids.get(t, j) != (own < 0 ? -1 : alone.ids.get(own, j)) ? 1 : 0;
                wrong += with.slots.get(t, j) != (own < 0 ? -1 : alone.slots.get(own, j)) ? 1 : 0;
                wrong += with.weights.get(t, j) != (own < 0 ? 0.0f : alone.weights.get(own, j)) ? 1 : 0;
                wrong += with.dweights.get(t, j) != (own < 0 ? 0.0f : alone.dweights.get(own, j)) ? 1 : 0;
            }
            for (int64_t j = 0; j < width; ++j) wrong += with.y.get(t, j) != (own < 0 ? 0.0f : alone.y.get(own, j)) ? 1 : 0;
            for (int64_t e = 0; e < experts; ++e) wrong += with.dlogits.get(t, e) != (own < 0 ? 0.0f : alone.dlogits.get(own, e)) ? 1 : 0;
        }
        CHECK(wrong == 0);
        // Sums over tokens take another order: 100 roundings of parts below the sum are 2^-17 of it.
        for (int64_t i = 0; i < 2; ++i) CHECK(with.losses.at(0, i) == Approx(alone.losses.at(0, i)).epsilon(0x1p-17));
    }
}

TEST_CASE("layers' losses do not mix: two layers out of balance in opposite ways cost what each does") { // HF #31464: summed over layers first
    int64_t const tokens = 60, middle = 30;
    float cost[2];
    guarded_matrix<float> x(tokens, width);
    for (int layer = 0; layer < 2; ++layer) {
        guarded_matrix<float> z(tokens, experts, 0, floats(data_kind::normal, tokens * experts, 6));
        for (int64_t t = 0; t < tokens; ++t)
            for (int64_t e = 0; e < experts; ++e) z.set(t, e, z.get(t, e) + ((e < experts / 2) == (layer == 0) ? 6.0f : 0.0f));
        step s(tokens);
        s.run(z, x, middle, {}, keel::drop_order::position);
        cost[layer] = s.losses.get(0, 0);
        for (int64_t e = 0; e < experts; ++e) CHECK((s.r.demand[e] > tokens * k / experts) == ((e < experts / 2) == (layer == 0)));
    }
    for (float c : cost) CHECK(c > 1.9f); // half of the experts have nearly all: 2; with the two layers' counts added it would be near 1
}

TEST_CASE("rows that lie further apart than a 32-bit index reaches are served all the same") { // TE's offsets of 32 bits wrap
    int64_t const tokens = 2;
    sparse<float> far(2 * tokens * far_stride); // address space, hardly memory
    if (far.data() == nullptr) return;
    guarded_matrix<float> x(tokens, width, 0, floats(data_kind::normal, tokens * width, 8)), y(tokens, width), dx(tokens, width), dw(tokens, 1);
    guarded_matrix<float> w(tokens, 1, 0, {0.5f, 0.25f});
    guarded_matrix<int64_t> slots(tokens, 1), offsets(1, 2);
    slots.set(0, 0, 1), slots.set(1, 0, 0), offsets.set(0, 1, 2);
    keel::expert_slots const where{slots.view(), offsets.vec()};
    auto const rows = keel::rows(far.data(), tokens, width, far_stride), drows = keel::rows(far.data() + tokens * far_stride, tokens, width, far_stride);
    keel::cpu const be;
    keel::dispatch(be, x.view(), where, rows).or_throw();
    keel::combine(be, rows, where, w.view(), keel::view<float, 2>{}, y.view()).or_throw();
    keel::combine_backward(be, x.view(), rows, where, w.view(), {.dexpert_rows = drows, .dweights = dw.view()}).or_throw();
    keel::dispatch_backward(be, drows, where, dx.view()).or_throw();
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t j = 0; j < width; ++j) {
            CHECK(rows(slots.get(t, 0), j) == x.get(t, j));
            CHECK(y.get(t, j) == w.get(t, 0) * x.get(t, j)); // one product by a power of two
            CHECK(dx.get(t, j) == y.get(t, j));
        }
}
