// A communicator that refuses parts of unequal sizes, as some backends do.
#pragma once

#include <string>
#include <string_view>
#include <utility>

#include "plait/comm/communicator.hpp"
#include "plait/comm/threads.hpp"

namespace plait::test {

/// In-process ranks.
class equal_parts_only : public verbs<equal_parts_only> {
 public:
  equal_parts_only() = default;
  explicit equal_parts_only(threads::communicator inner) : inner_(std::move(inner)) {}
  explicit operator bool() const { return static_cast<bool>(inner_); }
  int rank() const { return inner_.rank(); }
  int size() const { return inner_.size(); }
  std::string label() const { return inner_.label(); }
  [[nodiscard]] request start(const call& c) {
    if (c.ragged && c.kind != collective::all_to_all) fail({c.name(), " is not there"});
    return inner_.start(c);
  }
  equal_parts_only split(int color, int key, std::string_view label = {}) {
    return equal_parts_only(inner_.split(color, key, label));
  }
  void abort(const std::string& why) noexcept { inner_.abort(why); }

 private:
  threads::communicator inner_;
};

}  // namespace plait::test
