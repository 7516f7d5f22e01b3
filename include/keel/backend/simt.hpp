// A warp in lockstep on the host: runs the CUDA group's source lane by lane, for tests of its shape. Not for production.
#pragma once

#include <keel/backend/concepts.hpp>
#include <keel/backend/warp_group.hpp>
#include <keel/core/random.hpp>

namespace keel::inline KEEL_ABI {

/// One variable as all W lanes of a warp hold it. V is float, uint32_t or bool.
template <class V, int W> struct lockstep_of {
    V lane[std::size_t{W}];

    lockstep_of() = default;
    KEEL_FN lockstep_of(V x) {
        for (int l = 0; l < W; ++l) lane[l] = x;
    }

#define KEEL_LOCKSTEP_EACH(expression)                                                                                 \
    lockstep_of r;                                                                                                     \
    for (int l = 0; l < W; ++l) r.lane[l] = static_cast<V>(expression);                                                \
    return r;
#define KEEL_LOCKSTEP_OPERATOR(op)                                                                                     \
    KEEL_FN friend lockstep_of operator op(lockstep_of const& a, lockstep_of const& b) {                               \
        KEEL_LOCKSTEP_EACH(a.lane[l] op b.lane[l])                                                                     \
    }
#define KEEL_LOCKSTEP_2(name)                                                                                          \
    KEEL_FN friend lockstep_of name(lockstep_of const& a, lockstep_of const& b) {                                      \
        KEEL_LOCKSTEP_EACH(name(a.lane[l], b.lane[l]))                                                                 \
    }
    KEEL_LOCKSTEP_OPERATOR(+)
    KEEL_LOCKSTEP_OPERATOR(-)
    KEEL_LOCKSTEP_OPERATOR(*)
    KEEL_LOCKSTEP_OPERATOR(/)
    KEEL_LOCKSTEP_OPERATOR(&)
    KEEL_LOCKSTEP_OPERATOR(|)
    KEEL_LOCKSTEP_OPERATOR(^)
    KEEL_LOCKSTEP_2(mul)
    KEEL_LOCKSTEP_2(add)
    KEEL_LOCKSTEP_2(div)
    KEEL_LOCKSTEP_2(umin)
    KEEL_LOCKSTEP_2(umax)
    KEEL_LOCKSTEP_2(smax)
    KEEL_LOCKSTEP_2(shr_by)
    KEEL_FN friend lockstep_of fma(lockstep_of const& a, lockstep_of const& b, lockstep_of const& c) {
        KEEL_LOCKSTEP_EACH(fma(a.lane[l], b.lane[l], c.lane[l]))
    }
    KEEL_FN friend lockstep_of sqrt(lockstep_of const& a) { KEEL_LOCKSTEP_EACH(sqrt(a.lane[l])) }
    KEEL_FN friend lockstep_of select(lockstep_of<bool, W> const& m, lockstep_of const& a, lockstep_of const& b) {
        KEEL_LOCKSTEP_EACH(m.lane[l] ? a.lane[l] : b.lane[l])
    }
#undef KEEL_LOCKSTEP_OPERATOR
#undef KEEL_LOCKSTEP_2
#undef KEEL_LOCKSTEP_EACH
};

template <int W> using lockstep = lockstep_of<float, W>;
template <int W> struct lane_traits<lockstep_of<float, W>> {
    using bits = lockstep_of<uint32_t, W>;
    using mask = lockstep_of<bool, W>;
    static constexpr int width = W;
};
template <class V, int W> struct scalar_of_<lockstep_of<V, W>> {
    using type = V;
};

template <int W> KEEL_FN lockstep_of<uint32_t, W> bits(lockstep_of<float, W> const& a) {
    lockstep_of<uint32_t, W> r;
    for (int l = 0; l < W; ++l) r.lane[l] = bits(a.lane[l]);
    return r;
}
template <int W> KEEL_FN lockstep_of<float, W> as_float(lockstep_of<uint32_t, W> const& a) {
    lockstep_of<float, W> r;
    for (int l = 0; l < W; ++l) r.lane[l] = as_float(a.lane[l]);
    return r;
}
template <int W> KEEL_FN lockstep_of<bool, W> gt(lockstep_of<uint32_t, W> const& a, lockstep_of<uint32_t, W> const& b) {
    lockstep_of<bool, W> r;
    for (int l = 0; l < W; ++l) r.lane[l] = a.lane[l] > b.lane[l];
    return r;
}
template <int W> KEEL_FN lockstep_of<bool, W> eq(lockstep_of<uint32_t, W> const& a, lockstep_of<uint32_t, W> const& b) {
    lockstep_of<bool, W> r;
    for (int l = 0; l < W; ++l) r.lane[l] = a.lane[l] == b.lane[l];
    return r;
}
template <int N, int W> KEEL_FN lockstep_of<uint32_t, W> shl(lockstep_of<uint32_t, W> const& a) {
    lockstep_of<uint32_t, W> r;
    for (int l = 0; l < W; ++l) r.lane[l] = a.lane[l] << N;
    return r;
}
template <int N, int W> KEEL_FN lockstep_of<uint32_t, W> shr(lockstep_of<uint32_t, W> const& a) {
    lockstep_of<uint32_t, W> r;
    for (int l = 0; l < W; ++l) r.lane[l] = a.lane[l] >> N;
    return r;
}

/// a * b in 64 bits in every lane (core/random.hpp): returns the low words, `high` takes the others.
template <int W>
KEEL_FN lockstep_of<uint32_t, W> multiply_wide(lockstep_of<uint32_t, W> const& a, uint32_t b, lockstep_of<uint32_t, W>& high) {
    lockstep_of<uint32_t, W> low;
    for (int l = 0; l < W; ++l) low.lane[l] = multiply_wide(a.lane[l], b, high.lane[l]);
    return low;
}

/// What warp_group needs of a warp, emulated.
template <int W> struct lockstep_warp {
    static constexpr int width = W;
    using value = lockstep_of<float, W>;
    using words = lockstep_of<uint32_t, W>;

    KEEL_FN static bool leader() { return true; }
    KEEL_FN static void sync() {}
    template <class Body> KEEL_FN static void each_lane(Body body) {
        for (int l = 0; l < W; ++l) body(l);
    }
    template <class V> KEEL_FN static V& of(lockstep_of<V, W>& v, int lane) { return v.lane[lane]; }
    template <class V> KEEL_FN static V of(lockstep_of<V, W> const& v, int lane) { return v.lane[lane]; }
    template <class V> KEEL_FN static lockstep_of<V, W> shuffle_xor(lockstep_of<V, W> const& v, int with) {
        lockstep_of<V, W> r;
        for (int l = 0; l < W; ++l) r.lane[l] = v.lane[l ^ with];
        return r;
    }
    KEEL_FN static bool any(lockstep_of<bool, W> const& m) {
        bool some = false;
        for (int l = 0; l < W; ++l) some = some || m.lane[l];
        return some;
    }
    /// a in lanes whose index has `bit`, else b.
    KEEL_FN static value pick(int bit, value const& a, value const& b) {
        value r;
        for (int l = 0; l < W; ++l) r.lane[l] = (l & bit) != 0 ? a.lane[l] : b.lane[l];
        return r;
    }
    template <class V> KEEL_FN static V broadcast(lockstep_of<V, W> const& v, int lane) { return v.lane[lane]; }
};

} // namespace keel::inline KEEL_ABI

namespace keel {

template <int W> struct simt {
    KEEL_FN int64_t concurrency() const { return 1; }
    KEEL_FN simt alone() const { return {}; }
    template <class Kernel> KEEL_FN void for_rows(int64_t row_count, int64_t, Kernel const& kernel) const {
        warp_group<lockstep_warp<W>> const group{};
        for (int64_t row = 0; row < row_count; ++row) kernel(group, row);
    }
    template <class Task> KEEL_FN void for_tasks(int64_t n, Task const& task) const {
        for (int64_t i = 0; i < n; ++i) task(i, 0);
    }
};

template <int W> struct backend_traits<simt<W>> {
    static constexpr bool is_backend = true;
    static constexpr bool asynchronous = false;
    static constexpr memory_space space = memory_space::host;
};

} // namespace keel
