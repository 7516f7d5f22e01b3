// Capacity, demand's factors and the balancing bias instantiated for CUDA: compiled wherever nvcc is; where there is a GPU they run
// against the reference, bit for bit. Their calls read counts on the host: kernels run over memory that both see.
#include <keel/moe/balance.hpp>
#include <keel/moe/capacity.hpp>
#include <keel/moe/load_balance.hpp>
#include <support/catch.hpp>
#include <support/device_twins.hpp>

using namespace keel_test;

namespace {

constexpr int64_t tokens = 600, experts = 37, k = 3, spare = 2;

/// Distinct experts a token, early ones more often; every 20th token is padding.
std::vector<int32_t> choices_of() {
    std::vector<int32_t> ids;
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t j = 0; j < k + spare; ++j) ids.push_back(t % 20 == 7 ? -1 : static_cast<int32_t>((t * t / 50 % 11 + j * (1 + t % 5)) % experts));
    return ids;
}
std::vector<int64_t> counts_of(std::vector<int32_t> const& ids) {
    std::vector<int64_t> counts(std::size_t{experts});
    for (std::size_t i = 0; i < ids.size(); ++i)
        if (i % (k + spare) < k && ids[i] >= 0) ++counts[static_cast<std::size_t>(ids[i])];
    return counts;
}
constexpr int64_t routed_tokens = tokens - tokens / 20;

template <class Be> keel::demand_counts demand_on(Be be, unified_twins<int64_t>& asked) {
    keel::demand_counts demand;
    keel::demand_from_counts(keel::vec(asked.on(be), experts), routed_tokens, k, demand).or_throw();
    return demand;
}

void check_capacity(keel::drop_order order, bool reroutes) {
    unified_twins<int32_t> choices(choices_of()), ids(tokens * k);
    unified_twins<int64_t> asked(counts_of(choices.host)), given(experts), slots(tokens * k), offsets(experts + 1), moved(2 * experts);
    unified_twins<float> weights(values<float>(tokens * k, 2));
    unified_twins<std::byte> memory(keel::reroute_overflow_workspace(tokens, experts, k, spare));
    CHECK(on_both<unified>([&](auto be) {
        keel::demand_counts const demand = demand_on(be, asked);
        keel::served_counts served(keel::vec(given.on(be), experts));
        auto const choice = keel::rows<int32_t const>(choices.on(be), tokens, k + spare);
        auto const weight = keel::rows<float const>(weights.on(be), tokens, k);
        keel::expert_slots const where{keel::rows(slots.on(be), tokens, k), keel::vec(offsets.on(be), experts + 1)};
        keel::capacity_saved const saved{keel::vec(moved.on(be), experts), keel::vec(moved.on(be) + experts, experts)};
        keel::capacity_options const options{keel::capacity_limit::factor(5, 4), order};
        keel::workspace const ws{memory.on(be), static_cast<int64_t>(memory.host.size())};
        if (reroutes) keel::reroute_overflow(be, choice, weight, demand, keel::rows(ids.on(be), tokens, k), where, served, saved, options, ws).or_throw();
        else keel::apply_capacity(be, keel::columns(choice, 0, k), weight, demand, where, served, saved, options, ws).or_throw();
    }));
    CHECK((ids.equal() && given.equal() && slots.equal() && offsets.equal() && moved.equal()));
}

} // namespace

TEST_CASE("CUDA gives the reference's bits: capacity in every drop order, with and without next choices") {
    for (bool reroutes : {false, true})
        for (int order = 0; order < 4; ++order) check_capacity(static_cast<keel::drop_order>(order), reroutes);
}

TEST_CASE("CUDA gives the reference's bits: factors of the load-balancing losses, of a batch and of documents") {
    int64_t const count = 3;
    unified_twins<int32_t> choices(choices_of());
    unified_twins<int64_t> asked(counts_of(choices.host)), documents(std::vector<int64_t>{0, 100, 100, tokens});
    unified_twins<float> batch(experts), each(count * experts);
    unified_twins<std::byte> memory(keel::sequence_balance_factors_workspace(count, experts));
    CHECK(on_both<unified>([&](auto be) {
        keel::demand_counts const demand = demand_on(be, asked);
        auto const documents_ = keel::vec<int64_t const>(documents.on(be), count + 1);
        keel::load_balance_factors(be, demand, demand.tokens(), keel::rows(batch.on(be), 1, experts), {.coefficient = 0.01f}).or_throw();
        keel::sequence_balance_factors(be, keel::rows(choices.on(be), tokens, k + spare), documents_, demand, keel::rows(each.on(be), count, experts), {},
                                       {memory.on(be), static_cast<int64_t>(memory.host.size())})
            .or_throw();
        keel::load_balance_factors(be, demand, tokens, keel::rows(each.on(be), count, experts), {.coefficient = 0.1f, .mode = keel::accumulate}).or_throw();
    }));
    CHECK((batch.equal() && each.equal()));
}

// The ledger's arithmetic is the host's on every backend; what a device would run is the row of the bias.
TEST_CASE("CUDA gives the reference's bits: every rule's move of the bias, and its centre") {
    int64_t const bins = 40;
    for (int rule = 0; rule < 4; ++rule)
        for (float deadband : {0.0f, 0.3f}) {
            std::vector<int64_t> thresholds(std::size_t{experts * bins});
            for (int64_t t = 0; t < routed_tokens; ++t) // one threshold a token and expert, anywhere
                for (int64_t e = 0; e < experts; ++e) ++thresholds[static_cast<std::size_t>(e * bins + (t * (e + 3) + t * t / 7) % bins)];
            unified_twins<int64_t> asked(counts_of(choices_of())), signs(std::vector<int64_t>(std::size_t{experts}, 1)), histogram(thresholds);
            unified_twins<float> bias(values<float>(experts, 3));
            unified_twins<keel::balance_moves> moves(1);
            CHECK(on_both<unified>([&](auto be) {
                auto const b = keel::vec(bias.on(be), experts);
                keel::threshold_range const range = keel::threshold_range_of(b, bins);
                be.for_rows(1, experts,
                            keel::balance_row{keel::vec(asked.on(be), experts), b, keel::vec(signs.on(be), experts),
                                              keel::rows(histogram.on(be), experts, bins), range, routed_tokens * k,
                                              {.rule = static_cast<keel::balance_rule>(rule), .rate = 0.01f, .deadband = deadband}, moves.on(be)});
                be.for_rows(1, experts, keel::centre_row{b});
            }));
            CHECK((bias.equal() && signs.equal() && moves.equal()));
        }
}
