// The definitions of lora.hpp, which includes them unless they are compiled apart (core/compiled.hpp).
#pragma once

#include "plait/core/compiled.hpp"

namespace plait {

namespace detail {

PLAIT_INLINE lora_derivation derive_lora_at_run_time(const layout& gathered, const linear_layouts& base) {
  return find_lora(gathered, base);
}

}  // namespace detail

}  // namespace plait
