# Finds what plait::cpu and plait::mpi link with; used by the build and by the installed package alike.
#
#   plait_find_cpu(<missing>)   oneDNN, OpenBLAS, libgomp, threads, fmt, nlohmann_json
#   plait_find_mpi(<missing>)   MPI for C++
#
# Each sets <missing> to the list of what was not found, empty if all is there.

include_guard(DIRECTORY)

# oneDNN's runtime is libgomp under every compiler, so the library is named as such: FindOpenMP under clang
# would add a second runtime (libomp), with thread counts of its own.
set(PLAIT_CPU_LIBRARIES DNNL::dnnl plait::openblas gomp Threads::Threads fmt::fmt nlohmann_json::nlohmann_json)

# The deprecated C++ bindings of Open MPI and MPICH stay out of every translation unit.
set(PLAIT_MPI_DEFINITIONS OMPI_SKIP_MPICXX MPICH_SKIP_MPICXX)

# Debian keeps cblas.h and libopenblas in a folder per threading flavour, which pkg-config knows.
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
  foreach(plait_package IN ITEMS dnnl Threads fmt nlohmann_json)
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
