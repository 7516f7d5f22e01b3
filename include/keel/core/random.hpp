// Random numbers from a counter: any element's number is a function of its key and its index, and of nothing else.
//
// Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011) turns a 128-bit
// counter and a 64-bit key into four words. Threads, shards and batches do not matter as long as the index is global.
//
//     key      seed
//     counter  block (64 bits), tensor, step
//
// Elements come in chunks of 128. Element i has word (i % 128) / 32 of block 32 * (i / 128) + i % 32, so 32 lanes that
// each compute one block hold the whole chunk, word by word, with no exchange between lanes.
#pragma once

#include <keel/core/math.hpp>

namespace keel {

/// What names a stream of random numbers. Use another `tensor` for every purpose that must be independent.
struct random_key {
    uint64_t seed = 0;
    uint32_t step = 0;   ///< the training step: the same element draws anew at each
    uint32_t tensor = 0; ///< the tensor, or the purpose
};

/// Which random numbers a matrix draws: element [i, j] that of index first + i * pitch + j under `key`. A shard of a tensor names its own
/// first element and the whole tensor's pitch, and draws what the whole would.
struct random_elements {
    random_key key = {};
    uint64_t first = 0;
    uint64_t pitch = 0; ///< from one row to the next; 0: the number of columns
};

} // namespace keel

namespace keel::inline KEEL_ABI {

/// Four words a lane. U is uint32_t or the words of any lane type.
template <class U> struct random_block { U word[4]; };

/// a * b in 64 bits: returns the low word, `high` takes the other. The one operation that Philox asks of a lane type
/// beyond core/lanes.hpp; packs have it in backend/cpu/pack_multiply.hpp.
KEEL_FN constexpr uint32_t multiply_wide(uint32_t a, uint32_t b, uint32_t& high) {
    uint64_t const p = uint64_t{a} * b;
    high = static_cast<uint32_t>(p >> 32);
    return static_cast<uint32_t>(p);
}
template <class U, int K> KEEL_FN slots<U, K> multiply_wide(slots<U, K> const& a, uint32_t b, slots<U, K>& high) {
    slots<U, K> low;
    for (int k = 0; k < K; ++k) low.s[k] = multiply_wide(a.s[k], b, high.s[k]);
    return low;
}

/// Ten rounds of Philox on counter {c0, c1, c2, c3} under key {k0, k1}: bit for bit the published generator.
/// 20 wide multiplications and 40 exclusive ors for four words.
template <class U> KEEL_FN constexpr random_block<U> philox4x32(U c0, U c1, U c2, U c3, uint32_t k0, uint32_t k1) {
    for (int round = 0; round < 10; ++round) {
        U high0{}, high2{};
        U const low0 = multiply_wide(c0, 0xd2511f53u, high0);
        U const low2 = multiply_wide(c2, 0xcd9e8d57u, high2);
        c0 = high2 ^ c1 ^ U(k0);
        c1 = low2;
        c2 = high0 ^ c3 ^ U(k1);
        c3 = low0;
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
    return {{c0, c1, c2, c3}};
}

namespace detail {
template <class U>
KEEL_FN constexpr random_block<U> keyed_block(random_key const& key, U const& block_low, U const& block_high) {
    return philox4x32(block_low, block_high, U(key.tensor), U(key.step), static_cast<uint32_t>(key.seed),
                      static_cast<uint32_t>(key.seed >> 32));
}
} // namespace detail

/// The words of elements 128 * chunk + lane + {0, 32, 64, 96}, for lanes in 0 ... 31. All four of a block are used: the
/// fast way through a row of whole chunks.
template <class U>
KEEL_FN constexpr random_block<U> random_words(random_key const& key, uint64_t chunk, U const& lane) {
    uint64_t const first = 32 * chunk; // its low five bits are clear, so adding the lane never carries
    return detail::keyed_block(key, U(static_cast<uint32_t>(first)) + lane, U(static_cast<uint32_t>(first >> 32)));
}

/// The 32 random bits of element `index`.
KEEL_FN constexpr uint32_t random_word(random_key const& key, uint64_t index) {
    return random_words(key, index / 128, static_cast<uint32_t>(index % 32)).word[index % 128 / 32];
}

/// The 32 random bits of element first + offset in every lane, for any first and offset: one block a lane, of which one
/// word is used.
template <class U> KEEL_FN U random_word(random_key const& key, uint64_t first, U const& offset) {
    U const low = U(static_cast<uint32_t>(first)) + offset;
    U const high = U(static_cast<uint32_t>(first >> 32)) + select(gt(offset, low), U(1u), U(0u));
    U const block_low = (shl<5>(shr<7>(low)) | (low & U(31u))) | shl<30>(high); // (i / 128) * 32 + i % 32
    auto const b = detail::keyed_block(key, block_low, shr<2>(high));
    auto const odd = eq(low & U(32u), U(32u));
    auto const upper = eq(low & U(64u), U(64u));
    return select(upper, select(odd, b.word[3], b.word[2]), select(odd, b.word[1], b.word[0]));
}

/// A block an element, for kernels that need several words of it: block first + offset * step in every lane, step below 2^32. The same
/// generator in another order than random_word's, so such a purpose takes a key of its own.
template <class U>
KEEL_FN random_block<U> random_block_of(random_key const& key, uint64_t first, U const& offset, uint32_t step = 1) {
    U high(0u), low = offset;
    if (step != 1) low = multiply_wide(offset, step, high);
    U const sum = low + U(static_cast<uint32_t>(first));
    U const carry = select(gt(low, sum), U(1u), U(0u));
    return detail::keyed_block(key, sum, high + U(static_cast<uint32_t>(first >> 32)) + carry);
}

/// The word's upper 24 bits as a float in [0, 1): multiples of 2^-24, each equally likely.
template <class U> KEEL_FN auto uniform_from(U const& word) {
    using F = decltype(as_float(word));
    // 128 has ulp 2^-16 and 1/2 has ulp 2^-24: the bits go straight into the significands.
    F const upper = as_float(shr<16>(word) | U(bits(128.0f))) - F(128.0f);
    F const lower = as_float((shr<8>(word) & U(0xffu)) | U(bits(0.5f))) - F(0.5f);
    return upper + lower;
}

/// Two independent standard normals from two words (Box and Muller, 1958), with keel's own logarithm, square root and
/// sine, hence the same bits on every machine. x^2 + y^2 = -2 log u with u = (first + 1) 2^-32 in (0, 1], so |x| and
/// |y| are at most 6.67; the angle is uniform_from(second) turns. Never NaN or Inf.
template <class U, class F> KEEL_FN void normal_pair_from(U const& first, U const& second, F& x, F& y) {
    // 2^-9 has ulp 2^-32.
    F const upper = as_float(shr<16>(first) | U(bits(128.0f))) - F(128.0f);
    F const lower = as_float((first & U(0xffffu)) | U(bits(0x1p-9f))) - F(0x1p-9f - 0x1p-32f); // + 1
    F const radius = sqrt(log(upper + lower) * F(-2.0f));
    F sine, cosine;
    sincos_turns(uniform_from(second), sine, cosine);
    x = detail::product(radius, cosine);
    y = detail::product(radius, sine);
}

/// Uniform in [0, 1) for element `index`.
KEEL_FN float random_uniform(random_key const& key, uint64_t index) { return uniform_from(random_word(key, index)); }

/// The four standard normals of elements 128 * chunk + lane + {0, 32, 64, 96}, for lanes in 0 ... 31.
template <class F>
KEEL_FN void random_normals(random_key const& key, uint64_t chunk, bits_of<F> const& lane, F (&normal)[4]) {
    auto const b = random_words(key, chunk, lane);
    normal_pair_from(b.word[0], b.word[1], normal[0], normal[1]);
    normal_pair_from(b.word[2], b.word[3], normal[2], normal[3]);
}

/// Standard normal for element `index`: the same that random_normals gives it.
KEEL_FN float random_normal(random_key const& key, uint64_t index) {
    auto const b = random_words(key, index / 128, static_cast<uint32_t>(index % 32));
    auto const place = index % 128 / 32;
    float x, y;
    normal_pair_from(b.word[place & 2], b.word[(place & 2) + 1], x, y);
    return (place & 1) == 0 ? x : y;
}

} // namespace keel::inline KEEL_ABI
