# What keel's own tests, benchmarks and examples are compiled with. Nothing here reaches a consumer.

set(KEEL_MARCH native CACHE STRING "-march of tests, benchmarks and examples; empty for the compiler's default")
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
    set(CMAKE_BUILD_TYPE Release)
endif()

find_program(KEEL_CCACHE ccache)
mark_as_advanced(KEEL_CCACHE)
if(KEEL_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
    # The sloppiness is what ccache asks for before it caches files that use a precompiled header. With a base directory,
    # another clone of this tree finds what the first one compiled.
    set(CMAKE_CXX_COMPILER_LAUNCHER "${CMAKE_COMMAND}" -E env CCACHE_SLOPPINESS=pch_defines,time_macros
        "CCACHE_BASEDIR=${PROJECT_SOURCE_DIR}" CCACHE_NOHASHDIR=1 "${KEEL_CCACHE}")
endif()

set(KEEL_WARNINGS -Wall -Wextra -Wshadow -Wconversion -Wsign-conversion -Wdouble-promotion -Wundef -Werror)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # g++ 12 and 13 see overflows in std::string's operator+ that are none (GCC bug 105651); clang++ and the sanitizers look too.
    list(APPEND KEEL_WARNINGS -Wno-restrict -Wno-stringop-overflow -Wno-array-bounds)
    # g++ 12.2 with AVX-512 stores the constants {a, a, 0, 0} of four 64-bit integers as {a, a, a, a}, such as an argument of 32 bytes.
    if(CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 12 AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 12.3)
        set(KEEL_CORRECT_CODE -fno-tree-slp-vectorize)
    endif()
endif()

add_library(keel_developer INTERFACE)
target_link_libraries(keel_developer INTERFACE keel::keel)
target_compile_options(keel_developer INTERFACE
    "$<$<COMPILE_LANGUAGE:CXX>:${KEEL_WARNINGS};${KEEL_CORRECT_CODE}>"
    "$<$<AND:$<BOOL:${KEEL_MARCH}>,$<COMPILE_LANGUAGE:CXX>>:-march=${KEEL_MARCH}>")
set(CMAKE_CXX_EXTENSIONS OFF)

find_package(Threads REQUIRED)
target_link_libraries(keel_developer INTERFACE Threads::Threads)

# keel_eigen: Eigen for tests (as oracle), benchmarks (as peer) and examples. One thread, so that it is a steady peer.
function(keel_need_eigen)
    if(TARGET keel_eigen)
        return()
    endif()
    find_package(Eigen3 CONFIG QUIET)
    if(NOT TARGET Eigen3::Eigen AND KEEL_FETCH)
        include("${PROJECT_SOURCE_DIR}/cmake/fetch.cmake")
        keel_fetch(eigen)
    endif()
    if(NOT TARGET Eigen3::Eigen)
        message(FATAL_ERROR "keel: Eigen >= 3.4 was not found (Debian: libeigen3-dev)")
    endif()
    add_library(keel_eigen INTERFACE)
    target_link_libraries(keel_eigen INTERFACE Eigen3::Eigen)
    target_compile_definitions(keel_eigen INTERFACE EIGEN_DONT_PARALLELIZE)
    # gcc 12 takes the _mm512_undefined_ps of its own header for a mistake of Eigen's.
    target_compile_options(keel_eigen INTERFACE $<$<CXX_COMPILER_ID:GNU>:-Wno-uninitialized -Wno-maybe-uninitialized>)
endfunction()
