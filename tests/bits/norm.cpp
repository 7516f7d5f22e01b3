// Same bits: rms_norm, add_rms_norm and their backward.
#include <keel/format/bf16.hpp>
#include <keel/format/float32.hpp>
#include <keel/norm/rms_norm_quantize.hpp>
#include <support/bits.hpp>

using namespace keel_test;

int main() {
    for (data_kind kind : all_kinds)
        for (int64_t width : {1, 129, 2049, 7168})
            same_bits(std::string("rms_norm ") + name_of(kind) + " " + std::to_string(width), [&](auto const& be, digest& d) {
                guarded_matrix<keel::bf16> x(3, width, 1, floats(kind, 3 * width, 1)), residual(3, width, 0, floats(data_kind::normal, 3 * width, 2));
                guarded_matrix<keel::bf16> dy(3, width, 0, floats(data_kind::normal, 3 * width, 3)), sum(3, width), y(3, width), dx(3, width);
                guarded_matrix<float> delta(1, width, 0, floats(data_kind::uniform, width, 4)), rrms(1, 3), ddelta(1, width);
                scratch ws(keel::rms_norm_backward_workspace(3, width));
                keel::rms_norm(be, x.view(), delta.vec(), y.view(), {.rrms = rrms.vec()}).or_throw();
                d.add(y), d.add(rrms);
                keel::rms_norm_backward(be, dy.view(), x.view(), delta.vec(), {.rrms = rrms.vec()}, {.dx = dx.view(), .ddelta = ddelta.vec()}, {}, ws.get()).or_throw();
                d.add(dx), d.add(ddelta);
                keel::add_rms_norm(be, x.view(), residual.view(), delta.vec(), sum.view(), y.view()).or_throw();
                d.add(sum), d.add(y);
                guarded_matrix<keel::e4m3> codes(3, width, 1);
                guarded_matrix<float> scales(3, keel::row_blocks<>::scale_columns(width));
                keel::rms_norm_quantize<float, keel::overflow::saturate_finite>(be, x.view(), delta.vec(), keel::row_blocks<>{codes.view(), scales.view()}).or_throw();
                d.add(codes), d.add(scales);
            });
    return disagreements != 0;
}
