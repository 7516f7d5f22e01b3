// Views over the caller's buffers: pointer, extents, strides in elements. Nothing is owned.
#pragma once

#include <type_traits>

#include <keel/config.hpp>

namespace keel {

/// A strided view of `Rank` dimensions. Strides count elements and may be zero (a broadcast input) or negative.
/// An empty view (any extent 0) may have null data. Trivially copyable: kernels take it by value.
template <class T, int Rank> struct view {
    using element = T;
    using value = std::remove_const_t<T>;
    static constexpr int rank = Rank;

    T* data = nullptr;
    int64_t extent[std::size_t{Rank}] = {};
    int64_t stride[std::size_t{Rank}] = {};

    KEEL_FN constexpr int64_t size() const {
        int64_t n = 1;
        for (int d = 0; d < Rank; ++d) n *= extent[d];
        return n;
    }
    KEEL_FN constexpr bool empty() const { return size() == 0; }
    /// True of a default view: an optional argument that was not given. Null data beside elements is a mistake, which calls refuse.
    KEEL_FN constexpr bool absent() const {
        bool none = data == nullptr; // no branches: kernels ask inside their loops
        for (int d = 0; d < Rank; ++d) none = none & (extent[d] == 0);
        return none;
    }

    template <class... I> KEEL_FN constexpr T* at(I... index) const {
        static_assert(sizeof...(I) <= Rank);
        T* p = data;
        int d = 0;
        ((p += static_cast<int64_t>(index) * stride[d++]), ...);
        return p;
    }
    template <class... I> KEEL_FN constexpr T& operator()(I... index) const {
        static_assert(sizeof...(I) == Rank);
        return *at(index...);
    }

    /// Inputs convert: view<T> to view<T const>.
    template <class C>
        requires(std::is_same_v<C, T const> && !std::is_const_v<T>)
    KEEL_FN constexpr operator view<C, Rank>() const {
        view<C, Rank> v;
        v.data = data;
        for (int d = 0; d < Rank; ++d) v.extent[d] = extent[d], v.stride[d] = stride[d];
        return v;
    }
};

/// n elements, by default adjacent.
template <class T> KEEL_FN constexpr view<T, 1> vec(T* p, int64_t n, int64_t step = 1) { return {p, {n}, {step}}; }
/// All elements of a std::vector, std::array or std::span that outlives the view: an lvalue, since a temporary would not.
template <class C>
    requires requires(C& c) { *c.data(), c.size(); }
KEEL_HOST constexpr auto vec(C& c) {
    return vec(c.data(), static_cast<int64_t>(c.size()));
}

/// A row-major matrix whose rows start `row_stride` elements apart (by default without gaps).
template <class T> KEEL_FN constexpr view<T, 2> rows(T* p, int64_t row_count, int64_t columns) {
    return {p, {row_count, columns}, {columns, 1}};
}
template <class T> KEEL_FN constexpr view<T, 2> rows(T* p, int64_t row_count, int64_t columns, int64_t row_stride) {
    return {p, {row_count, columns}, {row_stride, 1}};
}

/// A dense row-major array of three dimensions, e.g. [tokens, heads, head_dim].
template <class T> KEEL_FN constexpr view<T, 3> cube(T* p, int64_t a, int64_t b, int64_t c) {
    return {p, {a, b, c}, {b * c, c, 1}};
}

template <class T> KEEL_FN constexpr view<T, 2> transposed(view<T, 2> v) {
    return {v.data, {v.extent[1], v.extent[0]}, {v.stride[1], v.stride[0]}};
}
/// Each matrix of a stack transposed, as grouped_matmul takes experts' weights that lie [experts, out, in].
template <class T> KEEL_FN constexpr view<T, 3> transposed(view<T, 3> v) {
    return {v.data, {v.extent[0], v.extent[2], v.extent[1]}, {v.stride[0], v.stride[2], v.stride[1]}};
}

/// Indices [first, first + count) of dimension 0; of an absent view an absent one.
template <class T, int Rank> KEEL_FN constexpr view<T, Rank> slice(view<T, Rank> v, int64_t first, int64_t count) {
    if (v.absent()) return v;
    if (v.data != nullptr) v.data += first * v.stride[0];
    v.extent[0] = count;
    return v;
}
/// Columns [first, first + count) of a matrix.
template <class T> KEEL_FN constexpr view<T, 2> columns(view<T, 2> v, int64_t first, int64_t count) {
    return transposed(slice(transposed(v), first, count));
}
/// One index of dimension 0, with a rank less.
template <class T, int Rank> KEEL_FN constexpr view<T, Rank - 1> part(view<T, Rank> v, int64_t index) {
    view<T, Rank - 1> r;
    r.data = v.data == nullptr ? nullptr : v.data + index * v.stride[0];
    for (int d = 0; d + 1 < Rank; ++d) r.extent[d] = v.extent[d + 1], r.stride[d] = v.stride[d + 1];
    return r;
}
/// A view that every call refuses, by the name of its argument: what a view that cannot be made becomes.
template <class T, int Rank> KEEL_FN constexpr view<T, Rank> impossible_view() {
    view<T, Rank> v;
    for (int d = 0; d < Rank; ++d) v.extent[d] = -1;
    return v;
}
/// [a, b, c] seen as [a*b, c]; needs stride[0] == extent[1] * stride[1], or one of the extents 1. Without it an impossible_view.
template <class T> KEEL_FN constexpr view<T, 2> flattened(view<T, 3> v) {
    if (v.extent[1] == 1) return {v.data, {v.extent[0], v.extent[2]}, {v.stride[0], v.stride[2]}};
    if (v.extent[0] > 1 && v.extent[1] > 0 && v.stride[0] != v.extent[1] * v.stride[1]) return impossible_view<T, 2>();
    return {v.data, {v.extent[0] * v.extent[1], v.extent[2]}, {v.stride[1], v.stride[2]}};
}

/// Whether a gradient output is set or added to.
enum class grad_mode : uint8_t { overwrite, accumulate };
inline constexpr grad_mode overwrite = grad_mode::overwrite;
inline constexpr grad_mode accumulate = grad_mode::accumulate;

} // namespace keel
