// How attention is cut into tiles. A plan is a function of shape alone; the key tile and the query block belong to the order of
// the sums, and so to the bits.
#pragma once

#include <string>

#include <keel/config.hpp>

namespace keel {

/// The extents of one attention call. `heads` query heads share `kv_heads` key and value heads: head h reads kv head
/// h / (heads / kv_heads).
struct attention_shape {
    int64_t tokens = 0;
    int64_t heads = 0;
    int64_t kv_heads = 0;
    int64_t head_dim = 0;

    KEEL_FN constexpr int64_t group() const { return kv_heads > 0 ? heads / kv_heads : 1; } ///< heads on one kv head
};

/// Queries go by blocks and keys by tiles, both counted from their document's start. The heads of a group that are together
/// in a tile share the packing of its keys and values.
struct attention_plan {
    int64_t query_block = 64;   ///< queries of one head
    int64_t key_tile = 512;     ///< a multiple of query_block, so every query of a block meets the same tiles
    int64_t heads_together = 1; ///< at most 512 / query_block

    /// Rows of a tile.
    KEEL_FN constexpr int64_t rows() const { return query_block * heads_together; }
    KEEL_FN std::string text() const {
        return "queries " + std::to_string(query_block) + ", keys " + std::to_string(key_tile) + ", heads together " +
               std::to_string(heads_together);
    }
};

KEEL_FN constexpr attention_plan plan_attention(attention_shape shape) {
    attention_plan plan;
    int64_t const group = shape.group();
    plan.heads_together = group < 1 ? 1 : group < 8 ? group : 8;
    return plan;
}

} // namespace keel
