// Views and workspaces over memory that knows its own size.
#include <array>
#include <type_traits>
#include <utility>
#include <vector>

#include <keel/core/view.hpp>
#include <keel/core/workspace.hpp>
#include <support/catch.hpp>

namespace {
template <class C> concept viewable = requires(C&& c) { keel::vec(static_cast<C&&>(c)); };
// A temporary would be gone before the view is used, and the bits of std::vector<bool> are no elements.
static_assert(viewable<std::vector<float>&> && viewable<std::vector<float> const&>);
static_assert(!viewable<std::vector<float>>);
static_assert(!viewable<std::vector<bool>&>);
static_assert(std::is_same_v<decltype(keel::vec(std::declval<std::vector<float> const&>())), keel::view<float const, 1>>);
} // namespace

TEST_CASE("a container is a view of all its elements, and bytes are a workspace") {
    std::vector<float> v(7);
    auto const all = keel::vec(v);
    CHECK((all.data == v.data() && all.extent[0] == 7 && all.stride[0] == 1));
    std::array<int64_t, 3> const three{1, 2, 3};
    CHECK(keel::vec(three)(2) == 3);
    std::vector<std::byte> bytes(100);
    keel::workspace const ws = keel::workspace_of(bytes);
    CHECK((ws.data == bytes.data() && ws.size == 100));
}

TEST_CASE("a stack is transposed matrix by matrix") {
    float memory[24];
    auto const t = keel::transposed(keel::cube(memory, 2, 3, 4));
    CHECK((t.extent[0] == 2 && t.extent[1] == 4 && t.extent[2] == 3));
    CHECK(t.at(1, 3, 2) == memory + 12 + 2 * 4 + 3);
}
