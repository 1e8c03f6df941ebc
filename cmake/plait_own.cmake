# plait::own: warnings, the processor's instruction set, sanitizers, fmt, PCRE2 and utf8proc. Only plait's own programs
# use it.

include_guard(GLOBAL)

add_library(plait_own INTERFACE)
add_library(plait::own ALIAS plait_own)
target_compile_options(plait_own INTERFACE -Wall -Wextra -Wpedantic -Wshadow)
target_include_directories(plait_own INTERFACE "${PROJECT_SOURCE_DIR}/examples")  # tests include parts of examples
find_package(fmt QUIET)
if(TARGET fmt::fmt)
  target_link_libraries(plait_own INTERFACE fmt::fmt)
endif()
# Libraries for reading tokenizers.
foreach(library IN ITEMS pcre2-8 utf8proc)
  string(MAKE_C_IDENTIFIER "PLAIT_LIBRARY_${library}" found)
  find_library(${found} ${library})
  mark_as_advanced(${found})
  if(${found})
    target_link_libraries(plait_own INTERFACE "${${found}}")
  else()
    list(APPEND plait_own_missing ${library})
  endif()
endforeach()
if(PLAIT_WERROR)
  target_compile_options(plait_own INTERFACE -Werror)
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # By default g++ collects garbage from 128 MiB on, in a tenth to a fifth of its time. Without it the largest file
  # needs 1.2 GiB.
  target_compile_options(plait_own INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:--param=ggc-min-heapsize=1500000> $<$<COMPILE_LANGUAGE:CXX>:--param=ggc-min-expand=1000>)
endif()
if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")  # clang warns about loops with a pragma that it cannot vectorise
  target_compile_options(plait_own INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-pass-failed>)
endif()
# Options for files that take longer to compile than to run. clang's -Og equals its -O1.
set(plait_quick_to_compile $<IF:$<CXX_COMPILER_ID:GNU>,-Og,-O0>)
if(PLAIT_NATIVE)
  target_compile_options(plait_own INTERFACE -march=native)
endif()
if(PLAIT_SANITIZE)
  if(NOT PLAIT_SANITIZE MATCHES "^(address|undefined|address,undefined|undefined,address|thread)$")
    message(FATAL_ERROR "PLAIT_SANITIZE is '${PLAIT_SANITIZE}'; legal are address, undefined, address,undefined and thread")
  endif()
  target_compile_options(plait_own INTERFACE
    -fsanitize=${PLAIT_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  target_link_options(plait_own INTERFACE -fsanitize=${PLAIT_SANITIZE})
  if(PLAIT_SANITIZE MATCHES "undefined" AND CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    # These checks would take a third of the compilation time. The address sanitizer finds a null pointer when it is
    # used. No function is called through a cast. Targets that read files and arrays of callers set PLAIT_ALIGNMENT.
    target_compile_options(plait_own INTERFACE -fno-sanitize=null,vptr,function
      $<$<NOT:$<BOOL:$<TARGET_PROPERTY:PLAIT_ALIGNMENT>>>:-fno-sanitize=alignment>)
  endif()
  if(PLAIT_SANITIZE MATCHES "undefined" AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # With checks for null pointers, g++ assumes that inline variables may have the same address. Then no comparison of
    # two tags is a constant. The address sanitizer finds a null pointer when it is used.
    target_compile_options(plait_own INTERFACE -fno-sanitize=null,nonnull-attribute,returns-nonnull-attribute)
  endif()
endif()
