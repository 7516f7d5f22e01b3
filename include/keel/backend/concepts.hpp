// What a backend offers, and the contract between a kernel and the group of lanes that runs it.
//
// A row primitive is one functor over (group, row). The group is the set of lanes that own the row: a CPU thread with
// SIMD registers, a CUDA warp, or one scalar. A kernel written against this page runs on all of them with the same bits:
//
//     using F = typename G::value;      what load() gives: some elements of the row as fp32
//     using U = typename G::words;      their 32-bit words
//
//     g.sum(n, term)      acc = term(acc, at) over the row in THE reduction order (core/reduce.hpp); a float, uniform. Past the row's
//                         end term must add +0: loads give +0 there, what is computed from them (exp(0) = 1) needs g.inside
//     g.sums<N>(n, term)  N such sums in one pass: term(acc, at) updates the array acc of N; a row_sums<N>
//     g.each(n, body)     body(at) over the row: whole packs, then one tail
//     g.holds(n)          each and sum visit a row of n elements in one step, all of them at the same lanes: what one body has computed
//                         of the row need not pass through memory
//     g.blocks<B>(n, body) body(b) over blocks of B elements. b.each(body): body(at) over the block; b.max_bits(u), b.total(u): the
//                         block's largest word and the sum of its words, in each lane that owns it; b.put(p, x), b.get(p): one
//                         value a block, element number `block` of the row p; b.put_word(p, u): a word; b.spread(x): a value beside the
//                         block's elements; b.valid(): lanes whose block lies in the row
//     g.load(p, at)       decoded to fp32; +0 past the row's end; never reads past it
//     g.store(p, at, v)   encoded with one rounding; one canonical NaN; never writes past the row's end.
//                         g.store<O>(p, at, v) names the overflow policy, which FP8 needs
//     g.store_code(p, at, u)  the low bits of words that encode_words or its kin have made already
//     g.prefetch(p, at)   a hint that another row's elements are wanted soon: rows that lie where no hardware expects them
//     g.copy(to, from, n) n adjacent elements with their bits, NaN too; the two rows are apart
//     g.any(m)            true in some lane; uniform
//     g.inside(at, v)     v with +0 past the row's end, for values that were computed rather than loaded
//     g.position(at)      each lane's element index as a word (rows shorter than 2^32)
//     g.max_bits(u)       largest word over all lanes; uniform
//     g.total(u)          sum of all lanes' words (counters); a uniform int64
//     g.arg_max(n, keys)  index of the largest pair {primary, secondary} = keys(at); ties go to the lowest index
//     g.leader()          true in one lane: guards scalar stores
//     g.sync()            what any lane has stored is seen by all: between a store and a load of other lanes' elements
//
// p points at the row's first element (adjacent elements), or is a strided<T> for elements `step` apart, or an
// indexed<T, I> for elements picked by a row of indices, or a repeated<T, B>.
#pragma once

#include <concepts>
#include <type_traits>

#include <keel/config.hpp>
#include <keel/core/view.hpp>

namespace keel {

enum class memory_space : uint8_t { host, device };

/// Specialised beside each backend.
template <class B> struct backend_traits {
    static constexpr bool is_backend = false;
};

/// A backend to which all rows are alike, scattered or adjacent: kernels need one walk for it.
template <class B>
concept elementwise_backend = requires { requires backend_traits<std::remove_cvref_t<B>>::elementwise; };

/// A backend whose groups are one thread each, so that all lanes of a row share its stack.
template <class B>
concept thread_backend = requires { requires backend_traits<std::remove_cvref_t<B>>::one_thread_a_row; };

/// A row whose elements lie `step` apart: a column of a row-major matrix.
template <class T> struct strided {
    T* data;
    int64_t step;
    KEEL_FN strided operator+(int64_t elements) const { return {data + elements * step, step}; }
    KEEL_FN T* element(int64_t i) const { return data + i * step; }
};

/// A row picked from another: element i is data[index[i]]. Where it is stored to, the indices are distinct.
template <class T, class I> struct indexed {
    T* data;
    I const* index;
    KEEL_FN T* element(int64_t i) const { return data + static_cast<int64_t>(index[i]); }
};

/// A row of which B elements in turn are one value: element i is data[(i / B) * step], such as its block's scale. Only loaded from; B is a
/// multiple of most widths.
template <class T, int B> struct repeated {
    T* data;
    int64_t step;
    KEEL_FN T* element(int64_t i) const { return data + i / B * step; }
};

/// A row whose elements are found one by one.
template <class P>
concept scattered_row = requires(P p, int64_t i) { p.element(i); };

/// Element i of a row, however it is given.
template <class T> KEEL_FN constexpr T* element_of(T* row, int64_t i) { return row + i; }
template <scattered_row P> KEEL_FN constexpr auto* element_of(P row, int64_t i) { return row.element(i); }

/// The result of g.sums<N>.
template <int N> struct row_sums {
    float value[std::size_t{N}] = {};
};

/// The keys of g.arg_max: compared as unsigned words, primary first.
template <class U> struct arg_max_keys {
    U primary, secondary;
};

/// A kernel for concept checks.
struct empty_kernel {
    template <class G> KEEL_FN void operator()(G const&, int64_t) const {}
};

/// for_rows(rows, width, kernel) runs kernel(group, row) for each row; `width` (elements a row, about) only decides how rows are
/// cut among threads. Where backend_traits<B>::asynchronous, the call enqueues.
template <class B>
concept row_backend = backend_traits<std::remove_cvref_t<B>>::is_backend && requires(B const& b, int64_t n) {
    { b.for_rows(n, n, empty_kernel{}) };
};

} // namespace keel
