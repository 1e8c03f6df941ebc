# The programs of cuda/ on the stand-in runtime, as tests cuda_on_cpu.NAME. ../CMakeLists.txt includes this.

option(PLAIT_TEST_CUDA "Compile the tests for CUDA with nvcc, where it is found" ON)

# This folder replaces the CUDA toolkit's headers.
add_library(plait_cuda_stand_in INTERFACE)
target_include_directories(plait_cuda_stand_in INTERFACE
  "${CMAKE_CURRENT_SOURCE_DIR}/stand_in/cuda" "${CMAKE_CURRENT_SOURCE_DIR}/stand_in/nccl"
  "${CMAKE_CURRENT_SOURCE_DIR}/stand_in/cudnn")
target_compile_definitions(plait_cuda_stand_in INTERFACE PLAIT_CUDA_STAND_IN)

# The code that switches between the threads of a block, and multiplies, runs most often in these tests. Every build
# optimises it; the sanitizers do not check it, only kernels.
add_library(plait_stand_in_blocks STATIC EXCLUDE_FROM_ALL stand_in/cuda/stand_in/block.cpp)
target_compile_features(plait_stand_in_blocks PRIVATE cxx_std_20)
target_compile_options(plait_stand_in_blocks PRIVATE -O2 -march=native -Wall -Wextra -Wpedantic -Wshadow)
target_include_directories(plait_stand_in_blocks PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}/stand_in/cuda")
if(PLAIT_SANITIZE MATCHES "address")
  target_compile_definitions(plait_stand_in_blocks PRIVATE STAND_IN_ADDRESS_SANITIZER)
elseif(PLAIT_SANITIZE MATCHES "thread")
  target_compile_definitions(plait_stand_in_blocks PRIVATE STAND_IN_THREAD_SANITIZER)
endif()
target_link_libraries(plait_cuda_stand_in INTERFACE plait_stand_in_blocks)

add_library(cuda_on_cpu_main OBJECT cuda/main.cpp)
target_link_libraries(cuda_on_cpu_main PRIVATE doctest::doctest plait::own plait plait_cuda_stand_in)
target_include_directories(cuda_on_cpu_main PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}")

# plait::compiled_cuda with the stand-in.
set(sources "")
foreach(part IN ITEMS compiled_cuda compiled_cuda_double compiled_cuda_sort)
  list(APPEND sources "${PROJECT_SOURCE_DIR}/include/plait/${part}.cu")
endforeach()
add_library(plait_compiled_stand_in STATIC EXCLUDE_FROM_ALL ${sources})
set_source_files_properties(${sources} PROPERTIES LANGUAGE CXX)
target_link_libraries(plait_compiled_stand_in PRIVATE plait::own PUBLIC plait_cuda_stand_in plait)
target_compile_definitions(plait_compiled_stand_in INTERFACE PLAIT_COMPILED_CUDA)
set_target_properties(plait_compiled_stand_in PROPERTIES PLAIT_ALIGNMENT ON)
if(CMAKE_BUILD_TYPE STREQUAL "Release")
  target_compile_options(plait_compiled_stand_in PRIVATE -O2 -UNDEBUG)  # a dozen tests wait for its kernels
endif()

# A mask with a rule; some tests link its kernels.
add_library(cuda_on_cpu_rule_mask STATIC EXCLUDE_FROM_ALL cuda/rule_mask.cu)
set_source_files_properties(cuda/rule_mask.cu PROPERTIES LANGUAGE CXX)
target_link_libraries(cuda_on_cpu_rule_mask PRIVATE plait::own plait plait_cuda_stand_in)
if(CMAKE_BUILD_TYPE STREQUAL "Release")
  target_compile_options(cuda_on_cpu_rule_mask PRIVATE -O2 -UNDEBUG)
endif()

# `host` is plait::compiled, or plait::cpu for the headers only.
function(plait_cuda_options target host)
  target_link_libraries(${target} PRIVATE plait::own ${host} doctest::doctest)
  target_include_directories(${target} PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}")
  if(CMAKE_BUILD_TYPE STREQUAL "Release")
    target_compile_options(${target} PRIVATE ${plait_quick_to_compile} -UNDEBUG)
  endif()
endfunction()

add_library(plait_stand_in_headers OBJECT EXCLUDE_FROM_ALL precompiled.cpp)
target_link_libraries(plait_stand_in_headers PRIVATE plait_compiled_stand_in)
plait_cuda_options(plait_stand_in_headers plait::compiled)
plait_precompile(plait_stand_in_headers)

function(plait_add_cuda_on_cpu source)
  get_filename_component(program "${source}" NAME_WE)
  set(target cuda_on_cpu_${program})
  set_source_files_properties("${source}" PROPERTIES LANGUAGE CXX)
  add_executable(${target} "${source}" $<TARGET_OBJECTS:cuda_on_cpu_main>)
  target_link_libraries(${target} PRIVATE plait_cuda_stand_in)
  if(program MATCHES "^attention(_cp)?$")
    target_link_libraries(${target} PRIVATE cuda_on_cpu_rule_mask)
  endif()
  if(source MATCHES "[.]cpp$")
    target_link_libraries(${target} PRIVATE plait_compiled_stand_in)
    if(source MATCHES "/layer_ranges")  # all files of a program must define PLAIT_NVTX
      plait_cuda_options(${target} plait::cpu)
    else()
      plait_share_precompiled(${target} plait_stand_in_headers "${source}")
      plait_cuda_options(${target} plait::compiled)
    endif()
  else()
    # Headers only, except the sort, which is in no header: the program needs nothing else of the archive.
    target_link_libraries(${target} PRIVATE $<TARGET_FILE:plait_compiled_stand_in>)
    add_dependencies(${target} plait_compiled_stand_in)
    plait_cuda_options(${target} plait::cpu)
  endif()
  plait_parts(parts "${source}")
  foreach(part IN LISTS parts)
    plait_add_cuda_on_cpu_test(${target} "${part}")
  endforeach()
endfunction()

function(plait_add_cuda_on_cpu_test target part)
  get_filename_component(name "${part}" NAME_WE)
  plait_cases_of(cases_of_part "${part}")
  plait_header_value(seconds "${part}" timeout 120)
  set(labels cuda_on_cpu)
  set(cases "")
  if(PLAIT_SANITIZE MATCHES "thread")
    plait_header_value(cases "${part}" races "")
  endif()
  if(cases)
    set(cases "--test-case=${cases}")
    list(APPEND labels threads)
    add_dependencies(plait_thread_tests ${target})
  endif()
  if(PLAIT_SANITIZE)
    math(EXPR seconds "${seconds} * 5")
  endif()
  plait_label_threads(labels "${name}" ${target})
  # The order in which a block's threads run must not matter; if it does, a barrier is missing. Kernels and
  # communicators run in both orders. Communicators have one GPU for all ranks in one order and a GPU for each rank in
  # the other. Programs on top of them run in one order. Tests of staged transfers run in both, because streams run as
  # late as possible in one of them only. Tests of cuDNN run in one order: its own kernels are not here, and both orders
  # test those around them.
  set(orders shuffle)
  if(NOT PLAIT_SANITIZE AND name MATCHES "^(attention|checkpoint_staging|kernel_|launch|comm_)|nccl" AND NOT name MATCHES "^(nccl_graph|attention_cudnn)$")
    set(orders forward shuffle)
  endif()
  list(GET orders 0 first_order)
  foreach(order IN LISTS orders)
    set(test cuda_on_cpu.${name})
    if(NOT order STREQUAL first_order)
      set(test ${test}.${order})
    endif()
    set(environment "${test_environment};PLAIT_STAND_IN_ORDER=${order}")
    if(order STREQUAL "shuffle" AND NOT name STREQUAL "memory")  # its releases run as late as CUDA allows
      list(APPEND environment "PLAIT_STAND_IN_STREAMS=random")
    endif()
    if(name MATCHES "^(memory|products)$")  # they use the whole capacity, and the arena fills it
      list(APPEND environment "PLAIT_STAND_IN_MEMORY=268435456")
    endif()
    if(name MATCHES "nccl" AND order STREQUAL "shuffle")  # with a GPU for each rank as well as with one for all
      list(APPEND environment "PLAIT_STAND_IN_DEVICES=8")
      if(NOT name MATCHES "^comm_")  # their errors concern ranks that meet on the host
        list(APPEND environment "PLAIT_STAND_IN_NCCL=late")
      endif()
    endif()
    add_test(NAME ${test} COMMAND ${target} "${cases_of_part}" ${cases})
    set_tests_properties(${test} PROPERTIES TIMEOUT ${seconds} LABELS "${labels}" ENVIRONMENT "${environment}")
  endforeach()
  # Cases that one GPU cannot run are skipped there, without a failure.
  if(NOT PLAIT_SANITIZE AND name MATCHES "nccl" AND NOT name MATCHES "nccl_graph|clock|overlap")
    add_test(NAME cuda_on_cpu.${name}.one_gpu COMMAND ${target} "${cases_of_part}")
    set_tests_properties(cuda_on_cpu.${name}.one_gpu PROPERTIES TIMEOUT ${seconds} LABELS cuda_on_cpu
      ENVIRONMENT "${test_environment};PLAIT_TEST_ONE_GPU=1")
  endif()
endfunction()

plait_glob(cuda_sources "cuda/*/*.cu")
plait_glob(cuda_host_sources "cuda/*/*.cpp")
list(APPEND cuda_sources ${cuda_host_sources})
# Sanitizers check every kernel and the communicators; tests on the CPU check the layers that use them.
set(sanitized "/(attention|comm_[a-z_]+|kernel_[a-z_]+|launch)[.](cu|cpp)$")
plait_leave_out(sources never ${cuda_sources})
if(PLAIT_TEST_QUICK)
  set(sources "")
elseif(host_only)
  list(FILTER sources INCLUDE REGEX "${sanitized}")
elseif(PLAIT_TEST_ELSEWHERE)
  list(FILTER sources EXCLUDE REGEX "${sanitized}")
endif()
plait_join(sources cuda_on_cpu ${sources})
foreach(source IN LISTS sources)
  plait_add_cuda_on_cpu("${source}")
endforeach()

if(host_only OR PLAIT_TEST_QUICK)
  return()
endif()

# NCCL before version 2.28, without names of communicators and windows, is enough.
file(CONFIGURE OUTPUT older_nccl.cpp CONTENT
  "#include <plait/comm/launch/nccl.hpp>\n" @ONLY)
add_library(cuda_on_cpu_older_nccl OBJECT "${CMAKE_CURRENT_BINARY_DIR}/older_nccl.cpp")
target_link_libraries(cuda_on_cpu_older_nccl PRIVATE plait::own plait plait_cuda_stand_in)
target_compile_definitions(cuda_on_cpu_older_nccl PRIVATE PLAIT_STAND_IN_NCCL_MINOR=26)
target_compile_options(cuda_on_cpu_older_nccl PRIVATE -O0)

# The trainer of the examples, for GPUs that the CPU stands in for: scripts/trainer_cuda.sh runs it.
if(PLAIT_BUILD_EXAMPLES)
  set(trainer "${PROJECT_SOURCE_DIR}/examples/train_llama")
  set(sources trainer/stand_in_programs.cpp ${trainer}/gpus.cpp)
  set_source_files_properties(${sources} PROPERTIES LANGUAGE CXX)
  add_executable(train_llama_stand_in ${sources})
  target_compile_definitions(train_llama_stand_in PRIVATE PLAIT_TRAINER_CUDA PLAIT_WITH_NCCL)
  set_target_properties(train_llama_stand_in PROPERTIES UNITY_BUILD ON)  # half of their instantiations are the same
  target_include_directories(train_llama_stand_in PRIVATE ${trainer})
  target_link_libraries(train_llama_stand_in PRIVATE plait_compiled_stand_in train_llama_host)
  if(CMAKE_BUILD_TYPE STREQUAL "Release")
    target_compile_options(train_llama_stand_in PRIVATE ${plait_quick_to_compile})
  endif()
endif()
