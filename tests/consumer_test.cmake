# cmake -DSOURCE=... -DBINARY=... -DMODULES=... -P: a program that takes kvferry by add_subdirectory compiles, by the
# defaults of its own compiler. Not kvferry once more: that takes a quarter of an hour.
execute_process(
  COMMAND "${CMAKE_COMMAND}" -G Ninja -S "${SOURCE}/tests/consumer" -B "${BINARY}" "-DKVFERRY_SOURCE_DIR=${SOURCE}"
          "-DKVFERRY_UCX=${UCX}" "-DPython3_EXECUTABLE=${PYTHON}" -DKVFERRY_CUDA=OFF
  COMMAND_ERROR_IS_FATAL ANY)
file(STRINGS "${BINARY}/CMakeCache.txt" build_type REGEX "^CMAKE_BUILD_TYPE:")
if(build_type MATCHES "=.+")
  message(FATAL_ERROR "kvferry has set the build type of who takes it: ${build_type}")
endif()
execute_process(
  COMMAND "${CMAKE_COMMAND}" --build "${BINARY}" --target "CMakeFiles/consumer.dir/main.cc.o"
  COMMAND_ERROR_IS_FATAL ANY)
