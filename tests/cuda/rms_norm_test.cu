// The norm and its backward instantiated for CUDA: compiled wherever nvcc is; where there is a GPU they run against the reference, bit for bit.
#include <keel/format/bf16.hpp>
#include <keel/norm/rms_norm.hpp>
#include <support/catch.hpp>
#include <support/device_twins.hpp>

using namespace keel_test;

namespace {

template <class X> void check_norm(int64_t rows, int64_t width) {
    twins<X> x(values<X>(rows * width, 1)), dy(values<X>(rows * width, 2)), y(rows * width), dx(rows * width);
    twins<float> delta(values<float>(width, 3)), ddelta(width), rrms(rows);
    twins<std::byte> memory(keel::rms_norm_backward_workspace(rows, width));
    CHECK(on_both([&](auto be) {
        auto const X_ = keel::rows(x.on(be), rows, width);
        auto const gain = keel::vec(delta.on(be), width);
        keel::rms_norm_saved const saved{keel::vec(rrms.on(be), rows)};
        keel::rms_norm(be, X_, gain, keel::rows(y.on(be), rows, width), saved).or_throw();
        keel::rms_norm_backward(be, keel::rows(dy.on(be), rows, width), X_, gain, saved,
                                {keel::rows(dx.on(be), rows, width), keel::vec(ddelta.on(be), width)}, {},
                                {memory.on(be), static_cast<int64_t>(memory.host.size())})
            .or_throw();
    }));
    CHECK((y.equal() && rrms.equal() && dx.equal() && ddelta.equal()));
}

} // namespace

TEST_CASE("CUDA gives the reference's bits: rms_norm and its backward") {
    for (int64_t width : {1, 127, 1000, 4099}) check_norm<float>(70, width), check_norm<keel::bf16>(70, width);
}
