# Finds UCX and defines the imported target kvferry::ucx_dep.
#
# KVFERRY_UCX = AUTO    the libucx wheel of the chosen Python if it has one, else the system's
#               WHEEL   the libucx wheel or an error
#               SYSTEM  pkg-config ucx >= 1.13 or an error
# KVFERRY_UCX_ROOT      folder of an unpacked wheel (the one holding lib/ and include/); skips the search
#
# An installed kvferry prefers the wheel that it was built with (KVFERRY_UCX_BUILT_WITH).
#
# Sets KVFERRY_UCX_VERSION and KVFERRY_UCX_ORIGIN for the configure summary, and KVFERRY_UCX_WHEEL, the
# wheel's folder or nothing, for whoever takes an installed kvferry.

set(KVFERRY_UCX "AUTO" CACHE STRING "Where UCX comes from: AUTO, WHEEL or SYSTEM")
set_property(CACHE KVFERRY_UCX PROPERTY STRINGS AUTO WHEEL SYSTEM)
set(KVFERRY_UCX_ROOT "" CACHE PATH "Folder of the libucx package (holds lib/ and include/)")

if(NOT KVFERRY_UCX MATCHES "^(AUTO|WHEEL|SYSTEM)$")
  message(FATAL_ERROR "KVFERRY_UCX is '${KVFERRY_UCX}'; it must be AUTO, WHEEL or SYSTEM")
endif()

if(TARGET kvferry::ucx_dep)  # Somebody else in this program has taken kvferry.
  return()
endif()

set(_ucx_root "${KVFERRY_UCX_ROOT}")
if(NOT _ucx_root AND KVFERRY_UCX STREQUAL "AUTO" AND
   EXISTS "${KVFERRY_UCX_BUILT_WITH}/lib/cmake/ucx/ucx-config.cmake")
  set(_ucx_root "${KVFERRY_UCX_BUILT_WITH}")
endif()
if(NOT _ucx_root AND NOT KVFERRY_UCX STREQUAL "SYSTEM")
  find_package(Python3 COMPONENTS Interpreter QUIET)
  if(Python3_Interpreter_FOUND)
    execute_process(
      COMMAND "${Python3_EXECUTABLE}" -c
              "import importlib.util as u; print(u.find_spec('libucx').submodule_search_locations[0])"
      OUTPUT_VARIABLE _ucx_root OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
endif()

if(_ucx_root AND EXISTS "${_ucx_root}/lib/cmake/ucx/ucx-config.cmake")
  find_package(ucx CONFIG REQUIRED PATHS "${_ucx_root}/lib/cmake/ucx" NO_DEFAULT_PATH)
  add_library(kvferry::ucx_dep INTERFACE IMPORTED GLOBAL)
  target_link_libraries(kvferry::ucx_dep INTERFACE ucx::ucp ucx::ucs)
  set(KVFERRY_UCX_ORIGIN "wheel at ${_ucx_root}")
  set(KVFERRY_UCX_WHEEL "${_ucx_root}")
  set(_ucx_header "${_ucx_root}/include/ucp/api/ucp_version.h")
elseif(KVFERRY_UCX_ROOT)
  message(FATAL_ERROR "KVFERRY_UCX_ROOT is '${KVFERRY_UCX_ROOT}', which has no lib/cmake/ucx/ucx-config.cmake: set it "
                      "to the folder libucx of an unpacked wheel, or to nothing for a search")
elseif(KVFERRY_UCX STREQUAL "WHEEL")
  message(FATAL_ERROR "KVFERRY_UCX=WHEEL but no libucx package was found: pip install libucx-cu13, "
                      "or set KVFERRY_UCX_ROOT to the folder that holds its lib/ and include/")
else()
  find_package(PkgConfig REQUIRED)
  pkg_check_modules(KVFERRY_PC_UCX REQUIRED IMPORTED_TARGET "ucx>=1.13")
  add_library(kvferry::ucx_dep INTERFACE IMPORTED GLOBAL)
  target_link_libraries(kvferry::ucx_dep INTERFACE PkgConfig::KVFERRY_PC_UCX)
  set(KVFERRY_UCX_ORIGIN "system (pkg-config)")
  set(KVFERRY_UCX_WHEEL "")
  set(_ucx_header "")
  set(KVFERRY_UCX_VERSION "${KVFERRY_PC_UCX_VERSION}")
endif()

if(_ucx_header)
  file(STRINGS "${_ucx_header}" _ucx_lines REGEX "define UCP_API_(MAJOR|MINOR) ")
  string(REGEX REPLACE ".*UCP_API_MAJOR +([0-9]+).*UCP_API_MINOR +([0-9]+).*" "\\1.\\2"
         KVFERRY_UCX_VERSION "${_ucx_lines}")
endif()
