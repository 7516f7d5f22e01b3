# Finds xsimd (8.1 or later) and makes of it the imported target keel::xsimd: its include path, and nothing else.
# Used by keel's own build and, installed beside keel-config.cmake, by find_package(keel). Looks for a target that the
# project has already, then for a package, then for the headers alone. Where nothing is found it makes no target.
# (Packages differ in the name of their target, and Debian's asks to link a library that does not exist.)

function(keel_xsimd)
    if(TARGET keel::xsimd)
        return()
    endif()

    if(NOT TARGET xsimd AND NOT TARGET xsimd::xsimd)
        find_package(xsimd CONFIG QUIET HINTS ${ARGN})
        if(xsimd_FOUND AND xsimd_VERSION VERSION_LESS 8.1)
            message(STATUS "keel: xsimd ${xsimd_VERSION} in ${xsimd_DIR} is too old (8.1 is needed)")
            return()
        endif()
    endif()

    set(include_directories)
    foreach(target xsimd xsimd::xsimd)
        if(TARGET ${target} AND NOT include_directories)
            get_target_property(include_directories ${target} INTERFACE_INCLUDE_DIRECTORIES)
        endif()
    endforeach()

    if(NOT include_directories)
        find_path(KEEL_XSIMD_INCLUDE_DIR xsimd/xsimd.hpp HINTS ${ARGN} PATH_SUFFIXES include)
        mark_as_advanced(KEEL_XSIMD_INCLUDE_DIR)
        if(NOT KEEL_XSIMD_INCLUDE_DIR)
            return()
        endif()
        file(STRINGS "${KEEL_XSIMD_INCLUDE_DIR}/xsimd/config/xsimd_config.hpp" version
             REGEX "define XSIMD_VERSION_(MAJOR|MINOR) [0-9]+")
        string(REGEX REPLACE "[^0-9;]" "" version "${version}")
        list(JOIN version "." version)
        if(version VERSION_LESS 8.1)
            message(STATUS "keel: xsimd ${version} in ${KEEL_XSIMD_INCLUDE_DIR} is too old (8.1 is needed)")
            return()
        endif()
        set(include_directories "${KEEL_XSIMD_INCLUDE_DIR}")
    endif()

    add_library(keel::xsimd INTERFACE IMPORTED GLOBAL)
    set_target_properties(keel::xsimd PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "${include_directories}")
endfunction()

keel_xsimd(${KEEL_XSIMD_HINTS})
