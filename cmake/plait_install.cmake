# Installs the headers, one export file for each component, and the package configuration, which loads requested ones.

include(CMakePackageConfigHelpers)

set(plait_config_dir "${CMAKE_INSTALL_LIBDIR}/cmake/plait")

install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/plait" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" DESTINATION "${CMAKE_INSTALL_DOCDIR}")

foreach(component IN ITEMS plait cpu mpi uring cuda nccl cudnn)
  set(target plait)
  if(NOT component STREQUAL "plait")
    set(target plait_${component})
  endif()
  if(TARGET ${target})
    install(TARGETS ${target} EXPORT plait-${component})
    install(EXPORT plait-${component} NAMESPACE plait:: FILE plait-${component}.cmake DESTINATION "${plait_config_dir}")
  endif()
endforeach()

configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/plaitConfig.cmake.in"
  "${PROJECT_BINARY_DIR}/plaitConfig.cmake" INSTALL_DESTINATION "${plait_config_dir}"
  PATH_VARS CMAKE_INSTALL_INCLUDEDIR)
write_basic_package_version_file("${PROJECT_BINARY_DIR}/plaitConfigVersion.cmake"
  VERSION ${PROJECT_VERSION} COMPATIBILITY SameMinorVersion ARCH_INDEPENDENT)
install(FILES
  "${PROJECT_BINARY_DIR}/plaitConfig.cmake"
  "${PROJECT_BINARY_DIR}/plaitConfigVersion.cmake"
  "${PROJECT_SOURCE_DIR}/cmake/plait_dependencies.cmake"
  DESTINATION "${plait_config_dir}")
