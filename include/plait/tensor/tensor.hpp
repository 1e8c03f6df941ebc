// One rank's part of a typed tensor, owned or viewed. It has no operations and records no graph: layers compute.
#pragma once

#include <type_traits>
#include <utility>

#include "plait/core/compiled.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/device/device.hpp"
#ifndef PLAIT_NO_CPU
#include "plait/device/cpu.hpp"
#endif
#include "plait/layout/spec.hpp"
#include "plait/tensor/boundary_check.hpp"
#include "plait/tensor/microbatch.hpp"

namespace plait {

/// One rank's part of a tensor that lies on the mesh as `Spec` says: contiguous, row-major in the spec's order of dims.
/// Owns its memory, or views the caller's. Move-only.
template <class T, spec_like Spec, compute_device Device = cpu>
class tensor {
 public:
  using value_type = T;
  using spec = Spec;

  tensor() = default;
  /// Owning and uninitialised, of the sizes that the context gives to the spec's dims. As the others, throws if the
  /// spec mentions an axis that the context's mesh does not have.
  explicit tensor(const context<Device>& ctx)
      : part_(plait::part_of<Spec>(ctx)),
        own_(ctx.device, static_cast<std::size_t>(part_.local_size()) * sizeof(T)),
        data_(own_.template data<T>()) {}
  /// A view of the caller's memory, which holds this rank's part.
  tensor(const context<Device>& ctx, T* data) : part_(plait::part_of<Spec>(ctx)), data_(data) {}
  /// Takes over memory that holds this rank's part. Throws where it is smaller than that.
  tensor(const context<Device>& ctx, buffer<Device> memory) : tensor(ctx, memory.template data<T>()) {
    if (const auto needed = static_cast<std::size_t>(part_.local_size()) * sizeof(T); memory.bytes() < needed)
      fail({"tensor ", describe(layout_v<Spec>), ": this rank's part has ", needed, " bytes, and the buffer has ",
            memory.bytes()});
    own_ = std::move(memory);
  }

  tensor(tensor&& other) noexcept { swap(other); }
  tensor& operator=(tensor&& other) noexcept {
    tensor(std::move(other)).swap(*this);
    return *this;
  }

  T* data() { return data_; }
  const T* data() const { return data_; }
  /// Local elements.
  std::int64_t size() const { return data_ ? part_.local_size() : 0; }
  /// Where this part lies in the global tensor.
  const box& part() const { return part_; }
  /// Local elements along the dim. Throws where the spec has no such dim.
  std::int64_t extent(dim_id dim) const {
    const int at = layout_v<Spec>.find(dim);
    if (at < 0) fail({"tensor ", describe(layout_v<Spec>), " has no dim ", dim.text()});
    return part_.local[static_cast<std::size_t>(at)];
  }
  bool owning() const { return !own_.empty(); }
  explicit operator bool() const { return data_ != nullptr; }
  void reset() { tensor().swap(*this); }

  /// Returns the same memory under an equivalent spec: invariant by mention or by default.
  template <spec_like Other>
    requires(equivalent(layout_v<Spec>, layout_v<Other>))
  tensor<T, Other, Device> as() && {
    return release_to<Other>();
  }
  /// A view of this tensor under an equivalent spec, which must not outlive it.
  template <spec_like Other>
    requires(equivalent(layout_v<Spec>, layout_v<Other>))
  const tensor<T, Other, Device> view_as() const& {
    tensor<T, Other, Device> other;
    other.part_ = part_;
    other.data_ = data_;
    return other;
  }
  /// A temporary takes its memory with it: `as` moves that.
  template <spec_like Other>
  const tensor<T, Other, Device> view_as() const&& = delete;
  /// Returns the same memory as a gradient: a value that has been overwritten with its own gradient.
  tensor<T, dual_t<Spec>, Device> into_dual() && { return release_to<dual_t<Spec>>(); }

  void swap(tensor& other) noexcept {
    std::swap(part_, other.part_);
    own_.swap(other.own_);
    std::swap(data_, other.data_);
  }

 private:
  template <class, spec_like, compute_device>
  friend class tensor;

  template <class Other>
  tensor<T, Other, Device> release_to() {
    tensor<T, Other, Device> other;
    other.part_ = part_;
    other.own_ = std::move(own_);
    other.data_ = std::exchange(data_, nullptr);
    return other;
  }

  box part_;
  buffer<Device> own_;
  T* data_ = nullptr;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
