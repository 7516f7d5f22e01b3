// The runner of the CUDA tests: says so and leaves where no device can be used.
#define CATCH_CONFIG_RUNNER
#include "catch.hpp"

#include <cstdio>

#include <cuda_runtime_api.h>

int main(int argc, char* argv[]) {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        std::puts("no CUDA device: compiled and linked, not run");
        return 0;
    }
    return Catch::Session().run(argc, argv);
}
