# The same two programs in every consumer: `app` includes every header in two translation units and links with all that
# there is; `algebra` needs plait::plait alone.
get_target_property(include plait::plait INTERFACE_INCLUDE_DIRECTORIES)
string(REGEX REPLACE ".*BUILD_INTERFACE:([^>;]*)>.*" "\\1" include "${include}")

file(GLOB_RECURSE headers RELATIVE "${include}" "${include}/plait/*.hpp")
if(NOT headers)
  message(FATAL_ERROR "no headers below '${include}'")
endif()
set(all "")
foreach(header IN LISTS headers)
  if(NOT header MATCHES "cuda|nccl" AND (TARGET plait::mpi OR NOT header MATCHES "mpi"))
    string(APPEND all "#include <${header}>\n")
  endif()
endforeach()
file(WRITE "${CMAKE_CURRENT_BINARY_DIR}/generated/all.hpp" "${all}")

add_executable(algebra "${CMAKE_CURRENT_LIST_DIR}/algebra.cpp")
target_link_libraries(algebra PRIVATE plait::plait)
if(HEADERS_ALONE)
  return()
endif()

add_executable(app "${CMAKE_CURRENT_LIST_DIR}/app.cpp" "${CMAKE_CURRENT_LIST_DIR}/other.cpp")
target_include_directories(app PRIVATE "${CMAKE_CURRENT_BINARY_DIR}/generated")
target_link_libraries(app PRIVATE plait::cpu ${app_links})
if(TARGET plait::mpi)
  target_link_libraries(app PRIVATE plait::mpi)
endif()
