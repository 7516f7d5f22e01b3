// A router that crowns no experts at its first step: rows of equal norm, optionally orthogonal, and a bias that balances a first batch.
//
// Normal rows differ in norm by 1 / sqrt(2 width), which alone skews the load by several percent; equal norms remove that. What is
// left comes from the activations' common mean, which gives every token the same offset an expert. Two cures: calibrate_bias balances
// a first batch, as long as the offsets leave the scores digits; rows without a component along the mean know no offset at all.
#pragma once

#include <keel/core/random.hpp>
#include <keel/moe/balance.hpp>
#include <keel/moe/route.hpp>

namespace keel {

struct router_init_options {
    float norm = 1.0f;       ///< of every row: the standard deviation of the logits for activations of unit root mean square
    bool orthogonal = false; ///< rows orthogonal to each other; needs experts <= width
};

struct calibrate_options {
    route_options route = {}; ///< as in the forward; spare is not read
    int64_t rounds = 96;  ///< the batch is routed once a round
    float rate = 0.25f;   ///< the first round's step of the bias, in units of the score
    float decay = 0.85f;  ///< factor on the step after each round; the steps left always exceed 5 times the last one
};

} // namespace keel

namespace keel::inline KEEL_ABI {

/// A row of standard normals, each a function of the key and its index in the matrix.
struct normal_row {
    view<float, 2> w;
    random_key key;

    template <class G> KEEL_FN void operator()(G const& g, int64_t row) const {
        if (!g.leader()) return;
        for (int64_t j = 0; j < w.extent[1]; ++j) w(row, j) = random_normal(key, static_cast<uint64_t>(row * w.extent[1] + j));
    }
};

/// Scales a row to the norm. A zero row stays zero.
struct scale_row {
    view<float, 2> w;
    float norm;

    template <class G> KEEL_FN void operator()(G const& g, int64_t row) const {
        using F = typename G::value;
        float* const p = w.at(row);
        float const squares = g.sum(w.extent[1], [&](F const& acc, auto at) {
            F const v = g.load(p, at);
            return fma(v, v, acc);
        });
        float const size = sqrt(squares);
        if (size > 0.0f) g.each(w.extent[1], [&](auto at) { g.store(p, at, g.load(p, at) / F(size) * F(norm)); });
    }
};

/// Takes a row's part along a direction away, twice, as Gram-Schmidt does below. A direction of zeros takes nothing.
struct leave_direction {
    view<float, 2> w;
    view<float const, 1> direction;

    template <class G> KEEL_FN void operator()(G const& g, int64_t row) const {
        using F = typename G::value;
        float* const p = w.at(row);
        float const* const d = direction.data;
        int64_t const n = w.extent[1];
        bits_of<F> largest(0u);
        g.each(n, [&](auto at) { largest = umax(largest, magnitude(g.load(d, at))); });
        float const top = as_float(g.max_bits(largest)); // the direction over this neither overflows nor vanishes when squared
        if (top == 0.0f) return;
        float const squares = g.sum(n, [&](F const& acc, auto at) {
            F const v = g.load(d, at) / F(top);
            return fma(v, v, acc);
        });
        for (int twice = 0; twice < 2; ++twice) {
            g.sync();
            float const dot = g.sum(n, [&](F const& acc, auto at) { return fma(g.load(p, at), g.load(d, at) / F(top), acc); });
            float const part = negate(div(dot, squares));
            g.sync();
            g.each(n, [&](auto at) { g.store(p, at, fma(F(part), g.load(d, at) / F(top), g.load(p, at))); });
        }
    }
};

/// Gram-Schmidt, row after row, each twice, which leaves them orthogonal to fp32's accuracy (Kahan and Parlett: "twice is enough").
struct orthogonal_rows {
    view<float, 2> w;

    template <class G> KEEL_FN void operator()(G const& g, int64_t) const {
        using F = typename G::value;
        int64_t const n = w.extent[1];
        for (int64_t i = 0; i < w.extent[0]; ++i) {
            float* const p = w.at(i);
            for (int64_t j = 0; j < 2 * i; ++j) {
                float const* const q = w.at(j % i);
                g.sync();
                float const dot = g.sum(n, [&](F const& acc, auto at) { return fma(g.load(p, at), g.load(q, at), acc); });
                g.sync();
                g.each(n, [&](auto at) { g.store(p, at, fma(F(negate(dot)), g.load(q, at), g.load(p, at))); });
            }
            g.sync();
            scale_row{w, 1.0f}(g, i);
        }
    }
};

/// Fills the router's weights [experts, width] with normals (core/random.hpp) and scales every row to options.norm.
///
/// Formula        w_e = norm * n_e / |n_e|; n_e less its part along `away_from`, and if orthogonal less its projections on the rows before
///                it. Norms hold to 2^-20 relative.
/// Shapes         weights [experts, width], columns adjacent, rows may be strided. Element (e, j) draws number e * width + j of `key`.
///                away_from [width], such as the mean of a batch of activations; absent: none.
/// Status         bad_shape, bad_stride, bad_pointer, overlap, bad_option (norm not finite or not above 0; orthogonal with more experts
///                than the width, less one for away_from; on host backends an away_from that is not finite).
/// Cost           orthogonal: experts^2 passes over a row on one worker. No workspace.
template <row_backend B>
status router_init(B const& be, view<float, 2> weights, random_key const& key, router_init_options options = {},
                   view<float const, 1> away_from = {}) {
    int64_t const experts = weights.extent[0], width = weights.extent[1];
    validation check("router_init");
    check.present("weights", weights).unit_stride("weights", weights).distinct("weights", weights);
    check.require(options.norm > 0.0f && options.norm <= 0x1.fffffep127f, status_code::bad_option, "options.norm", "a finite number above 0");
    bool const leaves = !away_from.absent();
    check.require(!options.orthogonal || experts <= width - (leaves ? 1 : 0), status_code::bad_option, "options.orthogonal", "experts", experts,
                  "no more than the directions there are");
    if (leaves) check.shape("away_from", away_from, width).unit_stride("away_from", away_from).disjoint("weights", weights, away_from);
    if (!check.ok()) return check.result;
    if constexpr (backend_traits<B>::space == memory_space::host)
        for (int64_t j = 0; check.ok() && leaves && j < width; ++j)
            if (is_non_finite(away_from(j))) check.fail(status_code::bad_option, "away_from", "a number that is not finite at column", j, 0, "none");
    if (!check.ok()) return check.result;
    be.for_rows(experts, width, normal_row{weights, key});
    if (leaves) be.for_rows(experts, width, leave_direction{weights, away_from});
    if (options.orthogonal) be.for_rows(experts > 0 ? 1 : 0, experts * width, orthogonal_rows{weights});
    be.for_rows(experts, width, scale_row{weights, options.norm});
    return check.result;
}

/// Bytes for calibrate_bias.
KEEL_HOST int64_t calibrate_bias_workspace(int64_t tokens, int64_t experts, int64_t k) {
    return workspace_total(workspace_bytes<int32_t>(tokens * k) + workspace_bytes<float>(tokens * k) + workspace_bytes<int64_t>(experts) +
                           workspace_bytes<float>(experts) + route_workspace(tokens, experts));
}

/// Sets the bias of a fresh router so that a first batch is spread evenly: step zero, before any training.
///
/// Rule           `rounds` times: route the batch, then a centred sign step on its demand, smaller by `decay` each time. The bias with
///                the smallest largest demand is kept, the first one among equals, so the result is never worse than what came in.
///                A token whose logits are not all finite counts like any other (route): leave it out by `valid`. options.route is
///                what the model routes with; its `spare` does not matter here.
/// Shapes         logits [tokens, experts] of the batch, bias [experts] (start it at 0), valid [tokens] as in route_inputs.
/// Status         bad_option (rounds below 0, rate, decay outside (0, 1]) and what route reports. small_workspace.
/// Cost           rounds + 1 calls of route. Workspace: calibrate_bias_workspace(tokens, experts, k).
template <row_backend B, class L>
status calibrate_bias(B const& be, view<L, 2> logits, int64_t k, view<float, 1> bias, calibrate_options options = {}, workspace ws = {},
                      view<bool const, 1> valid = {}) {
    int64_t const tokens = logits.extent[0], experts = logits.extent[1];
    validation check("calibrate_bias");
    check.present("logits", logits).shape("bias", bias, experts).unit_stride("bias", bias).disjoint("bias", bias, logits);
    check.require(k >= 1 && k <= experts, status_code::bad_option, "k", "value", k, "1 up to the number of experts");
    check.require(options.rounds >= 0, status_code::bad_option, "options.rounds", "value", options.rounds, "0 or more");
    check.require(options.rate >= 0.0f && options.rate <= 0x1.fffffep127f, status_code::bad_option, "options.rate",
                  "a finite number, 0 or above");
    check.require(options.decay > 0.0f && options.decay <= 1.0f, status_code::bad_option, "options.decay", "a number in (0, 1]");
    if (!check.ok()) return check.result;
    options.route.spare = 0; // next choices are no demand, and ids here have no room for them
    check.enough(ws, calibrate_bias_workspace(tokens, experts, k));
    if (!check.ok()) return check.result;

    auto const ids = rows(ws.take<int32_t>(tokens * k), tokens, k);
    auto const weights = rows(ws.take<float>(tokens * k), tokens, k);
    demand_counts demand(vec(ws.take<int64_t>(experts), experts));
    options.route.spare = 0;
    float* const trial = ws.take<float>(experts);
    for (int64_t e = 0; e < experts; ++e) trial[e] = bias(e);
    int64_t least = 0;
    balance_moves moves;
    float rate = options.rate;
    for (int64_t round = 0; round <= options.rounds; ++round) {
        status const routed =
            route(be, logits, {.bias = vec<float const>(trial, experts), .valid = valid}, ids, weights, demand, {}, options.route, ws);
        if (!routed.ok()) return routed;
        int64_t top = 0;
        for (int64_t e = 0; e < experts; ++e) top = demand[e] > top ? demand[e] : top;
        if (round == 0 || top < least) {
            least = top;
            for (int64_t e = 0; e < experts; ++e) bias(e) = trial[e];
        }
        be.for_rows(1, experts, balance_row{demand.counts(), vec(trial, experts), {}, {}, {}, demand.total(), {.rule = balance_rule::centred_sign, .rate = rate}, &moves});
        rate = mul(rate, options.decay);
    }
    return check.result;
}

} // namespace keel::inline KEEL_ABI
