# What every program that links kvferry needs, built with it or installed before it.

find_package(Threads REQUIRED)
find_package(absl REQUIRED)
find_package(spdlog REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(cppzmq REQUIRED)
# Up to 4.x the target is msgpackc-cxx, found as "msgpack"; later ones call both msgpack-cxx.
find_package(msgpackc-cxx CONFIG REQUIRED NAMES msgpackc-cxx msgpack-cxx msgpack)
if(NOT TARGET msgpackc-cxx)
  add_library(msgpackc-cxx ALIAS msgpack-cxx)
endif()
find_package(OpenSSL REQUIRED COMPONENTS Crypto)
find_package(PkgConfig REQUIRED)
pkg_check_modules(XXHASH REQUIRED IMPORTED_TARGET libxxhash)
include("${CMAKE_CURRENT_LIST_DIR}/KvferryUcx.cmake")
