// Where the tests' folder lies. (For this translation unit's sake CMake precompiles catch.hpp, which all tests then use.)
#include "environment.hpp"

std::string keel_test::data_path(std::string_view name) { return std::string(KEEL_TEST_FOLDER "/").append(name); }
