// An optimiser's state as bytes for a checkpoint, and back: a header that says what it is, then the elements, row after row without gaps,
// wherever and however they lay. On the host.
//
//     std::vector<std::byte> bytes(muon_state_bytes(p));                                     // yours: a file, a socket, a snapshot
//     save_muon_state(p, rule, vec(bytes)).or_throw();
//     load_muon_state(p, rule, vec(bytes)).or_throw();                                       // the same parameter, with state memory of its own
//
// Weights are the model's and not in it; what belongs to them is: compensation, and the count of applied steps, without which neither the
// bias correction nor the random numbers would go on where they stopped. A state that is loaded steps as the one that was saved would have,
// bit for bit.
//
//     header, 128 bytes   magic "keelopt", version, kind, the formats of what follows, shape, applied steps, bytes that follow, checksum
//     then                each piece: muon: momentum [, its scales] [, second moment] [, compensation]; adamw: m [, scales], v [, scales]
//                         [, compensation]
#pragma once

#include <keel/core/validate.hpp>
#include <keel/optim/adamw.hpp>
#include <keel/optim/muon_parameter.hpp>

namespace keel {

/// Counts every change of what the bytes mean.
inline constexpr uint32_t saved_state_version = 1;

enum class saved_state_kind : uint32_t { muon = 1, adamw = 2 };

/// The first bytes, in the machine's own order: another order is another magic.
struct saved_state_header {
    uint64_t magic = 0x0074706f6c65656bu; ///< "keelopt" where the low byte comes first
    uint32_t version = saved_state_version;
    saved_state_kind kind = saved_state_kind::muon;
    uint32_t rule = 0;                                   ///< muon: momentum_rule
    uint32_t format[5] = {};                             ///< of momentum or m, v or second moment, compensation, the scales of the first two; 0: none
    uint32_t block[2] = {};                              ///< elements a scale, of the first two
    int64_t stack = 0, rows = 0, columns = 0;            ///< adamw: 1, 1, elements
    int64_t applied = 0;
    int64_t bytes = 0;                                   ///< after the header
    uint64_t checksum = 0;                               ///< of those and of this header
    uint64_t reserved[4] = {};                           ///< 0
};
static_assert(sizeof(saved_state_header) == 128);

/// A word that names a format: digits, exponent bits, bias and special values.
template <class T> KEEL_HOST constexpr uint32_t format_word() {
    using traits = format_traits<T>;
    uint32_t special = 7;
    if constexpr (requires { traits::special_values; }) special = static_cast<uint32_t>(traits::special_values);
    return 0x80000000u | static_cast<uint32_t>(traits::bias) << 16 | special << 12 | static_cast<uint32_t>(traits::exponent_bits) << 8 |
           static_cast<uint32_t>(traits::mantissa_bits);
}

} // namespace keel

namespace keel::inline KEEL_ABI {
namespace saved {

/// What a pass over the pieces does with a row of adjacent elements.
struct measure {
    int64_t bytes = 0;
    template <class T> KEEL_HOST void row(T const*, int64_t, int64_t count) { bytes += count * static_cast<int64_t>(sizeof(T)); }
};
struct write {
    std::byte* to;
    template <class T> KEEL_HOST void row(T const* p, int64_t step, int64_t count) {
        if (step == 1 && count > 0) __builtin_memcpy(to, p, static_cast<std::size_t>(count) * sizeof(T));
        else
            for (int64_t i = 0; i < count; ++i) __builtin_memcpy(to + i * static_cast<int64_t>(sizeof(T)), p + i * step, sizeof(T));
        to += count * static_cast<int64_t>(sizeof(T));
    }
};
struct read {
    std::byte const* from;
    template <class T> KEEL_HOST void row(T* p, int64_t step, int64_t count) {
        if (step == 1 && count > 0) __builtin_memcpy(p, from, static_cast<std::size_t>(count) * sizeof(T));
        else
            for (int64_t i = 0; i < count; ++i) __builtin_memcpy(p + i * step, from + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
        from += count * static_cast<int64_t>(sizeof(T));
    }
};

template <class Pass, class T> KEEL_HOST void each_row(Pass& pass, view<T, 1> const& v) { pass.row(v.data, v.stride[0], v.extent[0]); }
template <class Pass, class T, int Rank> KEEL_HOST void each_row(Pass& pass, view<T, Rank> const& v) {
    for (int64_t i = 0; i < v.extent[0]; ++i) each_row(pass, part(v, i));
}
template <class Pass, class Code, class Scale, int C> KEEL_HOST void each_row(Pass& pass, block_scaled<Code, Scale, 1, C> const& q) {
    each_row(pass, q.codes);
    each_row(pass, q.scales);
}

template <class S> struct described {
    static constexpr uint32_t format = format_word<S>(), scale = 0, block = 0;
};
template <class Code, class Scale, int C> struct described<block_scaled<Code, Scale, 1, C>> {
    // That fp32 scales are powers of two is part of what they are.
    static constexpr uint32_t format = format_word<Code>(), block = C,
                              scale = format_word<typename Scale::storage>() | (Scale::is_power_of_two ? 0x00008000u : 0u);
};

/// Four words at a time, each times an odd constant of its own: any change of one word shows.
KEEL_HOST uint64_t checksum(std::byte const* p, int64_t count) {
    uint64_t lane[4] = {0x9e3779b97f4a7c15u, 0xc2b2ae3d27d4eb4fu, 0x165667b19e3779f9u, static_cast<uint64_t>(count)};
    for (int64_t i = 0; i < count; i += 32)
        for (int64_t k = 0; k < 4; ++k) {
            int64_t const left = count - i - 8 * k;
            uint64_t word = 0;
            if (left > 0) __builtin_memcpy(&word, p + i + 8 * k, left < 8 ? static_cast<std::size_t>(left) : 8);
            lane[k] = (lane[k] ^ word) * 0x9fb21c651e98df25u;
            lane[k] ^= lane[k] >> 29;
        }
    uint64_t sum = 0;
    for (uint64_t const l : lane) sum = (sum ^ l) * 0x9fb21c651e98df25u, sum ^= sum >> 32;
    return sum;
}

KEEL_HOST uint64_t checksum(saved_state_header header, std::byte const* p) {
    header.checksum = 0;
    return checksum(p, header.bytes) ^ checksum(reinterpret_cast<std::byte const*>(&header), sizeof header);
}

/// The pieces of one parameter's state, in their order.
template <class Parameter> struct muon_pieces {
    Parameter const& p;
    template <class Pass> KEEL_HOST void each(Pass& pass) const {
        each_row(pass, p.momentum);
        if (!p.second_moment.absent()) each_row(pass, p.second_moment);
        if (!p.compensation.absent()) each_row(pass, p.compensation);
    }
};
template <class M, class V, class Compensation> struct adamw_pieces {
    adamw_state_of<M, V> const& state;
    view<Compensation, 1> compensation;
    template <class Pass> KEEL_HOST void each(Pass& pass) const {
        each_row(pass, state.m);
        each_row(pass, state.v);
        if (!compensation.absent()) each_row(pass, compensation);
    }
};

template <class T, class Gradient, class Shadow, class Momentum, class Weight>
KEEL_HOST saved_state_header header_of(muon_parameter<T, Gradient, Shadow, Momentum, Weight> const& p, momentum_rule rule) {
    using m = described<Momentum>;
    saved_state_header h{.kind = saved_state_kind::muon, .rule = static_cast<uint32_t>(rule)};
    h.format[0] = m::format, h.format[3] = m::scale, h.block[0] = m::block;
    if (!p.second_moment.absent()) h.format[1] = format_word<float>();
    if (!p.compensation.absent()) h.format[2] = format_word<Weight>();
    h.stack = p.plan.stack, h.rows = p.plan.rows, h.columns = p.plan.columns;
    h.applied = p.applied == nullptr ? 0 : *p.applied;
    measure bytes;
    muon_pieces<muon_parameter<T, Gradient, Shadow, Momentum, Weight>>{p}.each(bytes);
    h.bytes = bytes.bytes;
    return h;
}
template <class M, class V, class Compensation>
KEEL_HOST saved_state_header header_of(adamw_pieces<M, V, Compensation> const& pieces, int64_t count) {
    saved_state_header h{.kind = saved_state_kind::adamw};
    h.format[0] = described<M>::format, h.format[1] = described<V>::format;
    h.format[3] = described<M>::scale, h.format[4] = described<V>::scale;
    h.block[0] = described<M>::block, h.block[1] = described<V>::block;
    if (!pieces.compensation.absent()) h.format[2] = format_word<Compensation>();
    h.stack = 1, h.rows = 1, h.columns = count;
    h.applied = pieces.state.applied == nullptr ? 0 : *pieces.state.applied;
    measure bytes;
    pieces.each(bytes);
    h.bytes = bytes.bytes;
    return h;
}

template <class Pieces> KEEL_HOST status save(validation& check, saved_state_header header, Pieces const& pieces, view<std::byte, 1> out) {
    int64_t const head = sizeof header;
    if (check.ok()) check.shape("out", out, head + header.bytes).unit_stride("out", out);
    if (!check.ok()) return check.result;
    write pass{out.data + head};
    pieces.each(pass);
    header.checksum = checksum(header, out.data + head);
    __builtin_memcpy(out.data, &header, sizeof header);
    return check.result;
}
template <class Pieces>
KEEL_HOST status load(validation& check, saved_state_header const& wanted, Pieces const& pieces, int64_t* applied, view<std::byte const, 1> in) {
    int64_t const head = sizeof wanted;
    if (check.ok()) check.present("in", in).unit_stride("in", in);
    check.require(!check.ok() || in.extent[0] >= head, status_code::bad_shape, "in", "length", in.extent[0], "a header of 128 bytes and what it announces");
    if (!check.ok()) return check.result;
    saved_state_header got;
    __builtin_memcpy(&got, in.data, sizeof got);
    auto const same = [&](char const* property, auto is, auto wants, char const* text = "") {
        if (is != wants) check.fail(status_code::bad_state, "in", property, static_cast<int64_t>(is), static_cast<int64_t>(wants), text);
    };
    check.require(got.magic == wanted.magic, status_code::bad_state, "in", "bytes that keel saved, in this machine's byte order");
    same("version", got.version, wanted.version);
    same("kind", static_cast<uint32_t>(got.kind), static_cast<uint32_t>(wanted.kind), "the state of this optimiser (1: muon, 2: adamw)");
    same("momentum rule", got.rule, wanted.rule, "momentum of the rule that the call names (0: ema, 1: heavy_ball)");
    same("stack", got.stack, wanted.stack), same("rows", got.rows, wanted.rows), same("columns", got.columns, wanted.columns);
    char const* const names[5] = {"format of the momentum", "format of the second moment", "format of the compensation", "format of the momentum's scales",
                                  "format of the second moment's scales"};
    for (int k = 0; k < 5; ++k) same(names[k], got.format[k], wanted.format[k], "the format of this state (0: none)");
    for (int k = 0; k < 2; ++k) same("block", got.block[k], wanted.block[k]);
    same("bytes", got.bytes, wanted.bytes);
    if (check.ok()) check.extent("in", in, 0, head + got.bytes);
    check.require(!check.ok() || got.applied >= 0, status_code::bad_state, "in", "applied steps", got.applied, "0 or more");
    check.require(!check.ok() || applied != nullptr || got.applied == 0, status_code::bad_pointer, "applied", "data, not null: the saved state counts its steps");
    check.require(!check.ok() || got.checksum == checksum(got, in.data + head), status_code::bad_state, "in", "the bytes that were saved: their checksum differs");
    if (!check.ok()) return check.result;
    read pass{in.data + head};
    pieces.each(pass);
    if (applied != nullptr) *applied = got.applied;
    return check.result;
}

/// That the state has the shape of its plan.
template <class T, class Gradient, class Shadow, class Momentum, class Weight>
KEEL_HOST void check_state(validation& check, muon_parameter<T, Gradient, Shadow, Momentum, Weight> const& p) {
    int64_t const stack = p.plan.stack, rows = p.plan.rows, columns = p.plan.columns;
    check.require(p.plan.valid(), status_code::bad_state, "plan", "parts that cover the rows, each row once, in whole matrices");
    if constexpr (is_block_state<Momentum>) check_state_rows(check, "momentum", "momentum.scales", p.momentum, stack * rows, columns);
    else check.shape("momentum", p.momentum, stack, rows, columns);
    if (!p.second_moment.absent()) check.shape("second_moment", p.second_moment, stack, rows);
    if (!p.compensation.absent()) check.shape("compensation", p.compensation, stack, rows, columns);
}
template <class Shadow> KEEL_HOST view<bf16, 1> compensation_of(adamw_weights<Shadow> const&) { return {}; }
template <class Weight> KEEL_HOST view<Weight, 1> compensation_of(stochastic_weights<Weight> const&) { return {}; }
template <class Weight> KEEL_HOST view<Weight, 1> compensation_of(kahan_weights<Weight> const& w) { return w.compensation; }
template <class Weights, class M, class V> KEEL_HOST void check_state(validation& check, Weights const& weights, adamw_state_of<M, V> const& state) {
    int64_t const count = count_of(weights);
    check.require(count >= 0, status_code::bad_shape, "weights", "length", count, "0 or more");
    check_state_run(check, "state.m", "state.m.scales", state.m, count);
    check_state_run(check, "state.v", "state.v.scales", state.v, count);
    auto const rest = compensation_of(weights);
    if (!rest.absent()) check.shape("weights.compensation", rest, count);
}

} // namespace saved

/// Bytes of a parameter's saved state, its header with them.
template <class... Kinds> KEEL_HOST int64_t muon_state_bytes(muon_parameter<Kinds...> const& p) {
    return static_cast<int64_t>(sizeof(saved_state_header)) + saved::header_of(p, momentum_rule::ema).bytes;
}
/// The state of p into `out`, of muon_state_bytes(p): momentum with its scales, second moment and compensation where p has them, and
/// applied. `rule` is the one that made the momentum.
///
/// Status         bad_shape (state that does not fit the plan; out of another length), bad_stride, bad_pointer, bad_state (no plan).
/// Cost           reads the state twice, writes it once.
template <class... Kinds> KEEL_HOST status save_muon_state(muon_parameter<Kinds...> const& p, momentum_rule rule, view<std::byte, 1> out) {
    validation check("save_muon_state");
    saved::check_state(check, p);
    if (!check.ok()) return check.result;
    return saved::save(check, saved::header_of(p, rule), saved::muon_pieces<muon_parameter<Kinds...>>{p}, out);
}
/// What save_muon_state wrote, into p's state: any strides, and any row parts, since those are the plan's and not the state's.
///
/// Status         as save_muon_state; bad_state (in: not keel's, another version, kind, momentum rule, shape or format, or a checksum that
///                differs), bad_pointer (p does not count applied steps and the saved state does): found before anything is written.
template <class... Kinds> KEEL_HOST status load_muon_state(muon_parameter<Kinds...> const& p, momentum_rule rule, view<std::byte const, 1> in) {
    validation check("load_muon_state");
    saved::check_state(check, p);
    if (!check.ok()) return check.result;
    return saved::load(check, saved::header_of(p, rule), saved::muon_pieces<muon_parameter<Kinds...>>{p}, p.applied, in);
}

/// The same for adamw_step: m and v with their scales, applied, and the weights' compensation where they have one.
template <class Weights, class M, class V> KEEL_HOST int64_t adamw_state_bytes(Weights const& weights, adamw_state_of<M, V> const& state) {
    auto const rest = saved::compensation_of(weights);
    saved::adamw_pieces<M, V, typename decltype(rest)::value> const pieces{state, rest};
    return static_cast<int64_t>(sizeof(saved_state_header)) + saved::header_of(pieces, count_of(weights)).bytes;
}
template <class Weights, class M, class V>
KEEL_HOST status save_adamw_state(Weights const& weights, adamw_state_of<M, V> const& state, view<std::byte, 1> out) {
    validation check("save_adamw_state");
    saved::check_state(check, weights, state);
    if (!check.ok()) return check.result;
    auto const rest = saved::compensation_of(weights);
    saved::adamw_pieces<M, V, typename decltype(rest)::value> const pieces{state, rest};
    return saved::save(check, saved::header_of(pieces, count_of(weights)), pieces, out);
}
template <class Weights, class M, class V>
KEEL_HOST status load_adamw_state(Weights const& weights, adamw_state_of<M, V> const& state, view<std::byte const, 1> in) {
    validation check("load_adamw_state");
    saved::check_state(check, weights, state);
    check.require(state.applied != nullptr, status_code::bad_pointer, "state.applied", "data, not null");
    if (!check.ok()) return check.result;
    auto const rest = saved::compensation_of(weights);
    saved::adamw_pieces<M, V, typename decltype(rest)::value> const pieces{state, rest};
    return saved::load(check, saved::header_of(pieces, count_of(weights)), pieces, state.applied, in);
}

} // namespace keel::inline KEEL_ABI
