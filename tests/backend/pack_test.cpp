// Every pack operation, on every instruction set that this translation unit may use, against loops over scalars.
#include <cstring>
#include <random>
#include <vector>

#include "support/catch.hpp"

#include <keel/backend/cpu/pack.hpp>
#include <keel/core/detail/exact_fma.hpp>

namespace {

using namespace keel;

template <class A> struct arch_case {
    static void run(auto const& body) {
        if constexpr (arch_usable<A>) {
            INFO("arch " << A::name());
            body(pack<A>{});
        } else {
            WARN("skipped: " << A::name() << " is not enabled in this build");
        }
    }
};

template <class Body> void for_each_arch(Body const& body) {
    arch_case<arch::scalar>::run(body);
#if defined(__x86_64__)
    arch_case<arch::sse2>::run(body);
    arch_case<arch::sse4>::run(body);
    arch_case<arch::avx2>::run(body);
    arch_case<arch::avx512>::run(body);
    arch_case<arch::avx512bf16>::run(body);
#elif defined(__aarch64__)
    arch_case<arch::neon>::run(body);
#endif
}

constexpr uint32_t edge_words[] = {
    0x00000000u, 0x80000000u, 0x3f800000u, 0xbf800000u, 0x7f800000u, 0xff800000u, 0x7fc00000u, 0xffc00001u,
    0x7f800001u, 0xff9fffffu, 0x00000001u, 0x80000001u, 0x007fffffu, 0x807fffffu, 0x00800000u, 0x80800000u,
    0x7f7fffffu, 0xff7fffffu, 0x3f7fffffu, 0x3f800001u, 0x4b800000u, 0x33800000u, 0x5f000000u, 0x1f800000u,
};

/// Edge cases in every pairing with each other and with random words; a multiple of 16 long.
struct operands {
    std::vector<uint32_t> a, b, c;
    operands() {
        std::mt19937 random(7);
        auto word = [&] { return static_cast<uint32_t>(random()); };
        auto near_one = [&] { return (word() & 0x80ffffffu) | 0x3f000000u; };
        for (uint32_t x : edge_words)
            for (uint32_t y : edge_words)
                for (uint32_t z : edge_words) push(x, y, z);
        for (int i = 0; i < 20000; ++i) push(word(), word(), word());
        for (int i = 0; i < 20000; ++i) push(near_one(), near_one(), near_one());
        for (int i = 0; i < 20000; ++i) { // cancellation: c close to -a*b
            uint32_t const x = near_one(), y = near_one();
            float const product = as_float(x) * as_float(y);
            push(x, y, (bits(product) ^ sign_bit) + (word() % 5) - 2);
        }
        for (int i = 0; i < 20000; ++i) push(word() & 0x80ffffffu, near_one(), word() & 0x807fffffu); // subnormals
        while (a.size() % 16 != 0) push(word(), word(), word());
    }
    void push(uint32_t x, uint32_t y, uint32_t z) {
        a.push_back(x);
        b.push_back(y);
        c.push_back(z);
    }
};

operands const& all_operands() {
    static operands const o;
    return o;
}

bool same_float(uint32_t x, uint32_t y) {
    bool const both_nan = (x & magnitude_mask) > infinity_bits && (y & magnitude_mask) > infinity_bits;
    return x == y || both_nan; // NaN payloads are not promised
}

/// f(a, b, c) on floats, once by packs and once by scalars.
template <class F, class Op> int float_mismatches(F, Op op) {
    auto const& o = all_operands();
    int wrong = 0;
    for (size_t i = 0; i < o.a.size(); i += F::width) {
        using U = bits_of<F>;
        F const x = as_float(load_words<U>(&o.a[i]));
        F const y = as_float(load_words<U>(&o.b[i]));
        F const z = as_float(load_words<U>(&o.c[i]));
        uint32_t got[F::width];
        store_words(&got[0], bits(F(op(x, y, z))));
        for (size_t j = 0; j < F::width; ++j) {
            float const want = op(as_float(o.a[i + j]), as_float(o.b[i + j]), as_float(o.c[i + j]));
            if (!same_float(got[j], bits(want))) ++wrong;
        }
    }
    return wrong;
}

/// f(a, b, c) on words, likewise.
template <class F, class Op> int word_mismatches(F, Op op) {
    using U = bits_of<F>;
    auto const& o = all_operands();
    int wrong = 0;
    for (size_t i = 0; i < o.a.size(); i += F::width) {
        uint32_t got[F::width];
        store_words(&got[0], U(op(load_words<U>(&o.a[i]), load_words<U>(&o.b[i]), load_words<U>(&o.c[i]))));
        for (size_t j = 0; j < F::width; ++j)
            if (got[j] != op(o.a[i + j], o.b[i + j], o.c[i + j])) ++wrong;
    }
    return wrong;
}

} // namespace

TEST_CASE("exact_fma rounds once, as libm does") {
    auto const& o = all_operands();
    int wrong = 0;
    for (size_t i = 0; i < o.a.size(); ++i) {
        float const x = as_float(o.a[i]), y = as_float(o.b[i]), z = as_float(o.c[i]);
        if (!same_float(bits(detail::exact_fma(x, y, z)), bits(__builtin_fmaf(x, y, z)))) ++wrong;
    }
    CHECK(wrong == 0);
}

TEST_CASE("pack arithmetic is correctly rounded on edge cases, cancellation and subnormals") {
    for_each_arch([](auto f) {
        CHECK(float_mismatches(f, [](auto a, auto b, auto) { return a + b; }) == 0);
        CHECK(float_mismatches(f, [](auto a, auto b, auto) { return a - b; }) == 0);
        CHECK(float_mismatches(f, [](auto a, auto b, auto) { return a * b; }) == 0);
        CHECK(float_mismatches(f, [](auto a, auto b, auto) { return a / b; }) == 0);
        CHECK(float_mismatches(f, [](auto a, auto b, auto) { return add(a, b); }) == 0);
        CHECK(float_mismatches(f, [](auto a, auto b, auto) { return mul(a, b); }) == 0);
        CHECK(float_mismatches(f, [](auto a, auto b, auto) { return div(a, b); }) == 0);
        CHECK(float_mismatches(f, [](auto a, auto b, auto c) { return fma(a, b, c); }) == 0);
        CHECK(float_mismatches(f, [](auto a, auto, auto) { return sqrt(a); }) == 0);
    });
}

TEST_CASE("mul is rounded before a sum sees it, whatever the compiler contracts") {
    auto const& o = all_operands();
    std::vector<float> product(o.a.size());
    for (size_t i = 0; i < o.a.size(); ++i) product[i] = as_float(o.a[i]) * as_float(o.b[i]);
    for_each_arch([&](auto f) {
        using F = decltype(f);
        int wrong = 0;
        for (size_t i = 0; i < o.a.size(); ++i) {
            float const x = as_float(o.a[i]), y = as_float(o.b[i]), z = as_float(o.c[i]);
            float lanes[F::width];
            store(&lanes[0], mul(F(x), F(y)) + F(z));
            uint32_t const want = bits(product[i] + z);
            if (!same_float(bits(mul(x, y) + z), want) || !same_float(bits(lanes[0]), want)) ++wrong;
        }
        CHECK(wrong == 0);
    });
}

TEST_CASE("pack operations on words and masks") {
    for_each_arch([](auto f) {
        CHECK(word_mismatches(f, [](auto a, auto b, auto) { return a + b; }) == 0);
        CHECK(word_mismatches(f, [](auto a, auto b, auto) { return a - b; }) == 0);
        CHECK(word_mismatches(f, [](auto a, auto b, auto) { return a & b; }) == 0);
        CHECK(word_mismatches(f, [](auto a, auto b, auto) { return a | b; }) == 0);
        CHECK(word_mismatches(f, [](auto a, auto b, auto) { return a ^ b; }) == 0);
        CHECK(word_mismatches(f, [](auto a, auto b, auto) { return umin(a, b); }) == 0);
        CHECK(word_mismatches(f, [](auto a, auto b, auto) { return umax(a, b); }) == 0);
        CHECK(word_mismatches(f, [](auto a, auto b, auto) { return smax(a, b); }) == 0);
        CHECK(word_mismatches(f, [](auto a, auto, auto) { return shl<0>(a); }) == 0);
        CHECK(word_mismatches(f, [](auto a, auto, auto) { return shl<16>(a); }) == 0);
        CHECK(word_mismatches(f, [](auto a, auto, auto) { return shl<31>(a); }) == 0);
        CHECK(word_mismatches(f, [](auto a, auto, auto) { return shr<0>(a); }) == 0);
        CHECK(word_mismatches(f, [](auto a, auto, auto) { return shr<13>(a); }) == 0);
        CHECK(word_mismatches(f, [](auto a, auto, auto) { return shr<31>(a); }) == 0);
        CHECK(word_mismatches(f, [](auto a, auto b, auto) { return shr_by(a, b); }) == 0);
        CHECK(word_mismatches(f, [](auto a, auto b, auto) { return shr_by(a, b & 31u); }) == 0);
        CHECK(word_mismatches(f, [](auto a, auto b, auto) { return shr_by(a, b & 255u); }) == 0);
        CHECK(word_mismatches(f, [](auto a, auto b, auto c) { return select(gt(a, b), a, c); }) == 0);
        CHECK(word_mismatches(f, [](auto a, auto b, auto c) { return select(eq(a, b), a, c); }) == 0);
        CHECK(word_mismatches(f, [](auto a, auto b, auto c) {
                  auto const x = gt(a, b), y = gt(b, c);
                  return select(x & y, a, c);
              }) == 0);
        CHECK(word_mismatches(f, [](auto a, auto b, auto c) {
                  auto const x = gt(a, b), y = eq(b, c);
                  return select(x | y, a, c);
              }) == 0);
    });
}

TEST_CASE("scalars convert, and the derived lane functions work on packs") {
    for_each_arch([](auto f) {
        using F = decltype(f);
        using U = bits_of<F>;
        using M = mask_of<F>;
        CHECK(float_mismatches(f, [](auto a, auto, auto) { return a * 2.0f; }) == 0);
        CHECK(float_mismatches(f, [](auto a, auto, auto) { return 1.0f / a; }) == 0);
        CHECK(float_mismatches(f, [](auto a, auto b, auto) { return fma(a, b, 1.0f); }) == 0);
        CHECK(float_mismatches(f, [](auto a, auto b, auto c) { return select(is_nan(a), b, c); }) == 0);
        CHECK(float_mismatches(f, [](auto a, auto b, auto c) { return select(is_non_finite(a), b, c); }) == 0);
        CHECK(word_mismatches(f, [](auto a, auto, auto) { return bits(negate(as_float(a))); }) == 0);
        CHECK(word_mismatches(f, [](auto a, auto, auto) { return bits(canonical(as_float(a))); }) == 0);
        CHECK(word_mismatches(f, [](auto a, auto, auto) { return magnitude(as_float(a)); }) == 0);
        CHECK(word_mismatches(f, [](auto a, auto, auto) { return select(gt(a, 5u), a & 0xffu, a + 1u); }) == 0);
        CHECK(max_word(select(M(true), U(3u), U(9u))) == 3u);
        CHECK(max_word(select(M(false), U(3u), U(9u))) == 9u);
        CHECK(any(M(true)));
        CHECK_FALSE(any(M(false)));
        for (uint32_t lane = 0; lane < F::width; ++lane) CHECK(any(eq(iota<U>(), lane)));
        CHECK_FALSE(any(eq(iota<U>(), static_cast<uint32_t>(F::width))));
    });
}

namespace {

/// Loads and stores of T through a guarded buffer: nothing outside [p, p + n) may be read into lanes or written.
template <class T, class F> void check_word_memory(F) {
    using U = bits_of<F>;
    constexpr int w = F::width;
    constexpr auto lane_count = static_cast<size_t>(w);
    constexpr T guard = static_cast<T>(0xa5a5a5a5u);
    std::mt19937 random(3);
    for (int n = 0; n <= w; ++n) {
        std::vector<T> source(static_cast<size_t>(w) + 1);
        for (T& x : source) x = static_cast<T>(random());
        T const* p = source.data() + 1; // unaligned
        uint32_t lanes[lane_count];
        store_words(&lanes[0], load_words_partial<U>(p, n));
        for (int i = 0; i < w; ++i) CHECK(lanes[i] == (i < n ? static_cast<uint32_t>(p[i]) : 0u));
        if (n == w) {
            store_words(&lanes[0], load_words<U>(p));
            for (int i = 0; i < w; ++i) CHECK(lanes[i] == static_cast<uint32_t>(p[i]));
        }
        uint32_t words[lane_count];
        for (uint32_t& x : words) x = static_cast<uint32_t>(random());
        std::vector<T> target(static_cast<size_t>(w) + 3, guard);
        T* q = target.data() + 1;
        store_words_partial(q, load_words<U>(&words[0]), n);
        CHECK(q[-1] == guard);
        for (int i = 0; i <= w; ++i) CHECK(q[i] == (i < n ? static_cast<T>(words[i]) : guard));
        if (n == w) {
            store_words(q, load_words<U>(&words[0]));
            for (int i = 0; i <= w; ++i) CHECK(q[i] == (i < w ? static_cast<T>(words[i]) : guard));
        }
    }
}

} // namespace

TEST_CASE("loads and stores touch exactly n elements and keep the low bits") {
    for_each_arch([](auto f) {
        using F = decltype(f);
        check_word_memory<uint32_t>(f);
        check_word_memory<uint16_t>(f);
        check_word_memory<uint8_t>(f);
        for (int n = 0; n <= F::width; ++n) {
            // Exactly n floats on the heap: the sanitizers see a read or write beyond them.
            std::vector<float> exact(static_cast<size_t>(n), -2.5f);
            F const x = load_partial<F>(exact.data(), n);
            float lanes[F::width];
            store(&lanes[0], x);
            for (int i = 0; i < F::width; ++i) CHECK(bits(lanes[i]) == (i < n ? bits(-2.5f) : 0u));
            store_partial(exact.data(), F(7.0f), n);
            for (float y : exact) CHECK(y == 7.0f);
            std::vector<uint8_t> bytes(static_cast<size_t>(n), uint8_t{9});
            store_words_partial(bytes.data(), load_words_partial<bits_of<F>>(bytes.data(), n), n);
            std::vector<uint16_t> halves(static_cast<size_t>(n), uint16_t{9});
            store_words_partial(halves.data(), load_words_partial<bits_of<F>>(halves.data(), n), n);
        }
        unsigned char bytes[4 * F::width + 1];
        for (size_t i = 0; i < sizeof bytes; ++i) bytes[i] = static_cast<unsigned char>(3 * i);
        uint32_t words[F::width], wanted[F::width];
        store_words(&words[0], load_bytes<bits_of<F>>(&bytes[1])); // aligned for nothing
        std::memcpy(&wanted[0], &bytes[1], sizeof wanted);
        CHECK(std::memcmp(&words[0], &wanted[0], sizeof wanted) == 0);
        float full[F::width + 1];
        for (int i = 0; i <= F::width; ++i) full[i] = static_cast<float>(i);
        float lanes[F::width];
        store(&lanes[0], load<F>(&full[1]));
        for (int i = 0; i < F::width; ++i) CHECK(lanes[i] == full[i + 1]);
    });
}

TEST_CASE("reductions over lanes follow the halving tree") {
    for_each_arch([](auto f) {
        using F = decltype(f);
        using U = bits_of<F>;
        std::mt19937 random(11);
        for (int trial = 0; trial < 1000; ++trial) {
            float x[F::width], tree[F::width];
            uint32_t words[F::width], largest = 0, total = 0;
            for (int i = 0; i < F::width; ++i) {
                words[i] = static_cast<uint32_t>(random());
                largest = words[i] > largest ? words[i] : largest;
                total += words[i];
                x[i] = tree[i] = as_float((words[i] & 0x8fffffffu) | 0x30000000u); // widely different sizes
            }
            for (int half = F::width / 2; half > 0; half /= 2)
                for (int i = 0; i < half; ++i) tree[i] = tree[i] + tree[i + half];
            CHECK(bits(tree_sum(load<F>(&x[0]))) == bits(tree[0]));
            CHECK(max_word(load_words<U>(&words[0])) == largest);
            CHECK(sum_words(load_words<U>(&words[0])) == total);
        }
    });
}

TEST_CASE("transpose exchanges rows and lanes") {
    for_each_arch([](auto f) {
        using F = decltype(f);
        using U = bits_of<F>;
        constexpr uint32_t w = F::width;
        U rows[w];
        for (uint32_t i = 0; i < w; ++i) rows[i] = iota<U>() + U(100 * i);
        transpose(rows);
        for (uint32_t i = 0; i < w; ++i) {
            uint32_t lanes[w];
            store_words(&lanes[0], rows[i]);
            for (uint32_t j = 0; j < w; ++j) CHECK(lanes[j] == 100 * j + i);
        }
    });
}
