// Same bits: NVFP4 by each rule, there and back, and compensated updates.
#include <keel/format/f16.hpp>
#include <keel/optim/kahan.hpp>
#include <keel/quantize/nvfp4.hpp>
#include <support/bits.hpp>

using namespace keel_test;

namespace {

template <class Rule, class X> void nvfp4(char const* name) {
    for (data_kind kind : all_kinds)
        same_bits(std::string("quantize_nvfp4 ") + name + " " + name_of(kind), [&](auto const& be, digest& d) {
            int64_t const rows = 31, columns = 259;
            guarded_matrix<X> x(rows, columns, 1, floats(kind, rows * columns, 1)), y(rows, columns);
            guarded_matrix<keel::e2m1x2> codes(rows, keel::nvfp4_matrix<>::pairs(columns), 1);
            guarded_matrix<keel::e4m3> scales(rows, keel::nvfp4_matrix<>::blocks(columns));
            guarded_matrix<float> tensor(1, 1);
            keel::nvfp4_matrix<> const q{columns, codes.view(), scales.view(), tensor.vec()};
            keel::report report;
            keel::quantize_nvfp4<Rule>(be, x.view(), q, {}, &report).or_throw();
            keel::dequantize_nvfp4(be, q, y.view()).or_throw();
            d.add(codes), d.add(scales), d.add(tensor), d.add(y), d.add(&report, sizeof report);
        });
}

template <class W> void kahan(char const* name) {
    for (data_kind kind : all_kinds)
        same_bits(std::string("kahan_update ") + name + " " + name_of(kind), [&](auto const& be, digest& d) {
            int64_t const n = 8400;
            guarded_matrix<float> update(1, n, 0, floats(kind, n, 3));
            guarded_matrix<W> w(1, n, 0, floats(data_kind::normal, n, 4)), c(1, n);
            for (int t = 0; t < 3; ++t) keel::kahan_update<W>(be, update.vec(), {w.vec(), c.vec()}, keel::open_gate()).or_throw();
            d.add(w), d.add(c);
        });
}

} // namespace

int main() {
    nvfp4<keel::nvfp4_rules::nearest, keel::bf16>("nearest");
    nvfp4<keel::nvfp4_rules::round_up, float>("round_up");
    nvfp4<keel::nvfp4_rules::transformer_engine, keel::f16>("transformer_engine");
    kahan<keel::bf16>("bf16");
    kahan<keel::f16>("f16");
    return disagreements != 0;
}
