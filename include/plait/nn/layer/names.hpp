// The name of a layer and of its ranges in profiles. Each call of a layer asks for one of them first, and so is refused
// where the layer was moved from.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/moved_mark.hpp"
#include "plait/device/range.hpp"

namespace plait::detail {

/// An object that was moved from keeps the layer's name, to be refused by it: every member throws there.
class layer_names {
 public:
  layer_names() = default;
  explicit layer_names(std::string_view layer) : layer_(std::make_shared<const std::string>(layer)), ranges_(layer) {}
  layer_names(const layer_names&) = default;
  layer_names& operator=(const layer_names&) = default;
  layer_names(layer_names&& from) noexcept
      : layer_(from.layer_), ranges_(std::move(from.ranges_)), mark_(std::move(from.mark_)) {}
  layer_names& operator=(layer_names&& from) noexcept {
    layer_ = from.layer_;
    ranges_ = std::move(from.ranges_);
    mark_ = std::move(from.mark_);
    return *this;
  }

  const std::string& layer() const { return checked(*layer_); }
  const char* forward() const { return checked(ranges_).forward(); }
  const char* backward() const { return checked(ranges_).backward(); }
  const char* weights() const { return checked(ranges_).weights(); }
  /// Returns `part`, which is one of the layer's.
  template <class T>
  T& checked(T& part) const {
    if (mark_.moved()) refuse();
    return part;
  }

 private:
  [[noreturn]] void refuse() const {
    fail({layer_ ? *layer_ : "a layer", ": it was moved from, and is used; use the object that it was moved to"});
  }

  std::shared_ptr<const std::string> layer_;
  range_names ranges_;
  moved_mark mark_;
};

}  // namespace plait::detail

#include "plait/core/macros_on.hpp"
