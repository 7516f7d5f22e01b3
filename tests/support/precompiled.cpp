// The translation unit for whose sake CMake precompiles catch.hpp; all test executables use the result.
#include "catch.hpp"
