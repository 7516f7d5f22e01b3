#!/usr/bin/env bash
# Builds and runs the benchmarks, each several times, and prints the median and the spread:
#   benchmarks/run.sh [NAME...] [--benchmark_...]     e.g. benchmarks/run.sh matmul --benchmark_filter=bf16
# NAME: a file of benchmarks/ without .cpp; all of them where none is named. Results also go to build/benchmarks/results.
# onednn takes turns with oneDNN's products, where that is installed;
# rows takes turns with a copy of the same bytes by as many threads and prints its own medians (support/in_turns.hpp says which), and
# newton_schulz_sweep its own table, once.
# benchmarks/compare/run.sh runs PyTorch and JAX on the same work.
set -u
root=$(cd "$(dirname "$0")/.." && pwd)
build=$root/build/benchmarks
. "$root/cmake/needs.sh"

case " $* " in
*" --help "* | *" -h "*) # nothing is installed or built for a question
    sed -n '2,8s/^# \{0,1\}//p' "$0"
    printf 'Names:'
    for source in "$root"/benchmarks/*.cpp; do printf ' %s' "$(basename "$source" .cpp)"; done
    printf '\n'
    echo "Options: those of Google Benchmark, of which the commonest are --benchmark_filter=REGEX and --benchmark_min_time=SECONDS."
    exit 0
    ;;
esac

need_compiler_and_cmake
want 'has_header benchmark/benchmark.h' libbenchmark-dev "Google Benchmark 1.7 or later"
want 'has_header Eigen/Core -isystem /usr/include/eigen3' libeigen3-dev "Eigen, a peer"
want 'has_header oneapi/dnnl/dnnl.hpp' libdnnl-dev "oneDNN, a peer"
install_missing

names=() options=()
for argument in "$@"; do
    case $argument in
    -*) options+=("$argument") ;;
    *) names+=("$argument") ;;
    esac
done
if [ ${#names[@]} = 0 ]; then
    for source in "$root"/benchmarks/*.cpp; do
        if [ -e "$source" ]; then names+=("$(basename "$source" .cpp)"); fi
    done
fi
if [ ${#names[@]} = 0 ]; then
    echo "benchmarks/run.sh: there is no benchmark in benchmarks/"
    exit 1
fi

if ! has_header oneapi/dnnl/dnnl.hpp; then # a named one is refused by the build
    for i in "${!names[@]}"; do
        if [ "${names[i]}" = onednn ]; then echo "oneDNN is not installed: its comparison is left out"; unset "names[i]"; fi
    done
    names=("${names[@]}")
    if [ ${#names[@]} = 0 ]; then exit 77; fi
fi
export OMP_NUM_THREADS=1 # oneDNN's

mkdir -p "$build/results"
if ! (cd "$root" && cmake --preset release -B "$build" -DKEEL_TESTS=OFF -DKEEL_EXAMPLES=OFF) >"$build/configure.log" 2>&1; then
    cat "$build/configure.log"
    exit 1
fi
cmake --build "$build" --parallel "$(cores)" --target "${names[@]/#/benchmark_}" || exit 1

passed=0 failed=0
for name in "${names[@]}"; do
    printf '\n== %s\n' "$name"
    usual=(--benchmark_repetitions=5 --benchmark_min_time=0.1 --benchmark_enable_random_interleaving=true
        --benchmark_display_aggregates_only=true --benchmark_report_aggregates_only=true)
    case $name in rows | onednn | newton_schulz_sweep) usual=(--benchmark_counters_tabular=true) ;; esac
    if "$build/benchmarks/$name" "${usual[@]}" \
        --benchmark_out="$build/results/$name.json" --benchmark_out_format=json "${options[@]}"; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
    fi
done
printf '\nbenchmarks/run.sh: %d ran, %d failed; results in %s\n' $passed $failed "${build#"$root"/}/results"
[ $failed = 0 ]
