// Scratch memory from the caller: a bump allocator over bytes that the caller owns.
#pragma once

#include <keel/config.hpp>

namespace keel {

inline constexpr int64_t workspace_alignment = 64;

/// Bytes that `count` objects of T take in a workspace.
template <class T> KEEL_FN constexpr int64_t workspace_bytes(int64_t count) {
    int64_t const bytes = count * static_cast<int64_t>(sizeof(T));
    return (bytes + workspace_alignment - 1) / workspace_alignment * workspace_alignment;
}

/// Passed by value: a callee takes from its own copy, so the caller's workspace is whole again afterwards. The sizes that
/// `*_workspace` functions give include room to align the start.
struct workspace {
    std::byte* data = nullptr;
    int64_t size = 0;

    /// 64-byte aligned memory for `count` objects, or null when too little is left.
    template <class T> KEEL_FN T* take(int64_t count) {
        auto const address = reinterpret_cast<std::uintptr_t>(data);
        auto const skip = static_cast<int64_t>((workspace_alignment - address % workspace_alignment) % workspace_alignment);
        int64_t const bytes = workspace_bytes<T>(count);
        if (skip + bytes > size) return nullptr;
        T* const result = reinterpret_cast<T*>(data + skip);
        data += skip + bytes;
        size -= skip + bytes;
        return result;
    }
    /// The next `bytes` as a workspace of its own, e.g. one a thread.
    KEEL_FN workspace part(int64_t bytes) {
        auto* const p = take<std::byte>(bytes);
        return p == nullptr ? workspace{} : workspace{p, bytes};
    }
};

/// The bytes of a std::vector<std::byte> or the like, which has to outlive the call: workspace_of(scratch).
template <class C>
    requires requires(C& c) { *c.data() = std::byte{}, c.size(); }
KEEL_HOST constexpr workspace workspace_of(C& bytes) {
    return {bytes.data(), static_cast<int64_t>(bytes.size())};
}

/// What a `*_workspace` function returns for parts that sum to `bytes`: room to align the start is added once.
KEEL_FN constexpr int64_t workspace_total(int64_t bytes) { return bytes == 0 ? 0 : bytes + workspace_alignment; }

} // namespace keel
