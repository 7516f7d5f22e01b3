// The one source of keel's version; cmake reads it from here.
#pragma once

#define KEEL_VERSION_MAJOR 0
#define KEEL_VERSION_MINOR 1
#define KEEL_VERSION_PATCH 0

namespace keel {

/// Counts every change of any result's bits, from the first release on. Two releases with the same bits_version agree with memcmp.
inline constexpr int bits_version = 1;

} // namespace keel
