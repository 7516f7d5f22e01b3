// Eigen matrices as keel views and back. The only header of keel that sees Eigen.
#pragma once

#include <concepts>

#include <Eigen/Core>

#include <keel/core/view.hpp>

namespace keel {

/// A view of a dense Eigen matrix, map or block of either storage order; no copy. A column-major matrix has unit row stride: products
/// take it as it is, row primitives want it transposed. Vectors become [n, 1] or [1, n].
template <class Derived> KEEL_HOST auto eigen_view(Eigen::DenseBase<Derived>& m) {
    auto& d = m.derived();
    int64_t const inner = d.innerStride(), outer = d.outerStride();
    return view<std::remove_reference_t<decltype(*d.data())>, 2>{
        d.data(), {d.rows(), d.cols()}, {Derived::IsRowMajor ? outer : inner, Derived::IsRowMajor ? inner : outer}};
}
template <class Derived> KEEL_HOST auto eigen_view(Eigen::DenseBase<Derived> const& m) {
    auto const& d = m.derived();
    int64_t const inner = d.innerStride(), outer = d.outerStride();
    return view<std::remove_reference_t<decltype(*d.data())> const, 2>{
        d.data(), {d.rows(), d.cols()}, {Derived::IsRowMajor ? outer : inner, Derived::IsRowMajor ? inner : outer}};
}

/// Of a block or map that is itself a temporary, eigen_view(m.block(...)): what it refers to decides whether it may be written.
template <class Derived>
    requires(!std::derived_from<Derived, Eigen::PlainObjectBase<Derived>>)
KEEL_HOST auto eigen_view(Eigen::DenseBase<Derived>&& m) {
    return eigen_view(static_cast<Eigen::DenseBase<Derived>&>(m));
}
template <class Derived>
    requires std::derived_from<Derived, Eigen::PlainObjectBase<Derived>>
auto eigen_view(Eigen::DenseBase<Derived>&&) = delete; ///< a temporary matrix would be gone

template <class T, int Options, class Stride>
auto eigen_view(Eigen::Ref<T const, Options, Stride>&&) = delete; ///< may hold a copy of its own

/// A view as an unaligned Eigen map. Strides must not be negative.
template <class T> KEEL_HOST auto eigen_map(view<T, 2> v) {
    using value = std::remove_const_t<T>;
    using matrix = Eigen::Matrix<value, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
    using mapped = std::conditional_t<std::is_const_v<T>, matrix const, matrix>;
    return Eigen::Map<mapped, Eigen::Unaligned, Eigen::Stride<Eigen::Dynamic, Eigen::Dynamic>>(
        v.data, v.extent[0], v.extent[1], Eigen::Stride<Eigen::Dynamic, Eigen::Dynamic>(v.stride[0], v.stride[1]));
}

} // namespace keel
