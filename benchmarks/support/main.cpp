// The runner that every benchmark links: says which keel and which instruction set the numbers belong to.
#include <string>

#include <benchmark/benchmark.h>
#include <keel/keel.hpp>

#if defined(__GNUC__) && !defined(__OPTIMIZE__)
#error "keel: benchmarks need an optimised build"
#endif

#define KEEL_TEXT_(name) #name
#define KEEL_TEXT(name) KEEL_TEXT_(name)

int main(int argc, char* argv[]) {
    benchmark::AddCustomContext("keel", KEEL_TEXT(KEEL_ABI));
    benchmark::AddCustomContext("keel_bits_version", std::to_string(keel::bits_version));
    benchmark::Initialize(&argc, argv);
    if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
    benchmark::RunSpecifiedBenchmarks();
    benchmark::Shutdown();
    return 0;
}
