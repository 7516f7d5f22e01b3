// Same bits: SwiGLU, cross-entropy, embedding, and the linear layer in bf16 and FP8.
#include <keel/backend/cpu/matmul.hpp>
#include <keel/backend/reference_matmul.hpp>
#include <keel/format/bf16.hpp>
#include <keel/format/float32.hpp>
#include <keel/nn/cross_entropy.hpp>
#include <keel/nn/embedding.hpp>
#include <keel/nn/fp8_linear.hpp>
#include <keel/nn/swiglu.hpp>
#include <support/bits.hpp>

using namespace keel_test;

int main() {
    for (data_kind kind : all_kinds) {
        same_bits(std::string("swiglu ") + name_of(kind), [&](auto const& be, digest& d) {
            guarded_matrix<keel::bf16> gate(2, 517, 1, floats(kind, 2 * 517, 1)), up(2, 517, 0, floats(data_kind::normal, 2 * 517, 2));
            guarded_matrix<keel::bf16> dy(2, 517, 0, floats(data_kind::normal, 2 * 517, 3)), y(2, 517), dgate(2, 517), dup(2, 517);
            keel::swiglu(be, gate.view(), up.view(), y.view()).or_throw();
            keel::swiglu_backward(be, dy.view(), gate.view(), up.view(), {.dgate = dgate.view(), .dup = dup.view()}).or_throw();
            d.add(y), d.add(dgate), d.add(dup);
        });
        same_bits(std::string("cross_entropy ") + name_of(kind), [&](auto const& be, digest& d) {
            guarded_matrix<float> logits(3, 2051, 1, floats(kind, 3 * 2051, 5)), loss(1, 3), lse(1, 3), dlogits(3, 2051);
            std::vector<int32_t> const targets = {2050, 0, -1};
            auto const t = keel::vec(targets.data(), 3);
            keel::cross_entropy(be, logits.view(), t, loss.vec(), {.lse = lse.vec()}, {.z_loss = 1e-4f}).or_throw();
            keel::cross_entropy_backward(be, logits.view(), t, {.lse = lse.vec()}, dlogits.view(), {.z_loss = 1e-4f, .scale = 0.5f}).or_throw();
            d.add(loss), d.add(lse), d.add(dlogits);
        });
    }
    same_bits("embedding", [&](auto const& be, digest& d) {
        guarded_matrix<keel::bf16> table(7, 100, 0, floats(data_kind::normal, 700)), y(50, 100);
        guarded_matrix<float> dtable(7, 100);
        std::vector<int32_t> ids(50);
        for (std::size_t t = 0; t < 50; ++t) ids[t] = static_cast<int32_t>(t * t % 6);
        scratch ws(keel::embedding_backward_workspace(50, 7));
        keel::embedding(be, table.view(), keel::vec(ids.data(), 50), y.view()).or_throw();
        keel::embedding_backward(be, y.view(), keel::vec(ids.data(), 50), dtable.view(), {}, ws.get()).or_throw();
        d.add(y), d.add(dtable);
    });
    same_bits("linear", [&](auto const& be, digest& d) {
        int64_t const tokens = 67, inputs = 131, outputs = 45;
        guarded_matrix<keel::bf16> x(tokens, inputs, 0, floats(data_kind::normal, tokens * inputs, 1)), w(outputs, inputs, 0, floats(data_kind::normal, outputs * inputs, 2));
        guarded_matrix<keel::bf16> dy(tokens, outputs, 0, floats(data_kind::normal, tokens * outputs, 3)), y(tokens, outputs), dx(tokens, inputs);
        guarded_matrix<float> dw(outputs, inputs);
        scratch ws(keel::linear_workspace(be, tokens, inputs, outputs));
        keel::linear(be, x.view(), w.view(), y.view(), ws.get()).or_throw();
        keel::linear_backward(be, dy.view(), x.view(), w.view(), {.dx = dx.view(), .dw = dw.view()}, {}, ws.get()).or_throw();
        d.add(y), d.add(dx), d.add(dw);
        keel::fp8_linear_plan<> const plan{tokens, inputs, outputs};
        guarded_matrix<keel::e4m3> w_codes(outputs, inputs), x_codes(tokens, inputs);
        guarded_matrix<float> w_scales(1, 2), x_scales(1, inputs);
        auto const wq = plan.weight(w_codes.view().data, w_scales.view().data);
        auto const saved = plan.saved(x_codes.view().data, x_scales.view().data);
        scratch fp8_ws(keel::fp8_linear_workspace(be, plan));
        keel::quantize<keel::overflow::saturate_finite>(be, w.view(), wq).or_throw();
        keel::fp8_linear(be, plan, x.view(), wq, y.view(), saved, nullptr, fp8_ws.get()).or_throw();
        keel::fp8_linear_backward(be, plan, dy.view(), wq, saved, {.dx = dx.view(), .dw = dw.view()}, {}, nullptr, fp8_ws.get()).or_throw();
        d.add(y), d.add(dx), d.add(dw);
    });
    return disagreements != 0;
}
