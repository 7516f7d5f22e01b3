# keel_fetch(name): downloads one of the dependencies below, each pinned to a commit. To build from a copy on disk, set
# FETCHCONTENT_SOURCE_DIR_<NAME>.
include(FetchContent)

FetchContent_Declare(xsimd SYSTEM # 14.3.0
    GIT_REPOSITORY https://github.com/xtensor-stack/xsimd.git
    GIT_TAG e88a72831858123924f7118f345dfe5d70d95991)
FetchContent_Declare(eigen SYSTEM # 3.4.0
    GIT_REPOSITORY https://gitlab.com/libeigen/eigen.git
    GIT_TAG 3147391d946bb4b6c68edd901f2add6ac1f31f8c)
FetchContent_Declare(catch2 SYSTEM # 3.7.1
    GIT_REPOSITORY https://github.com/catchorg/Catch2.git
    GIT_TAG fa43b77429ba76c462b1898d6cd2f2d7a9416b14)
FetchContent_Declare(benchmark SYSTEM # 1.9.5
    GIT_REPOSITORY https://github.com/google/benchmark.git
    GIT_TAG 192ef10025eb2c4cdd392bc502f0c852196baa48)

function(keel_fetch name)
    message(STATUS "keel: ${name} was not found here, downloading it (KEEL_FETCH)")
    set(BUILD_TESTING OFF)
    set(BENCHMARK_ENABLE_TESTING OFF)
    set(BENCHMARK_ENABLE_INSTALL OFF)
    set(EIGEN_BUILD_DOC OFF)
    set(EIGEN_BUILD_PKGCONFIG OFF)
    set(CATCH_INSTALL_DOCS OFF)
    set(CATCH_INSTALL_EXTRAS OFF)
    foreach(policy CMP0077 CMP0126) # normal variables above stand before the dependencies' options
        set(CMAKE_POLICY_DEFAULT_${policy} NEW)
    endforeach()
    FetchContent_MakeAvailable(${name})
endfunction()
