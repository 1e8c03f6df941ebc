# Bugs in programs that were made parallel, as tests ports.NAME. ../CMakeLists.txt includes this.

# NAME.txt has the bugs of a file of examples/. Bugs that compile become the program ports_NAME, from NAME.cpp. The
# compiler must refuse the others; it runs with the options after `example`.
function(plait_add_port name example)
  set(bugs "${CMAKE_CURRENT_SOURCE_DIR}/ports/${name}.txt")
  set(script "${CMAKE_CURRENT_SOURCE_DIR}/ports/ports.py")
  set(made "${CMAKE_CURRENT_BINARY_DIR}/made/ports")
  file(MAKE_DIRECTORY "${made}")
  add_custom_command(OUTPUT "${made}/${name}.inc"
    COMMAND "${Python3_EXECUTABLE}" "${script}" write "${bugs}" --source "${PROJECT_SOURCE_DIR}" --out "${made}/${name}.inc"
    DEPENDS "${bugs}" "${script}" "${PROJECT_SOURCE_DIR}/examples/${example}"
    VERBATIM)
  add_executable(ports_${name} ports/${name}.cpp "${made}/${name}.inc")
  target_include_directories(ports_${name} PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}" "${CMAKE_CURRENT_BINARY_DIR}/made")
  if(CMAKE_BUILD_TYPE STREQUAL "Release")
    target_compile_options(ports_${name} PRIVATE ${plait_quick_to_compile} -UNDEBUG)
  endif()
  add_test(NAME ports.${name} COMMAND "${Python3_EXECUTABLE}" "${script}" check "${bugs}" --source "${PROJECT_SOURCE_DIR}"
    --compiler "${PLAIT_CLANG}" --scratch "${made}/${name}_compiled.cpp" --program $<TARGET_FILE:ports_${name}>
    "-I${PROJECT_SOURCE_DIR}/include" ${ARGN})
  set_tests_properties(ports.${name} PROPERTIES TIMEOUT 120 LABELS ports ENVIRONMENT "${test_environment}")
endfunction()

if(NOT PLAIT_CLANG)
  return()
endif()
plait_add_port(gpt2_c gpt2_c/parallel.cpp "-I${PROJECT_SOURCE_DIR}/examples/gpt2_c" -DPLAIT_COMPILED)
target_include_directories(ports_gpt2_c PRIVATE "${PROJECT_SOURCE_DIR}/examples/gpt2_c")
target_link_libraries(ports_gpt2_c PRIVATE plait::own plait::compiled)
if(PLAIT_TEST_QUICK)
  return()
endif()

# With the CPU as the stand-in for a GPU.
set(stand_in "${CMAKE_CURRENT_SOURCE_DIR}/stand_in")
plait_add_port(cuda_mlp cuda_mlp/parallel.cu "-I${stand_in}/cuda" "-I${stand_in}/nccl" -DPLAIT_CUDA_STAND_IN
  -DPLAIT_COMPILED -DPLAIT_COMPILED_CUDA)
target_link_libraries(ports_cuda_mlp PRIVATE plait_compiled_stand_in plait::own plait::compiled)
