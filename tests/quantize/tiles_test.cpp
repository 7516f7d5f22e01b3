// Rows walked together tile by tile, and stores past the caches: the bits of the reference, whatever the tiles' edges and their lines.
#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>

#include <keel/format/bf16.hpp>
#include <keel/quantize/quantize.hpp>
#include <support/backends.hpp>
#include <support/catch.hpp>
#include <support/data.hpp>

using namespace keel_test;
using keel::overflow;

namespace {

/// What a call makes, to be compared whole.
template <class Blocks> struct made {
    guarded_matrix<typename Blocks::code> codes;
    guarded_matrix<typename Blocks::scale_storage> scales;
    keel::report report;
    made(int64_t rows, int64_t columns, int64_t gap) : codes(rows, columns, gap), scales(Blocks::scale_rows(rows), Blocks::scale_columns(columns), 1) {}
    Blocks view() { return {codes.view(), scales.view()}; }
    bool operator==(made const& o) const {
        return codes.contents() == o.codes.contents() && scales.contents() == o.scales.contents() && report.elements == o.report.elements &&
               report.saturated == o.report.saturated && report.flushed == o.report.flushed && report.non_finite == o.report.non_finite &&
               report.scale_min_bits == o.report.scale_min_bits && report.scale_max_bits == o.report.scale_max_bits;
    }
    bool untouched() const { return codes.untouched() && scales.untouched(); }
};

/// Elements over many binades, some zero, so that scales differ from block to block; `bad` of them not finite.
template <class X> guarded_matrix<X> spread(int64_t rows, int64_t columns, int64_t bad) {
    std::vector<float> v = floats(data_kind::mixed_scales, rows * columns, 11);
    for (std::size_t i = 0; i < v.size(); i += 5) v[i] = 0.0f;
    for (int64_t k = 0; k < bad && !v.empty(); ++k)
        v[static_cast<std::size_t>(k * 7919 + 401) % v.size()] = k % 2 == 0 ? std::numeric_limits<float>::quiet_NaN() : -std::numeric_limits<float>::infinity();
    return guarded_matrix<X>(rows, columns, 3, v);
}

template <class X, class Blocks> void check_bands(int64_t rows, int64_t columns, int64_t bad) {
    INFO("1x" << Blocks::block_columns << " on " << rows << "x" << columns << ", " << bad << " not finite");
    auto x = spread<X>(rows, columns, bad);
    made<Blocks> want(rows, columns, 2);
    keel::quantize<overflow::saturate>(keel::reference{}, x.view(), want.view(), {}, &want.report).or_throw();
    for_each_cpu([&](std::string const& name, auto const& be) {
        INFO(name);
        made<Blocks> got(rows, columns, 2);
        keel::quantize<overflow::saturate>(be, x.view(), got.view(), {}, &got.report).or_throw();
        CHECK(got == want);
        CHECK(got.untouched());
    });
}

template <class X, class Blocks> void check_all_bands() {
    for (int64_t const rows : {1, 2, 7, 8, 9, 17})
        for (int64_t const columns : {1, 31, 128, 255, 256, 257, 512, 700, 1024}) {
            if (!every_case && rows + columns % 13 > 12) continue;
            for (int64_t const bad : {0, 1, 5}) check_bands<X, Blocks>(rows, columns, bad);
        }
    for (int64_t const columns : {keel::tile_elements, keel::tile_elements + 1, 2 * keel::tile_elements + 900}) // tiles that run on from row to row
        for (int64_t const bad : {0, 2}) check_bands<X, Blocks>(3, columns, bad);
}

} // namespace

TEST_CASE("rows walked together give the bits of rows alone") {
    check_all_bands<keel::bf16, keel::row_blocks<>>();
    check_all_bands<float, keel::row_blocks<>>();
    check_all_bands<keel::bf16, keel::mx_blocks<keel::e5m2>>();
    check_all_bands<float, keel::mx_blocks<>>();
    check_all_bands<keel::bf16, keel::block_scaled<keel::e4m3, keel::fp32_scale, 1, 48>>();
    check_all_bands<keel::bf16, keel::block_scaled<keel::e4m3, keel::fp32_scale, 1, 512>>();
}

namespace {

/// Elements on a line of 64 bytes, or `past` elements after it.
template <class T> struct lined {
    std::vector<T> memory;
    T* first;
    lined(int64_t n, int64_t past) : memory(static_cast<std::size_t>(n + past) + 64 / sizeof(T) + 1) {
        void* p = memory.data();
        std::size_t room = memory.size() * sizeof(T);
        first = static_cast<T*>(std::align(64, static_cast<std::size_t>(n + past) * sizeof(T), p, room)) + past;
    }
    std::vector<T> values(int64_t n) const { return {first, first + n}; }
};

constexpr int64_t tile_rows = 3, tile_width = 512, tile_size = tile_rows * tile_width;

/// The codes and the next tile's magnitudes, with stores past the caches or without. Codes `pitch` apart.
template <class Arch, class X, int C> void check_streamed_tiles(int64_t past, int64_t pitch) {
    keel::cpu_row_group<Arch> g{};
    using words = typename decltype(g)::words;
    lined<X> x(2 * tile_size, 0);
    std::vector<float> const v = floats(data_kind::mixed_scales, 2 * tile_size, 5);
    for (int64_t i = 0; i < 2 * tile_size; ++i) x.first[i] = to_format<X>(v[static_cast<std::size_t>(i)]);
    keel::tile<X const> const here{x.first, tile_width, tile_rows, tile_width}, next{x.first + tile_size, tile_width, tile_rows, tile_width};
    constexpr int64_t blocks = tile_rows * tile_width / C;
    lined<float> multipliers(blocks, 0), top(blocks, 0), want_top(blocks, 0);
    for (int64_t b = 0; b < blocks; ++b) multipliers.first[b] = 0x1p-7f + 0x1p-10f * static_cast<float>(b);
    int64_t const reach = tile_rows * pitch;
    lined<keel::e4m3> want(reach, past), got(reach, past);
    words want_flushed(0u), got_flushed(0u);
    keel::encode_tile<C>(g, here, keel::tile<keel::e4m3>{want.first, pitch, tile_rows, tile_width}, multipliers.first, want_flushed);
    keel::largest_of_tile<C>(g, next, want_top.first);
    g.streams = true;
    keel::encode_tile_and_look<C>(g, here, keel::tile<keel::e4m3>{got.first, pitch, tile_rows, tile_width}, multipliers.first, got_flushed,
                                  next, static_cast<X const*>(nullptr), top.first);
    keel::store_fence();
    for (int64_t i = 0; i < reach; ++i) REQUIRE(int{got.first[i].bits} == int{want.first[i].bits});
    CHECK(top.values(blocks) == want_top.values(blocks));
    CHECK(g.total(got_flushed) == g.total(want_flushed));

    std::fill(got.memory.begin(), got.memory.end(), keel::e4m3{});
    words again(0u);
    keel::encode_tile<C>(g, here, keel::tile<keel::e4m3>{got.first, pitch, tile_rows, tile_width}, multipliers.first, again);
    keel::store_fence();
    for (int64_t i = 0; i < reach; ++i) REQUIRE(int{got.first[i].bits} == int{want.first[i].bits});
}

/// A row along and down together.
template <class Arch> void check_streamed_pair(int64_t past_along, int64_t past_down) {
    keel::cpu_row_group<Arch> g{};
    using words = typename decltype(g)::words;
    lined<keel::bf16> x(tile_width, 0);
    std::vector<float> const v = floats(data_kind::mixed_scales, tile_width, 5);
    for (int64_t i = 0; i < tile_width; ++i) x.first[i] = to_format<keel::bf16>(v[static_cast<std::size_t>(i)]);
    lined<float> block(tile_width / 128, 0), column(tile_width, 0);
    for (int64_t b = 0; b < tile_width / 128; ++b) block.first[b] = 0x1p-7f + 0x1p-10f * static_cast<float>(b);
    for (int64_t j = 0; j < tile_width; ++j) column.first[j] = 0x1p-13f * static_cast<float>(j + 1);
    keel::arrange_multipliers<keel::bf16, keel::e4m3>(g, column.first, tile_width);
    lined<keel::e4m3> want_along(tile_width, 0), want_down(tile_width, 0), along(tile_width, past_along), down(tile_width, past_down);
    words want_flushed(0u), got_flushed(0u);
    keel::encode_blocks<128>(g, static_cast<keel::bf16 const*>(x.first), want_along.first, tile_width, static_cast<float const*>(block.first), want_flushed);
    keel::encode_columns(g, static_cast<keel::bf16 const*>(x.first), want_down.first, tile_width, static_cast<float const*>(column.first), want_flushed);
    g.streams = true;
    keel::encode_both<128>(g, static_cast<keel::bf16 const*>(x.first), along.first, down.first, tile_width, static_cast<float const*>(block.first),
                           static_cast<float const*>(column.first), got_flushed, static_cast<keel::bf16 const*>(nullptr));
    keel::store_fence();
    for (int64_t i = 0; i < tile_width; ++i) {
        REQUIRE(int{along.first[i].bits} == int{want_along.first[i].bits});
        REQUIRE(int{down.first[i].bits} == int{want_down.first[i].bits});
    }
    CHECK(g.total(got_flushed) == g.total(want_flushed));
}

/// Codes back to Y; a row's scales are 0.3 and NaN.
template <class Arch, class Y> void check_streamed_words(int64_t past) {
    keel::cpu_row_group<Arch> g{};
    lined<keel::e4m3> codes(256, 0);
    for (int64_t i = 0; i < 256; ++i) codes.first[i] = keel::from_word<keel::e4m3>(static_cast<uint32_t>(i * 37 % 256));
    lined<Y> want(256, past), got(256, past);
    auto const walk = [&](Y* to) {
        g.template blocks<128>(256, [&](auto const& b) {
            keel::decode_scaled(g, b, static_cast<keel::e4m3 const*>(codes.first), to, b.spread(b.index == 0 ? 0.3f : std::numeric_limits<float>::quiet_NaN()));
        });
    };
    walk(want.first);
    g.streams = true;
    walk(got.first);
    keel::store_fence();
    CHECK(std::memcmp(got.first, want.first, 256 * sizeof(Y)) == 0);
}

} // namespace

TEST_CASE("stores past the caches change no bit, and lines that do not allow them are stored to as ever") {
    for_each_cpu([&]<class Arch, class Threads>(std::string const& name, keel::cpu<Arch, Threads> const&) {
        INFO(name);
        for (int64_t const past : {0, 1, 32}) {
            for (int64_t const pitch : {tile_width, tile_width + 1, tile_width + 64 - past}) { // rows that begin on a line: all, the first, the others
                check_streamed_tiles<Arch, keel::bf16, 128>(past, pitch);
                check_streamed_tiles<Arch, keel::bf16, 32>(past, pitch);
                check_streamed_tiles<Arch, float, 128>(past, pitch);
            }
            for (int64_t const past_down : {0, 1, 32}) check_streamed_pair<Arch>(past, past_down);
            check_streamed_words<Arch, keel::bf16>(past);
            check_streamed_words<Arch, float>(past);
        }
    });
}

namespace {
/// Notes what its group was told.
struct noting_kernel {
    int64_t bytes;
    bool* streams;
    int64_t output_bytes() const { return bytes; }
    template <class G> void operator()(G const& g, int64_t row) const { streams[row] = g.streams; }
};
} // namespace

TEST_CASE("outputs go past the caches from a size on that caches do not hold, in every chunk") {
    for_each_cpu([&](std::string const& name, auto const& be) {
        INFO(name);
        for (int64_t const bytes : {int64_t{0}, keel::streamed_bytes - 1, keel::streamed_bytes, keel::streamed_bytes + 1}) {
            bool streams[9] = {};
            be.for_rows(9, 20000, noting_kernel{bytes, &streams[0]});
            for (bool const s : streams) CHECK(s == (bytes >= keel::streamed_bytes));
        }
    });
}

namespace {
/// One in four elements of size, the others no size, or the least there is: of which only that is flushed, in every lane.
template <class X> void check_flushed() {
    int64_t const rows = 3, columns = 1024 + 37;
    X const least = keel::from_word<X>(1u), negative = keel::from_word<X>(1u << (8 * sizeof(X) - 1) | 3u);
    for (int64_t turn = 0; turn < 5; ++turn) {
        guarded_matrix<X> x(rows, columns);
        int64_t small = 0;
        for (int64_t i = 0; i < rows; ++i)
            for (int64_t j = 0; j < columns; ++j) {
                int64_t const kind = (i + j + turn) % 5;
                x.set(i, j, kind == 0 ? to_format<X>(1.0f) : kind == 1 ? to_format<X>(-0.0f) : kind == 2 ? least : kind == 3 ? negative : X{});
                small += kind == 2 || kind == 3;
            }
        for_each_cpu([&](std::string const& name, auto const& be) {
            INFO(name);
            made<keel::row_blocks<>> q(rows, columns, 2), along(rows, columns, 2);
            keel::quantize<overflow::saturate>(be, x.view(), q.view(), {}, &q.report).or_throw();
            CHECK(q.report.flushed == small);
            made<keel::block_scaled<keel::e4m3, keel::fp32_scale, 16, 1>> down(rows, columns, 2);
            keel::quantize_pair<overflow::saturate>(be, x.view(), along.view(), down.view(), {}, &along.report).or_throw();
            int64_t wide = 0; // columns whose largest element is not of that kind flush it
            for (int64_t j = 0; j < columns; ++j) {
                bool has_one = false;
                for (int64_t i = 0; i < rows; ++i) has_one = has_one || x.at(i, j) == 1.0;
                for (int64_t i = 0; i < rows; ++i) wide += x.at(i, j) != 0 && down.codes.at(i, j) == 0;
                if (!has_one) continue;
                for (int64_t i = 0; i < rows; ++i) CHECK((x.at(i, j) == 1.0 || down.codes.at(i, j) == 0));
            }
            CHECK(along.report.flushed == small + wide);
        });
    }
}
} // namespace

TEST_CASE("zeros of either sign are not flushed, and the least subnormal is, in every lane") {
    check_flushed<keel::bf16>();
    check_flushed<float>();
}
