# cmake -DBUILD=... -DSOURCE=... -DBINARY=... -P: a program that finds kvferry where it is installed compiles, links and
# moves a page. The prefix is moved before, as images and packages do.
file(REMOVE_RECURSE "${BINARY}")
execute_process(COMMAND "${CMAKE_COMMAND}" --install "${BUILD}" --prefix "${BINARY}/staged"
                OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
file(RENAME "${BINARY}/staged" "${BINARY}/prefix")
execute_process(
  COMMAND "${CMAKE_COMMAND}" -G Ninja -S "${SOURCE}/tests/consumer" -B "${BINARY}/build"
          "-DCMAKE_PREFIX_PATH=${BINARY}/prefix"
  COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND "${CMAKE_COMMAND}" --build "${BINARY}/build" COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND "${BINARY}/build/consumer" COMMAND_ERROR_IS_FATAL ANY)
