# `cmake --install`: headers under include/kvferry, so that they are included as in the repository, static libraries, and
# what find_package(kvferry) reads. Included behind the last library.
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

set(_headers "${CMAKE_INSTALL_INCLUDEDIR}/kvferry")
set(_package "${CMAKE_INSTALL_LIBDIR}/cmake/kvferry")

get_property(_libraries GLOBAL PROPERTY KVFERRY_LIBRARIES)
install(TARGETS ${_libraries} EXPORT kvferry
        ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}"
        INCLUDES DESTINATION "${_headers}")
install(DIRECTORY base pool transport connector DESTINATION "${_headers}"
        FILES_MATCHING PATTERN "*.h" PATTERN "*_impl.h" EXCLUDE
        PATTERN transport/ucx EXCLUDE PATTERN transport/control EXCLUDE)
install(EXPORT kvferry NAMESPACE kvferry:: FILE kvferryTargets.cmake DESTINATION "${_package}")

# By which whoever takes it finds again what this build has found.
foreach(_library pool_cuda store_redis store_rocksdb)
  string(TOUPPER "KVFERRY_HAS_${_library}" _has)
  if(TARGET kvferry::${_library})
    set(${_has} ON)
  else()
    set(${_has} OFF)
  endif()
endforeach()
configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/kvferryConfig.cmake.in"
                              "${PROJECT_BINARY_DIR}/kvferryConfig.cmake"
                              INSTALL_DESTINATION "${_package}" NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file("${PROJECT_BINARY_DIR}/kvferryConfigVersion.cmake"
                                 COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/kvferryConfig.cmake"
              "${PROJECT_BINARY_DIR}/kvferryConfigVersion.cmake"
              "${PROJECT_SOURCE_DIR}/cmake/KvferryDependencies.cmake"
              "${PROJECT_SOURCE_DIR}/cmake/KvferryUcx.cmake"
        DESTINATION "${_package}")
