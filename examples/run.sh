#!/usr/bin/env bash
# Builds the examples and trains examples/tiny_lm on a text:
#   examples/run.sh [options of tiny_lm]        e.g. examples/run.sh --precision fp8, examples/run.sh --text my.txt
# Without --text it takes the King James Bible of Debian's package bible-kjv, or what text the machine has, and says which.
set -u
root=$(cd "$(dirname "$0")/.." && pwd)
build=$root/build/examples
. "$root/cmake/needs.sh"

case " $* " in
*" --help "* | *" -h "*) # the program's own list, if it is built; nothing is installed or built for a question
    sed -n '2,4s/^# \{0,1\}//p' "$0"
    if [ -x "$build/examples/tiny_lm" ]; then exec "$build/examples/tiny_lm" --help; fi
    echo "The options of tiny_lm are in examples/tiny_lm/options.cpp, and shown here once it has been built."
    exit 0
    ;;
esac

need_compiler_and_cmake
want 'has_header Eigen/Core -isystem /usr/include/eigen3' libeigen3-dev "Eigen, which some examples use"
install_missing

say() { printf '== %s\n' "$*"; }

say "building in ${build#"$root"/}"
mkdir -p "$build"
if ! (cd "$root" && cmake --preset release -B "$build" -DKEEL_TESTS=OFF -DKEEL_BENCHMARKS=OFF) >"$build/configure.log" 2>&1; then
    cat "$build/configure.log"
    say "examples/run.sh: the configuration failed"
    exit 1
fi
if ! cmake --build "$build" --parallel "$(cores)"; then
    say "examples/run.sh: the build failed"
    exit 1
fi

text=()
case " $* " in
*" --text "*) ;;
*)
    what=$("$root/examples/find_text.sh" "$build/text") || exit $?
    say "text: $what"
    text=(--text "$build/text/text.txt")
    ;;
esac

began=$SECONDS
"$build/examples/tiny_lm" "${text[@]}" "$@"
code=$?
case $code in
0) say "examples/run.sh: tiny_lm ended well after $((SECONDS - began)) s" ;;
*) say "examples/run.sh: tiny_lm ended with exit code $code after $((SECONDS - began)) s" ;;
esac
exit $code
