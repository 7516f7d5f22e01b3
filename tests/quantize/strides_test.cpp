// Where elements lie changes nothing: any strides of x, codes, scales and y, turned, repeated and backwards, against contiguous copies.
#include <limits>

#include <keel/format/bf16.hpp>
#include <keel/format/f16.hpp>
#include <keel/quantize/quantize.hpp>
#include <support/backends.hpp>
#include <support/catch.hpp>
#include <support/data.hpp>

using namespace keel_test;
using keel::overflow;
using keel::whole;

namespace {

/// A matrix inside memory of its own: element [i, j] at first + i * row + j * column.
template <class T> struct laid_out {
    char const* name;
    std::vector<T> memory;
    keel::view<T, 2> view;
    std::vector<bool> inside;

    laid_out(char const* name_, int64_t rows, int64_t columns, int64_t row, int64_t column) : name(name_) {
        int64_t const back_rows = row < 0 ? -row * (rows - 1) : 0, back_columns = column < 0 ? -column * (columns - 1) : 0;
        int64_t const first = 5 + back_rows + back_columns, size = first + 5 + std::abs(row) * rows + std::abs(column) * columns;
        memory.resize(static_cast<std::size_t>(size), marked());
        inside.resize(memory.size());
        view = {memory.data() + first, {rows, columns}, {row, column}};
        for (int64_t i = 0; i < rows; ++i)
            for (int64_t j = 0; j < columns; ++j) inside[static_cast<std::size_t>(view.at(i, j) - memory.data())] = true;
    }
    static T marked() {
        T v;
        std::memset(&v, 0xa5, sizeof v);
        return v;
    }
    bool untouched() const {
        T const mark = marked();
        for (std::size_t i = 0; i < memory.size(); ++i)
            if (!inside[i] && std::memcmp(&memory[i], &mark, sizeof mark) != 0) return false;
        return true;
    }
};

/// Row-major with padding, turned, spread in both directions, backwards.
template <class T> std::vector<laid_out<T>> layouts(int64_t rows, int64_t columns) {
    std::vector<laid_out<T>> all;
    all.emplace_back("row-major", rows, columns, columns + 3, 1);
    all.emplace_back("turned", rows, columns, 1, rows + 5);
    all.emplace_back("spread", rows, columns, 2 * columns + 1, 2);
    all.emplace_back("turned and spread", rows, columns, 3, 3 * rows + 2);
    all.emplace_back("backwards", rows, columns, columns, -1);
    all.emplace_back("turned, backwards", rows, columns, -1, rows);
    return all;
}

template <class T> int64_t differing(keel::view<T, 2> got, guarded_matrix<T> const& want) {
    int64_t wrong = 0;
    for (int64_t i = 0; i < want.rows(); ++i)
        for (int64_t j = 0; j < want.columns(); ++j) {
            T const w = want.get(i, j);
            wrong += std::memcmp(got.at(i, j), &w, sizeof w) != 0;
        }
    return wrong;
}

template <class X, class Code, class Scale, int Rows, int Columns> void check_layouts(int64_t rows, int64_t columns, data_kind kind) {
    using blocks = keel::block_scaled<Code, Scale, Rows, Columns>;
    using storage = typename Scale::storage;
    INFO(Rows << "x" << Columns << " on " << rows << "x" << columns << " " << name_of(kind));
    int64_t const sr = blocks::scale_rows(rows), sc = blocks::scale_columns(columns);
    guarded_matrix<X> x(rows, columns, 0, floats(kind, rows * columns, 11)), y(rows, columns);
    guarded_matrix<Code> codes(rows, columns);
    guarded_matrix<storage> scales(sr, sc);
    keel::report want;
    blocks const plain{codes.view(), scales.view()};
    keel::quantize<overflow::saturate_finite>(keel::reference{}, x.view(), plain, {}, &want).or_throw();
    keel::dequantize(keel::reference{}, plain, y.view()).or_throw();
    auto sources = layouts<X>(rows, columns);
    for (auto& s : sources)
        for (int64_t i = 0; i < rows; ++i)
            for (int64_t j = 0; j < columns; ++j) s.view(i, j) = x.get(i, j);
    auto const check = [&](std::string const& name, auto const& be, auto const& from) {
        auto code_layouts = layouts<Code>(rows, columns);
        auto scale_layouts = layouts<storage>(sr, sc);
        for (std::size_t l = 0; l < code_layouts.size(); ++l) {
            auto& to = code_layouts[l];
            auto& with = scale_layouts[(l + 1) % scale_layouts.size()];
            INFO(name << ": x " << from.name << ", codes " << to.name << ", scales " << with.name);
            blocks const q{to.view, with.view};
            keel::report seen;
            keel::quantize<overflow::saturate_finite>(be, from.view, q, {}, &seen).or_throw();
            CHECK(differing(to.view, codes) == 0);
            CHECK(differing(with.view, scales) == 0);
            CHECK(std::memcmp(&seen, &want, sizeof seen) == 0);
            laid_out<X> back("y", rows, columns, l % 2 == 0 ? columns : 1, l % 2 == 0 ? 1 : rows);
            keel::dequantize(be, q, back.view).or_throw();
            CHECK(differing(back.view, y) == 0);
            CHECK((to.untouched() && with.untouched() && back.untouched()));
        }
    };
    for (auto const& from : sources) check("cpu", keel::cpu{}, from);
    check("reference", keel::reference{}, sources[3]);
    check("simt<32>", keel::simt<32>{}, sources[1]);
    check("simt<32>", keel::simt<32>{}, sources[0]);
}

} // namespace

TEST_CASE("quantise and dequantise take any strides, also turned") { // FBGEMM #2919, #3508, vllm #49092
    for (data_kind kind : {data_kind::mixed_scales, data_kind::with_inf}) {
        check_layouts<keel::bf16, keel::e4m3, keel::fp32_scale, 1, 128>(37, 200, kind);
        check_layouts<keel::bf16, keel::e4m3, keel::e8m0_scale, 128, 1>(150, 77, kind);
        check_layouts<float, keel::e5m2, keel::power_of_two_scale, 128, 128>(131, 150, kind);
        check_layouts<float, keel::e4m3, keel::fp32_scale, whole, whole>(19, 70, kind);
        check_layouts<float, keel::e4m3, keel::fp32_scale, 1, whole>(19, 70, kind);
    }
    check_layouts<keel::f16, keel::e4m3, keel::e8m0_scale, 1, 32>(5, 66, data_kind::normal);
    check_layouts<keel::bf16, keel::e4m3, keel::fp32_scale, 32, 1>(70, 130, data_kind::outlier);
    check_layouts<keel::bf16, keel::e4m3, keel::fp32_scale, 5, 7>(23, 31, data_kind::normal);
    for (int64_t rows : {0, 1, 2})
        for (int64_t columns : {0, 1, 3}) {
            check_layouts<float, keel::e4m3, keel::fp32_scale, 1, 128>(rows, columns, data_kind::normal);
            check_layouts<float, keel::e4m3, keel::fp32_scale, 128, 1>(rows, columns, data_kind::normal);
        }
}

TEST_CASE("turned codes of wide strips: every width and height around the tiles") {
    for (auto [rows, columns] : {std::pair<int64_t, int64_t>{128, 64}, {129, 65}, {31, 63}, {32, 1025}, {33, 1088}, {7, 9}, {256, 8}}) {
        for (bool const bad : {false, true}) {
            INFO(rows << "x" << columns << (bad ? " with NaN" : ""));
            guarded_matrix<keel::bf16> x(rows, columns, 1, floats(data_kind::normal, rows * columns, 3));
            if (bad) x.set(0, 0, to_format<keel::bf16>(std::numeric_limits<float>::quiet_NaN())), x.set(rows - 1, columns - 1, x.get(0, 0)); // first and last stretch
            guarded_matrix<keel::e4m3> want(rows, columns), got(columns, rows, 7);
            using down = keel::column_blocks<>;
            guarded_matrix<float> a(down::scale_rows(rows), columns), b(down::scale_rows(rows), columns);
            keel::quantize<overflow::saturate>(keel::cpu{}, x.view(), down{want.view(), a.view()}).or_throw();
            keel::report seen;
            keel::quantize<overflow::saturate>(keel::cpu{}, x.view(), down{keel::transposed(got.view()), b.view()}, {}, &seen).or_throw();
            CHECK(differing(keel::transposed(got.view()), want) == 0);
            CHECK(a.contents() == b.contents());
            CHECK(got.untouched());
            CHECK(seen.elements == rows * columns);
            // The pair in one pass, its second half turned.
            guarded_matrix<keel::e4m3> along(rows, columns, 2), turned(columns, rows, 1), want_along(rows, columns);
            using row = keel::row_blocks<>;
            guarded_matrix<float> s(rows, row::scale_columns(columns)), t(rows, row::scale_columns(columns)), c(down::scale_rows(rows), columns);
            keel::quantize_pair<overflow::saturate>(keel::cpu{}, x.view(), row{along.view(), s.view()}, down{keel::transposed(turned.view()), c.view()})
                .or_throw();
            keel::quantize<overflow::saturate>(keel::cpu{}, x.view(), row{want_along.view(), t.view()}).or_throw();
            CHECK(along.contents() == want_along.contents());
            CHECK(s.contents() == t.contents());
            CHECK(differing(keel::transposed(turned.view()), want) == 0);
            CHECK(c.contents() == a.contents());
            CHECK((along.untouched() && turned.untouched()));
        }
    }
}

TEST_CASE("codes that overlap themselves are refused, whichever way they lie") {
    std::vector<float> x(64, 1.0f), scales(8, -1.0f);
    std::vector<keel::e4m3> codes(64, keel::from_word<keel::e4m3>(0x55));
    auto const X = keel::rows(x.data(), 8, 8);
    keel::view<keel::e4m3, 2> const bad[] = {{codes.data(), {8, 8}, {0, 1}}, {codes.data(), {8, 8}, {1, 0}}, {codes.data(), {8, 8}, {1, 7}}};
    for (auto const& v : bad)
        CHECK(keel::quantize<overflow::saturate>(keel::cpu{}, X, keel::row_blocks<>{v, keel::rows(scales.data(), 8, 1)}).code ==
              keel::status_code::bad_stride);
    CHECK(codes[0].bits == 0x55);
    CHECK(scales[0] == -1.0f);
}
