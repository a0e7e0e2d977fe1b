# cmake -DBUILD=... -DSOURCE=... -DBINARY=... -P: a program that finds kvferry where it is installed compiles, links and
# moves a page. The prefix is moved before, as images and packages do.
file(REMOVE_RECURSE "${BINARY}")
execute_process(COMMAND "${CMAKE_COMMAND}" --install "${BUILD}" --prefix "${BINARY}/staged"
                OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
file(RENAME "${BINARY}/staged" "${BINARY}/prefix")
# The second time as whenever a CMakeLists.txt was touched: it has to find the same.
foreach(time 1 2)
  execute_process(
    COMMAND "${CMAKE_COMMAND}" -G Ninja -S "${SOURCE}/tests/consumer" -B "${BINARY}/build"
            "-DCMAKE_PREFIX_PATH=${BINARY}/prefix"
    OUTPUT_VARIABLE configured COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCH "UCX of kvferry: [^\n]*" found_${time} "${configured}")
endforeach()
if(NOT found_1 OR NOT found_1 STREQUAL found_2)
  message(FATAL_ERROR "first '${found_1}', then '${found_2}'")
endif()
execute_process(COMMAND "${CMAKE_COMMAND}" --build "${BINARY}/build" COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND "${BINARY}/build/consumer" COMMAND_ERROR_IS_FATAL ANY)
