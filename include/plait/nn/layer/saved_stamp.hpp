// The mark in what a forward pass keeps, by which a backward pass knows that it is its own: of this layer, of this
// microbatch, and not used yet.
#pragma once

#include <cstdint>
#include <string_view>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"

namespace plait::detail {

/// `layer` is anything that a layer keeps its life long, such as its first parameter; `input` is where the input lies
/// that a backward pass will take, null where it takes none.
class saved_stamp {
 public:
  void make(const void* layer, std::int64_t microbatch, const void* input) {
    overwritten_ = layer_ && !used_;
    layer_ = layer, microbatch_ = microbatch, input_ = input, used_ = false;
  }
  /// Throws unless the forward pass that made it was of this layer and microbatch, and no backward pass has used it.
  /// One that no forward pass has made is used as well. Throws also where several forward passes have made it since the
  /// last use, and the input is not where that of the last one was.
  void use(std::string_view name, const void* layer, std::int64_t microbatch, const void* input) {
    constexpr const char* each = "; each forward pass makes one `saved`, for one backward pass of the same layer";
    if (used_) fail({name, ": this `saved` was used by a backward pass before", each});
    if (layer_ && layer_ != layer) fail({name, ": this `saved` was made by another layer", each});
    if (layer_ && microbatch_ != microbatch)
      fail({name, ": this `saved` is of microbatch ", microbatch_, ", and the backward pass of ", microbatch, each});
    if (overwritten_ && input_ != input)
      fail({name,
            ": several forward passes have made this `saved`, and the backward pass has the input of another than ",
            "the last", each});
    used_ = true;
  }

 private:
  const void* layer_ = nullptr;
  const void* input_ = nullptr;
  std::int64_t microbatch_ = 0;
  bool used_ = false, overwritten_ = false;
};

}  // namespace plait::detail

#include "plait/core/macros_on.hpp"
