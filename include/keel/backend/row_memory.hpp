// How a row's elements pass between memory and fp32 lanes, whatever their format: what every group's load and store share.
#pragma once

#include <type_traits>

#include <keel/core/lanes.hpp>
#include <keel/format/format.hpp>

namespace keel::inline KEEL_ABI {

/// An address, perhaps of nothing: some elements and bytes after p.
template <class T> KEEL_FN T const* address(T const* p, int64_t elements, int64_t bytes = 0) {
    return reinterpret_cast<T const*>(reinterpret_cast<uintptr_t>(p) + static_cast<uintptr_t>(elements) * sizeof(T) +
                                      static_cast<uintptr_t>(bytes));
}

/// The storage word of a format's element: p->bits.
template <class T> KEEL_FN auto* storage_of(T* p) {
    static_assert(requires { p->bits; }, "keel: elements are float, bf16, f16, FP8 or another format of keel's; not double, not integers");
    return &p->bits;
}

/// The low bits of a word into an element.
template <class T> KEEL_FN void store_bits(T* p, uint32_t word) {
    *storage_of(p) = static_cast<std::remove_reference_t<decltype(*storage_of(p))>>(word);
}
KEEL_FN void store_bits(uint32_t* p, uint32_t word) { *p = word; }

/// One element to and from a float. Policy is that of encode_words: FP8 must be given one (format/format.hpp).
template <class T> KEEL_FN float load_element(T const* p) {
    if constexpr (std::is_same_v<T, float>) return *p;
    else return decode_words<T, float>(static_cast<uint32_t>(*storage_of(p)));
}
template <auto... Policy, class T> KEEL_FN void store_element(T* p, float v) {
    if constexpr (std::is_same_v<T, float>) *p = canonical(v);
    else *storage_of(p) = static_cast<std::remove_reference_t<decltype(*storage_of(p))>>(encode_words<T, Policy...>(v));
}

} // namespace keel::inline KEEL_ABI
