// Dispatch and combine instantiated for CUDA: compiled wherever nvcc is; where there is a GPU they run against the reference, bit for bit.
#include <keel/format/bf16.hpp>
#include <keel/moe/dispatch.hpp>
#include <support/catch.hpp>
#include <support/device_twins.hpp>

using namespace keel_test;

namespace {

/// Rows in a scattered order, one assignment in five dropped and one token without any; `k` of 20 is more than a kernel keeps at hand.
template <class X> void check_dispatch(int64_t tokens, int64_t width, int64_t k) {
    int64_t const experts = 3;
    std::vector<int64_t> order;
    int64_t served = 0;
    for (int64_t i = 0; i < tokens * k; ++i) order.push_back(i % 5 == 2 || i / k == 4 ? -1 : served++);
    for (int64_t& slot : order)
        if (slot >= 0) slot = served - 1 - slot;
    twins<int64_t> slots(order), offsets(std::vector<int64_t>{0, served / 2, served / 2, served});
    std::vector<std::byte> flags(static_cast<std::size_t>(tokens), std::byte{1});
    flags[3] = std::byte{0};
    twins<std::byte> valid(flags);
    twins<X> x(values<X>(tokens * width, 1)), dy(values<X>(tokens * width, 2)), shared(values<X>(tokens * width, 3));
    twins<X> taken(served * width), y(tokens * width), drows(served * width), dx(tokens * width);
    twins<float> weights(values<float>(tokens * k, 4)), dweights(tokens * k), terms(tokens * 4), row_terms(served), shares(experts);
    twins<keel::routed_share> share(1);
    CHECK(on_both([&](auto be) {
        keel::expert_slots const where{keel::rows(slots.on(be), tokens, k), keel::vec(offsets.on(be), experts + 1)};
        auto const matrix = [&](auto& t, int64_t n) { return keel::rows(t.on(be), n, width); };
        auto const w = keel::rows(weights.on(be), tokens, k);
        keel::dispatch(be, matrix(x, tokens), where, matrix(taken, served)).or_throw();
        keel::combine(be, matrix(taken, served), where, w, matrix(shared, tokens), matrix(y, tokens),
                      {keel::rows(terms.on(be), tokens, 4), keel::vec(row_terms.on(be), served)},
                      keel::vec(reinterpret_cast<bool const*>(valid.on(be)), tokens))
            .or_throw();
        keel::measure_routed_share(be, keel::rows(terms.on(be), tokens, 4), share.on(be)).or_throw();
        keel::combine_backward(be, matrix(dy, tokens), matrix(taken, served), where, w,
                               {.dexpert_rows = matrix(drows, served), .dweights = keel::rows(dweights.on(be), tokens, k)})
            .or_throw();
        keel::dispatch_backward(be, matrix(drows, served), where, matrix(dx, tokens)).or_throw();
    }));
    CHECK((taken.equal() && y.equal() && terms.equal() && row_terms.equal() && share.equal()));
    CHECK((drows.equal() && dweights.equal() && dx.equal()));
    keel::routed_share const measured = share.host[0];
    CHECK(on_both([&](auto be) {
        keel::measure_expert_shares(be, keel::vec(row_terms.on(be), served), keel::vec<int64_t const>(offsets.on(be), experts + 1), measured,
                                    keel::vec(shares.on(be), experts))
            .or_throw();
    }));
    CHECK(shares.equal());
}

} // namespace

TEST_CASE("CUDA gives the reference's bits: dispatch, combine, their gradients and the routed share") {
    for (int64_t width : {1, 127, 1000, 4099}) check_dispatch<float>(70, width, 4), check_dispatch<keel::bf16>(70, width, 1);
    check_dispatch<keel::bf16>(9, 300, 20);
}
