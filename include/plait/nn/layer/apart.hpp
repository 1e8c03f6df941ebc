// The check that a call on the caller's memory does not write what it still reads: such a call gives wrong numbers and
// no other sign. It knows arrays by where they begin; it finds no partial overlap.
#pragma once

#include <initializer_list>
#include <string_view>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"

namespace plait::detail {

struct named_array {
  const void* at;
  const char* name;
};

/// Throws where one of the arrays that `call` of `layer` reads is the one it writes. Null is no array.
inline void require_apart(std::string_view layer, const char* call, named_array written,
                          std::initializer_list<named_array> read) {
  if (written.at == nullptr) return;
  for (const named_array& in : read)
    if (in.at == written.at)
      fail(
          {layer, ": ", call, " writes ", written.name, " while it still reads ", in.name, ", and both are one array"});
}

}  // namespace plait::detail

#include "plait/core/macros_on.hpp"
