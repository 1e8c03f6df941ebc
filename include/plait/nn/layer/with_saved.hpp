// A layer and what its forward pass keeps, in one object: for programs that call forward and then backward on their own
// memory. Not for pipelines, which have several microbatches under way.
#pragma once

#include <type_traits>
#include <utility>

#include "plait/core/same_bits.hpp"
#include "plait/nn/layer.hpp"

namespace plait {

/// A linear or a norm that keeps the `saved` of its last forward pass, so that its calls take nothing but the program's
/// pointers. A forward pass forgets what the one before it has kept, and a backward pass uses it up. One that takes the
/// input of a forward pass before the last throws.
template <class Layer>
class with_saved : public Layer {
  using mb = microbatch<typename Layer::device>;
  using T = typename Layer::value_type;

 public:
  using Layer::Layer;
  /// As the layer's own on the caller's memory; `more` may follow, such as an addend.
  template <class... More>
  void forward(const mb& in, const T* x, T* y, More&&... more) {
    Layer::forward(in, x, y, &saved_, std::forward<More>(more)...);
  }
  template <class... More>
  void backward(const mb& in, const T* x, const T* dy, T* dx, More&&... more) {
    Layer::backward(in, x, saved_, dy, dx, std::forward<More>(more)...);
  }
  /// As the layer's own; what was kept is forgotten.
  void resize(const context<typename Layer::device>& ctx) {
    Layer::resize(ctx);
    saved_ = {};
  }
  /// As above, on arrays of a type with the same bits.
  template <class Other, class... More>
    requires same_bits<std::remove_const_t<Other>, T>
  void forward(const mb& in, Other* x, More&&... more) {
    forward(in, elements_of<T>(x), elements_of<T>(std::forward<More>(more))...);
  }
  template <class Other, class... More>
    requires same_bits<std::remove_const_t<Other>, T>
  void backward(const mb& in, Other* x, More&&... more) {
    backward(in, elements_of<T>(x), elements_of<T>(std::forward<More>(more))...);
  }

 private:
  typename Layer::saved saved_;
};

}  // namespace plait
