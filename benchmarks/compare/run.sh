#!/usr/bin/env bash
# Runs PyTorch (eager and compiled) and JAX (jit) on the work of keel's row primitives, in turns with keel, in one process and with
# as many threads, and prints how many times as long they take:
#   benchmarks/compare/run.sh [--python PROGRAM] [--threads 1,2] [--shapes 64x4096,16384x4096] [--rounds N] [--only NAME]
# or on Newton-Schulz, with the time and the orthogonality error of each:
#   benchmarks/compare/run.sh newton_schulz [--python PROGRAM] [--threads 1,2] [--shapes 512x512,64x64x128] [--rounds N]
#
# --python   a Python 3 that has numpy and torch, jax or both (default: $KEEL_PYTHON, or python3); what it lacks is left out, aloud
# --threads  how many; each number is a run of its own, bound to as many processors
# --shapes   rows x columns of bf16 elements, columns a multiple of 128
# --rounds   how often all take their turn (default 7); the medians are printed, of times and of ratios within a round
# --only     quantise, dequantise, rms_norm or swiglu
#
# quantise: bf16 to e4m3 with an fp32 scale for each 1 x 128; keel takes its report too. dequantise: back to bf16. rms_norm and swiglu:
# bf16 to bf16, forward. newton_schulz: five steps, fp32 in, of Keller Jordan's set, in fp32 and in bf16, and in keel also of Polar Express;
# torch.optim.Muon's own function a matrix at a time, as it calls it; shapes are matrices x rows x columns. A call of PyTorch or JAX makes
# new outputs, from memory that the process keeps, so none waits for new pages.
set -u
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
build=$root/build/benchmarks

python=${KEEL_PYTHON:-python3} options=() program=compare.py
if [ "${1-}" = newton_schulz ]; then
    program=newton_schulz.py
    shift
fi
while [ $# -gt 0 ]; do
    case $1 in
    --help | -h)
        sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
        exit 0
        ;;
    --python)
        if [ $# -lt 2 ]; then echo "benchmarks/compare/run.sh: --python needs a program"; exit 2; fi
        python=$2
        shift
        ;;
    *) options+=("$1") ;;
    esac
    shift
done

"$python" "$here/$program" --can-run "${options[@]}"
case $? in
0) ;;
77) exit 0 ;; # nothing to compare with: it has said so
*) exit 2 ;;
esac

. "$root/cmake/needs.sh"
need_compiler_and_cmake
want 'has_header benchmark/benchmark.h' libbenchmark-dev "Google Benchmark 1.7 or later"
want 'has_header Eigen/Core -isystem /usr/include/eigen3' libeigen3-dev "Eigen"
install_missing
mkdir -p "$build"
if ! (cd "$root" && cmake --preset release -B "$build" -DKEEL_TESTS=OFF -DKEEL_EXAMPLES=OFF) >"$build/configure.log" 2>&1; then
    cat "$build/configure.log"
    exit 1
fi
cmake --build "$build" --parallel "$(cores)" --target benchmark_compare || exit 1
exec "$python" "$here/$program" --library "$build/benchmarks/libcompare.so" "${options[@]}"
