// Sizes of one FP8 linear layer, and the types of its blocks (fp8_linear.hpp).
#pragma once

#include <string>

#include <keel/quantize/block_scaled.hpp>

namespace keel {

/// Sizes and scratch of one FP8 linear layer; printable, a function of the shape alone.
template <class Scale = fp32_scale, class Code = e4m3> struct fp8_linear_plan {
    using activation_blocks = row_blocks<Code, Scale>; ///< x and dy, along their columns
    using token_blocks = column_blocks<Code, Scale>;   ///< x and dy, along the tokens
    using weight_blocks = tile_blocks<Code, Scale>;    ///< W
    using read_weight_blocks = tile_blocks<Code const, Scale>;  ///< W where it is only read
    using read_token_blocks = column_blocks<Code const, Scale>; ///< the saved x where it is only read
    using storage = typename Scale::storage;

    int64_t tokens = 0, inputs = 0, outputs = 0;

    /// Elements of the codes and of the scales that the caller keeps for the weights, and from forward to backward for x.
    KEEL_FN int64_t weight_scales() const {
        return weight_blocks::scale_rows(outputs) * weight_blocks::scale_columns(inputs);
    }
    KEEL_FN int64_t saved_scales() const { return token_blocks::scale_rows(tokens) * inputs; }

    /// Views over the caller's memory.
    KEEL_FN weight_blocks weight(Code* codes, storage* scales) const {
        return {rows(codes, outputs, inputs),
                rows(scales, weight_blocks::scale_rows(outputs), weight_blocks::scale_columns(inputs))};
    }
    KEEL_FN token_blocks saved(Code* codes, storage* scales) const {
        return {rows(codes, tokens, inputs), rows(scales, token_blocks::scale_rows(tokens), inputs)};
    }

    /// "tokens 150, inputs 200, outputs 140; scales: 4 of w, 400 saved"
    KEEL_HOST std::string text() const {
        return "tokens " + std::to_string(tokens) + ", inputs " + std::to_string(inputs) + ", outputs " +
               std::to_string(outputs) + "; scales: " + std::to_string(weight_scales()) + " of w, " +
               std::to_string(saved_scales()) + " saved";
    }
};

} // namespace keel
