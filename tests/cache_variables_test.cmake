# cmake -DSOURCE=... -DBINARY=... -DPYTHON=... -P: values that a cache variable does not have are refused, by its name.
set(number 0)
foreach(wrong KVFERRY_CUDA=NO KVFERRY_REDIS=auto KVFERRY_ROCKSDB=0 KVFERRY_UCX=wheel KVFERRY_UCX_ROOT=/nowhere
              KVFERRY_SANITIZE=memory)
  math(EXPR number "${number} + 1")
  file(REMOVE_RECURSE "${BINARY}/${number}")
  execute_process(
    COMMAND "${CMAKE_COMMAND}" -G Ninja -S "${SOURCE}" -B "${BINARY}/${number}" "-DPython3_EXECUTABLE=${PYTHON}" "-D${wrong}"
    RESULT_VARIABLE result OUTPUT_QUIET ERROR_VARIABLE said)
  string(REPLACE "=" " is '" words "${wrong}'")
  string(FIND "${said}" "${words}" found)
  if(result EQUAL 0 OR found EQUAL -1)
    message(FATAL_ERROR "-D${wrong}: ${result}, not refused: ${said}")
  endif()
endforeach()
