// The definitions of posting.hpp, which includes them unless they are compiled apart (core/compiled.hpp).
#pragma once

#include <string>

#include "plait/core/compiled.hpp"
#include "plait/core/text.hpp"

namespace plait {

PLAIT_INLINE std::string describe(const schedule_verdict& v) {
  if (v.ok()) return "ok";
  std::string text;
  const bool in_program = v.code >= schedule_error::send_misplaced;
  if (v.rank >= 0) {
    append(text, {"rank ", v.rank, ", "});
    if (v.position >= 0) append(text, {in_program ? "step " : "action ", v.position, " "});
    text += "(" + describe(v.step) + "): ";
  }
  text += text_of(v.code);
  if (v.other_rank >= 0) {
    append(text, {"; it waits for rank ", v.other_rank});
    if (v.other_position >= 0)
      append(text, {", which is stuck at ", in_program ? "step " : "action ", v.other_position, " (",
                    describe(v.other_step), ")"});
  }
  if (v.below > 0 || v.above > 0) {
    const bool both = v.below > 0 && v.above > 0;
    text += v.code == schedule_error::over_activation_limit ? "; the nearest legal limit is "
            : both                                          ? "; the nearest legal numbers of microbatches are "
                                                            : "; the nearest legal number of microbatches is ";
    if (v.below > 0) text += std::to_string(v.below);
    if (both) text += " and ";
    if (v.above > 0) text += std::to_string(v.above);
  }
  return text;
}

}  // namespace plait
