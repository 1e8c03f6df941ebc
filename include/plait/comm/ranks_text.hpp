// A list of ranks in the text of an error. comm/agreement.hpp has what ranks may differ in.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "plait/core/macros_off.hpp"
#include "plait/core/text.hpp"

namespace plait::detail {

/// Returns "rank 3", or "ranks 0 to 2, 5".
inline std::string ranks_text(const std::vector<std::size_t>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0, runs = 0; i < ranks.size(); ++runs) {
    if (runs == 8) return cat({text, " and ", ranks.size() - i, " more"});
    std::size_t end = i + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
    if (end - i < 3) end = i + 1;
    append(text, {(i == 0 ? "" : ", "), ranks[i]});
    if (end - i > 1) append(text, {" to ", ranks[end - 1]});
    i = end;
  }
  return text;
}

}  // namespace plait::detail

#include "plait/core/macros_on.hpp"
