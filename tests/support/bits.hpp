// A same-bits program: each case is run on every backend of this build, which must agree, and its digest is printed for
// tests/bits/run.py to compare across compilers and instruction sets.
#pragma once

#include <cstdio>

#include <support/backends.hpp>
#include <support/data.hpp>

namespace keel_test {

inline int disagreements = 0;

/// run(backend, digest) computes one case and adds its results to the digest.
template <class Run> void same_bits(std::string const& name, Run run) {
    uint64_t first = 0;
    std::string first_backend;
    for_each_backend([&](std::string const& backend, auto const& be) {
        digest d;
        run(be, d);
        if (first_backend.empty()) first = d.value(), first_backend = backend;
        if (d.value() == first) return;
        std::fprintf(stderr, "%s: %s differs from %s\n", name.c_str(), backend.c_str(), first_backend.c_str());
        ++disagreements;
    });
    std::printf("%s %016llx\n", name.c_str(), static_cast<unsigned long long>(first));
}

} // namespace keel_test
