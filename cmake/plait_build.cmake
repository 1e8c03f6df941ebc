# Settings of a build of plait itself. They do not affect a project that embeds plait.

get_property(plait_multi_config GLOBAL PROPERTY GENERATOR_IS_MULTI_CONFIG)
if(NOT plait_multi_config AND NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Debug, Release, RelWithDebInfo or MinSizeRel" FORCE)
endif()

find_program(PLAIT_CCACHE ccache)
mark_as_advanced(PLAIT_CCACHE)
if(PLAIT_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # Settings that ccache needs for precompiled headers, and for hits in another copy of the same sources. It compares
  # files, not preprocessed text, which saves a run of the preprocessor. And by text, a precompiled header with changed
  # comments was a hit, but g++ recognizes included files by their bytes, and read that header twice. The namespace hides
  # entries that were kept by text.
  set(plait_ccache "${CMAKE_COMMAND}" -E env CCACHE_SLOPPINESS=pch_defines,time_macros
    "CCACHE_BASEDIR=${PROJECT_SOURCE_DIR}" CCACHE_NOHASHDIR=1 CCACHE_DEPEND=1 CCACHE_NAMESPACE=plait "${PLAIT_CCACHE}")
  set(CMAKE_CXX_COMPILER_LAUNCHER ${plait_ccache})
endif()

if(NOT CMAKE_RUNTIME_OUTPUT_DIRECTORY)
  set(CMAKE_RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/bin")
endif()
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_CXX_EXTENSIONS OFF)

# plait_reference: HTML of the headers' documentation and of the Markdown pages, if doxygen is found. It fails on any
# warning.
find_package(Doxygen QUIET)
if(DOXYGEN_FOUND)
  block()
    set(DOXYGEN_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/reference")
    set(DOXYGEN_FILE_PATTERNS *.hpp *.md)
    set(DOXYGEN_EXCLUDE_PATTERNS "${PROJECT_SOURCE_DIR}/examples/*.hpp" "${PROJECT_SOURCE_DIR}/benchmarks/*.hpp")
    set(DOXYGEN_EXCLUDE_SYMBOLS *detail*)
    # doxygen does not find headings of other pages, finds pictures only by their names, and reads `*pl::` as a link.
    set(DOXYGEN_FILTER_PATTERNS "*.md=sed -e s/[.]md#[a-z-]*/.md/g -e s:[.][.]/timeline[.]svg:timeline.svg: -e '/`/s/\\([*&]\\)\\(pl[ait]*::\\)/\\1%\\2/g'")
    set(DOXYGEN_USE_MDFILE_AS_MAINPAGE "${PROJECT_SOURCE_DIR}/README.md")
    set(DOXYGEN_IMAGE_PATH "${PROJECT_SOURCE_DIR}/examples")
    set(DOXYGEN_STRIP_FROM_PATH "${PROJECT_SOURCE_DIR}")
    set(DOXYGEN_STRIP_FROM_INC_PATH "${PROJECT_SOURCE_DIR}/include")
    set(DOXYGEN_JAVADOC_AUTOBRIEF YES)
    set(DOXYGEN_EXTRACT_ALL YES)
    set(DOXYGEN_HAVE_DOT NO)
    set(DOXYGEN_MACRO_EXPANSION YES)
    set(DOXYGEN_EXPAND_ONLY_PREDEF YES)
    set(DOXYGEN_SEARCH_INCLUDES NO)
    set(DOXYGEN_PREDEFINED "PLAIT_COMPILED_TEMPLATE(...)=")  # doxygen would read instantiations as functions
    set(DOXYGEN_QUIET YES)
    set(DOXYGEN_WARN_AS_ERROR FAIL_ON_WARNINGS)
    doxygen_add_docs(plait_reference README.md include/plait examples benchmarks tests/known_bugs.md)
  endblock()
endif()
