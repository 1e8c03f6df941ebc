// The definitions of posted.hpp, which includes them unless they are compiled apart (core/compiled.hpp).
#pragma once

#include <string>

#include "plait/core/compiled.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/text.hpp"

namespace plait {

PLAIT_INLINE std::string describe(const posted_program& of, const posted_call& c) {
  std::string text = name_of(c.kind);
  if (c.count != 0) text += cat({" of ", c.count});
  text += " over " + of.group_of(c).name;
  const bool sends = c.kind == collective::send;
  if (sends || c.kind == collective::receive)
    text += cat({sends ? " to rank " : " from rank ", of.group_of(c).ranks[static_cast<std::size_t>(c.peer)]});
  if (c.entry < 0) return text + " outside of the step's entries";
  if (static_cast<std::size_t>(c.entry) >= of.entries.size()) return text + " at the end of the step";
  return text + " in " + describe(of.entries[static_cast<std::size_t>(c.entry)]);
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
