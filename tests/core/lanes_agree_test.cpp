// Every lane type gives the bits of float: the elementary functions, and the random numbers made of them.
#include <random>
#include <utility>
#include <vector>

#include <keel/core/math.hpp>
#include <keel/core/random.hpp>

#include "core/every_lane.hpp"
#include "support/catch.hpp"

namespace {

constexpr int functions = 13;
/// Sine and cosine in one word.
template <class F> KEEL_FN F mixed(F const& s, F const& c) {
    using keel::as_float, keel::bits, keel::shl;
    return as_float(bits(s) ^ shl<1>(bits(c)));
}
/// All functions of one argument, by number.
template <int number, class F> KEEL_FN F apply(F const& x) {
    F s, c;
    if constexpr (number == 0)
        return keel::exp(x);
    else if constexpr (number == 1)
        return keel::log(x);
    else if constexpr (number == 2)
        return keel::log1p(x);
    else if constexpr (number == 3)
        return keel::sigmoid(x);
    else if constexpr (number == 4)
        return keel::one_minus_sigmoid(x);
    else if constexpr (number == 5)
        return keel::softplus(x);
    else if constexpr (number == 6)
        return keel::log_sigmoid(x);
    else if constexpr (number == 7)
        return keel::tanh(x);
    else if constexpr (number == 8)
        return keel::silu(x);
    else if constexpr (number == 9)
        return keel::silu_derivative(x);
    else if constexpr (number == 10)
        keel::sincos(x, s, c);
    else if constexpr (number == 11)
        keel::sincos_turns(x, s, c);
    else
        keel::sincos_product(x, F(0.37f), s, c);
    if constexpr (number >= 10) return mixed(s, c);
}

std::vector<float> arguments() {
    std::mt19937 engine(3);
    std::vector<float> x;
    for (int i = 0; i < 4096; ++i) x.push_back(keel::as_float(static_cast<uint32_t>(engine())));
    for (int i = 0; i < 4096; ++i) x.push_back((static_cast<float>(engine() >> 8) * 0x1p-23f - 1.0f) * 110.0f);
    for (int i = 0; i < 4096; ++i) x.push_back((static_cast<float>(engine() >> 8) * 0x1p-23f - 1.0f) * 2.0f);
    for (uint32_t const word : {0u, 1u, 0x7fffffu, 0x800000u, 0x3f800000u, 0x7f7fffffu, 0x7f800000u, 0x7f800001u,
                                0x7fc00000u, 0x42b17218u, 0x42cff1b5u, 0x4b800000u})
        for (uint32_t const sign : {0u, keel::sign_bit}) x.push_back(keel::as_float(word | sign));
    while (x.size() % 64 != 0) x.push_back(0.0f);
    return x;
}

template <class F, int number> [[maybe_unused]] int differing_words(std::vector<float> const& x) {
    constexpr std::size_t width = keel_test::lanes_of<F>;
    int different = 0;
    for (std::size_t i = 0; i < x.size(); i += width) {
        F v;
        float y[width];
        keel_test::read_lanes(v, x.data() + i);
        keel_test::write_lanes(&y[0], apply<number>(v));
        for (std::size_t l = 0; l < width; ++l) {
            float const wanted = apply<number>(x[i + l]);
            different += keel::bits(y[l]) != keel::bits(wanted) ? 1 : 0;
        }
    }
    return different;
}
template <class F, int number = 0> [[maybe_unused]] void check_functions(std::vector<float> const& x) {
    if constexpr (number < functions) {
        INFO("function " << number);
        CHECK(differing_words<F, number>(x) == 0);
        check_functions<F, number + 1>(x);
    }
}

} // namespace

#if !defined(KEEL_NATIVE_ONLY) // pure arithmetic, which sanitizers take minutes to compile
TEST_CASE("every lane type gives float's bits in every elementary function") {
    auto const x = arguments();
    auto const check = [&]<class F>(std::string const& name) {
        INFO(name);
        check_functions<F>(x);
    };
    keel_test::for_every_lane_type(check);
    check.operator()<keel::lockstep<32>>("lockstep<32>");
}
#endif

TEST_CASE("the elementary functions give the same bits on every machine, compiler and instruction set") {
    uint64_t digest = 0xcbf29ce484222325u; // FNV-1a
    auto const x = arguments();
    auto const add = [&]<std::size_t... number>(std::index_sequence<number...>) {
        for (float const v : x)
            for (float const y : {apply<static_cast<int>(number)>(v)...})
                digest = (digest ^ keel::bits(y)) * 0x100000001b3u;
    };
    add(std::make_index_sequence<functions>());
    static_assert(keel::bits_version == 1, "new bits, new digest");
    CHECK(digest == 0x05d33c9760c6302fu);
}

TEST_CASE("every lane type draws the random numbers that the scalar generator gives each element") {
    keel::random_key const key{.seed = 0x0123456789abcdefu, .step = 17, .tensor = 3};
    keel_test::for_every_lane_type([&]<class F>(std::string const& name) {
        INFO(name);
        using U = keel::bits_of<F>;
        constexpr std::size_t width = keel_test::lanes_of<F>;
        uint32_t numbers[width], words[width];
        float floats[width];
        for (std::size_t l = 0; l < width; ++l) numbers[l] = static_cast<uint32_t>(l);
        U lane;
        keel_test::read_lanes(lane, &numbers[0]);

        int different = 0;
        auto const check_word = [&](U const& got, uint64_t first, uint64_t stride) {
            keel_test::write_lanes(&words[0], got);
            for (std::size_t l = 0; l < width; ++l)
                different += words[l] != keel::random_word(key, first + stride * l) ? 1 : 0;
        };
        // Any first element, the carry into the upper word of the index among them.
        for (uint64_t const first :
             {uint64_t{0}, uint64_t{77}, uint64_t{127}, uint64_t{0xfffffff5}, (uint64_t{5} << 40) + 99})
            check_word(keel::random_word(key, first, lane), first, 1);
        if constexpr (width <= 32)
            for (uint64_t const chunk : {uint64_t{0}, uint64_t{9}, uint64_t{1} << 30, uint64_t{1} << 45}) {
                auto const b = keel::random_words(key, chunk, lane);
                F normal[4];
                keel::random_normals<F>(key, chunk, lane, normal);
                for (uint64_t k = 0; k < 4; ++k) {
                    check_word(b.word[k], 128 * chunk + 32 * k, 1);
                    keel_test::write_lanes(&floats[0], normal[k]);
                    for (std::size_t l = 0; l < width; ++l) {
                        float const wanted = keel::random_normal(key, 128 * chunk + 32 * k + l);
                        different += keel::bits(floats[l]) != keel::bits(wanted) ? 1 : 0;
                    }
                }
            }
        CHECK(different == 0);
    });
}
