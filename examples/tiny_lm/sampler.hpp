// The order of the training data, without state: sample number n of a run is a function of the seed and n alone. A
// checkpoint keeps nothing of it but the steps done, and threads cannot change the order.
//
// An epoch cuts the training text into windows of `sequence` inputs, end to end from a random phase, and visits each
// exactly once in a random order. The next epoch has another phase and another order.
#pragma once

#include <bit>
#include <cstdint>

#include "corpus.hpp"

namespace tiny_lm {

/// A bijection of 64-bit words whose outputs look random (the finaliser of splitmix64).
constexpr std::uint64_t scramble(std::uint64_t word) {
    word += 0x9e3779b97f4a7c15u;
    word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9u;
    word = (word ^ (word >> 27)) * 0x94d049bb133111ebu;
    return word ^ (word >> 31);
}

/// Where `index` goes in a random permutation of 0 .. size-1 chosen by the key, found without storing the
/// permutation: a Feistel network permutes the next power of four, and positions beyond `size` walk on along their
/// cycle until they are inside.
constexpr std::uint64_t permuted(std::uint64_t index, std::uint64_t size, std::uint64_t key) {
    auto const half = (static_cast<int>(std::bit_width(size - 1)) + 1) / 2;
    std::uint64_t const mask = (std::uint64_t{1} << half) - 1;
    do {
        std::uint64_t left = index >> half, right = index & mask;
        for (std::uint64_t round = 0; round < 6; ++round) {
            std::uint64_t const mixed = left ^ (scramble(key ^ scramble(right << 3 | round)) & mask);
            left = right;
            right = mixed;
        }
        index = left << half | right;
    } while (index >= size);
    return index;
}

class sampler {
public:
    /// The text must outlive the sampler and hold at least two contexts, as read_corpus ensures.
    sampler(corpus const& text, std::int64_t sequence, std::uint64_t seed)
        : train_(text.train), sequence_(static_cast<std::uint64_t>(sequence)), seed_(seed) {}

    /// Windows an epoch.
    std::int64_t windows() const { return static_cast<std::int64_t>((train_.size() - sequence_) / sequence_); }

    /// Sample n of the run, n counted from 0 over all steps: sequence + 1 bytes, the first `sequence` of which are
    /// inputs and the last `sequence` targets. Sequence b of step s (from 0) is sample s * batch + b.
    byte_span operator()(std::int64_t n) const {
        auto const count = static_cast<std::uint64_t>(windows());
        auto const number = static_cast<std::uint64_t>(n);
        std::uint64_t const key = scramble(seed_ ^ scramble(number / count));
        std::uint64_t const phase = scramble(key) % sequence_;
        std::uint64_t const start = phase + permuted(number % count, count, key) * sequence_;
        return train_.subspan(start, sequence_ + 1);
    }

private:
    byte_span train_;
    std::uint64_t sequence_, seed_;
};

} // namespace tiny_lm
