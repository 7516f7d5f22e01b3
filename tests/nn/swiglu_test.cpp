// SwiGLU against double, its gradients against finite differences, every backend against the reference.
#include <cmath>

#include <keel/format/bf16.hpp>
#include <keel/format/float32.hpp>
#include <keel/nn/swiglu.hpp>
#include <support/backends.hpp>
#include <support/catch.hpp>
#include <support/data.hpp>
#include <support/fenced.hpp>

using namespace keel_test;

namespace {
double silu(double x) { return x / (1 + std::exp(-x)); }
} // namespace

TEST_CASE("swiglu and its gradients match the formulas in double") {
    guarded_matrix<float> gate(3, 133, 2, floats(data_kind::normal, 399, 1)), up(3, 133, 1, floats(data_kind::normal, 399, 2)), y(3, 133, 5);
    guarded_matrix<float> dy(3, 133, 0, floats(data_kind::normal, 399, 3)), dgate(3, 133, 1), dup(3, 133);
    keel::cpu be;
    keel::swiglu(be, gate.view(), up.view(), y.view()).or_throw();
    keel::swiglu_backward(be, dy.view(), gate.view(), up.view(), {.dgate = dgate.view(), .dup = dup.view()}).or_throw();
    for (int64_t i = 0; i < 3; ++i)
        for (int64_t j = 0; j < 133; ++j) {
            double const g = gate.at(i, j), u = up.at(i, j), d = dy.at(i, j), h = 1e-5;
            // silu is within 3 ulp; two more roundings; finite differences in double add about 1e-10.
            CHECK(y.at(i, j) == Approx(silu(g) * u).epsilon(6e-7).margin(1e-12));
            CHECK(dup.at(i, j) == Approx(d * silu(g)).epsilon(6e-7).margin(1e-12));
            CHECK(dgate.at(i, j) == Approx(d * u * (silu(g + h) - silu(g - h)) / (2 * h)).epsilon(2e-6).margin(1e-6));
        }
    CHECK((y.untouched() && dgate.untouched() && dup.untouched()));
}

TEST_CASE("swiglu keeps its bits on every backend, in bf16, on any data") {
    for (data_kind kind : {data_kind::normal, data_kind::any_bits, data_kind::with_inf}) {
        guarded_matrix<keel::bf16> gate(2, 300, 1, floats(kind, 600, 1)), up(2, 300, 0, floats(data_kind::normal, 600, 2)), y(2, 300);
        guarded_matrix<keel::bf16> dy(2, 300, 0, floats(data_kind::normal, 600, 3)), dgate(2, 300), dup(2, 300);
        keel::swiglu(keel::reference{}, gate.view(), up.view(), y.view()).or_throw();
        keel::swiglu_backward(keel::reference{}, dy.view(), gate.view(), up.view(), {.dgate = dgate.view(), .dup = dup.view()}).or_throw();
        for_each_backend([&](std::string const& name, auto const& be) {
            INFO(name << " " << name_of(kind));
            guarded_matrix<keel::bf16> y2(2, 300, 3), dgate2(2, 300), dup2(2, 300);
            keel::swiglu(be, gate.view(), up.view(), y2.view()).or_throw();
            keel::swiglu_backward(be, dy.view(), gate.view(), up.view(), {.dgate = dgate2.view(), .dup = dup2.view()}).or_throw();
            CHECK(y2.contents() == y.contents());
            CHECK(dgate2.contents() == dgate.contents());
            CHECK(dup2.contents() == dup.contents());
        });
    }
}

TEST_CASE("swiglu in place, and its refusals") {
    keel::cpu be;
    guarded_matrix<float> gate(2, 9, 0, floats(data_kind::normal, 18)), up(2, 9, 0, floats(data_kind::normal, 18, 2)), y(2, 9);
    keel::swiglu(be, gate.view(), up.view(), y.view()).or_throw();
    auto const s = keel::swiglu(be, gate.view(), keel::columns(up.view(), 0, 8), y.view());
    CHECK(s.message() == "swiglu: up has columns = 8, wanted 9 (bad_shape)");
    keel::swiglu(be, gate.view(), up.view(), up.view()).or_throw();
    CHECK(up.contents() == y.contents());
    CHECK(keel::swiglu_backward(be, y.view(), gate.view(), up.view(), {.dgate = y.view(), .dup = up.view()}).code == keel::status_code::overlap);
    CHECK(keel::swiglu(be, keel::rows(static_cast<float*>(nullptr), 0, 9), keel::rows(static_cast<float*>(nullptr), 0, 9),
                       keel::rows(static_cast<float*>(nullptr), 0, 9)).ok());
}

TEST_CASE("a cube with gaps cannot be flattened: every call refuses it, also beside others like it") {
    std::vector<float> x(80, 3.0f), y(80, -1.0f);
    keel::view<float, 3> const from{x.data(), {2, 3, 8}, {40, 8, 1}}, to{y.data(), {2, 3, 8}, {40, 8, 1}};
    CHECK(keel::swiglu(keel::cpu{}, keel::flattened(from), keel::flattened(from), keel::flattened(to)).message() ==
          "swiglu: gate has rows = -1, wanted 0 or more (bad_shape)");
    CHECK(!keel::swiglu_backward(keel::cpu{}, flattened(from), flattened(from), flattened(from), {flattened(to), flattened(to)}).ok());
    CHECK(y == std::vector<float>(80, -1.0f));
    // Without gaps, or with one item, it is the same elements.
    CHECK(keel::flattened(keel::cube(x.data(), 2, 3, 8)).extent[0] == 6);
    CHECK(keel::flattened(keel::slice(from, 1, 1)).data == x.data() + 40);
    CHECK(keel::flattened(keel::cube(x.data(), 2, 0, 8)).empty());
    CHECK(keel::slice(keel::view<float, 2>{}, 3, 5).absent());
}

TEST_CASE("swiglu's gradients are within their stated error, also in place") {
    guarded_matrix<float> gate(2, 515, 0, floats(data_kind::mixed_scales, 1030, 1)), up(2, 515, 0, floats(data_kind::normal, 1030, 2));
    guarded_matrix<float> dy(2, 515, 0, floats(data_kind::normal, 1030, 3)), dgate(2, 515), dup(2, 515), g2 = gate, u2 = up;
    keel::cpu be;
    keel::swiglu_backward(be, dy.view(), gate.view(), up.view(), {dgate.view(), dup.view()}).or_throw();
    int64_t wrong = 0;
    for (int64_t i = 0; i < 2; ++i)
        for (int64_t j = 0; j < 515; ++j) {
            double const z = gate.at(i, j), s = 1 / (1 + std::exp(-z)), d = dy.at(i, j), u = up.at(i, j);
            wrong += !(std::abs(dup.at(i, j) - d * z * s) <= 6e-7 * std::abs(d * z * s) + 0x1p-140);
            wrong += !(std::abs(dgate.at(i, j) - d * u * s * (1 + z * (1 - s))) <= 0x1p-20 * std::abs(d * u));
        }
    CHECK(wrong == 0);
    keel::swiglu_backward(be, dy.view(), g2.view(), u2.view(), {g2.view(), u2.view()}).or_throw();
    CHECK((g2.contents() == dgate.contents() && u2.contents() == dup.contents()));
}

TEST_CASE("swiglu reads and writes nothing past its rows, up to a page's end") {
    for (bool at_end : {true, false})
        for (int64_t width : {1, 7, 16, 31, 97}) {
            INFO("width " << width << (at_end ? " at a page's end" : " at a page's start"));
            auto const values = floats(data_kind::normal, 2 * width, 5);
            fenced<float> gate(values, at_end), up(values, at_end), y(2 * width, at_end), dg(2 * width, at_end), du(2 * width, at_end);
            auto const m = [&](fenced<float> const& f) { return keel::rows(f.data(), 2, width); };
            keel::swiglu(keel::cpu{}, m(gate), m(up), m(y)).or_throw();
            keel::swiglu_backward(keel::cpu{}, m(y), m(gate), m(up), {m(dg), m(du)}).or_throw();
            for (std::size_t i = 0; i < values.size(); ++i)
                CHECK(static_cast<double>(y.data()[i]) == Approx(silu(static_cast<double>(values[i])) * static_cast<double>(values[i])).epsilon(6e-7));
        }
}
