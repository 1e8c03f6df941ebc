# Programs of several processes, as tests mpi.NAME. ../CMakeLists.txt includes this.

set(mpi_environment
  "OMPI_ALLOW_RUN_AS_ROOT=1"
  "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
  "OMPI_MCA_rmaps_base_oversubscribe=1"
  "OMPI_MCA_hwloc_base_binding_policy=none"
  "OMPI_MCA_mpi_yield_when_idle=1"
  "OMPI_MCA_btl_vader_single_copy_mechanism=none")

if(TARGET plait::mpi AND NOT PLAIT_TEST_QUICK)
  plait_glob(sources "mpi/*.cpp")
  if(NOT PLAIT_BUILD_EXAMPLES)
    list(FILTER sources EXCLUDE REGEX "/gpt2_c[.]cpp$")  # it includes a file that CMake makes from an example
  endif()
  foreach(source IN LISTS sources)
    get_filename_component(name "${source}" NAME_WE)
    add_executable(mpi_${name} "${source}")
    target_link_libraries(mpi_${name} PRIVATE plait::own plait::mpi plait::compiled doctest::doctest)
    target_include_directories(mpi_${name} PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}" "${PROJECT_BINARY_DIR}/examples")
    if(source MATCHES "/gpt2_c[.]cpp$")
      target_compile_definitions(mpi_${name} PRIVATE PLAIT_EXAMPLE_DATA="${PROJECT_SOURCE_DIR}/examples/data")
      target_include_directories(mpi_${name} PRIVATE "${PROJECT_SOURCE_DIR}/examples/gpt2_c")
    endif()
    if(CMAKE_BUILD_TYPE STREQUAL "Release")
      target_compile_options(mpi_${name} PRIVATE ${plait_quick_to_compile} -UNDEBUG)
    endif()
    plait_header_value(all_ranks "${source}" ranks 4)
    plait_header_value(seconds "${source}" timeout 120)
    string(REPLACE " " ";" all_ranks "${all_ranks}")
    list(GET all_ranks 0 first_ranks)
    foreach(ranks IN LISTS all_ranks)
      set(launch "${MPIEXEC_EXECUTABLE}" --allow-run-as-root --oversubscribe ${MPIEXEC_NUMPROC_FLAG} ${ranks}
        $<TARGET_FILE:mpi_${name}>)
      set(script "${CMAKE_CURRENT_SOURCE_DIR}/mpi/${name}.sh")
      if(EXISTS "${script}")
        set(launch sh "${script}" $<TARGET_FILE:mpi_${name}>)
      elseif(name MATCHES "^fails_")
        plait_header_value(expected "${source}" expect "")
        if(expected STREQUAL "")
          message(FATAL_ERROR "${source}: the leading comments need `// expect: REGEX`")
        endif()
        list(PREPEND launch "${Python3_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/mpi/expect_failure.py" "${expected}")
      endif()
      set(test mpi.${name})
      if(NOT ranks EQUAL first_ranks)
        set(test ${test}_${ranks})
      endif()
      add_test(NAME ${test} COMMAND ${launch})
      set_tests_properties(${test} PROPERTIES
        TIMEOUT ${seconds} LABELS mpi PROCESSORS 2 ENVIRONMENT "${test_environment};${mpi_environment}")
    endforeach()
  endforeach()
endif()
