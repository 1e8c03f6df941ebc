// The refusal of a null pointer where a program hands over memory. Sizes are checked elsewhere: nn/layer.hpp.
#pragma once

#include <cstdint>
#include <string_view>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"

namespace plait::detail {

/// Throws where the caller's memory for `size` elements is a null pointer. `where` is a layer or a function.
inline void require_array(std::string_view where, const char* name, const void* pointer, std::int64_t size) {
  if (pointer == nullptr && size > 0)
    fail({where, ": ", name, " is a null pointer; it must point to this rank's ", size, " elements"});
}

}  // namespace plait::detail

#include "plait/core/macros_on.hpp"
