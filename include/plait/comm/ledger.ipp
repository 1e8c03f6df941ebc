// The definitions of ledger.hpp, which includes them unless PLAIT_COMPILED is defined.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "plait/core/compiled.hpp"

namespace plait {

PLAIT_INLINE ledger::row& ledger::of(std::string_view label) {
  for (row& r : rows) {
    if (r.label == label) return r;
  }
  rows.push_back({std::string(label)});
  return rows.back();
}

PLAIT_INLINE void ledger::clear() {
  for (row& r : rows) {
    r.kinds = {};
    r.under_way.clear();
  }
}

PLAIT_INLINE void ledger::restore(const ledger& before) {
  clear();
  for (std::size_t i = 0; i < before.rows.size(); ++i) rows[i] = before.rows[i];
}

}  // namespace plait
