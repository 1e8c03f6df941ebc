# plait_share_headers(<program> <source>): programs that train share one reading of the two headers below. A source that
# lacks one of the two includes reads all headers itself, so no missing include goes unnoticed.

include_guard(GLOBAL)

# Otherwise each program may have options of its own.
option(PLAIT_EXAMPLES_JOINED "Compile the files of a larger example as one, and headers of many programs once" OFF)

set(plait_shared_headers plait/comm/threads.hpp plait/parallel/train_step.hpp CACHE INTERNAL "")
if(PLAIT_EXAMPLES_JOINED)
  file(CONFIGURE OUTPUT shared_headers.cpp CONTENT "" @ONLY)
  add_library(plait_shared_headers OBJECT EXCLUDE_FROM_ALL "${CMAKE_CURRENT_BINARY_DIR}/shared_headers.cpp")
  target_link_libraries(plait_shared_headers PRIVATE plait::own plait::compiled)
  list(TRANSFORM plait_shared_headers REPLACE "(.+)" "<\\1>" OUTPUT_VARIABLE names)
  target_precompile_headers(plait_shared_headers PRIVATE ${names})
endif()

function(plait_share_headers program source)
  if(NOT TARGET plait_shared_headers)
    return()
  endif()
  foreach(header IN LISTS plait_shared_headers)
    file(STRINGS "${source}" included REGEX "^#include [<\"]${header}[>\"]")
    if(NOT included)
      return()
    endif()
  endforeach()
  target_precompile_headers(${program} REUSE_FROM plait_shared_headers)
endfunction()
