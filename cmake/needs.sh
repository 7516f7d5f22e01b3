# shellcheck shell=bash
# Sourced by tests/run.sh, examples/run.sh and benchmarks/run.sh: finds out what is missing and installs it where apt-get
# exists and may be used. Elsewhere it says what is needed.

missing_needed=()   # without these nothing goes on
missing_optional=() # without these something is skipped aloud
sentences=()

has_header() { printf '#include <%s>\n' "$1" | g++ -std=c++20 "${@:2}" -fsyntax-only -x c++ - 2>/dev/null; }

# need CHECK PACKAGE WHAT, want CHECK PACKAGE WHAT: CHECK is a command that succeeds where WHAT is there; PACKAGE is Debian's.
need() { eval "$1" >/dev/null 2>&1 || { missing_needed+=("$2"); sentences+=("needed: $3 (Debian: $2)"); }; }
want() { eval "$1" >/dev/null 2>&1 || { missing_optional+=("$2"); sentences+=("useful: $3 (Debian: $2)"); }; }

have() { command -v "$1" >/dev/null 2>&1; }

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"
    elif have sudo && [ -t 0 ]; then sudo "$@"
    elif have sudo; then sudo -n "$@"
    else return 1
    fi
}

# Installs all that need and want found missing. Leaves the script where something needed cannot be had.
install_missing() {
    local wanted=("${missing_needed[@]}" "${missing_optional[@]}")
    if [ ${#wanted[@]} = 0 ]; then return 0; fi
    printf '%s\n' "${sentences[@]}"
    if have apt-get; then
        echo "installing: ${wanted[*]}"
        export DEBIAN_FRONTEND=noninteractive
        as_root apt-get update -qq || echo "apt-get update failed; going on with what is known"
        as_root apt-get install -y -qq --no-install-recommends "${wanted[@]}" >/dev/null || {
            # One name that this distribution does not know must not keep the others out.
            for package in "${wanted[@]}"; do
                as_root apt-get install -y -qq --no-install-recommends "$package" >/dev/null || echo "could not install $package"
            done
        }
    elif [ ${#missing_needed[@]} != 0 ]; then
        echo "There is no apt-get here: please install what is needed by the means of this system, and try again."
        exit 2
    fi
    missing_needed=() missing_optional=() sentences=()
}

need_compiler_and_cmake() {
    need 'have g++' g++ "a C++20 compiler (g++ 12 or later)"
    need 'have cmake' cmake "CMake 3.25 or later"
    need 'have ninja' ninja-build "Ninja"
    want 'have ccache' ccache "ccache, which saves compiling twice"
    install_missing
    for tool in g++ cmake ninja; do
        have $tool || { echo "$tool is not there, and could not be installed"; exit 2; }
    done
    local version
    version=$(cmake --version | sed -n '1s/[^0-9]*//p')
    if [ "$(printf '%s\n3.25\n' "$version" | sort -V | head -n 1)" != 3.25 ]; then
        echo "CMake $version is too old: 3.25 or later is needed (pip install cmake has it, where the system has not)"
        exit 2
    fi
    # The libraries are looked for by CMake too, which can download them; packages are quicker.
    want 'has_header xsimd/xsimd.hpp' libxsimd-dev "xsimd"
}

cores() { nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2; }
