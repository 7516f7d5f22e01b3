// The norms over their own inputs, where their headers allow it.
#include <keel/format/bf16.hpp>
#include <keel/format/float32.hpp>
#include <keel/norm/rms_norm.hpp>
#include <support/backends.hpp>
#include <support/catch.hpp>
#include <support/data.hpp>

using namespace keel_test;

TEST_CASE("what may be done in place has the bits of separate memory") {
    int64_t const count = 5, width = 133;
    using matrix = guarded_matrix<keel::bf16>;
    auto const values = [&](uint64_t seed) { return floats(data_kind::normal, count * width, seed); };
    matrix x(count, width, 0, values(1)), residual(count, width, 0, values(2)), sum(count, width), y(count, width), y2(count, width);
    guarded_matrix<float> delta(1, width, 0, floats(data_kind::uniform, width)), r(1, count), dd(1, width), dd2(1, width);
    keel::cpu be;
    keel::add_rms_norm(be, x.view(), residual.view(), delta.vec(), sum.view(), y.view(), {.rrms = r.vec()}).or_throw();
    matrix a = x, b = residual;
    keel::add_rms_norm(be, a.view(), residual.view(), delta.vec(), a.view(), y2.view()).or_throw();
    CHECK((a.contents() == sum.contents() && y2.contents() == y.contents()));
    keel::add_rms_norm(be, x.view(), b.view(), delta.vec(), b.view(), y2.view()).or_throw();
    CHECK((b.contents() == sum.contents() && y2.contents() == y.contents()));
    matrix c = x;
    keel::rms_norm(be, x.view(), delta.vec(), y.view()).or_throw();
    keel::rms_norm(be, c.view(), delta.vec(), c.view()).or_throw();
    CHECK(c.contents() == y.contents());
    // Backward: dx over dy, and over dsum with and without ddelta.
    matrix dy(count, width, 0, values(3)), dsum(count, width, 0, values(4)), dx(count, width), over_dy = dy, over_dsum = dsum;
    scratch ws(keel::rms_norm_backward_workspace(count, width));
    auto const backward = [&](matrix& gradient, matrix& stream, keel::view<keel::bf16, 2> to, keel::view<float, 1> to_delta) {
        return keel::add_rms_norm_backward(be, gradient.view(), stream.view(), sum.view(), delta.vec(), {.rrms = r.vec()},
                                           {.dx = to, .ddelta = to_delta}, {}, ws.get());
    };
    backward(dy, dsum, dx.view(), dd.vec()).or_throw();
    backward(over_dy, dsum, over_dy.view(), {}).or_throw();
    CHECK(over_dy.contents() == dx.contents());
    backward(dy, over_dsum, over_dsum.view(), dd2.vec()).or_throw();
    CHECK((over_dsum.contents() == dx.contents() && dd2.contents() == dd.contents()));
    matrix refused = dy;
    CHECK(backward(refused, dsum, refused.view(), dd2.vec()).code == keel::status_code::overlap);
    CHECK(refused.contents() == dy.contents());
}
