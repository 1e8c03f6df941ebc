// Contiguous memory for the values and gradients of one or several parameters.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/comm/any_communicator.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/types.hpp"
#include "plait/deterministic/gradient_terms.hpp"
#include "plait/device/device.hpp"
#include "plait/kernels/kernels.hpp"
#include "plait/layout/mesh.hpp"
#include "plait/tensor/context.hpp"
#include "plait/tensor/microbatch.hpp"

namespace plait::detail {

// Kernels add gradients directly to the parameter's memory if it has the type of their sums. Otherwise they add to
// temporary numbers of that type, which are then added to the narrower gradient with one rounding.

/// Whether kernels for activations of T add directly to gradients of G.
template <class T, class G>
inline constexpr bool sums_in_place = std::is_same_v<G, gradient_of<T>>;

/// Calls f(sums), which adds to n numbers of gradient_of<T>. `sums` is `gradient`, or if that is narrower, zeros that
/// are added to it afterwards. `sums` is null if `gradient` is.
template <class T, class G, compute_device Device, class F>
void with_kernel_sum(Device& device, G* gradient, std::int64_t n, F&& f) {
  using Sum = gradient_of<T>;
  if constexpr (sums_in_place<T, G>) {
    f(gradient);
  } else {
    if (gradient == nullptr) return f(static_cast<Sum*>(nullptr));
    const auto size = static_cast<std::size_t>(n);
    auto sums = make_buffer<Sum>(device, size), before = make_buffer<Sum>(device, size);
    device.zero(sums.data(), sums.bytes(), device.main_stream());
    f(sums.template data<Sum>());
    kernels::cast(device, static_cast<const G*>(gradient), before.template data<Sum>(), n);
    kernels::accumulate(device, static_cast<const Sum*>(before.template data<Sum>()), sums.template data<Sum>(), n);
    kernels::cast(device, static_cast<const Sum*>(sums.template data<Sum>()), gradient, n);
  }
}

}  // namespace plait::detail

namespace plait {

// The storage of parameters between steps under data parallelism, and how a parameter finds its slice in it.
// parallel/bucket.hpp moves the data.

template <class Precision, compute_device Device>
class parameter;
template <class Precision, compute_device Device>
class reduced_gradient;
namespace detail {
template <class Precision, compute_device Device>
class parameter_rebinding;
}  // namespace detail

/// A range of the elements that a rank stores of a parameter, in row-major order.
struct storage_slice {
  std::int64_t begin = 0, end = 0;
  std::int64_t size() const { return end - begin; }
  friend bool operator==(const storage_slice&, const storage_slice&) = default;
};

/// A flat array that holds parameters side by side. Between steps every rank of a group has an equal slice of it, or
/// all of it if it is not split.
template <class Precision, compute_device Device>
class flat_storage {
 public:
  virtual ~flat_storage() = default;
  flat_storage(const flat_storage&) = delete;
  flat_storage& operator=(const flat_storage&) = delete;

  /// Gathers the values of all its parameters for the layers. Collective over `axes`.
  virtual void gather(const context<Device>& ctx) = 0;
  /// Waits for a gather in flight. It communicates with no rank.
  virtual void wait_for_transfers() = 0;

  /// The axes over whose ranks it is split; empty: every rank has all of it.
  const axis_list& axes() const { return axes_; }
  /// The communicator over these axes.
  any_communicator& group() { return group_; }
  /// The slice that `rank` of that group has of the `size` elements that begin at `at` in the array.
  storage_slice slice_of(std::int64_t at, std::int64_t size, std::int64_t rank) const {
    const std::int64_t first = rank * slice_ - at;
    return {std::clamp<std::int64_t>(first, 0, size), std::clamp<std::int64_t>(first + slice_, 0, size)};
  }
  std::int64_t rank() const { return rank_; }
  /// Slices begin and end at multiples of this number of elements of a layer's array; 0: arrays are not split.
  std::int64_t cuts_at() const { return cuts_at_; }

 protected:
  using parameter_type = parameter<Precision, Device>;
  using master_type = master_of<Precision>;
  using weight_type = weight_of<Precision>;
  using gradient_type = gradient_of<Precision>;
  friend parameter_type;

  flat_storage() = default;

  /// Moves `p`, with its values, to `at` in this storage's array.
  static void move(const context<Device>& ctx, parameter_type& p, flat_storage& storage, std::int64_t at) {
    p.move_to(ctx, storage, at);
  }
  static void set_current(parameter_type& p, bool current) { p.set_current(current); }
  static bool rounded_current(const parameter_type& p) { return p.rounded_current_; }
  /// Begins the reduction of a gradient; no pass may add to it afterwards.
  static void begin_reduction(parameter_type& p) {
    p.added_ = false;
    if (!p.frozen_) p.phase_ = parameter_type::phase::reducing;
  }
  static reduced_gradient<Precision, Device> complete(parameter_type& p) { return p.complete_gradient(); }
  static any_communicator& stages_of(parameter_type& p) { return p.stages_; }

  axis_list axes_;
  any_communicator group_;
  std::int64_t slice_ = 0;  ///< elements of a slice, including padding
  std::int64_t rank_ = 0;
  std::int64_t cuts_at_ = 1;
  master_type* masters_ = nullptr;      ///< of this rank's slice
  weight_type* rounded_ = nullptr;      ///< where an optimizer writes rounded values; null: it does not
  gradient_type* gradients_ = nullptr;  ///< reduced gradients of this rank's slice
};

/// Contiguous values and gradients of one or several parameters, so that one product can use them all. The memory
/// belongs to the caller; or the array allocates it when it is first needed; or a bucket that moves several arrays
/// together lends it.
template <class Precision, compute_device Device>
class parameter_array {
 public:
  using weight_type = weight_of<Precision>;
  using gradient_type = gradient_of<Precision>;

  /// Holds `size` elements. `values` and `gradients` are the caller's memory, unless they are null.
  parameter_array(Device& device, std::int64_t size, weight_type* values = nullptr, gradient_type* gradients = nullptr)
      : device_(&device),
        size_(size),
        values_(values),
        gradients_(gradients),
        callers_values_(values != nullptr),
        callers_gradients_(gradients != nullptr) {}
  parameter_array(const parameter_array&) = delete;
  parameter_array& operator=(const parameter_array&) = delete;

  std::int64_t size() const { return size_; }
  bool callers_values() const { return callers_values_; }
  bool callers_gradients() const { return callers_gradients_; }
  /// Whether its memory is lent, so that it neither allocates nor releases it.
  bool lent() const { return lender_ != nullptr; }
  const std::shared_ptr<void>& lender() const { return lender_; }
  /// Whether any of its parameters has a gradient.
  bool trainable() const { return trainable_ > 0; }

  /// The values. They are allocated if needed, unless they are lent or the caller's. Null while lent memory is absent.
  weight_type* values() {
    if (!values_ && !lent()) {
      own_values_ = make_collective_buffer<weight_type>(*device_, static_cast<std::size_t>(size_));
      values_ = own_values_.template data<weight_type>();
    }
    return values_;
  }
  /// Whether the values have memory.
  bool has_values() const { return values_ != nullptr; }
  /// The values; null if they have no memory yet.
  const weight_type* existing_values() const { return values_; }
  const gradient_type* existing_gradients() const { return gradients_; }
  /// The gradients, in the order of the values; null if all parameters are frozen.
  gradient_type* gradients() {
    if (!gradients_ && !lent() && trainable()) {
      own_gradients_ = make_collective_buffer<gradient_type>(*device_, static_cast<std::size_t>(size_));
      gradients_ = own_gradients_.template data<gradient_type>();
    }
    return gradients_;
  }

  /// Whether the gradients have memory, or receive it when it is needed.
  bool can_have_gradients() const { return gradients_ != nullptr || !lent(); }

  /// Counts a parameter of this array; `freeze_parameter` counts one that no longer has a gradient.
  void add_parameter() { ++trainable_; }
  void freeze_parameter() {
    if (--trainable_ > 0) return;
    own_gradients_.reset();
    if (!lent()) gradients_ = nullptr;
  }

  /// Replaces the caller's memory by other memory that the caller owns; other memory stays.
  void rebind(weight_type* values, gradient_type* gradients) {
    if (callers_values_) values_ = values;
    if (callers_gradients_ && trainable()) gradients_ = gradients;
  }

  /// Lets `lender` provide the memory, and keeps it alive; `use_values` and `use_gradients` set the addresses. Releases
  /// memory that the array owns.
  void lend(std::shared_ptr<void> lender) {
    if (callers_values_ || callers_gradients_) fail("parameter_array: the caller's memory cannot be replaced");
    lender_ = std::move(lender);
    values_ = nullptr;
    gradients_ = nullptr;
    own_values_.reset();
    own_gradients_.reset();
  }
  /// The deterministic sums of gradients, one for each layer that uses this array; empty unless sums are deterministic.
  using terms_type = gradient_terms<Precision, Device>;
  const std::vector<std::unique_ptr<terms_type>>& terms() const { return terms_; }
  /// Adds a sum for a layer that uses these parameters.
  terms_type& add_terms(token_leaves leaves) {
    return *terms_.emplace_back(std::make_unique<terms_type>(size_, std::move(leaves)));
  }
  void clear_terms() {
    for (const auto& t : terms_) t->clear();
  }

  void use_values(weight_type* at) { values_ = at; }
  void use_gradients(gradient_type* at) { gradients_ = at; }

 private:
  Device* device_;
  std::int64_t size_;
  weight_type* values_;
  gradient_type* gradients_;
  buffer<Device> own_values_, own_gradients_;
  std::shared_ptr<void> lender_;
  std::vector<std::unique_ptr<terms_type>> terms_;
  bool callers_values_, callers_gradients_;
  int trainable_ = 0;
};

/// The place of a parameter in an array that a layer has made for several. Without an array, the parameter has its own.
template <class Precision, compute_device Device>
struct parameter_place {
  parameter_place() = default;
  parameter_place(std::shared_ptr<parameter_array<Precision, Device>> where, std::int64_t at,
                  master_of<Precision>* callers_master = nullptr, gradient_of<Precision>* callers_reduced = nullptr)
      : array(std::move(where)), offset(at), master(callers_master), reduced(callers_reduced) {}
  /// For a single parameter, in the caller's memory if the pointers are not null.
  parameter_place(Device& device, std::int64_t size, weight_of<Precision>* value, gradient_of<Precision>* gradient,
                  master_of<Precision>* callers_master = nullptr, gradient_of<Precision>* callers_reduced = nullptr)
      : array(std::make_shared<parameter_array<Precision, Device>>(device, size, value, gradient)),
        master(callers_master),
        reduced(callers_reduced) {}

  std::shared_ptr<parameter_array<Precision, Device>> array;
  std::int64_t offset = 0;
  master_of<Precision>* master = nullptr;     ///< the caller's, unless null: in the stored layout
  gradient_of<Precision>* reduced = nullptr;  ///< the caller's, unless null: reduced gradient in the stored layout
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
