// RMSNorm against its formula in double, its gradients against finite differences, and every backend against the reference.
#include <cmath>
#include <limits>

#include <keel/format/bf16.hpp>
#include <keel/format/f16.hpp>
#include <keel/format/fp8.hpp>
#include <keel/format/float32.hpp>
#include <keel/norm/rms_norm.hpp>
#include <support/backends.hpp>
#include <support/catch.hpp>
#include <support/data.hpp>
#include <support/fenced.hpp>

using namespace keel_test;

namespace {

constexpr int64_t widths[] = {1, 2, 7, 16, 63, 64, 65, 127, 128, 129, 255, 1000, 2048, 2049, 4099};

struct oracle {
    std::vector<double> y, r;
};

/// The formula in double, on the values as stored.
template <class X, class D> oracle forward(guarded_matrix<X> const& x, guarded_matrix<D> const& delta, double epsilon) {
    oracle o{std::vector<double>(static_cast<std::size_t>(x.rows() * x.columns())), {}};
    for (int64_t i = 0; i < x.rows(); ++i) {
        long double squares = 0;
        for (int64_t j = 0; j < x.columns(); ++j) squares += static_cast<long double>(x.at(i, j)) * static_cast<long double>(x.at(i, j));
        auto const r = 1 / std::sqrt(squares / static_cast<long double>(x.columns()) + static_cast<long double>(epsilon));
        o.r.push_back(static_cast<double>(r));
        for (int64_t j = 0; j < x.columns(); ++j)
            o.y[static_cast<std::size_t>(i * x.columns() + j)] =
                static_cast<double>(static_cast<long double>(x.at(i, j)) * r * (1 + static_cast<long double>(delta.at(0, j))));
    }
    return o;
}

/// Half an ulp of T at v, plus what fp32 adds before: the sum's error is below 2^-20 relative for these widths (THE order
/// keeps chains at 16 terms a segment: 2^-24 * (16 + 7 + segments)), halved by the square root; then five roundings.
template <class T> double allowed(double v) {
    double const half_ulp = std::ldexp(1.0, -keel::format_traits<T>::mantissa_bits - 1) * std::abs(v);
    return half_ulp * (1 + 1e-6) + std::abs(v) * 0x1p-20 + static_cast<double>(keel::format_traits<T>::min_subnormal());
}

template <class X, class D, class Y> void check_forward(data_kind kind, int64_t width) {
    INFO(name_of(kind) << " width " << width);
    float const epsilon = 1e-6f;
    guarded_matrix<X> x(3, width, 5, floats(kind, 3 * width, 11));
    guarded_matrix<D> delta(1, width, 0, floats(data_kind::uniform, width, 12));
    guarded_matrix<Y> y(3, width, 3);
    guarded_matrix<float> r(1, 3);
    keel::rms_norm(keel::reference{}, x.view(), delta.vec(), y.view(), {.rrms = r.vec()}, {.epsilon = epsilon}).or_throw();
    auto const want = forward(x, delta, static_cast<double>(epsilon));
    for (int64_t i = 0; i < 3; ++i) {
        if (std::isfinite(want.r[static_cast<std::size_t>(i)]))
            CHECK(std::abs(r.at(0, i) - want.r[static_cast<std::size_t>(i)]) <=
                  want.r[static_cast<std::size_t>(i)] * 0x1p-20 + std::numeric_limits<double>::denorm_min() + 0x1p-149);
        for (int64_t j = 0; j < width; ++j) {
            double const w = want.y[static_cast<std::size_t>(i * width + j)], got = y.at(i, j);
            if (std::isnan(w)) CHECK(std::isnan(got));
            else if (!(std::abs(got - w) <= allowed<Y>(w))) FAIL_CHECK("row " << i << " column " << j << ": " << got << " for " << w);
        }
    }
    CHECK(y.untouched());
    auto const expected = y.contents();
    auto const expected_r = r.contents();
    auto const agrees = [&](std::string const& name, auto const& be) {
        INFO(name);
        guarded_matrix<Y> z(3, width, 3);
        guarded_matrix<float> s(1, 3);
        keel::rms_norm(be, x.view(), delta.vec(), z.view(), {.rrms = s.vec()}, {.epsilon = epsilon}).or_throw();
        CHECK(z.contents() == expected);
        CHECK(s.contents() == expected_r);
        CHECK(z.untouched());
    };
    // Every backend with bf16 in and out; the other formats differ in their load and store alone, which tests/backend covers.
    if constexpr (std::is_same_v<X, keel::bf16> && std::is_same_v<Y, keel::bf16>) for_each_backend(agrees);
    else agrees("cpu", keel::cpu{});
}

} // namespace

TEST_CASE("rms_norm matches its formula in double and its own bits on every backend") {
    for (int64_t width : widths) {
        for (data_kind kind : finite_kinds) check_forward<float, float, float>(kind, width);
        check_forward<keel::bf16, float, keel::bf16>(data_kind::normal, width);
    }
    for (data_kind kind : {data_kind::huge, data_kind::tiny, data_kind::subnormal}) check_forward<float, float, float>(kind, 129);
    for (data_kind kind : finite_kinds) check_forward<keel::bf16, keel::bf16, float>(kind, 257);
    for (data_kind kind : finite_kinds) check_forward<float, float, keel::bf16>(kind, 100);
    check_forward<keel::f16, keel::f16, keel::f16>(data_kind::normal, 131);
    check_forward<keel::e4m3, float, keel::bf16>(data_kind::normal, 131);
    check_forward<keel::e5m2, keel::bf16, float>(data_kind::normal, 131);
}

TEST_CASE("rms_norm keeps its bits on any data, backend by backend") {
    for (data_kind kind : all_kinds)
        for (int64_t width : {1, 17, 129, 2050}) {
            INFO(name_of(kind) << " width " << width);
            guarded_matrix<float> x(2, width, 0, floats(kind, 2 * width, 5)), y(2, width), sum(2, width);
            guarded_matrix<float> residual(2, width, 1, floats(data_kind::normal, 2 * width, 6)), delta(1, width, 0, floats(kind, width, 7));
            keel::add_rms_norm(keel::reference{}, x.view(), residual.view(), delta.vec(), sum.view(), y.view()).or_throw();
            for_each_backend([&](std::string const& name, auto const& be) {
                INFO(name);
                guarded_matrix<float> z(2, width), s(2, width);
                keel::add_rms_norm(be, x.view(), residual.view(), delta.vec(), s.view(), z.view()).or_throw();
                CHECK(z.contents() == y.contents());
                CHECK(s.contents() == sum.contents());
            });
        }
}

TEST_CASE("delta = 0 equals no gain bit for bit, and delta = 2^-8 is not lost") { // Liger #1462, TE #1690
    guarded_matrix<keel::bf16> x(2, 100, 0, floats(data_kind::normal, 200)), y(2, 100), z(2, 100);
    guarded_matrix<float> zero(1, 100);
    guarded_matrix<keel::bf16> small(1, 100, 0, std::vector<float>(100, 0x1p-8f));
    keel::cpu be;
    keel::rms_norm(be, x.view(), zero.vec(), y.view()).or_throw();
    keel::rms_norm(be, x.view(), keel::view<float, 1>{}, z.view()).or_throw();
    CHECK(y.contents() == z.contents());
    guarded_matrix<float> one(1, 1, 0, {1.0f}), out(1, 1);
    keel::rms_norm(be, one.view(), keel::vec(small.view().data, 1), out.view(), {}, {.epsilon = 0x1p-126f}).or_throw();
    CHECK(out.at(0, 0) == 1.00390625);
}

TEST_CASE("sums of squares neither overflow nor vanish") { // tt-metal #55159, nntrainer #3935, keras #23546
    keel::cpu be;
    for (float v : {1e25f, 3e38f, 1e-10f, 1e-25f, 1e-38f}) {
        INFO(v);
        guarded_matrix<float> x(1, 1000, 0, std::vector<float>(1000, v)), y(1, 1000);
        keel::rms_norm(be, x.view(), keel::view<float, 1>{}, y.view(), {}, {.epsilon = 0x1p-126f}).or_throw();
        // 1e-38 squared is far below epsilon = 2^-126: y = v / sqrt(v^2 + epsilon).
        double const want = static_cast<double>(v) / std::sqrt(static_cast<double>(v) * static_cast<double>(v) + 0x1p-126);
        CHECK(y.at(0, 500) == Approx(want).epsilon(1e-6));
    }
    guarded_matrix<keel::f16> half(1, 4096, 0, std::vector<float>(4096, 1000.0f)), out(1, 4096);
    keel::rms_norm(be, half.view(), keel::view<float, 1>{}, out.view()).or_throw();
    CHECK(out.at(0, 77) == 1.0);
    guarded_matrix<float> zero(1, 33), zero_out(1, 33, 0, std::vector<float>(33, 7.0f));
    keel::rms_norm(be, zero.view(), keel::view<float, 1>{}, zero_out.view()).or_throw();
    CHECK(zero_out.contents() == zero.contents());
}

TEST_CASE("cast_then_gain rounds u before the gain") {
    keel::cpu be;
    guarded_matrix<keel::bf16> x(4, 96, 0, floats(data_kind::normal, 4 * 96)), y(4, 96), u(4, 96);
    guarded_matrix<float> delta(1, 96, 0, floats(data_kind::uniform, 96));
    keel::rms_norm(be, x.view(), keel::view<float, 1>{}, u.view()).or_throw();
    keel::rms_norm(be, x.view(), delta.vec(), y.view(), {}, {.order = keel::cast_order::cast_then_gain}).or_throw();
    for (int64_t i = 0; i < 4; ++i)
        for (int64_t j = 0; j < 96; ++j)
            CHECK(y.at(i, j) == to_double(to_format<keel::bf16>(std::fma(static_cast<float>(u.at(i, j)), static_cast<float>(delta.at(0, j)),
                                                                        static_cast<float>(u.at(i, j))))));
}

TEST_CASE("rms_norm's gradients match finite differences of the formula in double") {
    // L = sum(w * y): dy = w. Central differences of the double formula, step 1e-4: error about 1e-8 relative.
    for (int64_t width : {1, 3, 64, 130}) {
        int64_t const count = 3;
        guarded_matrix<float> x(count, width, 2, floats(data_kind::normal, count * width, 21));
        guarded_matrix<float> delta(1, width, 0, floats(data_kind::uniform, width, 22));
        guarded_matrix<float> dy(count, width, 1, floats(data_kind::normal, count * width, 23));
        guarded_matrix<float> y(count, width), r(1, count), dx(count, width, 3), ddelta(1, width);
        float const epsilon = 1e-2f;
        keel::cpu be;
        keel::rms_norm(be, x.view(), delta.vec(), y.view(), {.rrms = r.vec()}, {.epsilon = epsilon}).or_throw();
        scratch ws(keel::rms_norm_backward_workspace(count, width));
        keel::rms_norm_backward(be, dy.view(), x.view(), delta.vec(), {.rrms = r.vec()}, {.dx = dx.view(), .ddelta = ddelta.vec()}, {},
                                ws.get())
            .or_throw();
        auto const loss = [&](std::vector<double> const& xs, std::vector<double> const& ds) {
            double total = 0;
            for (int64_t i = 0; i < count; ++i) {
                double squares = 0;
                for (int64_t j = 0; j < width; ++j) squares += xs[static_cast<std::size_t>(i * width + j)] * xs[static_cast<std::size_t>(i * width + j)];
                double const rr = 1 / std::sqrt(squares / static_cast<double>(width) + static_cast<double>(epsilon));
                for (int64_t j = 0; j < width; ++j)
                    total += dy.at(i, j) * xs[static_cast<std::size_t>(i * width + j)] * rr * (1 + ds[static_cast<std::size_t>(j)]);
            }
            return total;
        };
        std::vector<double> xs, ds;
        for (int64_t i = 0; i < count; ++i)
            for (int64_t j = 0; j < width; ++j) xs.push_back(x.at(i, j));
        for (int64_t j = 0; j < width; ++j) ds.push_back(delta.at(0, j));
        auto const slope = [&](std::vector<double>& v, std::size_t k) {
            double const keep = v[k], h = 1e-4;
            v[k] = keep + h;
            double const up = loss(xs, ds);
            v[k] = keep - h;
            double const down = loss(xs, ds);
            v[k] = keep;
            return (up - down) / (2 * h);
        };
        for (std::size_t k = 0; k < xs.size(); ++k) // fp32 arithmetic of O(1) values: 1e-5 leaves room for cancellation
            CHECK(dx.at(static_cast<int64_t>(k) / width, static_cast<int64_t>(k) % width) == Approx(slope(xs, k)).margin(1e-5).epsilon(1e-5));
        for (std::size_t k = 0; k < ds.size(); ++k)
            CHECK(ddelta.at(0, static_cast<int64_t>(k)) == Approx(slope(ds, k)).margin(1e-5).epsilon(1e-5));
        CHECK(dx.untouched());
    }
}

TEST_CASE("the gradient of the residual stream is added after the norm's Jacobian") { // quack #53
    guarded_matrix<float> s(5, 70, 0, floats(data_kind::normal, 350)), zero(5, 70), ds(5, 70, 0, floats(data_kind::normal, 350, 9)), dx(5, 70);
    guarded_matrix<float> r(1, 5), y(5, 70);
    keel::cpu be;
    keel::rms_norm(be, s.view(), keel::view<float, 1>{}, y.view(), {.rrms = r.vec()}).or_throw();
    keel::add_rms_norm_backward(be, zero.view(), ds.view(), s.view(), keel::view<float, 1>{}, {.rrms = r.vec()}, {.dx = dx.view()}).or_throw();
    CHECK(dx.contents() == ds.contents());
}

TEST_CASE("the backward keeps its bits on every backend, in every format, and split at multiples of 64 rows") { // attorch #18: last rows count
    int64_t const count = 1025, width = 37;
    guarded_matrix<keel::bf16> x(count, width, 3, floats(data_kind::normal, count * width, 1)), dy(count, width, 0, floats(data_kind::normal, count * width, 2));
    guarded_matrix<keel::bf16> delta(1, width, 0, floats(data_kind::uniform, width, 3)), y(count, width), dx(count, width);
    guarded_matrix<float> r(1, count), ddelta(1, width);
    scratch ws(keel::rms_norm_backward_workspace(count, width));
    keel::rms_norm(keel::reference{}, x.view(), delta.vec(), y.view(), {.rrms = r.vec()}).or_throw();
    keel::rms_norm_backward(keel::reference{}, dy.view(), x.view(), delta.vec(), {.rrms = r.vec()}, {.dx = dx.view(), .ddelta = ddelta.vec()}, {}, ws.get()).or_throw();
    for_each_backend([&](std::string const& name, auto const& be) {
        INFO(name);
        guarded_matrix<keel::bf16> dx2(count, width, 1);
        guarded_matrix<float> ddelta2(1, width);
        keel::rms_norm_backward(be, dy.view(), x.view(), delta.vec(), {.rrms = r.vec()}, {.dx = dx2.view(), .ddelta = ddelta2.vec()}, {}, ws.get()).or_throw();
        CHECK(dx2.contents() == dx.contents());
        CHECK(ddelta2.contents() == ddelta.contents());
    });
    // The last row alone carries a gradient: it must arrive.
    guarded_matrix<keel::bf16> last(count, width);
    for (int64_t j = 0; j < width; ++j) last.set(count - 1, j, to_format<keel::bf16>(1.0f));
    keel::rms_norm_backward(keel::cpu{}, last.view(), x.view(), delta.vec(), {.rrms = r.vec()}, {.ddelta = ddelta.vec()}, {}, ws.get()).or_throw();
    for (int64_t j = 0; j < width; ++j) CHECK(ddelta.at(0, j) == Approx(x.at(count - 1, j) * r.at(0, count - 1)).epsilon(1e-6));
    // accumulate adds to what stands there
    keel::rms_norm_backward(keel::cpu{}, last.view(), x.view(), delta.vec(), {.rrms = r.vec()}, {.ddelta = ddelta.vec()}, {.grad = keel::accumulate}, ws.get()).or_throw();
    for (int64_t j = 0; j < width; ++j) CHECK(ddelta.at(0, j) == Approx(2 * x.at(count - 1, j) * r.at(0, count - 1)).epsilon(1e-6));
}

TEST_CASE("a bad call names the argument and writes nothing") {
    keel::cpu be;
    guarded_matrix<float> x(2, 8, 0, floats(data_kind::normal, 16)), y(3, 8), delta(1, 8), r(1, 2);
    auto const before = y.contents();
    auto s = keel::rms_norm(be, x.view(), delta.vec(), y.view());
    CHECK(s.code == keel::status_code::bad_shape);
    CHECK(s.message() == "rms_norm: y has rows = 3, wanted 2 (bad_shape)");
    auto z = keel::rows(y.view().data, 2, 8);
    CHECK(keel::rms_norm(be, x.view(), keel::vec(delta.vec().data, 7), z).code == keel::status_code::bad_shape);
    CHECK(keel::rms_norm(be, keel::transposed(x.view()), delta.vec(), keel::transposed(z)).code != keel::status_code::ok);
    CHECK(keel::rms_norm(be, x.view(), delta.vec(), keel::rows(x.view().data + 1, 2, 8)).code == keel::status_code::overlap);
    CHECK(keel::rms_norm(be, x.view(), delta.vec(), z, {}, {.epsilon = 0.0f}).code == keel::status_code::bad_option);
    CHECK(keel::rms_norm(be, x.view(), delta.vec(), keel::rows(z.data, 2, 8, 0)).code == keel::status_code::bad_stride);
    CHECK(keel::rms_norm(be, x.view(), delta.vec(), keel::view<float, 2>{nullptr, {2, 8}, {8, 1}}).code == keel::status_code::bad_pointer);
    CHECK(keel::rms_norm_backward(be, x.view(), x.view(), delta.vec(), {.rrms = r.vec()}, {.ddelta = delta.vec()}).code ==
          keel::status_code::small_workspace);
    // What is saved and the gradients have memory of their own too.
    auto const overlap = keel::status_code::overlap;
    guarded_matrix<float> sum(2, 8), dx(2, 8), dd(1, 8);
    CHECK(keel::rms_norm(be, x.view(), delta.vec(), z, {.rrms = keel::vec(x.view().data, 2)}).code == overlap);
    CHECK(keel::rms_norm(be, x.view(), delta.vec(), z, {.rrms = keel::vec(delta.vec().data, 2)}).code == overlap);
    CHECK(keel::add_rms_norm(be, x.view(), x.view(), delta.vec(), sum.view(), z, {.rrms = keel::vec(sum.view().data, 2)}).code == overlap);
    scratch ws(keel::rms_norm_backward_workspace(2, 8));
    auto const backward = [&](keel::view<float, 2> to_x, keel::view<float, 1> to_delta) {
        return keel::rms_norm_backward(be, x.view(), z, delta.vec(), {.rrms = r.vec()},
                                       {.dx = to_x, .ddelta = to_delta}, {}, ws.get())
            .code;
    };
    CHECK(backward(dx.view(), keel::vec(x.view().data, 8)) == overlap);
    CHECK(backward(dx.view(), keel::vec(z.data, 8)) == overlap);
    CHECK(backward(dx.view(), delta.vec()) == overlap);
    CHECK(backward(dx.view(), dd.vec()) == keel::status_code::ok);
    CHECK(y.contents() == before);
    CHECK_THROWS_WITH(s.or_throw(), Catch::Matchers::ContainsSubstring("wanted 2"));
    // Zero sizes are no-ops; ddelta of no rows is defined.
    CHECK(keel::rms_norm(be, keel::rows(static_cast<float*>(nullptr), 0, 8), delta.vec(), keel::rows(static_cast<float*>(nullptr), 0, 8)).ok());
    CHECK(keel::rms_norm(be, keel::rows(static_cast<float*>(nullptr), 5, 0), keel::view<float, 1>{}, keel::rows(static_cast<float*>(nullptr), 5, 0)).ok());
    // In place and with a broadcast row
    guarded_matrix<float> w(2, 8, 0, floats(data_kind::normal, 16));
    CHECK(keel::rms_norm(be, x.view(), delta.vec(), x.view()).ok());
    CHECK(keel::rms_norm(be, w.view(), delta.vec(), w.view()).ok());
    CHECK(w.contents() == x.contents());
    CHECK(keel::rms_norm(be, keel::rows(w.view().data, 2, 8, 0), delta.vec(), z).ok());
}

TEST_CASE("rms_norm refuses views that cannot be made, and null data where an optional argument has elements") {
    std::vector<float> x(80, 3.0f), y(80, -1.0f), r(6, 0.5f);
    keel::cpu be;
    keel::view<float, 3> const from{x.data(), {2, 3, 8}, {40, 8, 1}}, to{y.data(), {2, 3, 8}, {40, 8, 1}};
    CHECK(keel::rms_norm(be, flattened(from), keel::view<float, 1>{}, flattened(to)).message() ==
          "rms_norm: x has rows = -1, wanted 0 or more (bad_shape)");
    auto const X = keel::rows(x.data(), 6, 8), Y = keel::rows(y.data(), 6, 8);
    auto const null = [](int64_t n) { return keel::vec(static_cast<float*>(nullptr), n); };
    CHECK(keel::rms_norm(be, X, null(8), Y).message() == "rms_norm: delta, wanted data, not null (bad_pointer)");
    CHECK(keel::rms_norm(be, X, null(0), Y).ok());
    CHECK(keel::rms_norm(be, X, keel::view<float, 1>{}, Y, {.rrms = null(6)}).message() ==
          "rms_norm: saved.rrms, wanted data, not null (bad_pointer)");
    y.assign(80, -1.0f);
    auto const backward = [&](keel::view<float, 2> dsum, keel::view<float, 1> delta, keel::view<float, 2> dx) {
        float const* const kept = r.data(); // const, as every input may be
        return keel::add_rms_norm_backward(be, X, dsum, X, delta, {.rrms = keel::vec(kept, 6)}, {.dx = dx}).message();
    };
    auto const nothing = keel::rows(static_cast<float*>(nullptr), 6, 8);
    CHECK(backward(nothing, {}, Y) == "add_rms_norm_backward: dsum, wanted data, not null (bad_pointer)");
    CHECK(backward({}, null(8), Y) == "add_rms_norm_backward: delta, wanted data, not null (bad_pointer)");
    CHECK(backward({}, {}, nothing) == "add_rms_norm_backward: out.dx, wanted data, not null (bad_pointer)");
    CHECK(y == std::vector<float>(80, -1.0f));
    CHECK(backward({}, {}, Y) == "ok");
}

TEST_CASE("rms_norm and its backward read and write nothing past their rows, up to a page's end") {
    for (bool at_end : {true, false})
        for (int64_t width : {1, 3, 15, 16, 17, 33, 130}) {
            INFO("width " << width << (at_end ? " at a page's end" : " at a page's start"));
            int64_t const count = 3;
            std::vector<keel::bf16> values, gains;
            for (float v : floats(data_kind::normal, count * width, 3)) values.push_back(to_format<keel::bf16>(v));
            gains.assign(values.begin(), values.begin() + width);
            fenced<keel::bf16> x(values, at_end), d(gains, at_end), y(count * width, at_end), dx(count * width, at_end);
            fenced<float> r(count, at_end), dd(width, at_end);
            scratch ws(keel::rms_norm_backward_workspace(count, width));
            std::vector<keel::bf16> want(values.size());
            keel::cpu be;
            auto const X = keel::rows(x.data(), count, width), Y = keel::rows(y.data(), count, width);
            keel::rms_norm(be, X, keel::vec(d.data(), width), Y, {.rrms = keel::vec(r.data(), count)}).or_throw();
            keel::rms_norm(be, keel::rows(values.data(), count, width), keel::vec(gains.data(), width), keel::rows(want.data(), count, width)).or_throw();
            CHECK(std::memcmp(y.data(), want.data(), want.size() * sizeof(keel::bf16)) == 0);
            keel::rms_norm_backward(be, Y, X, keel::vec(d.data(), width), {.rrms = keel::vec(r.data(), count)},
                                    {.dx = keel::rows(dx.data(), count, width), .ddelta = keel::vec(dd.data(), width)}, {}, ws.get())
                .or_throw();
        }
}

TEST_CASE("rows may lie further apart than a 32-bit index reaches") {
    int64_t const count = 3, width = 37;
    sparse<keel::bf16> x(count * far_stride), y(count * far_stride);
    if (x.data() == nullptr || y.data() == nullptr) {
        WARN("no address space: skipped");
        return;
    }
    auto const X = keel::rows(x.data(), count, width, far_stride), Y = keel::rows(y.data(), count, width, far_stride);
    guarded_matrix<keel::bf16> near(count, width, 0, floats(data_kind::normal, count * width)), want(count, width);
    for (int64_t i = 0; i < count; ++i)
        for (int64_t j = 0; j < width; ++j) X(i, j) = near.get(i, j);
    guarded_matrix<float> r(1, count), dd(1, width), dd_near(1, width);
    scratch ws(keel::rms_norm_backward_workspace(count, width));
    keel::cpu be;
    keel::view<float, 1> const none;
    auto const same = [&] {
        for (int64_t i = 0; i < count; ++i)
            for (int64_t j = 0; j < width; ++j)
                if (Y(i, j).bits != want.get(i, j).bits) return false;
        return true;
    };
    keel::rms_norm(be, X, none, Y, {.rrms = r.vec()}).or_throw();
    keel::rms_norm(be, near.view(), none, want.view()).or_throw();
    CHECK(same());
    keel::rms_norm_backward(be, X, X, none, {.rrms = r.vec()}, {.dx = Y, .ddelta = dd.vec()}, {}, ws.get()).or_throw();
    keel::rms_norm_backward(be, near.view(), near.view(), none, {.rrms = r.vec()}, {.dx = want.view(), .ddelta = dd_near.vec()}, {}, ws.get()).or_throw();
    CHECK(same());
    CHECK(dd.contents() == dd_near.contents());
}

TEST_CASE("the backward: within its stated error, on broadcast gradients, zero rows, a gain of zero and a NaN that stood there") {
    for (int64_t width : {1, 130, 4099}) {
        INFO(width);
        int64_t const count = 130;
        guarded_matrix<float> x(count, width, 0, floats(data_kind::mixed_scales, count * width, 1)), dy(1, width, 0, floats(data_kind::normal, width, 2));
        guarded_matrix<float> delta(1, width, 0, floats(data_kind::uniform, width, 3)), y(count, width), r(1, count), dx(count, width), dx2(count, width);
        for (int64_t j = 0; j < width; ++j) x.set(7, j, 0.0f), delta.set(0, j, j % 5 == 0 ? -1.0f : delta.get(0, j));
        guarded_matrix<float> ddelta(1, width, 0, std::vector<float>(static_cast<std::size_t>(width), std::numeric_limits<float>::quiet_NaN())), full(count, width);
        for (int64_t i = 0; i < count; ++i)
            for (int64_t j = 0; j < width; ++j) full.set(i, j, dy.get(0, j));
        scratch ws(keel::rms_norm_backward_workspace(count, width));
        keel::cpu be;
        auto const broadcast = keel::rows(dy.view().data, count, width, 0);
        keel::rms_norm(be, x.view(), delta.vec(), y.view(), {.rrms = r.vec()}).or_throw();
        keel::rms_norm_backward(be, broadcast, x.view(), delta.vec(), {.rrms = r.vec()}, {.dx = dx.view(), .ddelta = ddelta.vec()},
                                {.grad = keel::accumulate}, ws.get()).or_throw();
        for (int64_t j = 0; j < width; ++j) CHECK(std::isnan(ddelta.get(0, j))); // never hidden
        keel::rms_norm_backward(be, full.view(), x.view(), delta.vec(), {.rrms = r.vec()}, {.dx = dx2.view(), .ddelta = ddelta.vec()}, {}, ws.get()).or_throw();
        CHECK(dx.contents() == dx2.contents());
        std::vector<double> dd(static_cast<std::size_t>(width)), size(dd.size());
        int64_t wrong = 0;
        for (int64_t i = 0; i < count; ++i) {
            double const rr = r.at(0, i);
            double c = 0, absolute = 0;
            auto const u = [&](int64_t j) { return x.at(i, j) * rr; };
            auto const g = [&](int64_t j) { return dy.at(0, j) * (1 + delta.at(0, j)); };
            for (int64_t j = 0; j < width; ++j) {
                c += g(j) * u(j) / static_cast<double>(width), absolute += std::abs(g(j) * u(j)) / static_cast<double>(width);
                dd[static_cast<std::size_t>(j)] += dy.at(0, j) * u(j), size[static_cast<std::size_t>(j)] += std::abs(dy.at(0, j) * u(j));
            }
            for (int64_t j = 0; j < width; ++j)
                wrong += !(std::abs(dx.at(i, j) - rr * (g(j) - c * u(j))) <= 0x1p-18 * rr * (std::abs(g(j)) + std::abs(u(j)) * absolute));
        }
        CHECK(wrong == 0);
        for (std::size_t j = 0; j < dd.size(); ++j)
            if (!(std::abs(ddelta.at(0, static_cast<int64_t>(j)) - dd[j]) <= (68.0 + count / 64) * 0x1p-24 * size[j])) FAIL_CHECK("ddelta " << j);
        scratch short_of(keel::rms_norm_backward_workspace(count, width) - 1);
        auto const before = ddelta.contents();
        CHECK(keel::rms_norm_backward(be, full.view(), x.view(), delta.vec(), {.rrms = r.vec()}, {.ddelta = ddelta.vec()}, {}, short_of.get()).code ==
              keel::status_code::small_workspace);
        CHECK(ddelta.contents() == before);
    }
}
