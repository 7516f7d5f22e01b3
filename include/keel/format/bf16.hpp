// bf16: the upper half of a float. Same layout as __nv_bfloat16, torch.bfloat16 and ml_dtypes.bfloat16.
#pragma once

#include <keel/format/minifloat.hpp>

namespace keel {

/// float's range with 8 significant bits; one NaN, 7FFF. FLT_MAX rounds to Inf.
using bf16 = minifloat<8, 7, 127, specials::ieee>;

} // namespace keel
