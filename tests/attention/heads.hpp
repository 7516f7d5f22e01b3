// Views of [tokens, heads, head_dim] over test buffers whose rows are tokens.
#pragma once

#include <support/data.hpp>

namespace keel_test {

/// `heads` heads of `head_dim` elements from column `first` on: what a fused QKV projection's rows hold.
template <class T> keel::view<T, 3> heads_of(guarded_matrix<T>& m, int64_t heads, int64_t head_dim, int64_t first = 0) {
    auto const v = m.view();
    return {v.data + first, {v.extent[0], heads, head_dim}, {v.stride[0], head_dim, 1}};
}

} // namespace keel_test
