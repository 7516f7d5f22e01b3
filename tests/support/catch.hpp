// Catch2, whichever major version the build found. Tests include this and no header of Catch2 itself.
#pragma once

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif

#if defined(CATCH_VERSION_MAJOR) && CATCH_VERSION_MAJOR >= 3
using Catch::Approx;
using Catch::Matchers::ContainsSubstring;
#else
namespace Catch::Matchers {
/// The name that Catch2 v3 gives to v2's Contains on strings.
inline auto ContainsSubstring(std::string const& text) { return Contains(text); }
} // namespace Catch::Matchers
#endif
