// Checks of a layer's calls that give wrong numbers and no other sign: one that writes what it still reads (arrays are
// known by where they begin; it finds no partial overlap), and one with tensors of other sizes than the layer's.
#pragma once

#include <cstdint>
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

/// Throws unless a tensor of a call has the elements that the layer was made for: sizes are the context's at that time.
inline void require_size(std::string_view layer, const char* name, std::int64_t has, std::int64_t made_for) {
  if (has != made_for)
    fail({layer, ": ", name, " has ", has, " elements on this rank, and the layer was made for ", made_for,
          ": make the layer with a context of these sizes"});
}

}  // namespace plait::detail

#include "plait/core/macros_on.hpp"
