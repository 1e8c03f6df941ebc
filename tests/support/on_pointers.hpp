// Calls layers on plain memory, for tests whose arrays are vectors: each pointer gets the spec that the layer names.
#pragma once

#include <concepts>
#include <type_traits>

#include "plait/layout/part.hpp"
#include "plait/layout/spec.hpp"
#include "plait/tensor/microbatch.hpp"

namespace plait::test {

/// A part of the caller's array; an empty part where the pointer is null.
template <class Spec, class Device, class T>
part<T, Spec> typed(const context<Device>& ctx, T* data) {
  return data ? part<T, Spec>(ctx, data) : part<T, Spec>();
}

template <class Layer, class X, class Y>
void forward_on(Layer& layer, const microbatch<typename Layer::device>& mb, const X* x, Y* y) {
  layer.forward(mb, typed<typename Layer::input>(mb.ctx, x), typed<typename Layer::output>(mb.ctx, y));
}
template <class Layer, class X, class Y>
void forward_on(Layer& layer, const microbatch<typename Layer::device>& mb, const X* x, Y* y,
                typename Layer::saved* saved, const X* addend = nullptr) {
  layer.forward(mb, typed<typename Layer::input>(mb.ctx, x), typed<typename Layer::output>(mb.ctx, y), saved,
                typed<typename Layer::output>(mb.ctx, addend));
}

template <class Layer, class T>
void backward_on(Layer& layer, const microbatch<typename Layer::device>& mb, const T* x, typename Layer::saved& saved,
                 const T* dy, T* dx, const T* addend = nullptr) {
  using input = typename Layer::input;
  using gradient = dual_t<typename Layer::output>;
  layer.backward(mb, typed<input>(mb.ctx, x), saved, typed<gradient>(mb.ctx, dy), typed<dual_t<input>>(mb.ctx, dx),
                 typed<dual_t<input>>(mb.ctx, addend));
}
/// Calls of a layer with its saved values.
template <class Layer, class T>
void backward_on(Layer& layer, const microbatch<typename Layer::device>& mb, const T* x, const T* dy, T* dx,
                 const T* addend = nullptr) {
  using input = typename Layer::input;
  using gradient = dual_t<typename Layer::output>;
  layer.backward(mb, typed<input>(mb.ctx, x), typed<gradient>(mb.ctx, dy), typed<dual_t<input>>(mb.ctx, dx),
                 typed<dual_t<input>>(mb.ctx, addend));
}
/// Calls of an embedding.
template <class Layer, std::integral Id, class T>
void backward_on(Layer& layer, const microbatch<typename Layer::device>& mb, const Id* ids, const T* dy) {
  layer.backward(mb, typed<typename Layer::input>(mb.ctx, ids), typed<dual_t<typename Layer::output>>(mb.ctx, dy));
}

}  // namespace plait::test
