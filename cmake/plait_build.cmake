# Settings of a build of plait itself; nothing here reaches a project that embeds it.

get_property(plait_multi_config GLOBAL PROPERTY GENERATOR_IS_MULTI_CONFIG)
if(NOT plait_multi_config AND NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Debug, Release, RelWithDebInfo or MinSizeRel" FORCE)
endif()

find_program(PLAIT_CCACHE ccache)
mark_as_advanced(PLAIT_CCACHE)
if(PLAIT_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # What it must be told where headers are precompiled, and so that another copy of the same sources hits.
  set(plait_ccache "${CMAKE_COMMAND}" -E env CCACHE_SLOPPINESS=pch_defines,time_macros
    "CCACHE_BASEDIR=${PROJECT_SOURCE_DIR}" CCACHE_NOHASHDIR=1)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # By preprocessed text, a precompiled header whose comments alone had changed was a hit; g++ knows included files by their
    # bytes and read that header twice. So files themselves are compared, and what was kept by text is left out.
    list(APPEND plait_ccache CCACHE_DEPEND=1 CCACHE_NAMESPACE=plait)
  endif()
  list(APPEND plait_ccache "${PLAIT_CCACHE}")
  set(CMAKE_CXX_COMPILER_LAUNCHER ${plait_ccache})
endif()

if(NOT CMAKE_RUNTIME_OUTPUT_DIRECTORY)
  set(CMAKE_RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/bin")
endif()
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_CXX_EXTENSIONS OFF)
