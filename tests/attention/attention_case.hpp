// One attention problem with guarded buffers, and its formulas in double: whole score rows, textbook gradients from the ungated
// output. Beside each number stands the sum of the magnitudes that went into it, which scales what rounding may do to it.
#pragma once

#include <cmath>
#include <limits>

#include <attention/heads.hpp>
#include <keel/attention/gated_attention.hpp>
#include <keel/format/bf16.hpp>
#include <keel/format/float32.hpp>
#include <support/data.hpp>

namespace keel_test {

struct attention_setup {
    std::vector<int64_t> lengths; ///< of the documents
    int64_t heads = 1, kv_heads = 1, head_dim = 1;
    int64_t gate_dim = 0; ///< 0: no gate; 1: head-wise; head_dim: element-wise
    data_kind kind = data_kind::normal;
    uint64_t seed = 1;
    float scale = 0; ///< 0: the default

    int64_t tokens() const {
        int64_t n = 0;
        for (int64_t l : lengths) n += l;
        return n;
    }
    double factor() const {
        return scale != 0 ? static_cast<double>(scale) : 1 / std::sqrt(static_cast<double>(head_dim));
    }
    keel::attention_shape shape() const { return {tokens(), heads, kv_heads, head_dim}; }
};

template <class T> struct attention_case {
    attention_setup setup;
    std::vector<int64_t> offsets{0};
    guarded_matrix<T> q, k, v, gate, dy, y, dq, dk, dv, dgate;
    guarded_matrix<float> lse, max_logit, first_token, entropy;

    explicit attention_case(attention_setup s)
        : setup(s), q(s.tokens(), s.heads * s.head_dim, 3, values(s, s.heads * s.head_dim, 1)),
          k(s.tokens(), s.kv_heads * s.head_dim, 1, values(s, s.kv_heads * s.head_dim, 2)),
          v(s.tokens(), s.kv_heads * s.head_dim, 5, values(s, s.kv_heads * s.head_dim, 3)),
          gate(s.tokens(), s.heads * s.gate_dim, 1, values(s, s.heads * s.gate_dim, 4)),
          dy(s.tokens(), s.heads * s.head_dim, 0, values(s, s.heads * s.head_dim, 5)),
          y(s.tokens(), s.heads * s.head_dim, 1), dq(s.tokens(), s.heads * s.head_dim, 1),
          dk(s.tokens(), s.kv_heads * s.head_dim), dv(s.tokens(), s.kv_heads * s.head_dim, 2),
          dgate(s.tokens(), s.heads * s.gate_dim, 1), lse(s.tokens(), s.heads, 1), max_logit(1, s.heads),
          first_token(1, s.heads), entropy(1, s.heads) {
        for (int64_t l : s.lengths) offsets.push_back(offsets.back() + l);
    }

    keel::view<T const, 3> gate_view() {
        if (setup.gate_dim == 0) return {};
        return heads_of(gate, setup.heads, setup.gate_dim);
    }
    keel::view<int64_t const, 1> documents() {
        return keel::vec(static_cast<int64_t const*>(offsets.data()), static_cast<int64_t>(offsets.size()));
    }

    template <class B> void forward(B const& be) {
        scratch ws(keel::gated_attention_workspace<T>(be, setup.shape()));
        keel::gated_attention(
            be, heads_of(q, setup.heads, setup.head_dim), heads_of(k, setup.kv_heads, setup.head_dim),
            heads_of(v, setup.kv_heads, setup.head_dim), gate_view(), documents(),
            heads_of(y, setup.heads, setup.head_dim), {.lse = lse.view()},
            {.max_logit = max_logit.vec(), .first_token_sum = first_token.vec(), .entropy_sum = entropy.vec()},
            {.scale = setup.scale}, ws.get())
            .or_throw();
    }
    template <class B> void backward(B const& be) {
        keel::attention_gradients<T> out{heads_of(dq, setup.heads, setup.head_dim),
                                         heads_of(dk, setup.kv_heads, setup.head_dim),
                                         heads_of(dv, setup.kv_heads, setup.head_dim),
                                         {}};
        if (setup.gate_dim != 0) out.dgate = heads_of(dgate, setup.heads, setup.gate_dim);
        backward(be, out);
    }
    template <class B> void backward(B const& be, keel::attention_gradients<T> out) {
        scratch ws(keel::gated_attention_backward_workspace<T>(be, setup.shape()));
        keel::gated_attention_backward(
            be, heads_of(dy, setup.heads, setup.head_dim), heads_of(q, setup.heads, setup.head_dim),
            heads_of(k, setup.kv_heads, setup.head_dim), heads_of(v, setup.kv_heads, setup.head_dim), gate_view(),
            documents(), heads_of(y, setup.heads, setup.head_dim), {.lse = lse.view()}, out, {.scale = setup.scale},
            ws.get())
            .or_throw();
    }
    bool untouched() const {
        return y.untouched() && lse.untouched() && dq.untouched() && dk.untouched() && dv.untouched() &&
               dgate.untouched();
    }
    uint64_t result() const {
        digest d;
        d.add(y), d.add(lse), d.add(max_logit), d.add(first_token), d.add(entropy), d.add(dq), d.add(dk), d.add(dv),
            d.add(dgate);
        return d.value();
    }

private:
    static std::vector<float> values(attention_setup const& s, int64_t width, uint64_t which) {
        return floats(s.kind, s.tokens() * width, 16 * s.seed + which);
    }
};

/// Digest of everything that the forward and the backward give on a backend; 0 where they wrote beside their outputs.
template <class T, class B> uint64_t attention_result(attention_setup const& s, B const& be) {
    attention_case<T> c(s);
    c.forward(be);
    c.backward(be);
    return c.untouched() ? c.result() : 0;
}

/// A double matrix and the magnitudes behind it.
struct measured {
    std::vector<double> value, magnitude;
    explicit measured(int64_t n = 0) : value(static_cast<std::size_t>(n)), magnitude(static_cast<std::size_t>(n)) {}
    void add(int64_t i, double v, double m) {
        value[static_cast<std::size_t>(i)] += v, magnitude[static_cast<std::size_t>(i)] += m;
    }
};

struct attention_oracle {
    measured y, dq, dk, dv, dgate; ///< row-major [tokens, width]
    std::vector<double> lse, max_logit, first_token, entropy;

    /// From any source of doubles: q(token, column) and so on.
    template <class Q, class K, class V, class Z, class DY>
    attention_oracle(attention_setup const& s, Q const& q, K const& k, V const& v, Z const& z, DY const& dy)
        : y(s.tokens() * s.heads * s.head_dim), dq(s.tokens() * s.heads * s.head_dim),
          dk(s.tokens() * s.kv_heads * s.head_dim), dv(s.tokens() * s.kv_heads * s.head_dim),
          dgate(s.tokens() * s.heads * s.gate_dim), lse(static_cast<std::size_t>(s.tokens() * s.heads)),
          max_logit(static_cast<std::size_t>(s.heads), -std::numeric_limits<double>::infinity()),
          first_token(static_cast<std::size_t>(s.heads)), entropy(static_cast<std::size_t>(s.heads)) {
        int64_t const d = s.head_dim, width = s.heads * d, kv_width = s.kv_heads * d;
        int64_t begin = 0;
        for (int64_t length : s.lengths) {
            for (int64_t h = 0; h < s.heads; ++h)
                for (int64_t i = 0; i < length; ++i) {
                    int64_t const token = begin + i, kv = h / (s.heads / s.kv_heads);
                    auto const hi = static_cast<std::size_t>(h);
                    std::vector<double> p(static_cast<std::size_t>(i + 1)), scores = p;
                    double top = -std::numeric_limits<double>::infinity(), sum = 0;
                    for (int64_t j = 0; j <= i; ++j) {
                        double dot = 0;
                        for (int64_t c = 0; c < d; ++c) dot += q(token, h * d + c) * k(begin + j, kv * d + c);
                        scores[static_cast<std::size_t>(j)] = dot * s.factor();
                        top = std::max(top, dot * s.factor());
                    }
                    for (std::size_t j = 0; j < p.size(); ++j) sum += p[j] = std::exp(scores[j] - top);
                    for (double& x : p) x /= sum;
                    lse[static_cast<std::size_t>(token * s.heads + h)] = top + std::log(sum);
                    max_logit[hi] = std::max(max_logit[hi], top);
                    first_token[hi] += p[0];
                    for (double x : p) entropy[hi] -= x > 0 ? x * std::log(x) : 0;

                    std::vector<double> o(static_cast<std::size_t>(d)), o_size = o, upper = o;
                    for (int64_t c = 0; c < d; ++c)
                        for (int64_t j = 0; j <= i; ++j) {
                            double const part = p[static_cast<std::size_t>(j)] * v(begin + j, kv * d + c);
                            o[static_cast<std::size_t>(c)] += part,
                                o_size[static_cast<std::size_t>(c)] += std::abs(part);
                        }
                    double products = 0, products_size = 0;
                    for (int64_t c = 0; c < d; ++c) {
                        auto const e = static_cast<std::size_t>(c);
                        int64_t const at = token * s.heads * s.gate_dim + h * s.gate_dim + (s.gate_dim == 1 ? 0 : c);
                        double const logit = s.gate_dim == 0 ? 0 : z(token, h * s.gate_dim + (s.gate_dim == 1 ? 0 : c));
                        double const open = s.gate_dim == 0 ? 1 : 1 / (1 + std::exp(-logit)),
                                     shut = s.gate_dim == 0 ? 0 : 1 / (1 + std::exp(logit));
                        double const g = dy(token, h * d + c);
                        y.add(token * width + h * d + c, o[e] * open, o_size[e] * open);
                        upper[e] = g * open;
                        products += upper[e] * o[e], products_size += std::abs(upper[e]) * o_size[e];
                        if (s.gate_dim != 0)
                            dgate.add(at, g * o[e] * open * shut, std::abs(g) * o_size[e] * open * shut);
                    }
                    for (int64_t j = 0; j <= i; ++j) {
                        double dp = 0, dp_size = 0;
                        double const pj = p[static_cast<std::size_t>(j)];
                        for (int64_t c = 0; c < d; ++c) {
                            double const u = upper[static_cast<std::size_t>(c)], x = v(begin + j, kv * d + c);
                            dp += u * x, dp_size += std::abs(u * x);
                            dv.add((begin + j) * kv_width + kv * d + c, pj * u, pj * std::abs(u));
                        }
                        double const ds = pj * (dp - products) * s.factor(),
                                     ds_size = pj * (dp_size + products_size) * std::abs(s.factor());
                        for (int64_t c = 0; c < d; ++c) {
                            double const kk = k(begin + j, kv * d + c), qq = q(token, h * d + c);
                            dq.add(token * width + h * d + c, ds * kk, ds_size * std::abs(kk));
                            dk.add((begin + j) * kv_width + kv * d + c, ds * qq, ds_size * std::abs(qq));
                        }
                    }
                }
            begin += length;
        }
    }
};

template <class T> attention_oracle oracle_of(attention_case<T> const& c) {
    auto const from = [](guarded_matrix<T> const& m) { return [&m](int64_t i, int64_t j) { return m.at(i, j); }; };
    return {c.setup, from(c.q), from(c.k), from(c.v), from(c.gate), from(c.dy)};
}

/// What rounding may do to a sum, as a share of its magnitudes.
/// float: chains of up to 576 fma, each 2^-24, adding up like a random walk: 2^-19; scores of up to about 10 carry their error
/// into e^s: times 8. bf16: P, dS, dO and y round at 2^-9 each, independently; three of them meet in a gradient.
template <class T> constexpr double rounding_share = std::is_same_v<T, float> ? 0x1p-16 : 3 * 0x1p-9;

/// Counts elements outside their bounds: the share of the magnitudes, and half an ulp of the format.
template <class T> int64_t outside(guarded_matrix<T> const& got, measured const& want) {
    double const half_ulp = std::ldexp(1.0, -keel::format_traits<T>::mantissa_bits - 1);
    int64_t count = 0;
    for (int64_t i = 0; i < got.rows(); ++i)
        for (int64_t j = 0; j < got.columns(); ++j) {
            auto const e = static_cast<std::size_t>(i * got.columns() + j);
            double const allowed =
                want.magnitude[e] * rounding_share<T> + std::abs(want.value[e]) * half_ulp + 0x1p-120;
            if (!(std::abs(got.at(i, j) - want.value[e]) <= allowed)) ++count;
        }
    return count;
}

} // namespace keel_test
