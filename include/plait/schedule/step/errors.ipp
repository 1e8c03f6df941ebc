// The definitions of errors.hpp, which includes them unless they are compiled apart (core/compiled.hpp).
#pragma once

#include <string>

#include "plait/core/compiled.hpp"
#include "plait/core/text.hpp"

namespace plait {

PLAIT_INLINE std::string describe(const step_verdict& v) {
  if (v.ok()) return "ok";
  std::string text;
  if (v.rank >= 0) {
    append(text, {"rank ", v.rank});
    if (v.position >= 0)
      append(text, {", entry ", v.position, " (", describe(v.entry), ")"});
    else
      append(text, {", ", describe(v.entry)});
    text += ": ";
  }
  text += text_of(v.code);
  if (v.other_position >= 0) {
    text += "; see ";
    if (v.other_rank != v.rank) append(text, {"rank ", v.other_rank, ", "});
    append(text, {"entry ", v.other_position, " (", describe(v.other), ")"});
  }
  if (v.code == step_error::over_memory) append(text, {": ", v.bytes, " bytes, of which ", v.limit, " are allowed"});
  if (!v.pipeline.empty()) text += ": " + v.pipeline;
  return text;
}

}  // namespace plait
