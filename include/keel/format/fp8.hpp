// The two FP8 formats of the OCP specification. Same layouts as __nv_fp8_e4m3 and __nv_fp8_e5m2, and as float8_e4m3fn
// and float8_e5m2 of torch and ml_dtypes.
//
// Row primitives read them as raw values; scaled FP8 is a block_scaled view. They have no default overflow.
#pragma once

#include <keel/format/minifloat.hpp>

namespace keel {

/// 4 significant bits up to 448, no Inf; one NaN, 7F.
using e4m3 = minifloat<4, 3, 7, specials::fn>;

/// 3 significant bits up to 57344; Inf 7C, one NaN, 7F.
using e5m2 = minifloat<5, 2, 15, specials::ieee>;

} // namespace keel
