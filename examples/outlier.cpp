// Two ways to lose a number, and what helps: one outlier under one scale, and a small number beside a big one in bf16.
//
//     outlier                prints both, and says what to see
//     outlier numbers.csv    also writes what it printed; plot_outlier.py draws it
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include <keel/keel.hpp>

namespace {

constexpr int64_t row_count = 64, width = 4096;

/// Normal numbers, the same at every run and on every machine.
std::vector<float> normal_numbers(int64_t count) {
    std::vector<float> values(static_cast<std::size_t>(count));
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = keel::random_normal({.seed = 1}, i);
    return values;
}

struct loss {
    double error = 0;   ///< root mean square of what was lost, by that of the numbers themselves
    double flushed = 0; ///< share that became zero
};

/// Quantises to e4m3 in these blocks and back; what happened to everybody but the outlier, which is element 0.
template <class Scale, int Rows, int Columns> loss measure(std::vector<float> const& values) {
    using blocks = keel::block_scaled<keel::e4m3, Scale, Rows, Columns>;
    std::vector<keel::e4m3> codes(values.size());
    std::vector<typename Scale::storage> scales(
        static_cast<std::size_t>(blocks::scale_rows(row_count) * blocks::scale_columns(width)));
    std::vector<float> back(values.size());
    blocks const q{keel::rows(codes.data(), row_count, width),
                   keel::rows(scales.data(), blocks::scale_rows(row_count), blocks::scale_columns(width))};
    keel::cpu<> const be;
    keel::quantize<keel::overflow::saturate>(be, keel::rows(values.data(), row_count, width), q).or_throw();
    keel::dequantize(be, q, keel::rows(back.data(), row_count, width)).or_throw();

    double lost = 0, all = 0, zeros = 0;
    for (std::size_t i = 1; i < values.size(); ++i) {
        double const x = static_cast<double>(values[i]), d = static_cast<double>(back[i]) - x;
        lost += d * d, all += x * x;
        zeros += x != 0 && back[i] == 0.0f ? 1 : 0;
    }
    return {std::sqrt(lost / all), zeros / static_cast<double>(values.size() - 1)};
}

void one_outlier(std::FILE* csv) {
    std::printf("One outlier among %lld normal numbers, quantised to e4m3 (3 bits behind the point, 448 / 2^-9 from largest\n"
                "to smallest). Error of the others, and the share of them that became zero:\n\n",
                static_cast<long long>(row_count * width));
    std::printf("%12s | %16s | %16s | %16s | %16s\n", "outlier", "a tensor", "a row", "1x128, fp32", "1x32, e8m0 (MX)");
    auto values = normal_numbers(row_count * width);
    for (double const size : {1e0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7}) {
        values[0] = static_cast<float>(size);
        loss const by[] = {measure<keel::fp32_scale, keel::whole, keel::whole>(values),
                           measure<keel::fp32_scale, 1, keel::whole>(values), measure<keel::fp32_scale, 1, 128>(values),
                           measure<keel::e8m0_scale, 1, 32>(values)};
        std::printf("%12g", size);
        for (loss const& l : by) std::printf(" | %6.2f %% %6.2f %%", 100 * l.error, 100 * l.flushed);
        std::printf("\n");
        char const* const names[] = {"a tensor", "a row", "1x128 fp32", "1x32 e8m0"};
        for (int i = 0; csv != nullptr && i < 4; ++i)
            std::fprintf(csv, "outlier,%s,%g,%.9g\n", names[i], size, by[i].error);
    }
    std::printf("\nWhat to see: three bits cost about 2.6 %%, whoever scales. One scale for all keeps that until the outlier is ten\n"
                "thousand times larger than the rest, then the rest goes under; with a scale a block it takes its own block along,\n"
                "1 of %lld here, and the error stops rising.\n\n",
                static_cast<long long>(row_count * width / 128));
}

/// A weight of 1 that grows by 1/1000 a step, kept in four ways.
void big_plus_small(std::FILE* csv) {
    using keel::bf16, keel::overflow, keel::rounding;
    std::printf("A weight of 1 that an optimiser moves by 0.001 a step. Numbers of bf16 near 1 lie 0.0078 apart:\n\n");
    std::printf("%12s | %12s | %12s | %12s | %12s | %12s\n", "step", "exact", "bf16", "stochastic", "bf16 + Kahan", "fp32 master");
    float const step = 0.001f;
    bf16 nearest = keel::encode<bf16>(1.0f), stochastic = nearest, kahan = nearest, lost = {};
    float master = 1.0f;
    for (int i = 1; i <= 1000; ++i) {
        nearest = keel::encode<bf16>(keel::decode(nearest) + step);
        uint32_t const noise = keel::random_word({.seed = 2, .step = static_cast<uint32_t>(i)}, 0);
        stochastic = keel::encode<bf16, overflow::to_nonfinite, rounding::stochastic>(keel::decode(stochastic) + step, noise);
        keel::kahan_update<bf16>(keel::cpu<>{}, keel::vec(&step, 1), {keel::vec(&kahan, 1), keel::vec(&lost, 1)}, keel::open_gate()).or_throw();
        master += step;
        double const shown[] = {1 + 0.001 * i, static_cast<double>(keel::decode(nearest)), static_cast<double>(keel::decode(stochastic)),
                                static_cast<double>(keel::decode(kahan)), static_cast<double>(keel::decode(keel::encode<bf16>(master)))};
        if (i % 200 == 0 || i == 1)
            std::printf("%12d | %12.4f | %12.4f | %12.4f | %12.4f | %12.4f\n", i, shown[0], shown[1], shown[2], shown[3], shown[4]);
        char const* const names[] = {"exact", "bf16", "stochastic", "bf16 + Kahan", "fp32 master"};
        for (int k = 0; csv != nullptr && k < 5 && i % 10 == 0; ++k)
            std::fprintf(csv, "weight,%s,%d,%.9g\n", names[k], i, shown[k]);
    }
    std::printf("\nWhat to see: a step below half the distance to the next number is rounded away, every time, so the weight never\n"
                "moves. Rounded up with the right probability it arrives on average (this run 0.08 above); with a second bf16 that\n"
                "keeps what was rounded away, or with a master in fp32, it arrives.\n");
}

} // namespace

int main(int argc, char** argv) {
    if (argc > 2 || (argc == 2 && std::string(argv[1]).starts_with("-"))) {
        std::fputs("outlier [numbers.csv]: one outlier under FP8 scales, and big plus small in bf16\n", stderr);
        return 2;
    }
    std::FILE* const csv = argc == 2 ? std::fopen(argv[1], "w") : nullptr;
    if (argc == 2 && csv == nullptr) {
        std::fprintf(stderr, "outlier: cannot write %s\n", argv[1]);
        return 2;
    }
    if (csv != nullptr) std::fputs("what,kept,x,y\n", csv);
    one_outlier(csv);
    big_plus_small(csv);
    bool const written = csv == nullptr || (std::ferror(csv) == 0 && std::fclose(csv) == 0);
    if (!written) std::fprintf(stderr, "outlier: cannot write %s\n", argv[1]);
    return written ? 0 : 1;
}
