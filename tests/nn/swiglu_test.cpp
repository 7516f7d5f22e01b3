// SwiGLU against double, its gradients against finite differences, every backend against the reference.
#include <cmath>

#include <keel/format/bf16.hpp>
#include <keel/format/float32.hpp>
#include <keel/nn/swiglu.hpp>
#include <support/backends.hpp>
#include <support/catch.hpp>
#include <support/data.hpp>

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
