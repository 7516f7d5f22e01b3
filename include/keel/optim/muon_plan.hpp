// Which logical matrices a parameter holds, and how each is orthogonalised and scaled. A fused weight is several matrices
// that only share memory: orthogonalising the slab would mix them, and a scale taken from its shape would be wrong for all.
//
//     plan_muon(1, 512, 512)                                                  one matrix
//     plan_muon(1, 1536, 512, {{"q", 1024, 16}, {"k", 256, 4}, {"v", 256, 4}})     QKV, a matrix a head
//     plan_muon(64, 2048, 512, {{"gate", 1024}, {"up", 1024}})               64 experts, gate over up
//     plan_muon(1, 2048, 512, {{"gate", 1024, 1, 0, 1, 2}, {"up", 1024, 1, 1, 1, 2}})     row by row in turn
//     plan_muon(1, 768, 512, {{"q", 512, 8, 0, 128, 192}, {"k", 128, 2, 128, 32, 192}, {"v", 128, 2, 160, 32, 192}})
//                                                      4 groups of 2 query heads of 64 rows, then k, then v: a group after another
//     plan_muon(1, out, in * height * width)                                 a convolution's filters
#pragma once

#include <initializer_list>
#include <string>

#include <keel/optim/newton_schulz_plan.hpp>

namespace keel {

/// The factor on the orthogonal update of a matrix [out, in]. O has singular values of 1, so RMS 1 / sqrt(max(out, in)).
enum class muon_scale : uint8_t {
    match_rms_adamw, ///< 0.2 sqrt(max(out, in)): RMS 0.2, about AdamW's, so both share a learning rate (Moonlight)
    spectral,        ///< sqrt(max(1, out / in)) (Jordan)
    spectral_mup,    ///< sqrt(out / in): RMS-to-RMS norm 1, learning rates transfer over widths
    unit,            ///< 1
    unit_rms,        ///< sqrt(max(out, in)): RMS 1, before any factor of the caller's (Emerging-Optimizers calls this spectral)
    analytic_rms_adamw ///< sqrt(0.1 / 1.9) sqrt(max(out, in)): RMS 0.229, AdamW's with beta1 = 0.9 under gradients of pure noise
};

KEEL_HOST constexpr char const* name_of(muon_scale scale) {
    switch (scale) {
    case muon_scale::match_rms_adamw: return "match_rms_adamw";
    case muon_scale::spectral: return "spectral";
    case muon_scale::spectral_mup: return "spectral_mup";
    case muon_scale::unit: return "unit";
    case muon_scale::unit_rms: return "unit_rms";
    case muon_scale::analytic_rms_adamw: return "analytic_rms_adamw";
    }
    return "unknown";
}

KEEL_HOST float muon_scale_of(muon_scale rule, int64_t out, int64_t in) {
    auto const rows = static_cast<double>(out), columns = static_cast<double>(in), longer = rows > columns ? rows : columns;
    switch (rule) {
    case muon_scale::match_rms_adamw: return static_cast<float>(0.2 * __builtin_sqrt(longer));
    case muon_scale::spectral: return static_cast<float>(rows > columns ? __builtin_sqrt(rows / columns) : 1.0);
    case muon_scale::spectral_mup: return static_cast<float>(__builtin_sqrt(rows / columns));
    case muon_scale::unit: return 1.0f;
    case muon_scale::unit_rms: return static_cast<float>(__builtin_sqrt(longer));
    case muon_scale::analytic_rms_adamw: return static_cast<float>(__builtin_sqrt(longer / 19.0));
    }
    return 1.0f;
}

/// `rows` rows of a fused weight that hold `matrices` equal matrices, one below the other. Of rows that do not lie together, `run` adjacent
/// ones are taken every `period` rows: row k of the part is row first + (k / run) * period + k % run of the weight.
struct row_part {
    char const* name = "";
    int64_t rows = 0;
    int64_t matrices = 1;
    int64_t first = -1; ///< -1: where the part before it ends (where its first run ends)
    int64_t run = 0;    ///< 0: all of them
    int64_t period = 0; ///< at least run
};

/// Where the rows of one matrix lie: row i is row i + (i + phase) / run * gap, counted from its first one.
struct row_map {
    int64_t run = int64_t{1} << 62, gap = 0, phase = 0;

    KEEL_FN constexpr int64_t operator()(int64_t row) const { return gap == 0 ? row : row + (row + phase) / run * gap; }
    /// All distances are one.
    KEEL_FN constexpr bool is_even(int64_t rows) const { return gap == 0 || run == 1 || phase + rows <= run; }
    KEEL_FN constexpr int64_t distance(int64_t rows) const { return gap == 0 || phase + rows <= run ? 1 : run + gap; }
};

/// T is the format of the products' operands.
template <scalar_format T = float> struct muon_plan_options {
    muon_scale scale = muon_scale::match_rms_adamw;
    newton_schulz_coefficients<T> coefficients = keel::coefficients<polar_express, T>();
    newton_schulz_form form = newton_schulz_form::automatic;
    float wanted_error = 0.0f; ///< stops each matrix as in newton_schulz_options; 0: all steps are taken
};

/// One logical matrix of a parameter.
struct logical_matrix {
    int64_t item = 0, first_row = 0, rows = 0; ///< in [stack, rows, columns]
    int part = 0;
    row_map map = {};
};

/// A value; made by plan_muon. A parameter is [stack, rows, columns], each item cut by the same row parts.
template <scalar_format T = float> struct muon_plan {
    static constexpr int most_parts = 16;

    int64_t stack = 0, rows = 0, columns = 0;
    int part_count = 0;
    row_part parts[most_parts] = {};
    muon_plan_options<T> options = {};
    bool too_many_parts = false;

    /// Parts must cover the rows, each row once, each part a whole number of matrices and of runs; at most 2^48 matrices.
    KEEL_HOST bool valid() const {
        int64_t covered = 0;
        double matrices = 0.0; // of all items, in double: an int64 could wrap
        for (int p = 0; p < part_count; ++p) {
            row_part const& part = parts[p];
            if (part.matrices < 1 || part.rows < 0 || part.rows > rows || part.rows % part.matrices != 0 || part.run < 0) return false;
            if (part.run > 0 && (part.rows % part.run != 0 || part.period < part.run || part.period > rows)) return false;
            if (part.rows > rows - covered) return false;
            covered += part.rows;
            matrices += static_cast<double>(part.matrices) * static_cast<double>(stack);
            runs const r = runs_of(p);
            if (r.first < 0 || r.first > rows) return false;
            if (r.count > 0 && (r.size > rows - r.first || r.count - 1 > (rows - r.first - r.size) / r.period)) return false;
        }
        if (matrices > 0x1p48) return false;
        if (too_many_parts || covered != rows || stack < 0 || columns < 0 || options.coefficients.count < 1) return false;
        for (int p = 0; p < part_count; ++p)
            for (int q = 0; q < part_count; ++q)
                if (p != q && meet(runs_of(p), runs_of(q))) return false;
        return true;
    }
    KEEL_HOST int64_t matrices_a_item() const {
        int64_t n = 0;
        for (int p = 0; p < part_count; ++p) n += parts[p].matrices;
        return n;
    }
    KEEL_HOST int64_t matrices() const { return stack * matrices_a_item(); }
    KEEL_HOST logical_matrix matrix(int64_t index) const {
        logical_matrix m{index / matrices_a_item(), 0, 0, 0};
        index %= matrices_a_item();
        while (index >= parts[m.part].matrices) index -= parts[m.part++].matrices;
        m.rows = parts[m.part].rows / parts[m.part].matrices;
        runs const r = runs_of(m.part);
        int64_t const before = index * m.rows;
        m.first_row = r.first + (r.size > 0 ? before / r.size * r.period + before % r.size : 0);
        if (r.count > 1) m.map = {r.size, r.period - r.size, before % r.size};
        return m;
    }
    KEEL_HOST newton_schulz_plan iteration(int part) const {
        return plan_newton_schulz<T>(parts[part].rows / parts[part].matrices, columns, options.coefficients, options.form);
    }
    KEEL_HOST float scale(int part) const { return muon_scale_of(options.scale, parts[part].rows / parts[part].matrices, columns); }
    KEEL_HOST double flops() const {
        double sum = 0.0;
        for (int p = 0; p < part_count; ++p) sum += static_cast<double>(parts[p].matrices) * iteration(p).flops();
        return static_cast<double>(stack) * sum;
    }
    /// A line a part: "q: 64 of 64 x 512: gram, ..., scale 4.525484 (match_rms_adamw)".
    KEEL_HOST std::string text() const {
        if (!valid()) return "no plan: the parts do not cover the rows\n";
        std::string s;
        for (int p = 0; p < part_count; ++p)
            s += (*parts[p].name != '\0' ? std::string(parts[p].name) + ": " : std::string()) +
                 std::to_string(stack * parts[p].matrices) + " of " + iteration(p).text() + ", scale " +
                 std::to_string(static_cast<double>(scale(p))) + " (" + name_of(options.scale) + ")" + where(p) + "\n";
        return s;
    }

private:
    /// A part's rows as runs.
    struct runs {
        int64_t first, size, count, period;
    };
    KEEL_HOST runs runs_of(int part) const {
        int64_t first = 0;
        for (int p = 0;; ++p) {
            int64_t const own = parts[p].first >= 0 ? parts[p].first : first, size = parts[p].run > 0 ? parts[p].run : parts[p].rows;
            if (p == part) return {own, size, size > 0 ? parts[p].rows / size : 0, parts[p].run > 0 ? parts[p].period : size};
            first = own + size;
        }
    }
    /// Whether a run of a shares a row with a run of b.
    KEEL_HOST static bool meet(runs const& a, runs const& b) {
        for (int64_t k = 0; k < a.count && b.count > 0; ++k) {
            int64_t const begin = a.first + k * a.period, end = begin + a.size;
            int64_t const before = begin < b.first ? -1 : (begin - b.first) / b.period; // the last run that begins no later
            int64_t const last = before < b.count ? before : b.count - 1;
            if (last >= 0 && b.first + last * b.period + b.size > begin) return true;
            if (last + 1 < b.count && b.first + (last + 1) * b.period < end) return true;
        }
        return false;
    }
    KEEL_HOST std::string where(int part) const {
        runs const r = runs_of(part);
        if (r.count <= 1) return "";
        return ", " + std::to_string(r.size) + " of every " + std::to_string(r.period) + " rows from " + std::to_string(r.first);
    }
};

/// The plan of a parameter [stack, rows, columns]; no parts: each item is one matrix. What does not fit is found by valid().
template <scalar_format T = float>
KEEL_HOST muon_plan<T> plan_muon(int64_t stack, int64_t row_count, int64_t column_count, row_part const* parts, int64_t part_count,
                                 std::type_identity_t<muon_plan_options<T>> options = {}) {
    muon_plan<T> plan{.stack = stack, .rows = row_count, .columns = column_count, .options = options};
    if (part_count == 0) plan.parts[plan.part_count++] = {"", row_count, 1};
    for (int64_t i = 0; i < part_count; ++i) {
        if (plan.part_count < muon_plan<T>::most_parts) plan.parts[plan.part_count++] = parts[i];
        else plan.too_many_parts = true;
    }
    return plan;
}
template <scalar_format T = float>
KEEL_HOST muon_plan<T> plan_muon(int64_t stack, int64_t row_count, int64_t column_count, std::initializer_list<row_part> parts = {},
                                 std::type_identity_t<muon_plan_options<T>> options = {}) {
    return plan_muon<T>(stack, row_count, column_count, parts.begin(), static_cast<int64_t>(parts.size()), options);
}

} // namespace keel
