// The checks that guard every primitive: what they let through and what they name.
#include <vector>

#include <keel/core/validate.hpp>
#include <support/catch.hpp>

using keel::validation;

namespace {
template <class A, class B> bool disjoint(A const& a, B const& b) { return validation("f").disjoint("a", a, b).ok(); }
template <class A> bool distinct(A const& a) { return validation("f").distinct("a", a).ok(); }
} // namespace

TEST_CASE("memory is shared exactly when an element is") {
    std::vector<float> m(1000);
    float* const p = m.data();
    CHECK(disjoint(keel::vec(p, 10), keel::vec(p + 10, 10)));
    CHECK(!disjoint(keel::vec(p, 11), keel::vec(p + 10, 10)));
    CHECK(disjoint(keel::vec(p, 0), keel::vec(p, 10)));
    // Columns of one buffer, in either order; one more column and they meet.
    CHECK(disjoint(keel::rows(p, 9, 10, 30), keel::rows(p + 10, 9, 20, 30)));
    CHECK(disjoint(keel::rows(p + 10, 9, 20, 30), keel::rows(p, 9, 10, 30)));
    CHECK(!disjoint(keel::rows(p, 9, 11, 30), keel::rows(p + 10, 9, 20, 30)));
    CHECK(!disjoint(keel::rows(p + 10, 9, 21, 30), keel::rows(p, 9, 10, 30)));
    CHECK(!disjoint(keel::rows(p, 9, 10, 30), keel::rows(p + 10, 9, 20, 29)));
    CHECK(disjoint(keel::rows(p + 60, 3, 10, 30), keel::rows(p + 10, 9, 20, 30))); // starts two rows below
    // Heads of a fused projection.
    CHECK(disjoint(keel::view<float, 3>{p, {9, 2, 5}, {30, 5, 1}}, keel::view<float, 3>{p + 10, {9, 4, 5}, {30, 5, 1}}));
    CHECK(!disjoint(keel::view<float, 3>{p, {9, 2, 5}, {30, 6, 1}}, keel::view<float, 3>{p + 10, {9, 4, 5}, {30, 5, 1}}));
}

TEST_CASE("columns side by side are disjoint in whatever dimension the pitch lies") {
    float memory[400];
    float* const p = memory;
    using matrix = keel::view<float, 2>;
    CHECK(disjoint(matrix{p, {10, 9}, {1, 30}}, matrix{p + 10, {20, 9}, {1, 30}})); // transposes
    CHECK(!disjoint(matrix{p, {11, 9}, {1, 30}}, matrix{p + 10, {20, 9}, {1, 30}}));
    CHECK(disjoint(matrix{p + 30, {1, 10}, {7, 1}}, keel::rows(p + 10, 9, 20, 30))); // one row: its stride says nothing
    CHECK(disjoint(keel::view<float, 1>{p, {20}, {2}}, keel::view<float, 1>{p + 1, {20}, {2}}));
    CHECK(disjoint(keel::view<float, 1>{p, {9}, {30}}, keel::rows(p + 1, 9, 20, 30))); // a column beside a matrix
    CHECK(disjoint(matrix{p + 240, {9, 10}, {-30, 1}}, keel::rows(p + 10, 9, 20, 30))); // rows backwards
    // Whatever the strides: views that share an element are never called disjoint.
    uint32_t state = 1;
    auto const draw = [&](uint32_t n) { return static_cast<int64_t>((state = state * 1664525u + 1013904223u) >> 8) % n; };
    int64_t wrong = 0, apart = 0;
    for (int i = 0; i < 20000; ++i) {
        auto const any = [&] {
            matrix v{p + 150 + draw(40), {1 + draw(4), 1 + draw(4)}, {draw(25) - 12, draw(25) - 12}};
            if (draw(2) == 0) v.stride[0] = 12;
            return v;
        };
        matrix const a = any(), b = any();
        bool shared = false;
        for (int64_t k = 0; k < a.extent[0] * a.extent[1]; ++k)
            for (int64_t l = 0; l < b.extent[0] * b.extent[1]; ++l)
                shared = shared || a.at(k / a.extent[1], k % a.extent[1]) == b.at(l / b.extent[1], l % b.extent[1]);
        bool const said = disjoint(a, b);
        wrong += said && shared;
        apart += said;
    }
    CHECK(wrong == 0);
    CHECK(apart > 1000);
}

TEST_CASE("an output's elements are distinct exactly when its strides clear each other") {
    std::vector<float> m(1000);
    float* const p = m.data();
    CHECK(distinct(keel::rows(p, 5, 7)));
    CHECK(distinct(keel::transposed(keel::rows(p, 5, 7))));
    CHECK(!distinct(keel::rows(p, 5, 7, 6)));
    CHECK(!distinct(keel::rows(p, 5, 7, 0)));
    CHECK(distinct(keel::rows(p, 1, 7, 0)));
    CHECK(distinct(keel::view<float, 2>{p + 100, {5, 7}, {-7, 1}}));
    CHECK(!distinct(keel::vec(p, 3, 0)));
}

TEST_CASE("a size that wraps around is refused, and not taken for a small or an empty one") {
    float memory[4];
    auto const refused = [](auto const& v) { return validation("f").present("x", v).result.code == keel::status_code::bad_shape; };
    constexpr int64_t half = int64_t{1} << 32;
    CHECK(refused(keel::rows(memory, half, half)));                       // 2^64 elements: 0
    CHECK(refused(keel::view<float, 3>{memory, {half, half / 4, 5}, {}})); // 5 * 2^62: 2^62
    CHECK(refused(keel::view<float, 2>{nullptr, {int64_t{1} << 62, 0}, {}}));
    CHECK(refused(keel::vec(memory, (int64_t{1} << 60) + 1024)));
    CHECK(!refused(keel::view<float, 2>{memory, {half, half / 16}, {}})); // one element shown 2^60 times
    CHECK(!refused(keel::view<float, 2>{nullptr, {half, 0}, {}}));
    CHECK(validation("f").extent("y", keel::rows(memory, half, half), 0, half).distinct("y", keel::rows(memory, half, half)).result.message() ==
          "f: y has columns = 4294967296, wanted a size in bytes of at most 2^62 (bad_shape)");
}

TEST_CASE("the same elements are the same whatever the stride of a dimension of one") {
    float memory[8];
    auto const same = [](keel::view<float, 2> a, keel::view<float, 2> b) { return validation("f").disjoint_or_same("a", a, b).ok(); };
    CHECK(same(keel::rows(memory, 1, 8, 8), keel::rows(memory, 1, 8, 0)));
    CHECK(same(keel::view<float, 2>{memory, {4, 1}, {2, 1}}, keel::view<float, 2>{memory, {4, 1}, {2, 5}}));
    CHECK(!same(keel::rows(memory, 2, 4, 4), keel::rows(memory, 2, 4, 3)));
    CHECK(!same(keel::rows(memory, 1, 8), keel::rows(memory, 1, 7)));
}

TEST_CASE("the first failure is the one that is told") {
    validation check("f");
    std::vector<float> m(10);
    check.shape("x", keel::rows(m.data(), 2, 5), 2, 4).fail(keel::status_code::bad_option, "y", "something else");
    CHECK(check.result.message() == "f: x has columns = 5, wanted 4 (bad_shape)");
    CHECK(validation("f").present("x", keel::view<float, 1>{nullptr, {3}, {1}}).result.message() == "f: x, wanted data, not null (bad_pointer)");
    CHECK(validation("f").present("x", keel::view<float, 1>{nullptr, {-1}, {1}}).result.message() ==
          "f: x has length = -1, wanted 0 or more (bad_shape)");
    CHECK(validation("f").enough({nullptr, 0}, 64).result.message() == "f: workspace has bytes = 0, wanted 64 (small_workspace)");
    CHECK(keel::status{}.message() == "ok");
    // Of a list: which of its items, unless the message has said so already.
    CHECK(validation("f").of("item", 3).present("x", keel::view<float, 1>{nullptr, {3}, {1}}).result.message() ==
          "f: x, wanted data, not null, at item 3 (bad_pointer)");
    CHECK(validation("f").of("item", 3).require(false, keel::status_code::bad_state, "x", "item", 3, "good").result.message() ==
          "f: x has item = 3, wanted good (bad_state)");
    CHECK(validation("f").of("item", 3).of("").fail(keel::status_code::bad_option, "y", "less").result.message() == "f: y, wanted less (bad_option)");
}

TEST_CASE("three dimensions are two where the rows follow each other, or where one of them is 1") {
    float memory[64];
    auto const flat = [&](keel::view<float, 3> v) { return keel::flattened(v); };
    auto const dense = flat({memory, {2, 3, 4}, {12, 4, 1}});
    CHECK((dense.extent[0] == 6 && dense.extent[1] == 4 && dense.stride[0] == 4));
    auto const one_head = flat({memory, {4, 1, 3}, {16, 3, 1}}); // one head of a fused buffer
    CHECK((one_head.extent[0] == 4 && one_head.stride[0] == 16 && one_head.at(2, 1) == memory + 33));
    auto const one_token = flat({memory, {1, 4, 3}, {99, 5, 1}});
    CHECK((one_token.extent[0] == 4 && one_token.stride[0] == 5));
    CHECK(flat({memory, {2, 3, 4}, {13, 4, 1}}).extent[0] == -1);
}
