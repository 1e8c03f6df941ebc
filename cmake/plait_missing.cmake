# plait_name_missing(<targets> <missing> [<hint>]): for a project that embeds plait. CMake's own error for a missing
# target does not say why it is missing. If one of the project's targets links with one of `targets` ("cpu;compiled"
# means plait::cpu and plait::compiled), configuring ends with an error. It names the missing libraries of this machine,
# and how to get them. Otherwise there is no message, because the headers of plait::plait need no library.

include_guard(GLOBAL)

function(plait_name_missing targets missing)
  get_property(before GLOBAL PROPERTY plait_missing_targets)
  if(NOT before)
    cmake_language(DEFER DIRECTORY "${CMAKE_SOURCE_DIR}" CALL plait_check_missing "${CMAKE_SOURCE_DIR}")
  endif()
  list(JOIN missing ", " missing)
  list(JOIN ARGN "" hint)
  foreach(target IN LISTS targets)
    set_property(GLOBAL APPEND PROPERTY plait_missing_targets ${target})
    list(GET targets 0 first)
    set_property(GLOBAL PROPERTY plait_missing_${target} "plait::${first} needs: ${missing}. ${hint}")
  endforeach()
endfunction()

# Called after the project's top folder has been read, before CMake resolves the targets' libraries.
function(plait_check_missing folder)
  get_property(missing GLOBAL PROPERTY plait_missing_targets)
  get_property(targets DIRECTORY "${folder}" PROPERTY BUILDSYSTEM_TARGETS)
  foreach(target IN LISTS targets)
    foreach(property IN ITEMS LINK_LIBRARIES INTERFACE_LINK_LIBRARIES)
      get_target_property(links ${target} ${property})
      foreach(name IN LISTS missing)
        if("${links};" MATCHES "plait::${name}[;>,]")
          get_property(message GLOBAL PROPERTY plait_missing_${name})
          message(FATAL_ERROR "${target} links with plait::${name}, and there is none here: ${message}")
        endif()
      endforeach()
    endforeach()
  endforeach()
  get_property(folders DIRECTORY "${folder}" PROPERTY SUBDIRECTORIES)
  foreach(below IN LISTS folders)
    plait_check_missing("${below}")
  endforeach()
endfunction()
