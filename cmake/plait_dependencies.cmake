# Finds the libraries of plait::cpu, mpi, uring, cuda, nccl and cudnn. The build and the installed package use it.
#
#   plait_find_cpu(<missing>)   oneDNN, OpenBLAS, libgomp, threads, nlohmann_json
#   plait_find_mpi(<missing>)   MPI for C++
#   plait_find_uring(<missing>) liburing
#   plait_find_cuda(<missing>)  CUDA's headers and runtime, cuBLASLt, NVTX (headers)
#   plait_find_nccl(<missing>)  NCCL
#   plait_find_cudnn(<missing>) cuDNN 9 and its header-only frontend
#
# CUDA's libraries come from a toolkit (PLAIT_CUDA_ROOT, CUDA_PATH, CUDA_HOME, the folder above nvcc, /usr/local/cuda),
# or from Python wheels (PLAIT_CUDA_WHEELS, the folder `nvidia` in site-packages of the python3 in PATH).
#
#   plait_add_compiled(<folder>)       plait::compiled, a library of compiled*.cpp there, built when linked with
#   plait_add_compiled_cuda(<folder>)  plait::compiled_cuda, of compiled_cuda*.cu; the project must have enabled CUDA
#
# Each plait_find_* sets <missing> to the list of missing parts, empty if all were found.

include_guard(DIRECTORY)

# oneDNN uses libgomp under every compiler, so this names libgomp. Under clang, FindOpenMP would add a second runtime
# (libomp) with a separate number of threads.
set(PLAIT_CPU_LIBRARIES DNNL::dnnl plait::openblas gomp Threads::Threads nlohmann_json::nlohmann_json)

# The deprecated C++ bindings of Open MPI and MPICH stay out of every translation unit.
set(PLAIT_MPI_DEFINITIONS OMPI_SKIP_MPICXX MPICH_SKIP_MPICXX)

# Debian has a folder of cblas.h and libopenblas for each threading variant; pkg-config finds it.
function(plait_find_openblas)
  if(TARGET plait::openblas)
    return()
  endif()
  find_package(PkgConfig QUIET)
  if(PkgConfig_FOUND)
    pkg_check_modules(PC_PLAIT_OPENBLAS QUIET openblas)
  endif()
  find_path(PLAIT_OPENBLAS_INCLUDE_DIR cblas.h
    HINTS ${PC_PLAIT_OPENBLAS_INCLUDE_DIRS} PATH_SUFFIXES openblas openblas-pthread)
  find_library(PLAIT_OPENBLAS_LIBRARY openblas
    HINTS ${PC_PLAIT_OPENBLAS_LIBRARY_DIRS} PATH_SUFFIXES openblas-pthread)
  mark_as_advanced(PLAIT_OPENBLAS_INCLUDE_DIR PLAIT_OPENBLAS_LIBRARY)
  if(PLAIT_OPENBLAS_INCLUDE_DIR AND PLAIT_OPENBLAS_LIBRARY)
    add_library(plait::openblas UNKNOWN IMPORTED GLOBAL)
    set_target_properties(plait::openblas PROPERTIES
      IMPORTED_LOCATION "${PLAIT_OPENBLAS_LIBRARY}"
      INTERFACE_INCLUDE_DIRECTORIES "${PLAIT_OPENBLAS_INCLUDE_DIR}")
  endif()
endfunction()

# A macro, so that imported targets land in the caller's scope.
macro(plait_find_cpu missing)
  set(${missing} "")
  plait_find_openblas()
  if(NOT TARGET plait::openblas)
    list(APPEND ${missing} OpenBLAS)
  endif()
  set(THREADS_PREFER_PTHREAD_FLAG ON)
  foreach(plait_package IN ITEMS dnnl Threads nlohmann_json)
    find_package(${plait_package} QUIET GLOBAL)
    if(NOT ${plait_package}_FOUND)
      list(APPEND ${missing} ${plait_package})
    endif()
  endforeach()
endmacro()

macro(plait_find_mpi missing)
  set(${missing} "")
  find_package(MPI QUIET GLOBAL COMPONENTS CXX)
  if(NOT MPI_CXX_FOUND)
    list(APPEND ${missing} MPI)
  endif()
endmacro()

function(plait_find_uring missing)
  set(${missing} "" PARENT_SCOPE)
  if(TARGET plait::liburing)
    return()
  endif()
  find_path(PLAIT_LIBURING_INCLUDE_DIR liburing.h)
  find_library(PLAIT_LIBURING_LIBRARY uring)
  mark_as_advanced(PLAIT_LIBURING_INCLUDE_DIR PLAIT_LIBURING_LIBRARY)
  if(NOT PLAIT_LIBURING_INCLUDE_DIR OR NOT PLAIT_LIBURING_LIBRARY)
    set(${missing} liburing PARENT_SCOPE)
    return()
  endif()
  add_library(plait::liburing UNKNOWN IMPORTED GLOBAL)
  set_target_properties(plait::liburing PROPERTIES
    IMPORTED_LOCATION "${PLAIT_LIBURING_LIBRARY}"
    INTERFACE_INCLUDE_DIRECTORIES "${PLAIT_LIBURING_INCLUDE_DIR}")
endfunction()

# The folders that may have parts of CUDA, with include/ and lib/ or lib64/.
function(plait_cuda_roots result)
  set(roots "${PLAIT_CUDA_ROOT}" "$ENV{CUDA_PATH}" "$ENV{CUDA_HOME}")
  find_program(PLAIT_NVCC nvcc HINTS ${roots} /usr/local/cuda /opt/cuda PATH_SUFFIXES bin)
  mark_as_advanced(PLAIT_NVCC)
  if(PLAIT_NVCC)
    get_filename_component(beside "${PLAIT_NVCC}" REALPATH)
    get_filename_component(beside "${beside}/../.." ABSOLUTE)
    list(APPEND roots "${beside}" "${beside}/targets/${CMAKE_SYSTEM_PROCESSOR}-linux")
  endif()
  list(APPEND roots /usr/local/cuda /opt/cuda)
  if(NOT PLAIT_CUDA_WHEELS)
    find_program(PLAIT_PYTHON python3)
    mark_as_advanced(PLAIT_PYTHON)
    if(PLAIT_PYTHON)
      execute_process(COMMAND "${PLAIT_PYTHON}" -c
        "import importlib.util as u; s = u.find_spec('nvidia'); print(list(s.submodule_search_locations)[0] if s else '')"
        OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
      set(PLAIT_CUDA_WHEELS "${found}" CACHE PATH "The folder `nvidia` of Python wheels with CUDA's libraries" FORCE)
    endif()
  endif()
  if(PLAIT_CUDA_WHEELS)
    file(GLOB wheels LIST_DIRECTORIES TRUE "${PLAIT_CUDA_WHEELS}/*")
    list(APPEND roots ${wheels})
  endif()
  list(REMOVE_ITEM roots "")
  set(${result} "${roots}" PARENT_SCOPE)
endfunction()

# Makes an imported target of a library and its header. The library may have only a versioned name, as in wheels.
function(plait_find_cuda_part target header roots)
  if(TARGET ${target})
    return()
  endif()
  string(MAKE_C_IDENTIFIER "PLAIT_${target}" variable)
  string(TOUPPER "${variable}" variable)
  find_path(${variable}_INCLUDE_DIR ${header} HINTS ${roots} PATH_SUFFIXES include)
  find_library(${variable}_LIBRARY NAMES ${ARGN} HINTS ${roots} PATH_SUFFIXES lib64 lib)
  mark_as_advanced(${variable}_INCLUDE_DIR ${variable}_LIBRARY)
  if(${variable}_INCLUDE_DIR AND ${variable}_LIBRARY)
    add_library(${target} UNKNOWN IMPORTED GLOBAL)
    set_target_properties(${target} PROPERTIES
      IMPORTED_LOCATION "${${variable}_LIBRARY}"
      INTERFACE_INCLUDE_DIRECTORIES "${${variable}_INCLUDE_DIR}")
  endif()
endfunction()

set(PLAIT_CUDA_LIBRARIES plait::cublas plait::cublaslt plait::cuda_runtime)

macro(plait_find_cuda missing)
  set(${missing} "")
  plait_cuda_roots(plait_roots)
  plait_find_cuda_part(plait::cudart cuda_runtime.h "${plait_roots}" cudart libcudart.so.13 libcudart.so.12)
  plait_add_cuda_runtime()
  plait_find_cuda_part(plait::cublaslt cublasLt.h "${plait_roots}" cublasLt libcublasLt.so.13 libcublasLt.so.12)
  plait_find_cuda_part(plait::cublas cublas_v2.h "${plait_roots}" cublas libcublas.so.13 libcublas.so.12)
  foreach(plait_part IN ITEMS cudart cublas cublaslt)
    if(NOT TARGET plait::${plait_part})
      list(APPEND ${missing} ${plait_part})
    endif()
  endforeach()
endmacro()

# Links CUDA's runtime only once. If CMake links a program as CUDA, it adds a runtime (CUDA_RUNTIME_LIBRARY, static by
# default). Two runtimes in one program would have separate streams and errors.
function(plait_add_cuda_runtime)
  if(TARGET plait::cudart AND NOT TARGET plait::cuda_runtime)
    add_library(plait::cuda_runtime INTERFACE IMPORTED GLOBAL)
    set(has_own "$<AND:$<LINK_LANGUAGE:CUDA>,$<NOT:$<STREQUAL:$<TARGET_PROPERTY:CUDA_RUNTIME_LIBRARY>,None>>>")
    get_target_property(headers plait::cudart INTERFACE_INCLUDE_DIRECTORIES)
    set_target_properties(plait::cuda_runtime PROPERTIES
      INTERFACE_INCLUDE_DIRECTORIES "${headers}"
      INTERFACE_LINK_LIBRARIES "$<$<NOT:${has_own}>:plait::cudart>")
  endif()
endfunction()

macro(plait_find_nccl missing)
  set(${missing} "")
  plait_cuda_roots(plait_roots)
  plait_find_cuda_part(plait::libnccl nccl.h "${plait_roots}" nccl libnccl.so.2)
  if(NOT TARGET plait::libnccl)
    list(APPEND ${missing} NCCL)
  endif()
endmacro()

macro(plait_find_cudnn missing)
  set(${missing} "")
  plait_cuda_roots(plait_roots)
  plait_find_cuda_part(plait::libcudnn cudnn.h "${plait_roots}" cudnn libcudnn.so.9)
  find_path(PLAIT_CUDNN_FRONTEND_INCLUDE_DIR cudnn_frontend.h HINTS ${plait_roots} PATH_SUFFIXES include)
  mark_as_advanced(PLAIT_CUDNN_FRONTEND_INCLUDE_DIR)
  plait_find_cuda_part(plait::nvrtc nvrtc.h "${plait_roots}" nvrtc libnvrtc.so.13 libnvrtc.so.12)
  if(NOT TARGET plait::libcudnn)
    list(APPEND ${missing} cuDNN)
  endif()
  # The frontend compiles kernels at run time.
  if(NOT TARGET plait::nvrtc)
    list(APPEND ${missing} NVRTC)
  elseif(TARGET plait::libcudnn)
    set_target_properties(plait::libcudnn PROPERTIES INTERFACE_LINK_LIBRARIES plait::nvrtc)
  endif()
  if(NOT PLAIT_CUDNN_FRONTEND_INCLUDE_DIR)
    list(APPEND ${missing} "cudnn_frontend.h (PLAIT_CUDNN_FRONTEND_INCLUDE_DIR)")
  endif()
endmacro()

# The project that links with it compiles it, with its own compiler, flags and sanitizers.
function(plait_add_compiled folder)
  if(TARGET plait_compiled)
    return()
  endif()
  add_library(plait_compiled STATIC EXCLUDE_FROM_ALL "${folder}/compiled.cpp" "${folder}/compiled_files.cpp")
  add_library(plait::compiled ALIAS plait_compiled)
  target_link_libraries(plait_compiled PUBLIC plait::cpu)
  target_compile_definitions(plait_compiled INTERFACE PLAIT_COMPILED)
endfunction()

function(plait_add_compiled_cuda folder)
  if(TARGET plait_compiled_cuda)
    return()
  endif()
  if(NOT CMAKE_CUDA_COMPILER)
    message(FATAL_ERROR "plait::compiled_cuda is compiled by nvcc: enable the language, as in "
      "project(... LANGUAGES CXX CUDA), before find_package(plait COMPONENTS compiled_cuda)")
  endif()
  add_library(plait_compiled_cuda STATIC EXCLUDE_FROM_ALL
    "${folder}/compiled_cuda.cu" "${folder}/compiled_cuda_double.cu" "${folder}/compiled_cuda_sort.cu")
  add_library(plait::compiled_cuda ALIAS plait_compiled_cuda)
  set_target_properties(plait_compiled_cuda PROPERTIES CUDA_RUNTIME_LIBRARY None)  # plait::cuda has it
  target_link_libraries(plait_compiled_cuda PUBLIC plait::cuda)
  target_compile_definitions(plait_compiled_cuda INTERFACE PLAIT_COMPILED_CUDA)
  if(NOT TARGET plait::cpu)
    target_compile_definitions(plait_compiled_cuda INTERFACE PLAIT_NO_CPU)
  endif()
endfunction()
