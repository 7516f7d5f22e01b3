// The test runner that every test executable links, compiled once.
#define CATCH_CONFIG_RUNNER
#include "catch.hpp"
#include "environment.hpp"

std::string keel_test::data_path(std::string_view name) { return std::string(KEEL_TEST_FOLDER "/").append(name); }

int main(int argc, char* argv[]) { return Catch::Session().run(argc, argv); }
