// The step gate: one look at all gradients of the model, one decision that every optimiser obeys.
//
//     std::vector<gradient_tensor> gradients{keel::rows(dw, out, in), keel::vec(dgain, width)};     // every one of the model
//     step_gate gate;                                                            // in the backend's memory
//     make_gate(be, keel::vec(gradients), {.max_norm = 1.0f}, &gate, ws).or_throw();
//     adamw_step(be, ..., gate, ...);  muon_step(be, ..., gate, ...);            // all step, or none does
//
// Optimisers multiply each gradient by gate.clip as they read it, so no gradient is ever rewritten, and return at once where
// gate.apply is 0: a select, not a multiplication by 0, which would let a NaN through. Kernels: step_gate_rows.hpp.
#pragma once

#include <keel/backend/concepts.hpp>
#include <keel/core/validate.hpp>
#include <keel/format/bf16.hpp>
#include <keel/format/float32.hpp>
#include <keel/guard/step_gate_rows.hpp>

namespace keel {

struct gate_options {
    float max_norm = as_float(infinity_bits); ///< norm above which gradients are scaled down to it; > 0. Default: never
};

/// One gradient tensor of the model: dense, float or bf16, of any rank.
struct gradient_tensor {
    enum class format : uint8_t { float32, bfloat16 };

    void const* data = nullptr;
    int64_t count = 0;
    format stored = format::float32;
    bool dense = true;

    gradient_tensor() = default;
    template <class T, int Rank>
        requires(std::is_same_v<std::remove_const_t<T>, float> || std::is_same_v<std::remove_const_t<T>, bf16>)
    KEEL_HOST gradient_tensor(view<T, Rank> const& v)
        : data(v.data), count(v.size()),
          stored(std::is_same_v<std::remove_const_t<T>, float> ? format::float32 : format::bfloat16) {
        int64_t step = 1;
        for (int d = Rank - 1; d >= 0; --d) {
            dense = dense && (v.extent[d] <= 1 || v.stride[d] == step);
            step *= v.extent[d];
        }
    }
};

} // namespace keel

namespace keel::inline KEEL_ABI {

KEEL_HOST int64_t gate_chunks(int64_t count) { return count <= 0 ? 0 : (count + gate_chunk - 1) / gate_chunk; }

/// Of the largest tensor: tensors take turns with one buffer.
KEEL_HOST int64_t most_gate_chunks(view<gradient_tensor const, 1> gradients) {
    int64_t most = 0;
    for (int64_t t = 0; t < gradients.extent[0]; ++t)
        if (gate_chunks(gradients(t).count) > most) most = gate_chunks(gradients(t).count);
    return most;
}

/// Bytes for make_gate over this list.
KEEL_HOST int64_t make_gate_workspace(view<gradient_tensor const, 1> gradients) {
    return workspace_total(workspace_bytes<gradient_chunk>(most_gate_chunks(gradients)) +
                           workspace_bytes<gradient_total>(gradients.extent[0]));
}

/// Looks at every gradient of the model once and decides whether, and with what clip factor, the step happens.
///
/// Formula        chunks of 8192 elements: top = max|g|; s = sum((g * 2^-exponent(top))^2) in THE order, fp32. Chunks in order, then
///                tensors in order, in double: norm = sqrt(sum). clip = norm <= max_norm ? 1 : float(max_norm / norm).
/// Shapes         a list of dense tensors in host memory; a tensor that several replicas hold is listed once.
/// Formats        float or bf16 gradients, read as stored and not written. The norm neither overflows nor vanishes.
/// Status         bad_shape, bad_stride (a tensor that is not dense), bad_pointer, bad_option (max_norm not above 0), small_workspace.
/// Too far        max_norm / norm below 2^-126 closes the gate as well: a float cannot hold the factor. pre_clip_norm is finite then
///                and non_finite() is 0.
/// Non-finite     any NaN or Inf closes the gate: apply = 0, clip = 0, counts and the first tensor given. Nothing else is touched.
///                No tensors, or empty ones: norm 0, the gate is open.
/// Workspace      make_gate_workspace(gradients). Where the backend is asynchronous the gate is ready when the stream reaches it.
/// Cost           reads each gradient once from memory (twice from cache).
/// Deviation      torch adds 1e-6 to the norm and multiplies by min(1, ...); here a norm within the limit changes no bit.
template <row_backend B>
status make_gate(B const& be, view<gradient_tensor const, 1> gradients, gate_options options, step_gate* gate, workspace ws) {
    int64_t const tensor_count = gradients.extent[0];
    validation check("make_gate");
    check.present("gradients", gradients).unit_stride("gradients", gradients);
    check.require(options.max_norm > 0.0f, status_code::bad_option, "options.max_norm", "a number above 0");
    check.require(gate != nullptr, status_code::bad_pointer, "gate", "data, not null");
    if (!check.ok()) return check.result;
    for (int64_t t = 0; t < tensor_count; ++t) {
        gradient_tensor const& g = gradients(t);
        check.require(g.count >= 0, status_code::bad_shape, "gradients", "elements", g.count, "0 or more");
        check.require(g.count <= 0 || g.data != nullptr, status_code::bad_pointer, "gradients", "index", t, "data, not null");
        check.require(g.dense, status_code::bad_stride, "gradients", "index", t, "a dense tensor");
    }
    check.enough(ws, make_gate_workspace(gradients));
    if (!check.ok()) return check.result;

    auto* const totals = ws.take<gradient_total>(tensor_count);
    auto* const chunks = ws.take<gradient_chunk>(most_gate_chunks(gradients));
    for (int64_t t = 0; t < tensor_count; ++t) {
        gradient_tensor const& g = gradients(t);
        int64_t const n = gate_chunks(g.count);
        if (g.stored == gradient_tensor::format::float32)
            be.for_rows(n, gate_chunk, gradient_chunk_row<float>{static_cast<float const*>(g.data), g.count, chunks});
        else be.for_rows(n, gate_chunk, gradient_chunk_row<bf16>{static_cast<bf16 const*>(g.data), g.count, chunks});
        be.for_rows(1, n, gradient_tensor_row{chunks, n, totals + t});
    }
    be.for_rows(1, tensor_count, gate_row{totals, tensor_count, options.max_norm, gate});
    return check.result;
}
template <row_backend B>
status make_gate(B const& be, view<gradient_tensor, 1> gradients, gate_options options, step_gate* gate, workspace ws) {
    return make_gate(be, view<gradient_tensor const, 1>(gradients), options, gate, ws);
}

} // namespace keel::inline KEEL_ABI
