// scaled_codes.hpp for codes that lie turned (those of a column adjacent): a tile of codes is made by rows on the stack, then turned in
// registers, so that memory is written in whole lines. The same bits.
#pragma once

#include <keel/backend/cpu/row_group.hpp>
#include <keel/backend/scaled_codes.hpp>

namespace keel::inline KEEL_ABI {

namespace detail {

inline constexpr int64_t turned_rows = 32; ///< of a tile: bytes that are adjacent afterwards

/// 8 x 8 bytes turned, each row a word whose first byte is lowest: quarters change places, then their quarters, then bytes.
KEEL_FN void turn_8x8(uint8_t const* from, int64_t from_pitch, uint8_t* to, int64_t to_pitch) {
    uint64_t row[8];
    for (int i = 0; i < 8; ++i) __builtin_memcpy(&row[i], from + i * from_pitch, 8);
    auto const exchange = [&](int step, uint64_t low) {
        for (int i = 0; i < 8; ++i) {
            if ((i & step) != 0) continue;
            uint64_t const change = ((row[i] >> (8 * step)) ^ row[i + step]) & low;
            row[i + step] ^= change;
            row[i] ^= change << (8 * step);
        }
    };
    exchange(4, 0x00000000ffffffffu);
    exchange(2, 0x0000ffff0000ffffu);
    exchange(1, 0x00ff00ff00ff00ffu);
    for (int i = 0; i < 8; ++i) __builtin_memcpy(to + i * to_pitch, &row[i], 8);
}

/// to[j * to_pitch + i] = from[i * from_pitch + j] for i < rows, j < columns.
KEEL_FN void turn_bytes(uint8_t const* from, int64_t from_pitch, int64_t rows, int64_t columns, uint8_t* to, int64_t to_pitch) {
    int64_t const whole_rows = rows / 8 * 8, whole_columns = columns / 8 * 8;
    for (int64_t j = 0; j < whole_columns; j += 8)
        for (int64_t i = 0; i < whole_rows; i += 8) turn_8x8(from + i * from_pitch + j, from_pitch, to + j * to_pitch + i, to_pitch);
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = i < whole_rows ? whole_columns : 0; j < columns; ++j) to[j * to_pitch + i] = from[i * from_pitch + j];
}

} // namespace detail

template <class A, class X, class Code>
    requires(sizeof(Code) == 1)
KEEL_FN void encode_columns_turned(cpu_row_group<A> const& g, X const* from, int64_t pitch, int64_t rows, Code* to, int64_t to_pitch,
                                   int64_t n, float const* multipliers, bits_pack<A>& flushed) {
    constexpr int64_t width = 64; // as many columns as encode_columns takes together
    alignas(64) Code tile[std::size_t{detail::turned_rows * width}];
    for (int64_t row = 0; row < rows; row += detail::turned_rows)
        for (int64_t j = 0; j < n; j += width) {
            int64_t const high = rows - row < detail::turned_rows ? rows - row : detail::turned_rows, wide = n - j < width ? n - j : width;
            for (int64_t i = 0; i < high; ++i)
                encode_columns(g, from + (row + i) * pitch + j, &tile[i * width], wide, multipliers + j, flushed);
            detail::turn_bytes(&tile[0].bits, width, high, wide, storage_of(to + j * to_pitch + row), to_pitch);
        }
}

template <class Code, class A, class Block, class X>
    requires(sizeof(Code) == 1 && Block::size > 0)
KEEL_FN void encode_scaled_rows(cpu_row_group<A> const& g, Block const& b, adjacent_rows<X> const& from, spread_rows<Code> const& to,
                                int64_t first, int64_t last, pack<A> const& multiplier, bits_pack<A>& flushed) {
    if constexpr (Block::size <= 256) {
        if (to.v.stride[0] == 1 && last - first > 1) {
            constexpr int64_t width = Block::size;
            Block const here{0, b.count, 0};
            alignas(64) Code tile[std::size_t{detail::turned_rows * width}];
            for (int64_t row = first; row < last; row += detail::turned_rows) {
                int64_t const high = last - row < detail::turned_rows ? last - row : detail::turned_rows;
                for (int64_t i = 0; i < high; ++i)
                    encode_scaled<Code>(g, here, from(row + i) + b.i, &tile[i * width], multiplier, flushed);
                detail::turn_bytes(&tile[0].bits, width, high, b.count, storage_of(to.v.at(row, b.i)), to.v.stride[1]);
            }
            return;
        }
    }
    for (int64_t row = first; row < last; ++row) encode_scaled<Code>(g, b, from(row), to(row), multiplier, flushed);
}

} // namespace keel::inline KEEL_ABI
