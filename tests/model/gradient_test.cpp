// Every parameter tensor of tiny_lm: its gradient in fp32 against central differences of the same model in double.
#include <algorithm>
#include <cmath>

#include <keel/keel.hpp>

#include "../../examples/tiny_lm/flop_ledger.hpp"
#include "../../examples/tiny_lm/model.hpp"
#include <support/catch.hpp>

#include "double_model.hpp"

namespace {

void check_gradients(tiny_lm::model_shape const& shape, int64_t sequences, int64_t length) {
    using backend = keel::cpu<keel::native_arch, keel::thread_pool>;
    keel::thread_pool const pool(2);
    auto const tokens = sequences * length;
    tiny_lm::model<backend, float> m(backend(pool), shape, false, tokens);
    m.initialise(7);
    int64_t parameters = 0;
    for (auto& p : m.parameters()) parameters += p.size();
    CHECK(parameters == tiny_lm::flop_ledger(shape, length).parameters());
    for (auto& p : m.parameters()) // gains away from their start at 1
        if (p.name.ends_with("delta")) p.randomise(8, m.parameters().number(p), 0.3);
    std::vector<int32_t> inputs, targets;
    for (int64_t t = 0; t < tokens; ++t) inputs.push_back(static_cast<int32_t>(t * t * 7 % 256)), targets.push_back(static_cast<int32_t>((t * 91 + 3) % 256));
    tiny_lm::z_losses const z{.head = 1e-2f, .router = 1e-2f};
    m.forward(inputs, length, true);
    double const cross_entropy = m.loss(targets, z);
    m.backward(inputs, targets, z);

    keel_test::double_model oracle{shape, {}, {}, static_cast<double>(z.head), static_cast<double>(z.router)};
    for (auto& p : m.parameters()) oracle.parameters[p.name].assign(p.master.begin(), p.master.end());
    int64_t dropped = 0;
    for (int64_t l = 0; l < shape.layers; ++l) {
        keel_test::frozen_routing routing;
        for (int64_t t = 0; t < tokens; ++t) {
            routing.experts.emplace_back();
            routing.served.emplace_back();
            for (int64_t j = 0; j < shape.top_k; ++j) {
                routing.experts.back().push_back(m.experts(l).chosen(tokens)(t, j));
                routing.served.back().push_back(m.experts(l).slots(tokens)(t, j) >= 0);
                dropped += m.experts(l).slots(tokens)(t, j) < 0;
            }
        }
        oracle.routing.push_back(routing);
    }
    CHECK((dropped > 0) == !shape.capacity.dropless());
    {
        auto plain = oracle;
        plain.head_z = plain.router_z = 0;
        CHECK(cross_entropy == Approx(plain.loss(inputs, targets, length)).epsilon(1e-5)); // fp32 through 2 layers
    }
    for (auto& p : m.parameters()) {
        INFO(p.name);
        auto& w = oracle.parameters[p.name];
        double largest = 0;
        for (float g : p.gradient) largest = std::max(largest, std::abs(static_cast<double>(g)));
        REQUIRE(largest > 0);
        std::size_t const step = std::max<std::size_t>(1, w.size() / 23);
        for (std::size_t i = 0; i < w.size(); i += step) {
            double const keep = w[i], h = 1e-5;
            w[i] = keep + h;
            double const up = oracle.loss(inputs, targets, length);
            w[i] = keep - h;
            double const down = oracle.loss(inputs, targets, length);
            w[i] = keep;
            double const want = (up - down) / (2 * h);
            // fp32 sums of some dozens of terms, through every layer: 2e-5 of the tensor's largest gradient, and the noise of
            // the differences, about 1e-16 * loss / h.
            if (!(std::abs(static_cast<double>(p.gradient[i]) - want) <= 2e-5 * largest + 1e-9))
                FAIL_CHECK(p.name << "[" << i << "]: " << p.gradient[i] << " for " << want);
        }
    }
}

tiny_lm::model_shape small() {
    tiny_lm::model_shape s;
    s.layers = 2, s.width = 20, s.heads = 4, s.kv_heads = 2, s.head_dim = 6, s.rotary_dims = 4;
    s.experts = 5, s.top_k = 2, s.expert_width = 9, s.shared_width = 11;
    return s;
}

} // namespace

TEST_CASE("every gradient of tiny_lm matches the model in double, with drops and an element-wise gate") {
    auto s = small();
    s.capacity = {1, 2};
    check_gradients(s, 2, 13);
}

TEST_CASE("every gradient of tiny_lm matches the model in double, dropless, one expert a token and a head-wise gate") {
    auto s = small();
    s.capacity = {1, 0};
    s.top_k = 1, s.gate = tiny_lm::gate_kind::head, s.kv_heads = 1, s.rotary_dims = 6;
    check_gradients(s, 3, 7);
}
