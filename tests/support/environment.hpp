// What a test may ask of its surroundings: the long form of a sweep, and the files that lie beside the tests.
#pragma once

#include <cstdlib>
#include <string>
#include <string_view>

namespace keel_test {

/// True under `tests/run.sh --all` (environment variable KEEL_EXHAUSTIVE=1): sweep all values instead of a sample.
inline bool exhaustive() {
    char const* const text = std::getenv("KEEL_EXHAUSTIVE");
    return text != nullptr && std::string_view(text) == "1";
}

/// Path of a data file in the tests folder: data_path("format/data/e4m3.csv").
std::string data_path(std::string_view name);

} // namespace keel_test
