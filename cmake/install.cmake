# Installs the headers and the package that find_package(keel) reads. All paths in it are relative to its own place.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(package_directory "${CMAKE_INSTALL_DATADIR}/cmake/keel")
install(TARGETS keel EXPORT keel_targets FILE_SET HEADERS DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
install(EXPORT keel_targets NAMESPACE keel:: FILE keel-targets.cmake DESTINATION "${package_directory}")

configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/keel-config.cmake.in"
                              "${PROJECT_BINARY_DIR}/cmake/keel-config.cmake"
                              INSTALL_DESTINATION "${package_directory}" NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file("${PROJECT_BINARY_DIR}/cmake/keel-config-version.cmake"
                                 COMPATIBILITY SameMinorVersion ARCH_INDEPENDENT)
install(FILES "${PROJECT_BINARY_DIR}/cmake/keel-config.cmake" "${PROJECT_BINARY_DIR}/cmake/keel-config-version.cmake"
              "${PROJECT_SOURCE_DIR}/cmake/keel_xsimd.cmake" DESTINATION "${package_directory}")
install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" DESTINATION "${CMAKE_INSTALL_DATADIR}/licenses/keel")
