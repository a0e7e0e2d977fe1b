# kvferry_library(NAME SOURCES... [PUBLIC deps...] [PRIVATE deps...])
# One static library a folder, alias kvferry::NAME, includes rooted at the repository, or where its
# headers are installed.
function(kvferry_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;PUBLIC;PRIVATE" ${ARGN})
  add_library(kvferry_${name} STATIC ${ARG_SOURCES})
  add_library(kvferry::${name} ALIAS kvferry_${name})
  kvferry_installed(${name})
  target_include_directories(kvferry_${name} PUBLIC "$<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>")
  # For whoever takes kvferry by add_subdirectory: the headers need it.
  target_compile_features(kvferry_${name} PUBLIC cxx_std_20)
  target_link_libraries(kvferry_${name} PUBLIC ${ARG_PUBLIC} PRIVATE ${ARG_PRIVATE} $<BUILD_INTERFACE:kvferry_flags>)
endfunction()

# kvferry_installed(NAME): as kvferry::NAME, with KvferryInstall.
function(kvferry_installed name)
  set_target_properties(kvferry_${name} PROPERTIES EXPORT_NAME ${name})
  set_property(GLOBAL APPEND PROPERTY KVFERRY_LIBRARIES kvferry_${name})
endfunction()
