// Text from the model, byte by byte.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include <keel/core/random.hpp>

#include "corpus.hpp"
#include "model.hpp"

namespace tiny_lm {

/// The index that a uniform number u in [0, 1) draws from softmax(logits / temperature); at temperature 0 the largest logit's, the
/// first one among equals.
inline std::int64_t draw(keel::view<float const, 1> logits, double temperature, double u) {
    std::int64_t best = 0;
    for (std::int64_t i = 1; i < logits.extent[0]; ++i)
        if (logits(i) > logits(best)) best = i;
    if (temperature == 0) return best;
    std::vector<double> weight(static_cast<std::size_t>(logits.extent[0]));
    double sum = 0;
    for (std::int64_t i = 0; i < logits.extent[0]; ++i)
        sum += weight[static_cast<std::size_t>(i)] = std::exp(static_cast<double>(logits(i) - logits(best)) / temperature);
    double left = u * sum;
    for (std::int64_t i = 0; i < logits.extent[0]; ++i)
        if ((left -= weight[static_cast<std::size_t>(i)]) < 0) return i;
    return best;
}

/// `count` bytes that follow the prompt, which is not empty. The context is the last `sequence` bytes; it is run anew for each
/// byte, since a cache of keys is inference's business, not training's.
template <class Model>
std::vector<std::uint8_t> generate(Model& m, byte_span prompt, std::int64_t count, std::int64_t sequence, double temperature, std::uint64_t seed) {
    keel::random_key const key{seed, 0, 0xffffffffu};
    std::vector<std::int32_t> context(prompt.begin(), prompt.end());
    std::vector<std::uint8_t> out;
    for (std::int64_t n = 0; n < count; ++n) {
        // Dropping a quarter at a time keeps most contexts long without running the longest one every time.
        if (static_cast<std::int64_t>(context.size()) > sequence)
            context.erase(context.begin(), context.end() - std::max<std::int64_t>(1, sequence * 3 / 4));
        auto const length = static_cast<std::int64_t>(context.size());
        m.forward(context, length, false);
        auto const u = static_cast<double>(keel::random_uniform(key, static_cast<std::uint64_t>(n)));
        auto const next = draw(m.logits(length - 1), temperature, u);
        out.push_back(static_cast<std::uint8_t>(next));
        context.push_back(static_cast<std::int32_t>(next));
    }
    return out;
}

} // namespace tiny_lm
