// The linear layer in float, bf16 and FP8: products against double, FP8 against its own parts.
#include <algorithm>
#include <cmath>

#include <keel/backend/cpu/matmul.hpp>
#include <keel/backend/reference_matmul.hpp>
#include <keel/format/bf16.hpp>
#include <keel/nn/fp8_linear.hpp>
#include <support/backends.hpp>
#include <support/catch.hpp>
#include <support/data.hpp>

using namespace keel_test;

namespace {

template <class T> void check_linear(int64_t tokens, int64_t inputs, int64_t outputs) {
    INFO(tokens << " x " << inputs << " x " << outputs);
    guarded_matrix<T> x(tokens, inputs, 2, floats(data_kind::normal, tokens * inputs, 1)), w(outputs, inputs, 0, floats(data_kind::normal, outputs * inputs, 2));
    guarded_matrix<T> dy(tokens, outputs, 1, floats(data_kind::normal, tokens * outputs, 3)), y(tokens, outputs, 1), dx(tokens, inputs);
    guarded_matrix<float> dw(outputs, inputs, 3);
    keel::cpu be;
    scratch ws(keel::linear_workspace(be, tokens, inputs, outputs));
    keel::linear(be, x.view(), w.view(), y.view(), ws.get()).or_throw();
    keel::linear_backward(be, dy.view(), x.view(), w.view(), {.dx = dx.view(), .dw = dw.view()}, {}, ws.get()).or_throw();
    keel::linear_backward(be, dy.view(), x.view(), w.view(), {.dw = dw.view()}, {.grad = keel::accumulate}, ws.get()).or_throw();
    // A chain of n fma is within n * 2^-24 * sum|ab|; then one rounding to the output.
    auto const near = [](double got, double exact, double size, int64_t n, int mantissa) {
        return std::abs(got - exact) <= static_cast<double>(n + 1) * 0x1p-24 * size + std::ldexp(std::abs(exact), -mantissa - 1) * 1.001;
    };
    constexpr int mantissa = keel::format_traits<T>::mantissa_bits;
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t o = 0; o < outputs; ++o) {
            double sum = 0, size = 0;
            for (int64_t i = 0; i < inputs; ++i) sum += x.at(t, i) * w.at(o, i), size += std::abs(x.at(t, i) * w.at(o, i));
            if (!near(y.at(t, o), sum, size, inputs, mantissa)) FAIL_CHECK("y " << t << "," << o);
        }
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t i = 0; i < inputs; ++i) {
            double sum = 0, size = 0;
            for (int64_t o = 0; o < outputs; ++o) sum += dy.at(t, o) * w.at(o, i), size += std::abs(dy.at(t, o) * w.at(o, i));
            if (!near(dx.at(t, i), sum, size, outputs, mantissa)) FAIL_CHECK("dx " << t << "," << i);
        }
    for (int64_t o = 0; o < outputs; ++o)
        for (int64_t i = 0; i < inputs; ++i) {
            double sum = 0, size = 0;
            for (int64_t t = 0; t < tokens; ++t) sum += dy.at(t, o) * x.at(t, i), size += std::abs(dy.at(t, o) * x.at(t, i));
            if (!near(dw.at(o, i), 2 * sum, 2 * size, tokens + 1, 23)) FAIL_CHECK("dw " << o << "," << i);
        }
    CHECK((y.untouched() && dx.untouched() && dw.untouched()));
}

} // namespace

TEST_CASE("linear and its gradients match double in float and bf16") {
    for (auto [t, i, o] : {std::array<int64_t, 3>{5, 7, 3}, {1, 1, 1}, {33, 65, 17}, {64, 128, 96}}) {
        check_linear<float>(t, i, o);
        check_linear<keel::bf16>(t, i, o);
    }
}

TEST_CASE("the FP8 layer is its parts, and close to the layer in double") {
    int64_t const tokens = 150, inputs = 200, outputs = 140;
    guarded_matrix<keel::bf16> x(tokens, inputs, 0, floats(data_kind::normal, tokens * inputs, 1)), dy(tokens, outputs, 0, floats(data_kind::normal, tokens * outputs, 2));
    guarded_matrix<float> w(outputs, inputs, 0, floats(data_kind::normal, outputs * inputs, 3));
    keel::fp8_linear_plan<> const plan{tokens, inputs, outputs};
    using plan_type = keel::fp8_linear_plan<>;
    std::vector<keel::e4m3> w_codes(static_cast<std::size_t>(outputs * inputs)), saved_codes(static_cast<std::size_t>(tokens * inputs));
    std::vector<float> w_scales(static_cast<std::size_t>(plan.weight_scales())), saved_scales(static_cast<std::size_t>(plan.saved_scales()));
    auto const wq = plan.weight(w_codes.data(), w_scales.data());
    auto const saved = plan.saved(saved_codes.data(), saved_scales.data());
    keel::cpu be;
    keel::quantize<keel::overflow::saturate_finite>(be, w.view(), wq).or_throw();
    guarded_matrix<keel::bf16> y(tokens, outputs), dx(tokens, inputs);
    guarded_matrix<float> dw(outputs, inputs);
    scratch ws(keel::fp8_linear_workspace(be, plan));
    keel::report report;
    keel::fp8_linear(be, plan, x.view(), wq, y.view(), saved, &report, ws.get()).or_throw();
    keel::fp8_linear_backward(be, plan, dy.view(), wq, saved, {.dx = dx.view(), .dw = dw.view()}, {}, nullptr, ws.get()).or_throw();
    CHECK(report.elements == 2 * tokens * inputs);
    CHECK(report.saturated == 0);
    // Evaluation keeps nothing and gives the same y.
    guarded_matrix<keel::bf16> y2(tokens, outputs);
    keel::fp8_linear(be, plan, x.view(), wq, y2.view(), plan_type::token_blocks{}, nullptr, ws.get()).or_throw();
    CHECK(y2.contents() == y.contents());
    // Each e4m3 element is off by a uniform relative error up to 2^-4: two factors of random sign over n terms give a relative
    // Frobenius error near 0.04 (2^-4 / sqrt(3) each, root of two, times the share below the block's largest). 0.06 would be a fault.
    auto const distance = [](auto const& got, int64_t n, auto left, auto right) {
        double off = 0, size = 0;
        for (int64_t i = 0; i < got.rows(); ++i)
            for (int64_t j = 0; j < got.columns(); ++j) {
                double sum = 0;
                for (int64_t p = 0; p < n; ++p) sum += left(i, p) * right(p, j);
                off += (got.at(i, j) - sum) * (got.at(i, j) - sum), size += sum * sum;
            }
        return std::sqrt(off / size);
    };
    double const forward = distance(y, inputs, [&](int64_t t, int64_t i) { return x.at(t, i); }, [&](int64_t i, int64_t o) { return w.at(o, i); });
    double const to_x = distance(dx, outputs, [&](int64_t t, int64_t o) { return dy.at(t, o); }, [&](int64_t o, int64_t i) { return w.at(o, i); });
    double const to_w = distance(dw, tokens, [&](int64_t o, int64_t t) { return dy.at(t, o); }, [&](int64_t t, int64_t i) { return x.at(t, i); });
    for (double d : {forward, to_x, to_w}) {
        CHECK(d < 0.06);
        CHECK(d > 0.01);
    }
    // Nothing depends on the backend.
    guarded_matrix<keel::bf16> y3(tokens, outputs), dx3(tokens, inputs);
    guarded_matrix<float> dw3(outputs, inputs);
    keel::reference const slow;
    scratch slow_ws(keel::fp8_linear_workspace(slow, plan));
    keel::fp8_linear(slow, plan, x.view(), wq, y3.view(), saved, nullptr, slow_ws.get()).or_throw();
    keel::fp8_linear_backward(slow, plan, dy.view(), wq, saved, {.dx = dx3.view(), .dw = dw3.view()}, {}, nullptr, slow_ws.get()).or_throw();
    CHECK(y3.contents() == y.contents());
    CHECK(dx3.contents() == dx.contents());
    CHECK(dw3.contents() == dw.contents());
}

TEST_CASE("linear layers refuse what does not fit") {
    guarded_matrix<float> x(4, 6), w(5, 7), y(4, 5);
    CHECK(!keel::linear(keel::cpu{}, x.view(), w.view(), y.view()).ok());
    keel::fp8_linear_plan<> const plan{4, 6, 5};
    CHECK(keel::fp8_linear(keel::cpu{}, plan, x.view(), {}, y.view()).message() == "fp8_linear: w.codes has rows = 0, wanted 5 (bad_shape)");
    guarded_matrix<float> w2(5, 6), dx(4, 6);
    // The FP8 layer looks at everything before the first code is written.
    guarded_matrix<keel::e4m3> w_codes(5, 6), saved_codes(4, 6);
    guarded_matrix<float> w_scales(1, 1), saved_scales(1, 6);
    scratch ws(keel::fp8_linear_workspace(keel::cpu{}, plan));
    auto const weight = keel::fp8_linear_plan<>::weight_blocks{w_codes.view(), w_scales.view()};
    auto const saved = keel::fp8_linear_plan<>::token_blocks{saved_codes.view(), saved_scales.view()};
    auto const forward = [&](auto weights, auto output, auto kept) {
        return keel::fp8_linear(keel::cpu{}, plan, x.view(), weights, output, kept, nullptr, ws.get());
    };
    auto no_scales = weight;
    no_scales.scales = {};
    CHECK(forward(no_scales, y.view(), saved).message() == "fp8_linear: w.scales has rows = 0, wanted 1 (bad_shape)");
    CHECK(forward(weight, keel::rows(x.view().data, 4, 5), saved).code == keel::status_code::overlap);
    auto over_scales = saved;
    over_scales.scales.data = y.view().data;
    CHECK(forward(weight, y.view(), over_scales).code == keel::status_code::overlap);
    CHECK(keel::fp8_linear_backward(keel::cpu{}, plan, y.view(), weight, saved, {.dx = keel::rows(saved_scales.view().data, 4, 6)}, {}, nullptr,
                                    ws.get())
              .code == keel::status_code::overlap);
    CHECK(saved_codes.at(0, 0) == 0.0);
    CHECK(forward(weight, y.view(), saved).ok());
    CHECK(keel::linear_backward(keel::cpu{}, y.view(), x.view(), w2.view(), {.dx = dx.view()}).code == keel::status_code::small_workspace);
}

TEST_CASE("linear refuses views that cannot be made") {
    std::vector<float> x(80, 3.0f), y(80, -1.0f);
    keel::view<float, 3> const from{x.data(), {2, 3, 8}, {40, 8, 1}}, to{y.data(), {2, 3, 8}, {40, 8, 1}};
    CHECK(keel::linear(keel::cpu{}, flattened(from), flattened(from), flattened(to)).message() ==
          "linear: x has rows = -1, wanted 0 or more (bad_shape)");
    CHECK(!keel::linear_backward(keel::cpu{}, flattened(from), flattened(from), flattened(from), {flattened(to), {}}).ok());
    CHECK(y == std::vector<float>(80, -1.0f));
}

TEST_CASE("the FP8 layer: no output lies over any input, w and saved may be const, the plan prints") {
    int64_t const t = 4, i = 6, o = 6;
    keel::fp8_linear_plan<> const plan{t, i, o};
    CHECK(plan.text() == "tokens 4, inputs 6, outputs 6; scales: 1 of w, 6 saved");
    std::vector<float> x(24, 1.5f), w(36, 0.25f), y(24, 7.0f), w_scales(64), saved_scales(16), codes_as_floats(16);
    std::vector<keel::e4m3> w_codes(64), saved_codes(64);
    auto const X = keel::rows(x.data(), t, i), Y = keel::rows(y.data(), t, o);
    keel::cpu be;
    scratch ws(keel::fp8_linear_workspace(be, plan));
    auto const refuses = [&](keel::e4m3* wc, float* wsc, keel::e4m3* sc, float* ssc) {
        keel::quantize<keel::overflow::saturate>(be, keel::rows(w.data(), o, i), plan.weight(wc, wsc)).or_throw();
        auto const s = keel::fp8_linear(be, plan, X, plan.weight(wc, wsc), Y, plan.saved(sc, ssc), nullptr, ws.get());
        return s.code == keel::status_code::overlap && y == std::vector<float>(24, 7.0f);
    };
    auto const as_codes = [](std::vector<float>& f) { return reinterpret_cast<keel::e4m3*>(f.data()); };
    CHECK(refuses(w_codes.data(), w_scales.data(), w_codes.data() + 30, saved_scales.data()));
    CHECK(refuses(w_codes.data(), w_scales.data(), as_codes(w_scales), saved_scales.data()));
    CHECK(refuses(as_codes(codes_as_floats), w_scales.data(), saved_codes.data(), codes_as_floats.data() + 8));
    CHECK(refuses(w_codes.data(), w_scales.data(), saved_codes.data(), w_scales.data()));
    CHECK(refuses(w_codes.data(), w_scales.data(), as_codes(y), saved_scales.data()));
    CHECK(refuses(w_codes.data(), w_scales.data(), as_codes(x), saved_scales.data()));
    auto const half = keel::fp8_linear_plan<>::token_blocks{{}, plan.saved(saved_codes.data(), saved_scales.data()).scales};
    CHECK(!keel::fp8_linear(be, plan, X, plan.weight(w_codes.data(), w_scales.data()), Y, half, nullptr, ws.get()).ok());
    // From const memory, the same results.
    keel::quantize<keel::overflow::saturate>(be, keel::rows(w.data(), o, i), plan.weight(w_codes.data(), w_scales.data())).or_throw();
    keel::e4m3 const *const wc = w_codes.data(), *const sc = saved_codes.data();
    float const *const wsc = w_scales.data(), *const ssc = saved_scales.data();
    keel::tile_blocks<keel::e4m3 const> const read_w{keel::rows(wc, o, i), keel::rows(wsc, 1, 1)};
    keel::column_blocks<keel::e4m3 const> const read_saved{keel::rows(sc, t, i), keel::rows(ssc, 1, i)};
    std::vector<float> dx(24), dw(36), plain_y(24), plain_dw(36);
    keel::fp8_linear(be, plan, X, read_w, Y, plan.saved(saved_codes.data(), saved_scales.data()), nullptr, ws.get()).or_throw();
    auto const plain_w = plan.weight(w_codes.data(), w_scales.data());
    auto const plain_saved = plan.saved(saved_codes.data(), saved_scales.data());
    keel::fp8_linear(be, plan, X, plain_w, keel::rows(plain_y.data(), t, o), {}, nullptr, ws.get()).or_throw();
    CHECK(equal_bits(y, plain_y));
    CHECK(y[0] == Approx(6 * 1.5 * 0.25).epsilon(1e-5));
    keel::fp8_linear_backward(be, plan, Y, read_w, read_saved, {keel::rows(dx.data(), t, i), keel::rows(dw.data(), o, i)}, {}, nullptr, ws.get())
        .or_throw();
    keel::fp8_linear_backward(be, plan, Y, plain_w, plain_saved, {.dw = keel::rows(plain_dw.data(), o, i)}, {}, nullptr, ws.get()).or_throw();
    CHECK(equal_bits(dw, plain_dw));
    CHECK(dw[0] == Approx(4 * 2.25 * 1.5).epsilon(1e-5));
}

TEST_CASE("a linear layer's workspace one byte short is refused and nothing is written") {
    int64_t const t = 5, i = 130, o = 7;
    guarded_matrix<float> x(t, i, 0, floats(data_kind::normal, t * i, 1)), w(o, i, 0, floats(data_kind::normal, o * i, 2)), y(t, o), dx(t, i), dw(o, i);
    keel::cpu be;
    // linear alone asks for no more than its own product.
    scratch forward_less(keel::matmul_workspace(be, t, o, i) - 1), less(keel::linear_workspace(be, t, i, o) - 1), enough(keel::linear_workspace(be, t, i, o));
    auto const small = keel::status_code::small_workspace;
    CHECK(keel::linear(be, x.view(), w.view(), y.view(), forward_less.get()).code == small);
    CHECK(keel::linear_backward(be, y.view(), x.view(), w.view(), {dx.view(), dw.view()}, {}, less.get()).code == small);
    keel::fp8_linear_plan<> const plan{t, i, o};
    std::vector<keel::e4m3> wc(static_cast<std::size_t>(o * i)), sc(static_cast<std::size_t>(t * i));
    std::vector<float> wsc(static_cast<std::size_t>(plan.weight_scales())), ssc(static_cast<std::size_t>(plan.saved_scales()));
    auto const W = plan.weight(wc.data(), wsc.data());
    auto const S = plan.saved(sc.data(), ssc.data());
    scratch fp8_less(keel::fp8_linear_workspace(be, plan) - 1);
    CHECK(keel::fp8_linear(be, plan, x.view(), W, y.view(), S, nullptr, fp8_less.get()).code == small);
    CHECK(keel::fp8_linear_backward(be, plan, y.view(), W, S, {dx.view(), dw.view()}, {}, nullptr, fp8_less.get()).code == small);
    CHECK((ssc[0] == 0.0f && sc[0].bits == 0));
    for (auto const& m : {y.contents(), dx.contents(), dw.contents()}) CHECK(m == std::vector<unsigned char>(m.size()));
    keel::linear(be, x.view(), w.view(), y.view(), enough.get()).or_throw();
    CHECK(y.at(0, 0) != 0.0);
}
