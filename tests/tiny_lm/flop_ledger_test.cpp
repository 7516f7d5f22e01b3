// The flop ledger of examples/tiny_lm against a count by hand, and the peak that it is measured against.
#include "../../examples/tiny_lm/flop_ledger.hpp"
#include "../../examples/tiny_lm/measure_peak.hpp"

#include "support/catch.hpp"

using namespace tiny_lm;

namespace {

// Small enough to count by hand, with no two sizes alike.
model_shape const small{.layers = 3,
                        .width = 10,
                        .heads = 4,
                        .kv_heads = 2,
                        .head_dim = 6,
                        .rotary_dims = 4,
                        .gate = gate_kind::element,
                        .experts = 5,
                        .top_k = 2,
                        .expert_width = 7,
                        .shared_width = 8,
                        .capacity = {}};

} // namespace

TEST_CASE("parameters are those of the shapes") {
    // Each layer: query, gate 24 x 10, output 10 x 24; key, value 12 x 10; router 5 x 10; shared 3 x 8 x 10;
    // 5 experts of 3 x 7 x 10; two norms of 10, two of 6. Outside: embedding and head 256 x 10, a norm of 10.
    std::int64_t const layer = 3 * 240 + 2 * 120 + 50 + 240 + 5 * 210 + 20 + 12;
    flop_ledger const ledger(small, 9);
    CHECK(ledger.parameters() == 3 * layer + 2 * 2560 + 10);
    CHECK(ledger.active_parameters() == 3 * (layer - 3 * 210) + 2 * 2560 + 10); // a token meets 2 of 5 experts
    CHECK(ledger.routed_parameter_share() == 3.0 * 5 * 210 / (3.0 * static_cast<double>(layer) + 5130));
}

TEST_CASE("forward flops are two for each multiply-add of a product") {
    // Products of one token: 24x10 thrice, 12x10 twice, router, shared expert, two experts; attention has 4 heads of 6
    // and (9 + 1) / 2 = 5 keys on average, in two products; the head.
    double const layer = 2.0 * (3 * 240 + 2 * 120 + 50 + 240 + 2 * 210) + 2.0 * 2 * 4 * 6 * 5;
    flop_ledger const ledger(small, 9);
    CHECK(ledger.forward_flops() == 3 * layer + 2 * 2560);
    CHECK(ledger.attention_flops() == 3 * 480.0);
    CHECK(ledger.training_flops() == 3 * ledger.forward_flops());
    CHECK(ledger.backward_flops() == 2 * ledger.forward_flops());
    CHECK(ledger.forward_flops(0.25) ==
          ledger.forward_flops() - 0.25 * 3 * 2.0 * 2 * 210); // exact: quarters of integers
}

TEST_CASE("one gate a head costs a row a head") {
    model_shape by_head = small;
    by_head.gate = gate_kind::head;
    CHECK(flop_ledger(small, 9).parameters() - flop_ledger(by_head, 9).parameters() == 3 * (24 - 4) * 10);
    CHECK(flop_ledger(small, 9).forward_flops() - flop_ledger(by_head, 9).forward_flops() == 3 * 2.0 * (24 - 4) * 10);
}

TEST_CASE("causal attention counts each pair once") {
    for (std::int64_t const sequence : {1, 2, 5, 64}) {
        double pairs = 0;
        for (std::int64_t query = 0; query < sequence; ++query) pairs += static_cast<double>(query + 1);
        double const by_hand = 3 * 2.0 * 2 * 24 * pairs / static_cast<double>(sequence);
        CHECK(flop_ledger(small, sequence).attention_flops() == by_hand);
    }
}

TEST_CASE("the measured peak is one that a processor can have") {
    double const one = measure_peak(1);
    CHECK(one > 1e8);
    CHECK(one < 1e13);
}
