# Reads the leading comments of test programs, and joins files to programs: for this folder, and for benchmarks/cuda,
# which builds tests/cuda without this folder.

# The value of the first line that reads `// KEY: VALUE` (`# KEY: VALUE` in shell scripts).
function(plait_header_value result file key default)
  file(STRINGS "${file}" lines REGEX "^(//|#) ${key}: ")
  set(value "${default}")
  if(lines)
    list(GET lines 0 value)
    string(REGEX REPLACE "^(//|#) ${key}: *" "" value "${value}")
  endif()
  set(${result} "${value}" PARENT_SCOPE)
endfunction()

# `result` has the sources, except those with the line `// stand-in: VALUE`: `only` leaves a file out of programs for
# GPUs, `never` out of those for the stand-in.
function(plait_leave_out result value)
  set(kept "")
  foreach(source IN LISTS ARGN)
    plait_header_value(stand_in "${source}" stand-in "")
    if(NOT stand_in MATCHES "^${value}")
      list(APPEND kept "${source}")
    endif()
  endforeach()
  set(${result} ${kept} PARENT_SCOPE)
endfunction()

# The sources that name one program become one file in the build tree, which includes them and has the extension of the
# first. `result` has the files to compile. plait_parts gives the sources of a file.
function(plait_join result folder)
  set(programs "")
  set(compiled "")
  foreach(source IN LISTS ARGN)
    plait_header_value(program "${source}" program "")
    if(program STREQUAL "")
      list(APPEND compiled "${source}")
    else()
      list(APPEND programs "${program}")
      list(APPEND parts_of_${program} "${source}")
    endif()
  endforeach()
  list(REMOVE_DUPLICATES programs)
  foreach(program IN LISTS programs)
    set(text "")
    foreach(part IN LISTS parts_of_${program})
      cmake_path(RELATIVE_PATH part BASE_DIRECTORY "${CMAKE_CURRENT_FUNCTION_LIST_DIR}" OUTPUT_VARIABLE within)
      string(APPEND text "#include \"${within}\"\n")  # does not depend on the folder of the tree, for compiler caches
    endforeach()
    list(GET parts_of_${program} 0 first)
    cmake_path(GET first EXTENSION extension)
    set(file "${PROJECT_BINARY_DIR}/joined/${folder}/${program}${extension}")
    file(CONFIGURE OUTPUT "${file}" CONTENT "${text}" @ONLY)
    list(APPEND compiled "${file}")
    set_property(GLOBAL PROPERTY "plait_parts_of_${file}" ${parts_of_${program}})
  endforeach()
  set(${result} "${compiled}" PARENT_SCOPE)
endfunction()

# The files with the test cases of `source`: itself, or its parts.
function(plait_parts result source)
  get_property(parts GLOBAL PROPERTY "plait_parts_of_${source}")
  if(NOT parts)
    set(parts "${source}")
  endif()
  set(${result} "${parts}" PARENT_SCOPE)
endfunction()

# The option that selects the test cases of the file `part`. The compiler records the path that it was given, which a
# compiler cache may make relative, so the option has the path below tests/ only.
function(plait_cases_of result part)
  cmake_path(RELATIVE_PATH part BASE_DIRECTORY "${CMAKE_CURRENT_FUNCTION_LIST_DIR}" OUTPUT_VARIABLE within)
  set(${result} "--source-file=*/${within}" PARENT_SCOPE)
endfunction()

# The name of a file below `folder`, without its extension: a_b for a/b.cpp.
function(plait_name result folder source)
  cmake_path(IS_PREFIX folder "${source}" within)
  if(within)
    cmake_path(RELATIVE_PATH source BASE_DIRECTORY "${folder}" OUTPUT_VARIABLE name)
  else()
    cmake_path(GET source FILENAME name)
  endif()
  string(REGEX REPLACE "[.](cpp|cu)$" "" name "${name}")
  string(REPLACE "/" "_" name "${name}")
  set(${result} "${name}" PARENT_SCOPE)
endfunction()

# Tests of one kind share precompiled headers: `kind` is an object library with the options of its programs.
option(PLAIT_TEST_PRECOMPILED "Compile the headers that most test programs include once" ON)
function(plait_precompile kind)
  if(PLAIT_TEST_PRECOMPILED)
    target_precompile_headers(${kind} PRIVATE "${PROJECT_SOURCE_DIR}/tests/support/precompiled.hpp")
  endif()
endfunction()
# A source that sets a macro of the library reads the headers itself.
function(plait_share_precompiled target kind source)
  file(STRINGS "${source}" settings REGEX "^#define PLAIT_")
  if(PLAIT_TEST_PRECOMPILED AND NOT settings)
    target_precompile_headers(${target} REUSE_FROM ${kind})
  endif()
endfunction()
