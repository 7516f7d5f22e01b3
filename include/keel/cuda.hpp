// Adds the CUDA backend. Compile this translation unit with nvcc; everything else of keel needs no CUDA.
#pragma once

#if !defined(__CUDACC__)
#error "keel/cuda.hpp needs nvcc; include keel/keel.hpp for the CPU"
#endif

#include <keel/backend/cuda/cuda.cuh>
