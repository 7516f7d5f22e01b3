#!/usr/bin/env bash
# Builds and runs keel's tests:
#   tests/run.sh          g++ in full; clang++ with sanitizers on the core; the same bits at every level; nvcc where it is
#   tests/run.sh --all    besides: exhaustive sweeps, clang++'s sanitizers over everything, clang++ -O2, debug, clang-tidy
#   tests/run.sh --list   the steps, without running them
# KEEL_JOBS: how many jobs at once (default: all cores). Everything is built under build/.
set -u
cd "$(dirname "$0")/.." || exit 2
. cmake/needs.sh
jobs=${KEEL_JOBS:-$(cores)}

all=no list=no
for argument in "$@"; do
    case $argument in
    --all) all=yes ;;
    --list) list=yes ;;
    --help | -h)
        sed -n '2,6s/^# \{0,1\}//p' "$0"
        exit 0
        ;;
    *)
        echo "tests/run.sh: unknown option $argument"
        sed -n '2,6s/^# \{0,1\}//p' "$0"
        exit 2
        ;;
    esac
done

# --- what is missing -------------------------------------------------------------------------------------------------

prepare() {
    need_compiler_and_cmake
    need 'have python3' python3 "python3"
    want 'has_header catch2/catch.hpp || has_header catch2/catch_all.hpp' catch2 "Catch2, version 2.13 or 3"
    want 'has_header Eigen/Core -isystem /usr/include/eigen3' libeigen3-dev "Eigen, an oracle"
    if [ $all = yes ]; then want 'has_header benchmark/benchmark.h' libbenchmark-dev "Google Benchmark, to see that the benchmarks compile"; fi
    want 'have clang++' clang "clang++"
    if [ $all = yes ]; then want 'have clang-tidy' clang-tidy "clang-tidy"; fi
    if [ "$(uname -m)" = x86_64 ]; then
        want 'have aarch64-linux-gnu-g++' g++-aarch64-linux-gnu "a compiler for AArch64"
        want 'have qemu-aarch64 || have qemu-aarch64-static' qemu-user "an emulator of AArch64"
    fi
    install_missing
    if have clang++; then # the parts of clang that have its version in their names
        local version
        version=$(clang++ -dumpversion | cut -d. -f1)
        want 'echo "int main() {}" | clang++ -fsanitize=address,undefined -x c++ - -o /dev/null' "libclang-rt-$version-dev" \
            "clang's sanitizers"
        want 'echo "int main() {}" | clang++ -fopenmp -x c++ - -o /dev/null' "libomp-$version-dev" "clang's OpenMP"
        install_missing
    fi
}

find_nvcc() {
    local place
    for place in "$(command -v nvcc)" "${CUDACXX:-}" "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc"; do
        if [ -x "$place" ]; then
            echo "$place"
            return 0
        fi
    done
    return 1
}

# --- steps -----------------------------------------------------------------------------------------------------------

names=() results=() seconds=()
passed=0 failed=0 skipped=0

# step NAME COMMAND...: runs one, and notes how it ended. Exit code 77 means skipped.
step() {
    local name=$1 began=$SECONDS code
    shift
    if [ $list = yes ]; then
        echo "$name"
        return
    fi
    printf '\n== %s\n' "$name"
    "$@"
    code=$?
    names+=("$name") seconds+=($((SECONDS - began)))
    case $code in
    0) results+=(passed) passed=$((passed + 1)) ;;
    77) results+=(skipped) skipped=$((skipped + 1)) ;;
    *) results+=(FAILED) failed=$((failed + 1)) ;;
    esac
}

configure() {
    local fewer=()
    if [ $all = no ] || [ "$1" != gcc-release ]; then fewer=(-DKEEL_BENCHMARKS=OFF); fi # they only have to compile, once, in --all
    mkdir -p "build/$1"
    cmake --preset "$@" "${fewer[@]}" >"build/$1/configure.log" 2>&1 || { cat "build/$1/configure.log"; return 1; }
}
# build PRESET [TARGET...]
build() {
    local preset=$1
    shift
    configure "$preset" && cmake --build "build/$preset" --parallel "$jobs" ${1:+--target "$@"}
}
run_tests() {
    local preset=$1
    shift
    ctest --preset "$preset" --parallel "$jobs" "$@"
}

# some PRESET FOLDER...: builds and runs the unit tests of those of the folders that hold any.
some() {
    local preset=$1 folder targets=() pattern=
    shift
    for folder in "$@"; do
        if ls "tests/$folder"/*.cpp >/dev/null 2>&1; then
            targets+=("keel_test_$folder")
            pattern+=${pattern:+|}$folder
        fi
    done
    build "$preset" "${targets[@]}" && run_tests "$preset" -R "^($pattern)\$"
}
with_clang() {
    have clang++ || { echo "clang++ is not installed: skipped"; return 77; }
    some "$@"
}

cuda() {
    local nvcc
    nvcc=$(find_nvcc) || { echo "nvcc is not installed: the CUDA kernels are not compiled"; return 77; }
    ls tests/cuda/*.cu >/dev/null 2>&1 || { echo "tests/cuda holds no *.cu file"; return 77; }
    CUDACXX=$nvcc build cuda-compile keel_test_cuda && run_tests cuda-compile
}

tidy() {
    have clang-tidy || { echo "clang-tidy is not installed: skipped"; return 77; }
    find include -name '*.hpp' ! -path '*/cuda*' ! -name '*_neon.hpp' | sort |
        xargs -P "$jobs" -n 1 sh -c 'clang-tidy --quiet "$0" -- -x c++ -std=c++20 -march=x86-64-v4 -Iinclude \
            -isystem /usr/include/eigen3 2>/dev/null'
}

# --- the run ---------------------------------------------------------------------------------------------------------

if [ $list = no ]; then prepare; fi
core_folders=(core format backend)
threadless='^(core|format|guard|interop|tiny_lm)$' # of no concern to the thread sanitizer
mapfile -t every_folder < <(find tests -mindepth 2 -maxdepth 2 -name '*.cpp' ! -path 'tests/bits/*' ! -path 'tests/consumers/*' \
    ! -path 'tests/odr/*' ! -path 'tests/support/*' ! -path 'tests/sweep/*' -printf '%h\n' | sed 's,tests/,,' | sort -u)

if [ $all = no ]; then
    step "g++: build" build quick
    step "g++: tests" run_tests quick
    step "clang++: address and undefined behaviour" with_clang asan-ubsan "${core_folders[@]}"
    step "clang++: threads" with_clang tsan backend
    step "the same bits at every level" python3 tests/bits/run.py --jobs "$jobs"
    step "nvcc: CUDA kernels" cuda
else
    step "g++ -O2: build" build gcc-release
    step "g++ -O2: all tests, with exhaustive sweeps" env KEEL_EXHAUSTIVE=1 ctest --preset gcc-release --parallel "$jobs"
    # Of everything clang++ makes the sanitizers' builds; its optimised kernels are those of the same-bits step.
    step "clang++ -O2: the core and tiny_lm" with_clang clang-release "${core_folders[@]}" guard interop tiny_lm
    step "clang++: address and undefined behaviour" with_clang asan-ubsan "${every_folder[@]}"
    step "clang++: threads" with_clang tsan $(printf '%s\n' "${every_folder[@]}" | grep -Ev "$threadless")
    # The sanitizers' builds have assertions too, of every folder; left are g++ and the packs of the lesser instruction sets.
    step "g++ -O0, assertions: every pack" some debug "${core_folders[@]}" norm
    step "the same bits at every level, both compilers" python3 tests/bits/run.py --all --jobs "$jobs"
    step "all floats to every format, at every level" python3 tests/sweep/sweep.py --jobs "$jobs"
    step "nvcc: CUDA kernels" cuda
    step "clang-tidy" tidy
fi
if [ $list = yes ]; then exit 0; fi

printf '\n%-50s %8s %8s\n' step result seconds
for i in "${!names[@]}"; do printf '%-50s %8s %8d\n' "${names[$i]}" "${results[$i]}" "${seconds[$i]}"; done
printf '\n'
if [ $skipped = 0 ]; then echo "$passed passed, $failed failed"; else echo "$passed passed, $failed failed, $skipped skipped"; fi
[ $failed = 0 ]
