# Ill-formed code and the message it must print, as tests fail.NAME. ../CMakeLists.txt includes this.

set(fail_compilers "")
foreach(compiler IN ITEMS "${PLAIT_GCC}" "${PLAIT_CLANG}")
  if(compiler AND NOT (PLAIT_TEST_QUICK AND PLAIT_CLANG AND NOT compiler STREQUAL "${PLAIT_CLANG}"))
    list(APPEND fail_compilers --compiler "${compiler}")
  endif()
endforeach()
find_program(PLAIT_FAIL_NVCC NAMES nvcc HINTS /usr/local/cuda/bin)  # for the cases that need it
mark_as_advanced(PLAIT_FAIL_NVCC)
if(PLAIT_FAIL_NVCC AND PLAIT_TEST_CUDA AND NOT PLAIT_TEST_QUICK)
  list(APPEND fail_compilers --compiler "${PLAIT_FAIL_NVCC}")
endif()

# Headers of most cases, compiled once for each compiler.
set(precompiled "${CMAKE_CURRENT_BINARY_DIR}/fail_precompiled")
set(precompiled_files "")
foreach(kind IN ITEMS gcc clang)
  if(kind STREQUAL "clang")
    set(compiler "${PLAIT_CLANG}")
    set(file "${precompiled}/clang/layers.pch")
  else()
    set(compiler "${PLAIT_GCC}")
    set(file "${precompiled}/gcc/layers.hpp.gch")
  endif()
  if(NOT compiler IN_LIST fail_compilers)
    continue()
  endif()
  add_custom_command(OUTPUT "${file}"
    COMMAND "${Python3_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/fail/precompile.py" --compiler "${compiler}"
      --include "${PROJECT_SOURCE_DIR}/include" --out "${precompiled}" --depfile "${file}.d"
    DEPENDS fail/layers.hpp fail/precompile.py fail/run_case.py
    DEPFILE "${file}.d"
    COMMENT "Precompiling what cases of fail include with ${compiler}"
    VERBATIM)
  list(APPEND precompiled_files "${file}")
endforeach()
add_custom_target(plait_fail_precompiled ALL DEPENDS ${precompiled_files})

plait_glob(sources "fail/*.cpp")
foreach(kind IN ITEMS gcc clang)
  set(compiler "${PLAIT_GCC}")
  if(kind STREQUAL "clang")
    set(compiler "${PLAIT_CLANG}")
  endif()
  if(NOT compiler IN_LIST fail_compilers)
    continue()
  endif()
  add_test(NAME fail.fixed_${kind} COMMAND "${Python3_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/fail/fixed.py"
    --compiler "${compiler}" --include "${PROJECT_SOURCE_DIR}/include" --out "${CMAKE_CURRENT_BINARY_DIR}/fixed_${kind}.cpp"
    ${sources})
  set_tests_properties(fail.fixed_${kind} PROPERTIES TIMEOUT 120 LABELS fail)
endforeach()
foreach(source IN LISTS sources)
  get_filename_component(name "${source}" NAME_WE)
  add_test(NAME fail.${name} COMMAND "${Python3_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/fail/run_case.py"
    ${fail_compilers} --include "${PROJECT_SOURCE_DIR}/include" --precompiled "${precompiled}" "${source}")
  set_tests_properties(fail.${name} PROPERTIES TIMEOUT 300 LABELS fail)
endforeach()
