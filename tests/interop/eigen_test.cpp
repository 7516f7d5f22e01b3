// Eigen matrices go through keel without a copy, in either storage order.
#include <keel/backend/cpu/matmul.hpp>
#include <keel/backend/matmul.hpp>
#include <keel/interop/eigen.hpp>
#include <support/catch.hpp>
#include <support/data.hpp>

template <class M> concept viewable = requires { keel::eigen_view(M()); };

TEST_CASE("views of Eigen matrices, maps and blocks are the matrices themselves") {
    Eigen::MatrixXf a = Eigen::MatrixXf::Random(7, 5);                                          // column-major
    Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor> b = Eigen::MatrixXf::Random(9, 6), c(7, 6);
    auto const va = keel::eigen_view(a);
    CHECK(va.at(3, 2) == &a(3, 2));
    auto block = b.block(1, 0, 5, 6);
    auto const vb = keel::eigen_view(block);
    CHECK((vb.extent[0] == 5 && vb.at(0, 3) == &b(1, 3)));
    keel::cpu be;
    keel_test::scratch ws(keel::matmul_workspace(be, 7, 6, 5));
    keel::matmul(be, va, vb, keel::eigen_view(c), {}, ws.get()).or_throw();
    for (int i = 0; i < 7; ++i)
        for (int j = 0; j < 6; ++j) CHECK(std::abs(c(i, j) - a.row(i).dot(block.col(j))) < 1e-6f); // five products of numbers below 1
    Eigen::MatrixXf const& constant = a;
    static_assert(std::is_same_v<decltype(keel::eigen_view(constant))::element, float const>);
    // A temporary block is an output where its matrix is; a temporary matrix is nothing to look at.
    auto const part = keel::eigen_view(a.block(2, 1, 3, 4));
    static_assert(std::is_same_v<decltype(part)::element, float> && !viewable<Eigen::MatrixXf>);
    static_assert(std::is_same_v<decltype(keel::eigen_view(constant.block(2, 1, 3, 4)))::element, float const>);
    part(1, 2) = 42.0f;
    CHECK(a(3, 3) == 42.0f);
}

TEST_CASE("a keel view is an Eigen map, strides and all") {
    std::vector<float> memory(40);
    for (std::size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<float>(i);
    auto m = keel::eigen_map(keel::rows(memory.data() + 1, 3, 4, 10));
    CHECK(m(2, 3) == 24.0f);
    m(1, 1) = -1.0f;
    CHECK(memory[12] == -1.0f);
    auto const t = keel::eigen_map(keel::transposed(keel::rows(memory.data() + 1, 3, 4, 10)));
    CHECK((t.rows() == 4 && t(3, 2) == 24.0f));
}
