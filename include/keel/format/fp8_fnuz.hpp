// The two FP8 formats without Inf and without -0, of AMD's CDNA 3 and of Graphcore. Same layouts as __hip_fp8_e4m3_fnuz and
// __hip_fp8_e5m2_fnuz, and as float8_e4m3fnuz and float8_e5m2fnuz of torch and ml_dtypes.
//
// Not the bits of e4m3 and e5m2: the bias is larger by one, and the code of their -0 is the NaN.
#pragma once

#include <keel/format/minifloat.hpp>

namespace keel {

/// 4 significant bits up to 240, no Inf; the NaN is 80.
using e4m3fnuz = minifloat<4, 3, 8, specials::fnuz>;

/// 3 significant bits up to 57344, no Inf; the NaN is 80.
using e5m2fnuz = minifloat<5, 2, 16, specials::fnuz>;

} // namespace keel
