// QK-norm and rotary positions against their formulas in double, gradients against finite differences, backends against the
// reference.
#include <cmath>
#include <limits>
#include <numbers>

#include <attention/heads.hpp>
#include <keel/attention/qk_norm.hpp>
#include <keel/format/bf16.hpp>
#include <keel/format/f16.hpp>
#include <keel/format/float32.hpp>
#include <keel/norm/rms_norm.hpp>
#include <support/backends.hpp>
#include <support/catch.hpp>
#include <support/data.hpp>

using namespace keel_test;
using keel::rope_layout;

namespace {

constexpr rope_layout layouts[] = {rope_layout::half_pairs, rope_layout::interleaved_pairs};

std::vector<float> inverse_frequencies(int64_t rotated) {
    std::vector<float> f;
    for (int64_t i = 0; i < rotated / 2; ++i)
        f.push_back(
            static_cast<float>(std::pow(10000.0, -2.0 * static_cast<double>(i) / static_cast<double>(rotated))));
    return f;
}

/// A table and what it was made from.
struct table {
    std::vector<float> frequencies;
    std::vector<int64_t> positions;
    guarded_matrix<float> cosine, sine;
    table(int64_t tokens, int64_t rotated, int64_t first = 3)
        : frequencies(inverse_frequencies(rotated)), cosine(tokens, rotated / 2, 1), sine(tokens, rotated / 2) {
        for (int64_t t = 0; t < tokens; ++t) positions.push_back(first + 7 * t);
        keel::rope_table(keel::cpu{}, keel::vec(positions.data(), tokens), keel::vec(frequencies.data(), rotated / 2),
                         cosine.view(), sine.view())
            .or_throw();
    }
    keel::rope_angles get() { return {cosine.view(), sine.view()}; }
};

int64_t first_of(rope_layout layout, int64_t pair, int64_t) {
    return layout == rope_layout::half_pairs ? pair : 2 * pair;
}
int64_t second_of(rope_layout layout, int64_t pair, int64_t rotated) {
    return layout == rope_layout::half_pairs ? pair + rotated / 2 : 2 * pair + 1;
}

/// One head by the formula.
std::vector<double> oracle_head(std::vector<double> const& x, std::vector<double> const& delta, double epsilon,
                                rope_layout layout, std::vector<float> const& frequencies, double position) {
    double squares = 0;
    for (double v : x) squares += v * v;
    double const r = 1 / std::sqrt(squares / static_cast<double>(x.size()) + epsilon);
    std::vector<double> z;
    for (std::size_t j = 0; j < x.size(); ++j) z.push_back(x[j] * r * (1 + delta[j]));
    auto y = z;
    auto const rotated = static_cast<int64_t>(2 * frequencies.size());
    for (int64_t i = 0; i < rotated / 2; ++i) {
        double const angle = position * static_cast<double>(frequencies[static_cast<std::size_t>(i)]);
        auto const a = static_cast<std::size_t>(first_of(layout, i, rotated)),
                   b = static_cast<std::size_t>(second_of(layout, i, rotated));
        y[a] = z[a] * std::cos(angle) - z[b] * std::sin(angle);
        y[b] = z[b] * std::cos(angle) + z[a] * std::sin(angle);
    }
    return y;
}

template <class T>
std::vector<double> head_values(guarded_matrix<T> const& m, int64_t token, int64_t first, int64_t n) {
    std::vector<double> v;
    for (int64_t j = 0; j < n; ++j) v.push_back(m.at(token, first + j));
    return v;
}

template <class X, class D, class Y>
void check_forward(int64_t head_dim, int64_t rotated, rope_layout layout, data_kind kind) {
    INFO("head_dim " << head_dim << " R " << rotated << " " << name_of(kind) << " interleaved "
                     << (layout == rope_layout::interleaved_pairs));
    int64_t const tokens = 3, heads = 2, width = heads * head_dim;
    guarded_matrix<X> x(tokens, width, 5, floats(kind, tokens * width, 1));
    guarded_matrix<D> delta(1, head_dim, 0, floats(data_kind::uniform, head_dim, 2));
    guarded_matrix<Y> y(tokens, width, 3);
    guarded_matrix<float> r(tokens, heads);
    table angles(tokens, rotated);
    keel::qk_norm(keel::reference{}, heads_of(x, heads, head_dim), delta.vec(), angles.get(),
                  heads_of(y, heads, head_dim), {.rrms = r.view()}, {.layout = layout})
        .or_throw();
    CHECK(y.untouched());
    double const half_ulp = std::ldexp(1.0, -keel::format_traits<Y>::mantissa_bits - 1);
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t h = 0; h < heads; ++h) {
            auto const xs = head_values(x, t, h * head_dim, head_dim), ds = head_values(delta, 0, 0, head_dim);
            auto const want = oracle_head(xs, ds, static_cast<double>(1e-6f), layout, angles.frequencies,
                                          static_cast<double>(angles.positions[static_cast<std::size_t>(t)]));
            double squares = 0;
            for (double v : xs) squares += v * v;
            CHECK(r.at(t, h) ==
                  Approx(1 / std::sqrt(squares / static_cast<double>(head_dim) + static_cast<double>(1e-6f)))
                      .epsilon(1e-6));
            // Half an ulp of the output, and fp32 before it: r to 2^-20 and a few roundings of the pair's longer leg.
            double largest = 0;
            for (double v : want) largest = std::max(largest, std::abs(v));
            for (int64_t j = 0; j < head_dim; ++j) {
                double const w = want[static_cast<std::size_t>(j)], got = y.at(t, h * head_dim + j);
                if (!(std::abs(got - w) <= half_ulp * std::abs(w) + largest * 0x1p-19 +
                                               static_cast<double>(keel::format_traits<Y>::min_subnormal())))
                    FAIL_CHECK("element " << j << ": " << got << " for " << w);
            }
        }
}

} // namespace

TEST_CASE("rope_table is right to an ulp far out, for both position types, and the same on every backend") {
    std::vector<int32_t> const narrow = {0, 1, 2, 4095, 131072, 16777215, -5};
    std::vector<int64_t> const wide(narrow.begin(), narrow.end());
    auto const frequencies = inverse_frequencies(70);
    auto const n = static_cast<int64_t>(narrow.size());
    guarded_matrix<float> c(n, 35, 2), s(n, 35, 1);
    keel::rope_table(keel::reference{}, keel::vec(narrow.data(), n), keel::vec(frequencies.data(), 35), c.view(),
                     s.view())
        .or_throw();
    for (int64_t t = 0; t < n; ++t)
        for (int64_t i = 0; i < 35; ++i) {
            long double const angle = static_cast<long double>(narrow[static_cast<std::size_t>(t)]) *
                                      static_cast<long double>(frequencies[static_cast<std::size_t>(i)]);
            auto const near = [](double got, long double want) { // 1 ulp of want
                return std::abs(static_cast<long double>(got) - want) <= std::ldexp(1.0L, std::ilogb(want) - 23);
            };
            CHECK(near(c.at(t, i), std::cos(angle)));
            if (narrow[static_cast<std::size_t>(t)] != 0)
                CHECK(near(s.at(t, i), std::sin(angle)));
            else
                CHECK(s.at(t, i) == 0);
        }
    auto const expected_c = c.contents(), expected_s = s.contents();
    for_each_backend([&](std::string const& name, auto const& be) {
        INFO(name);
        guarded_matrix<float> c2(n, 35), s2(n, 35, 3);
        keel::rope_table(be, keel::vec(wide.data(), n), keel::vec(frequencies.data(), 35), c2.view(), s2.view())
            .or_throw();
        CHECK(c2.contents() == expected_c);
        CHECK(s2.contents() == expected_s);
        CHECK(s2.untouched());
    });
}

TEST_CASE("qk_norm matches its formula in double") {
    for (rope_layout layout : layouts) {
        for (int64_t head_dim : {1, 2, 5, 17, 64, 80, 131})
            for (int64_t rotated : {int64_t{0}, int64_t{2}, head_dim / 4 * 2, head_dim / 2 * 2})
                if (rotated <= head_dim)
                    check_forward<float, float, float>(head_dim, rotated, layout, data_kind::normal);
        for (data_kind kind : finite_kinds) check_forward<keel::bf16, float, keel::bf16>(64, 32, layout, kind);
    }
    check_forward<float, keel::bf16, keel::bf16>(80, 20, rope_layout::half_pairs, data_kind::normal);
    check_forward<keel::f16, keel::f16, keel::f16>(33, 16, rope_layout::half_pairs, data_kind::normal);
    check_forward<keel::bf16, keel::bf16, float>(64, 64, rope_layout::half_pairs, data_kind::outlier);
}

TEST_CASE("qk_norm without rotation is rms_norm bit for bit, and so is position 0") {
    int64_t const tokens = 4, heads = 3, d = 40;
    guarded_matrix<keel::bf16> x(tokens, heads * d, 0, floats(data_kind::normal, tokens * heads * d)),
        y(tokens, heads * d), z(tokens, heads * d);
    guarded_matrix<float> delta(1, d, 0, floats(data_kind::uniform, d)),
        one(tokens, d / 2, 0, std::vector<float>(static_cast<std::size_t>(tokens * d / 2), 1.0f));
    guarded_matrix<float> zero(tokens, d / 2), no_gain(1, d);
    keel::cpu be;
    keel::rms_norm(be, keel::rows(x.view().data, tokens * heads, d), delta.vec(),
                   keel::rows(y.view().data, tokens * heads, d))
        .or_throw();
    keel::qk_norm(be, heads_of(x, heads, d), delta.vec(), {}, heads_of(z, heads, d)).or_throw();
    CHECK(z.contents() == y.contents());
    keel::qk_norm(be, heads_of(x, heads, d), delta.vec(), {one.view(), zero.view()}, heads_of(z, heads, d)).or_throw();
    CHECK(z.contents() == y.contents());
    // delta = 0 equals no gain.
    table angles(tokens, 24);
    keel::qk_norm(be, heads_of(x, heads, d), no_gain.vec(), angles.get(), heads_of(y, heads, d)).or_throw();
    keel::qk_norm(be, heads_of(x, heads, d), keel::view<float, 1>{}, angles.get(), heads_of(z, heads, d)).or_throw();
    CHECK(z.contents() == y.contents());
    // In place.
    keel::qk_norm(be, heads_of(x, heads, d), no_gain.vec(), angles.get(), heads_of(x, heads, d)).or_throw();
    CHECK(x.contents() == y.contents());
}

TEST_CASE("a rotation by R turns over R, not head_dim, and leaves the rest") { // theta_i = base^(-2i/R)
    int64_t const d = 8, rotated = 4;
    guarded_matrix<float> x(1, d, 0, {1, 0, 0, 0, 0, 0, 0, 0}), y(1, d);
    table angles(1, rotated, 1);
    keel::qk_norm(keel::cpu{}, heads_of(x, 1, d), keel::view<float, 1>{}, angles.get(), heads_of(y, 1, d), {},
                  {.epsilon = 1e-20f})
        .or_throw();
    double const u = std::sqrt(8.0); // x / rms(x)
    CHECK(y.at(0, 0) == Approx(u * std::cos(1.0)).epsilon(1e-6));
    CHECK(y.at(0, 2) == Approx(u * std::sin(1.0)).epsilon(1e-6));
    for (int64_t j : {1, 3, 4, 5, 6, 7}) CHECK(y.at(0, j) == 0);
    keel::qk_norm(keel::cpu{}, heads_of(x, 1, d), keel::view<float, 1>{}, angles.get(), heads_of(y, 1, d), {},
                  {.epsilon = 1e-20f, .layout = rope_layout::interleaved_pairs})
        .or_throw();
    CHECK(y.at(0, 1) == Approx(u * std::sin(1.0)).epsilon(1e-6));
}

TEST_CASE("qk_norm's gradients match finite differences of the formula in double") {
    // L = sum(w * y): dy = w. Central differences, step 1e-4: error about 1e-8; fp32 arithmetic of O(1) values: 1e-5.
    for (rope_layout layout : layouts)
        for (auto const& size : {std::pair<int64_t, int64_t>{1, 0}, {5, 4}, {17, 6}, {64, 32}}) {
            int64_t const d = size.first, rotated = size.second; // names that a lambda may capture
            INFO("head_dim " << d << " R " << rotated);
            int64_t const tokens = 3, heads = 2, width = heads * d;
            float const epsilon = 1e-2f;
            guarded_matrix<float> x(tokens, width, 2, floats(data_kind::normal, tokens * width, 21)),
                dy(tokens, width, 1, floats(data_kind::normal, tokens * width, 23));
            guarded_matrix<float> delta(1, d, 0, floats(data_kind::uniform, d, 22)), y(tokens, width), r(tokens, heads),
                dx(tokens, width, 3), ddelta(1, d);
            table angles(tokens, rotated);
            keel::cpu be;
            keel::qk_norm(be, heads_of(x, heads, d), delta.vec(), angles.get(), heads_of(y, heads, d),
                          {.rrms = r.view()}, {.epsilon = epsilon, .layout = layout})
                .or_throw();
            scratch ws(keel::qk_norm_backward_workspace(tokens, heads, d));
            keel::qk_norm_backward(be, heads_of(dy, heads, d), heads_of(x, heads, d), delta.vec(), angles.get(),
                                   {.rrms = r.view()}, {.dx = heads_of(dx, heads, d), .ddelta = ddelta.vec()},
                                   {.layout = layout}, ws.get())
                .or_throw();
            CHECK(dx.untouched());
            std::vector<double> xs, ds = head_values(delta, 0, 0, d);
            for (int64_t t = 0; t < tokens; ++t)
                for (double v : head_values(x, t, 0, width)) xs.push_back(v);
            auto const loss = [&] {
                double total = 0;
                for (int64_t t = 0; t < tokens; ++t)
                    for (int64_t h = 0; h < heads; ++h) {
                        auto const from = xs.begin() + (t * width + h * d);
                        auto const head =
                            oracle_head({from, from + d}, ds, static_cast<double>(epsilon), layout, angles.frequencies,
                                        static_cast<double>(angles.positions[static_cast<std::size_t>(t)]));
                        for (int64_t j = 0; j < d; ++j)
                            total += dy.at(t, h * d + j) * head[static_cast<std::size_t>(j)];
                    }
                return total;
            };
            auto const slope = [&](double& v) {
                double const keep = v, h = 1e-4;
                v = keep + h;
                double const up = loss();
                v = keep - h;
                double const down = loss();
                v = keep;
                return (up - down) / (2 * h);
            };
            for (int64_t k = 0; k < tokens * width; ++k)
                CHECK(dx.at(k / width, k % width) ==
                      Approx(slope(xs[static_cast<std::size_t>(k)])).margin(1e-5).epsilon(1e-5));
            for (int64_t k = 0; k < d; ++k)
                CHECK(ddelta.at(0, k) == Approx(slope(ds[static_cast<std::size_t>(k)])).margin(1e-5).epsilon(1e-5));
            // accumulate adds to what stands there
            std::vector<double> const before = head_values(ddelta, 0, 0, d);
            keel::qk_norm_backward(be, heads_of(dy, heads, d), heads_of(x, heads, d), delta.vec(), angles.get(),
                                   {.rrms = r.view()}, {.ddelta = ddelta.vec()},
                                   {.layout = layout, .grad = keel::accumulate}, ws.get())
                .or_throw();
            for (int64_t k = 0; k < d; ++k) CHECK(ddelta.at(0, k) == 2 * before[static_cast<std::size_t>(k)]);
        }
}

TEST_CASE("qk_norm keeps its bits on every backend, on the parts of a fused projection") {
    int64_t const tokens = 130, heads = 3, d = 72, rotated = 40, width = 2 * heads * d; // q and k side by side
    for (rope_layout layout : layouts) {
        guarded_matrix<keel::bf16> x(tokens, width, 3, floats(data_kind::outlier, tokens * width, 1)),
            dy(tokens, width, 0, floats(data_kind::normal, tokens * width, 2));
        guarded_matrix<float> delta(1, d, 0, floats(data_kind::uniform, d, 3));
        table angles(tokens, rotated);
        auto const run = [&](auto const& be) {
            guarded_matrix<keel::bf16> y(tokens, heads * d, 1), dx(tokens, width, 1);
            guarded_matrix<float> r(tokens, heads), ddelta(1, d);
            scratch ws(keel::qk_norm_backward_workspace(tokens, heads, d));
            keel::qk_norm(be, heads_of(x, heads, d, heads * d), delta.vec(), angles.get(), heads_of(y, heads, d),
                          {.rrms = r.view()}, {.layout = layout})
                .or_throw();
            keel::qk_norm_backward(be, heads_of(dy, heads, d, heads * d), heads_of(x, heads, d, heads * d), delta.vec(),
                                   angles.get(), {.rrms = r.view()},
                                   {.dx = heads_of(dx, heads, d, heads * d), .ddelta = ddelta.vec()},
                                   {.layout = layout}, ws.get())
                .or_throw();
            CHECK(y.untouched());
            CHECK(dx.untouched());
            digest all;
            all.add(y), all.add(r), all.add(dx), all.add(ddelta);
            for (int64_t t = 0; t < tokens; ++t)
                for (int64_t j = 0; j < heads * d; ++j)
                    if (dx.at(t, j) != 0) FAIL("wrote beside its part");
            return all.value();
        };
        auto const expected = run(keel::reference{});
        for_each_backend([&](std::string const& name, auto const& be) {
            INFO(name);
            CHECK(run(be) == expected);
        });
    }
}

TEST_CASE("qk_norm_backward may overwrite dy, and the last head of the last token counts") {
    int64_t const tokens = 65, heads = 5, d = 20;
    guarded_matrix<float> x(tokens, heads * d, 0, floats(data_kind::normal, tokens * heads * d)), y(tokens, heads * d),
        dx(tokens, heads * d), dy(tokens, heads * d);
    guarded_matrix<float> r(tokens, heads), ddelta(1, d), again(1, d);
    table angles(tokens, 8);
    keel::cpu be;
    scratch ws(keel::qk_norm_backward_workspace(tokens, heads, d));
    keel::qk_norm(be, heads_of(x, heads, d), keel::view<float, 1>{}, angles.get(), heads_of(y, heads, d),
                  {.rrms = r.view()})
        .or_throw();
    for (int64_t j = 8; j < d; ++j) dy.set(tokens - 1, (heads - 1) * d + j, 1.0f); // unrotated elements
    auto const backward = [&](keel::view<float, 3> out, keel::view<float, 1> gain) {
        keel::qk_norm_backward(be, heads_of(dy, heads, d), heads_of(x, heads, d), keel::view<float, 1>{}, angles.get(),
                               {.rrms = r.view()}, {.dx = out, .ddelta = gain}, {}, ws.get())
            .or_throw();
    };
    backward(heads_of(dx, heads, d), ddelta.vec());
    for (int64_t j = 0; j < 8; ++j) CHECK(ddelta.at(0, j) == 0);
    for (int64_t j = 8; j < d; ++j)
        CHECK(ddelta.at(0, j) ==
              Approx(x.at(tokens - 1, (heads - 1) * d + j) * r.at(tokens - 1, heads - 1)).epsilon(1e-6));
    backward(heads_of(dy, heads, d), again.vec());
    CHECK(dy.contents() == dx.contents());
    CHECK(again.contents() == ddelta.contents());
}

TEST_CASE("a NaN stays in its head, and a zero head is finite both ways") {
    int64_t const tokens = 2, heads = 2, d = 6;
    guarded_matrix<float> x(tokens, heads * d, 0, floats(data_kind::normal, tokens * heads * d)), y(tokens, heads * d),
        dx(tokens, heads * d), r(tokens, heads);
    for (int64_t j = 0; j < d; ++j) x.set(1, j, 0.0f);
    x.set(0, 3, std::numeric_limits<float>::quiet_NaN());
    table angles(tokens, 4);
    keel::cpu be;
    keel::qk_norm(be, heads_of(x, heads, d), keel::view<float, 1>{}, angles.get(), heads_of(y, heads, d),
                  {.rrms = r.view()})
        .or_throw();
    keel::qk_norm_backward(be, heads_of(y, heads, d), heads_of(x, heads, d), keel::view<float, 1>{}, angles.get(),
                           {.rrms = r.view()}, {.dx = heads_of(dx, heads, d)})
        .or_throw();
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t j = 0; j < heads * d; ++j) {
            bool const bad = t == 0 && j < d;
            CHECK(std::isnan(y.at(t, j)) == bad);
            CHECK(std::isnan(dx.at(t, j)) == bad);
        }
    for (int64_t j = 0; j < d; ++j) CHECK(y.at(1, j) == 0);
}

TEST_CASE("a bad call of qk_norm names the argument and writes nothing") {
    guarded_matrix<float> x(2, 12, 0, floats(data_kind::normal, 24)), y(2, 12), delta(1, 6), r(2, 2);
    table angles(2, 4);
    keel::cpu be;
    auto const before = y.contents();
    auto const call = [&](auto xv, auto dv, keel::rope_angles rope, auto yv, keel::qk_norm_saved saved = {},
                          keel::qk_norm_options options = {}) {
        return keel::qk_norm(be, xv, dv, rope, yv, saved, options);
    };
    auto const xv = heads_of(x, 2, 6), yv = heads_of(y, 2, 6);
    auto const none = keel::view<float, 1>{};
    using keel::status_code;
    CHECK(call(xv, keel::vec(delta.vec().data, 5), angles.get(), yv).message() ==
          "qk_norm: delta has length = 5, wanted 6 (bad_shape)");
    CHECK(call(xv, none, table(3, 4).get(), yv).code == status_code::bad_shape);
    CHECK(call(xv, none, table(2, 8).get(), yv).message() ==
          "qk_norm: rope.cosine has columns = 4, wanted at most head_dim / 2 (bad_shape)");
    CHECK(call(xv, none, {angles.cosine.view(), {}}, yv).code == status_code::bad_shape);
    CHECK(call(xv, none, angles.get(), heads_of(y, 3, 4)).code == status_code::bad_shape);
    CHECK(call(xv, none, angles.get(), keel::view<float, 3>{yv.data, {2, 2, 6}, {12, 3, 1}}).code ==
          status_code::bad_stride);
    CHECK(call(keel::slice(xv, 0, 1), none, {}, keel::view<float, 3>{xv.data + 1, {1, 2, 6}, {12, 6, 1}}).code ==
          status_code::overlap);
    CHECK(call(xv, none, angles.get(), yv, {.rrms = keel::rows(r.view().data, 2, 1)}).code == status_code::bad_shape);
    CHECK(call(xv, none, angles.get(), yv, {}, {.epsilon = 0.0f}).code == status_code::bad_option);
    CHECK(keel::qk_norm_backward(be, xv, xv, none, {}, {.rrms = r.view()}, {.ddelta = delta.vec()}).code ==
          status_code::small_workspace);
    CHECK(keel::qk_norm_backward(be, xv, xv, none, {}, {}, {.dx = yv}).code == status_code::bad_shape);
    CHECK(call(xv, delta.vec(), angles.get(), yv, {.rrms = keel::rows(delta.vec().data, 2, 2)}).code == status_code::overlap);
    scratch room(keel::qk_norm_backward_workspace(2, 2, 6));
    CHECK(keel::qk_norm_backward(be, yv, xv, none, {}, {.rrms = r.view()}, {.ddelta = keel::vec(y.view().data, 6)}, {}, room.get()).code ==
          status_code::overlap);
    keel::rope_angles const in_y{keel::rows(y.view().data, 2, 2), angles.get().sine};
    CHECK(call(xv, none, in_y, yv).code == status_code::overlap);
    CHECK(call(xv, none, {angles.get().cosine, in_y.cosine}, yv).code == status_code::overlap);
    CHECK(call(xv, none, angles.get(), yv, {.rrms = keel::rows(angles.cosine.view().data, 2, 2)}).code == status_code::overlap);
    CHECK(y.contents() == before);
    // Zero sizes: no-ops; ddelta of no tokens is zero.
    keel::view<float, 3> const no_tokens{nullptr, {0, 2, 6}, {12, 6, 1}};
    CHECK(keel::qk_norm(be, no_tokens, delta.vec(), {}, no_tokens).ok());
    delta.set(0, 2, 5.0f);
    scratch ws(keel::qk_norm_backward_workspace(0, 2, 6));
    CHECK(keel::qk_norm_backward(be, no_tokens, no_tokens, none, {}, {.rrms = keel::rows(r.view().data, 0, 2)},
                                 {.ddelta = delta.vec()}, {}, ws.get())
              .ok());
    for (int64_t j = 0; j < 6; ++j) CHECK(delta.at(0, j) == 0);
}
