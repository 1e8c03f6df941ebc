# plait_enable_nvcc(<result>): enables the language CUDA in the calling folder, for plait's own tests and examples, and
# adds plait::compiled_cuda. <result> is whether plait::cuda and nvcc were found.

set(PLAIT_CUDA_ARCHITECTURES "80;90" CACHE STRING
  "What tests and examples for CUDA are compiled for, as in CMAKE_CUDA_ARCHITECTURES")

set(plait_nvcc_headers "${CMAKE_CURRENT_LIST_DIR}/../include/plait")

macro(plait_enable_nvcc result)
  set(${result} FALSE)
  set(CMAKE_CUDA_ARCHITECTURES "${PLAIT_CUDA_ARCHITECTURES}")
  if(TARGET plait::cuda AND PLAIT_NVCC)
    set(${result} TRUE)
    if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
      set(CMAKE_CUDA_COMPILER "${PLAIT_NVCC}")
    endif()
    if(NOT CMAKE_CUDA_HOST_COMPILER AND NOT DEFINED ENV{CUDAHOSTCXX})  # the preset of tests names one
      set(CMAKE_CUDA_HOST_COMPILER "${CMAKE_CXX_COMPILER}")
    endif()
    if(plait_ccache AND NOT CMAKE_CUDA_COMPILER_LAUNCHER)
      set(CMAKE_CUDA_COMPILER_LAUNCHER ${plait_ccache})
    endif()

    # If libraries are directly next to bin/, as pip installs them, nvcc itself does not find them.
    get_filename_component(plait_cuda_root "${PLAIT_NVCC}" REALPATH)
    get_filename_component(plait_cuda_root "${plait_cuda_root}/../.." ABSOLUTE)
    if(IS_DIRECTORY "${plait_cuda_root}/lib" AND NOT EXISTS "${plait_cuda_root}/lib64"
        AND NOT EXISTS "${plait_cuda_root}/targets")
      string(APPEND CMAKE_CUDA_FLAGS " -L${plait_cuda_root}/lib")
    endif()

    enable_language(CUDA)
    plait_add_compiled_cuda("${plait_nvcc_headers}")
  endif()
endmacro()
