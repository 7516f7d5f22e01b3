// f16: IEEE 754 binary16. Same layout as __half, torch.float16 and numpy.float16.
#pragma once

#include <keel/format/minifloat.hpp>

namespace keel {

/// 11 significant bits up to 65504; one NaN, 7FFF.
using f16 = minifloat<5, 10, 15, specials::ieee>;

} // namespace keel
