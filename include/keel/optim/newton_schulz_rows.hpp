// The element work around Newton-Schulz's products, one row at a time.
//
// A `source` says what the matrix to orthogonalise is: source.peek(g, row, at) gives its elements.
#pragma once

#include <keel/backend/concepts.hpp>
#include <keel/core/lanes.hpp>
#include <keel/core/report.hpp>
#include <keel/core/view.hpp>
#include <keel/format/format.hpp>

namespace keel::inline KEEL_ABI {

/// Row `row` of a matrix with any strides.
template <class G, class T, class At> KEEL_FN typename G::value load_at(G const& g, view<T, 2> const& x, int64_t row, At at) {
    return x.stride[1] == 1 ? g.load(x.at(row), at) : g.load(strided<T>{x.at(row), x.stride[1]}, at);
}
template <class G, class T, class At>
KEEL_FN void store_at(G const& g, view<T, 2> const& x, int64_t row, At at, typename G::value const& v) {
    if (x.stride[1] == 1) g.store(x.at(row), at, v);
    else g.store(strided<T>{x.at(row), x.stride[1]}, at, v);
}

template <class U> struct matrix_source {
    view<U const, 2> u;

    template <class G, class At> KEEL_FN typename G::value peek(G const& g, int64_t row, At at) const { return load_at(g, u, row, at); }
};

/// 2^k that brings a largest magnitude into [2, 4), as two factors, of which the second is 1 unless that takes more than 2^127.
/// Exact for every element that does not fall below 2^-126 by it.
struct exact_scale {
    float first, second;
    template <class F> KEEL_FN F apply(F const& x) const { return (x * F(first)) * F(second); }
};
KEEL_FN exact_scale scale_to_two(uint32_t largest) {
    // 128 - exponent of the largest, as a biased exponent: 128 - (e - 127) + ... = 255 - e for normal e; subnormals go by their top bit.
    int64_t e = static_cast<int64_t>(largest >> 23);
    if (e == 0) {
        e = 1;
        for (uint32_t top = largest; top < 0x00800000u && top != 0; top <<= 1) --e;
    }
    int64_t const up = 128 - e; // power of two, in [-126, 150]
    int64_t const first = up < 127 ? up : 127;
    return {as_float(static_cast<uint32_t>(first + 127) << 23), as_float(static_cast<uint32_t>(up - first + 127) << 23)};
}

/// *top = largest magnitude word of the matrix (zeroed before). Integers: the order cannot show.
template <class Source> struct matrix_largest_row {
    Source source;
    int64_t width;
    uint32_t* top;

    template <class G> KEEL_FN void operator()(G const& g, int64_t row) const {
        using U = typename G::words;
        U m(0u);
        g.each(width, [&](auto at) { m = umax(m, g.inside(at, magnitude(source.peek(g, row, at)))); });
        uint32_t const largest = g.max_bits(m);
        if (g.leader()) max_shared(*top, largest);
    }
};

/// squares[row] = sum of (u * scale)^2.
template <class Source> struct squares_row {
    Source source;
    int64_t width;
    exact_scale scale;
    float* squares;

    template <class G> KEEL_FN void operator()(G const& g, int64_t row) const {
        using F = typename G::value;
        float const sum = g.sum(width, [&](F const& acc, auto at) {
            F const v = scale.apply(source.peek(g, row, at));
            return fma(v, v, acc);
        });
        if (g.leader()) squares[row] = sum;
    }
};

/// *inverse = 1 / the norm: rows in order, in double.
struct inverse_norm_row {
    float const* squares;
    int64_t count;
    float* inverse;

    template <class G> KEEL_FN void operator()(G const& g, int64_t) const {
        if (!g.leader()) return;
        double sum = 0.0;
        for (int64_t i = 0; i < count; ++i) sum += static_cast<double>(squares[i]);
        *inverse = static_cast<float>(1.0 / __builtin_sqrt(sum));
    }
};

/// X = (u * scale) / norm: exact, then one rounding to float and, where T is smaller, one to T.
template <class Source, class T> struct normalised_row {
    Source source;
    exact_scale scale;
    float const* inverse;
    view<T, 2> x;

    template <class G> KEEL_FN void operator()(G const& g, int64_t row) const {
        using F = typename G::value;
        F const r(*inverse);
        g.each(x.extent[1], [&](auto at) { g.store(x.at(row), at, scale.apply(source.peek(g, row, at)) * r); });
    }
};

/// y = x, rounded to y's format.
template <class X, class Y> struct copy_row {
    view<X const, 2> x;
    view<Y, 2> y;

    template <class G> KEEL_FN void operator()(G const& g, int64_t row) const {
        g.each(x.extent[1], [&](auto at) { store_at(g, y, row, at, g.load(x.at(row), at)); });
    }
};
template <class Y> struct zero_row {
    view<Y, 2> y;

    template <class G> KEEL_FN void operator()(G const& g, int64_t row) const {
        using F = typename G::value;
        g.each(y.extent[1], [&](auto at) { store_at(g, y, row, at, F(0.0f)); });
    }
};

/// out = a x + b z, as fma(a, x, b z).
struct polynomial_row {
    float a;
    view<float const, 2> x;
    float b;
    view<float const, 2> z;
    view<float, 2> out;

    template <class G> KEEL_FN void operator()(G const& g, int64_t row) const {
        using F = typename G::value;
        g.each(x.extent[1], [&](auto at) {
            g.store(out.at(row), at, fma(F(a), g.load(x.at(row), at), mul(F(b), g.load(z.at(row), at))));
        });
    }
};

/// squares[row] = sum over j of (gram[row, j] - (row == j))^2.
template <class T> struct identity_error_row {
    view<T const, 2> gram;
    float* squares;

    template <class G> KEEL_FN void operator()(G const& g, int64_t row) const {
        using F = typename G::value;
        using U = typename G::words;
        float const sum = g.sum(gram.extent[1], [&](F const& acc, auto at) {
            F const one = select(eq(g.position(at), U(static_cast<uint32_t>(row))), F(1.0f), F(0.0f));
            F const d = F(g.load(gram.at(row), at)) - one;
            return fma(d, d, acc);
        });
        if (g.leader()) squares[row] = sum;
    }
};

/// *error = sqrt(sum of squares / n).
struct root_mean_row {
    float const* squares;
    int64_t count;
    float* error;

    template <class G> KEEL_FN void operator()(G const& g, int64_t) const {
        if (!g.leader()) return;
        double sum = 0.0;
        for (int64_t i = 0; i < count; ++i) sum += static_cast<double>(squares[i]);
        *error = static_cast<float>(__builtin_sqrt(sum / static_cast<double>(count)));
    }
};

} // namespace keel::inline KEEL_ABI
