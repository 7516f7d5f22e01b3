// The checks that a primitive makes on its arguments before it writes anything.
#pragma once

#include <keel/core/status.hpp>
#include <keel/core/view.hpp>
#include <keel/core/workspace.hpp>

namespace keel {

/// Collects the first failed requirement of one call:
///
///     validation check("rms_norm");
///     check.extent("y", y, 0, x.extent[0]).extent("y", y, 1, x.extent[1]).row_major("y", y);
///     if (!check.ok()) return check.result;
struct validation {
    status result;

    KEEL_HOST explicit validation(char const* function) { result.function = function; }
    KEEL_HOST bool ok() const { return result.ok(); }

    KEEL_HOST validation& fail(status_code code, char const* argument, char const* wanted) {
        return fail(code, argument, "", 0, 0, wanted);
    }
    KEEL_HOST validation& fail(status_code code, char const* argument, char const* property, int64_t got,
                               int64_t wanted, char const* text = "") {
        if (ok()) result = {code, result.function, argument, property, text, got, wanted, result.item, result.index};
        return *this;
    }
    /// What fails from here on is of this item of a list; "" ends that.
    KEEL_HOST validation& of(char const* item, int64_t index = 0) {
        if (ok()) result.item = item, result.index = index;
        return *this;
    }
    /// Any condition, with words for what was wanted.
    KEEL_HOST validation& require(bool condition, status_code code, char const* argument, char const* wanted) {
        return condition ? *this : fail(code, argument, wanted);
    }
    KEEL_HOST validation& require(bool condition, status_code code, char const* argument, char const* property,
                                  int64_t got, char const* wanted) {
        return condition ? *this : fail(code, argument, property, got, 0, wanted);
    }

    /// No negative extent, no size that 64 bits cannot count (its product would come out small, or as 0), and data where there are elements.
    template <class T, int Rank> KEEL_HOST validation& present(char const* argument, view<T, Rank> const& v) {
        double bytes = static_cast<double>(sizeof(T));
        for (int d = 0; d < Rank; ++d) {
            if (v.extent[d] < 0)
                return fail(status_code::bad_shape, argument, dimension(Rank, d), v.extent[d], 0, "0 or more");
            if (v.extent[d] > 0) bytes *= static_cast<double>(v.extent[d]);
            if (bytes > 0x1p62)
                return fail(status_code::bad_shape, argument, dimension(Rank, d), v.extent[d], 0, "a size in bytes of at most 2^62");
        }
        if (!v.empty() && v.data == nullptr) return fail(status_code::bad_pointer, argument, "data, not null");
        return *this;
    }
    /// Extent of one dimension equals `wanted`; includes present().
    template <class T, int Rank>
    KEEL_HOST validation& extent(char const* argument, view<T, Rank> const& v, int d, int64_t wanted) {
        present(argument, v);
        if (v.extent[d] != wanted) fail(status_code::bad_shape, argument, dimension(Rank, d), v.extent[d], wanted);
        return *this;
    }
    template <class T> KEEL_HOST validation& shape(char const* argument, view<T, 1> const& v, int64_t n) {
        return extent(argument, v, 0, n);
    }
    template <class T>
    KEEL_HOST validation& shape(char const* argument, view<T, 2> const& v, int64_t row_count, int64_t column_count) {
        return extent(argument, v, 0, row_count).extent(argument, v, 1, column_count);
    }
    template <class T>
    KEEL_HOST validation& shape(char const* argument, view<T, 3> const& v, int64_t a, int64_t b, int64_t c) {
        return extent(argument, v, 0, a).extent(argument, v, 1, b).extent(argument, v, 2, c);
    }
    /// Elements of the last dimension are adjacent.
    template <class T, int Rank> KEEL_HOST validation& unit_stride(char const* argument, view<T, Rank> const& v) {
        if (v.extent[Rank - 1] > 1 && v.stride[Rank - 1] != 1)
            fail(status_code::bad_stride, argument, "last stride", v.stride[Rank - 1], 1);
        return *this;
    }
    /// No two elements of an output share memory (dimensions need not be ordered by stride).
    template <class T, int Rank> KEEL_HOST validation& distinct(char const* argument, view<T, Rank> const& v) {
        static_assert(!std::is_const_v<T>, "keel: a view of const elements was given where the call writes its output");
        if (!ok() || v.size() <= 1) return *this;
        // Each dimension's steps must clear everything that the smaller-strided dimensions reach.
        for (int d = 0; d < Rank; ++d) {
            if (v.extent[d] <= 1) continue;
            int64_t reach = 0;
            for (int e = 0; e < Rank; ++e)
                if (e != d && v.extent[e] > 1 && size_of(v.stride[e]) <= size_of(v.stride[d]))
                    reach += (v.extent[e] - 1) * size_of(v.stride[e]);
            if (size_of(v.stride[d]) <= reach)
                return fail(status_code::bad_stride, argument, "elements that do not overlap");
        }
        return *this;
    }
    /// The view shares no memory with any of the others.
    template <class A, int Rank, class... Views>
    KEEL_HOST validation& disjoint(char const* argument, view<A, Rank> const& a, Views const&... others) {
        if (ok() && (overlapping(a, others) || ...)) fail(status_code::overlap, argument, "memory of its own");
        return *this;
    }
    /// The two views share no memory, or are the very same elements of the same format (an elementwise call in place).
    template <class A, class B, int Rank>
    KEEL_HOST validation& disjoint_or_same(char const* argument, view<A, Rank> const& a, view<B, Rank> const& b) {
        bool same = std::is_same_v<std::remove_const_t<A>, std::remove_const_t<B>> &&
                    static_cast<void const*>(a.data) == static_cast<void const*>(b.data);
        for (int d = 0; d < Rank; ++d) same = same && a.extent[d] == b.extent[d] && (a.stride[d] == b.stride[d] || a.extent[d] <= 1);
        return same ? *this : disjoint(argument, a, b);
    }
    KEEL_HOST validation& enough(workspace const& ws, int64_t bytes) {
        if (ws.size < bytes)
            fail(status_code::small_workspace, "workspace", "bytes", ws.size, bytes);
        else if (bytes > 0 && ws.data == nullptr)
            fail(status_code::bad_pointer, "workspace", "data, not null");
        return *this;
    }

private:
    KEEL_HOST static int64_t size_of(int64_t stride) { return stride < 0 ? -stride : stride; }

    KEEL_HOST static char const* dimension(int rank, int d) {
        if (rank == 1) return "length";
        if (rank == 2) return d == 0 ? "rows" : "columns";
        return d == 0 ? "dimension 0" : d == 1 ? "dimension 1" : "dimension 2";
    }

    struct byte_range {
        std::uintptr_t low, high;
    };
    template <class T, int Rank> KEEL_HOST static byte_range range_of(view<T, Rank> const& v) {
        auto low = reinterpret_cast<std::uintptr_t>(v.data), high = low + sizeof(T);
        for (int d = 0; d < Rank; ++d) {
            int64_t const bytes = (v.extent[d] - 1) * v.stride[d] * static_cast<int64_t>(sizeof(T));
            if (bytes < 0)
                low -= static_cast<std::uintptr_t>(-bytes);
            else
                high += static_cast<std::uintptr_t>(bytes);
        }
        return {low, high};
    }
    /// The largest distance of neighbours in any dimension that has some.
    template <class T, int Rank> KEEL_HOST static int64_t pitch_of(view<T, Rank> const& v) {
        int64_t pitch = 0;
        for (int d = 0; d < Rank; ++d)
            if (v.extent[d] > 1 && size_of(v.stride[d]) > pitch) pitch = size_of(v.stride[d]);
        return pitch;
    }
    /// Elements from the first to the last column, a column being the place within `pitch`; more than pitch where it is not known.
    template <class T, int Rank> KEEL_HOST static int64_t width_of(view<T, Rank> const& v, int64_t pitch) {
        int64_t width = 1;
        for (int d = 0; d < Rank; ++d) {
            if (v.extent[d] <= 1 || size_of(v.stride[d]) == pitch) continue;
            if (v.stride[d] < 0) return pitch + 1;
            width += (v.extent[d] - 1) * v.stride[d];
        }
        return width;
    }
    /// True for columns of one buffer that lie beside each other, such as the parts of a fused projection (or their
    /// transposes): equal pitch, and the two ranges of columns do not meet.
    template <class A, int RankA, class B, int RankB>
    KEEL_HOST static bool side_by_side(view<A, RankA> const& a, view<B, RankB> const& b) {
        if constexpr (sizeof(A) == sizeof(B)) {
            auto const size = static_cast<int64_t>(sizeof(A));
            int64_t const pitch_a = pitch_of(a), pitch_b = pitch_of(b), pitch = pitch_a < pitch_b ? pitch_b : pitch_a;
            auto const distance = static_cast<int64_t>(reinterpret_cast<std::uintptr_t>(b.data) -
                                                       reinterpret_cast<std::uintptr_t>(a.data));
            if (pitch == 0 || distance % size != 0) return false;
            int64_t const column = (distance / size % pitch + pitch) % pitch;
            return column >= width_of(a, pitch) && column + width_of(b, pitch) <= pitch;
        } else {
            return false;
        }
    }
    template <class A, int RankA, class B, int RankB>
    KEEL_HOST static bool overlapping(view<A, RankA> const& a, view<B, RankB> const& b) {
        if (a.data == nullptr || b.data == nullptr || a.empty() || b.empty()) return false;
        byte_range const x = range_of(a), y = range_of(b);
        return x.low < y.high && y.low < x.high && !side_by_side(a, b);
    }
};

} // namespace keel
