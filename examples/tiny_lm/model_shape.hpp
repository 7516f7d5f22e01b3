// The sizes of the model: what a command line chooses, a checkpoint keeps and the flop ledger counts.
#pragma once

#include <cstdint>

namespace tiny_lm {

/// One gate value for a whole head, or one for each of its elements.
enum class gate_kind { head, element };

/// How many tokens an expert may take in training: numerator/denominator times its fair share, or as many as ask for it.
struct expert_capacity {
    std::int64_t numerator = 5;
    std::int64_t denominator = 4; ///< 0: dropless

    bool dropless() const { return denominator == 0; }
    bool operator==(expert_capacity const&) const = default;
};

/// A byte-level decoder. Each of its layers is
///     x += output * (gate * attention(qk_norm(query x', key x'), value x')),   x' = rms_norm(x)
///     x += shared_expert(x") + sum over top_k of weight * expert(x"),          x" = rms_norm(x)
/// between an embedding and, after a last norm, an output head with weights of its own.
struct model_shape {
    static constexpr std::int64_t vocabulary = 256; ///< a token is a byte
    std::int64_t layers = 4;
    std::int64_t width = 192;      ///< of the residual stream
    std::int64_t heads = 6;        ///< of queries
    std::int64_t kv_heads = 2;     ///< of keys and values; each serves heads / kv_heads query heads
    std::int64_t head_dim = 32;    ///< of one query, key or value
    std::int64_t rotary_dims = 16; ///< of these, the ones that RoPE turns
    gate_kind gate = gate_kind::element;
    std::int64_t experts = 8; ///< routed ones
    std::int64_t top_k = 2;   ///< of these, the ones a token visits
    std::int64_t expert_width = 128;
    std::int64_t shared_width = 256; ///< of the expert that every token visits
    expert_capacity capacity;

    std::int64_t query_width() const { return heads * head_dim; }
    std::int64_t kv_width() const { return kv_heads * head_dim; }
    std::int64_t gate_width() const { return gate == gate_kind::head ? heads : query_width(); }
};

} // namespace tiny_lm
