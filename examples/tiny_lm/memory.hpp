// Memory that the model owns, seen as keel views. Keel itself allocates nothing; this is the caller's side of that.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <keel/core/view.hpp>
#include <keel/core/workspace.hpp>

namespace tiny_lm {

/// Room for up to so many rows of fixed width; calls see as many rows as they work on.
template <class T> class matrix {
public:
    matrix() = default;
    matrix(std::int64_t most_rows, std::int64_t columns)
        : columns_(columns), values_(static_cast<std::size_t>(most_rows * columns)) {}

    keel::view<T, 2> rows(std::int64_t count) { return keel::rows(values_.data(), count, columns_); }
    keel::view<T, 1> vec(std::int64_t count) { return keel::vec(values_.data(), count); }
    /// Each row as heads of `head_dim` elements, from column `first` on.
    keel::view<T, 3> heads(std::int64_t count, std::int64_t first, std::int64_t heads, std::int64_t head_dim) {
        return {values_.data() + first, {count, heads, head_dim}, {columns_, head_dim, 1}};
    }
    T* data() { return values_.data(); }

private:
    std::int64_t columns_ = 0;
    std::vector<T> values_;
};

/// Scratch that grows to the largest request and then stays: after the first step nothing is allocated any more.
class scratch {
public:
    keel::workspace operator()(std::int64_t bytes) {
        if (static_cast<std::int64_t>(memory_.size()) < bytes) memory_.resize(static_cast<std::size_t>(bytes));
        return {memory_.data(), static_cast<std::int64_t>(memory_.size())};
    }

private:
    std::vector<std::byte> memory_;
};

} // namespace tiny_lm
