# libFuzzer targets, as tests fuzz.NAME. ../CMakeLists.txt includes this.

set(PLAIT_FUZZ_SECONDS 5 CACHE STRING "How long each libFuzzer target runs in the tests")
set(fuzzer_library "")
if(PLAIT_CLANG)
  execute_process(COMMAND "${PLAIT_CLANG}" -print-file-name=libclang_rt.fuzzer-x86_64.a
    OUTPUT_VARIABLE fuzzer_library OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(NOT EXISTS "${fuzzer_library}")
    execute_process(COMMAND "${PLAIT_CLANG}" -print-file-name=libclang_rt.fuzzer.a
      OUTPUT_VARIABLE fuzzer_library OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
endif()
if(EXISTS "${fuzzer_library}")
  plait_glob(sources "fuzz/*.cpp")
  set(fuzzers "")
  foreach(source IN LISTS sources)
    get_filename_component(name "${source}" NAME_WE)
    set(program "${CMAKE_RUNTIME_OUTPUT_DIRECTORY}/fuzz_${name}")
    add_custom_command(OUTPUT "${program}"
      COMMAND "${PLAIT_CLANG}" -std=c++20 -O1 -g1 -Wall -Wextra -Wshadow -Werror -fsanitize=fuzzer,address,undefined
        -fno-sanitize=null,vptr,function -fno-sanitize-recover=all -I "${PROJECT_SOURCE_DIR}/include" -I "${PROJECT_SOURCE_DIR}/examples" -MD -MF "${program}.d" "${source}" -o "${program}"
      DEPENDS "${source}" DEPFILE "${program}.d"
      COMMENT "Building the fuzzer of ${name} with ${PLAIT_CLANG}"
      VERBATIM)
    list(APPEND fuzzers "${program}")
    set(found "${CMAKE_CURRENT_BINARY_DIR}/fuzz/${name}")  # keeps inputs that reach new code for later runs
    file(MAKE_DIRECTORY "${found}")
    math(EXPR seconds "${PLAIT_FUZZ_SECONDS} + 60")
    add_test(NAME fuzz.${name} COMMAND "${program}" -seed=1 -max_total_time=${PLAIT_FUZZ_SECONDS} -rss_limit_mb=2048
      -timeout=20 -max_len=4096 "-dict=${CMAKE_CURRENT_SOURCE_DIR}/fuzz/${name}.dict" "-artifact_prefix=${found}-"
      "${found}" "${CMAKE_CURRENT_SOURCE_DIR}/fuzz/${name}")
    set_tests_properties(fuzz.${name} PROPERTIES TIMEOUT ${seconds} LABELS fuzz)
  endforeach()
  add_custom_target(plait_fuzz ALL DEPENDS ${fuzzers})
endif()
