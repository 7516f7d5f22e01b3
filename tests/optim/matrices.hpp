// Matrices with known singular values, and Eigen's SVD in double as the judge of what Newton-Schulz makes of them.
#pragma once

#include <cmath>
#include <list>
#include <utility>
#include <vector>

// Plain double loops are fast enough for an oracle; gcc 12 warns about its own AVX-512 intrinsics inside Eigen's.
#ifndef EIGEN_DONT_VECTORIZE
#define EIGEN_DONT_VECTORIZE
#endif
#include <Eigen/Dense>

#include <keel/core/view.hpp>
#include <keel/optim/coefficients.hpp>
#include <support/data.hpp>

namespace keel_test {

using matrix = Eigen::MatrixXd;

/// Entries near to normal, the same on every platform.
inline matrix random_matrix(int64_t row_count, int64_t column_count, uint64_t seed) {
    auto const x = floats(data_kind::normal, row_count * column_count, seed);
    matrix m(row_count, column_count);
    for (int64_t i = 0; i < row_count; ++i)
        for (int64_t j = 0; j < column_count; ++j) m(i, j) = static_cast<double>(x[static_cast<std::size_t>(i * column_count + j)]);
    return m;
}
/// With the given singular values, as many as the short side has.
inline matrix with_singular_values(int64_t row_count, int64_t column_count, std::vector<double> const& sigma, uint64_t seed) {
    int64_t const n = std::min(row_count, column_count);
    Eigen::HouseholderQR<matrix> const left(random_matrix(row_count, n, seed)), right(random_matrix(column_count, n, seed + 1));
    matrix const u = left.householderQ() * matrix::Identity(row_count, n), v = right.householderQ() * matrix::Identity(column_count, n);
    return u * Eigen::Map<Eigen::VectorXd const>(sigma.data(), n).asDiagonal() * v.transpose();
}
/// n values from 1 down to `least`, equally spaced in the logarithm.
inline std::vector<double> log_spaced(int64_t n, double least) {
    std::vector<double> s;
    for (int64_t i = 0; i < n; ++i) s.push_back(n == 1 ? 1.0 : std::pow(least, static_cast<double>(i) / static_cast<double>(n - 1)));
    return s;
}

template <class T> guarded_matrix<T> to_storage(matrix const& m, int64_t gap = 0) {
    std::vector<float> x;
    for (int64_t i = 0; i < m.rows(); ++i)
        for (int64_t j = 0; j < m.cols(); ++j) x.push_back(static_cast<float>(m(i, j)));
    return guarded_matrix<T>(m.rows(), m.cols(), gap, x);
}
template <class T> matrix to_matrix(guarded_matrix<T> const& g) {
    matrix m(g.rows(), g.columns());
    for (int64_t i = 0; i < g.rows(); ++i)
        for (int64_t j = 0; j < g.columns(); ++j) m(i, j) = g.at(i, j);
    return m;
}

/// The composed scalar map in double.
template <class T> double scalar_map(keel::newton_schulz_coefficients<T> const& set, double s) {
    for (int t = 0; t < set.count; ++t) {
        auto const p = set.step[t];
        s = static_cast<double>(p.a) * s + static_cast<double>(p.b) * s * s * s + static_cast<double>(p.c) * s * s * s * s * s;
    }
    return s;
}
template <class T> double slope_at_zero(keel::newton_schulz_coefficients<T> const& set) {
    double slope = 1;
    for (int t = 0; t < set.count; ++t) slope *= static_cast<double>(set.step[t].a);
    return slope;
}

/// The SVD of u / ||u||, kept: a test asks for the same matrix with one set after the other.
inline Eigen::JacobiSVD<matrix> const& normalised_svd(matrix const& u) {
    static std::list<std::pair<matrix, Eigen::JacobiSVD<matrix>>> known;
    for (auto const& [m, svd] : known)
        if (m.rows() == u.rows() && m.cols() == u.cols() && m == u) return svd;
    known.emplace_front(u, Eigen::JacobiSVD<matrix>(u / u.norm(), Eigen::ComputeThinU | Eigen::ComputeThinV));
    return known.front().second;
}
/// What exact arithmetic would give: the map applied to the singular values of u / ||u||.
template <class T> matrix mapped(matrix const& u, keel::newton_schulz_coefficients<T> const& set) {
    Eigen::JacobiSVD<matrix> const& svd = normalised_svd(u);
    Eigen::VectorXd sigma = svd.singularValues();
    for (auto& s : sigma) s = scalar_map(set, s);
    return svd.matrixU() * sigma.asDiagonal() * svd.matrixV().transpose();
}
inline matrix polar_factor(matrix const& u) {
    Eigen::JacobiSVD<matrix> const svd(u, Eigen::ComputeThinU | Eigen::ComputeThinV);
    return svd.matrixU() * svd.matrixV().transpose();
}
/// By the eigenvalues of the smaller Gram matrix, in a tenth of an SVD's time.
inline double largest_singular(matrix const& u) {
    matrix const gram = u.rows() <= u.cols() ? matrix(u * u.transpose()) : matrix(u.transpose() * u);
    return std::sqrt(Eigen::SelfAdjointEigenSolver<matrix>(gram, Eigen::EigenvaluesOnly).eigenvalues().maxCoeff());
}
inline Eigen::VectorXd singular_values(matrix const& u) { return Eigen::JacobiSVD<matrix>(u).singularValues(); }

} // namespace keel_test
