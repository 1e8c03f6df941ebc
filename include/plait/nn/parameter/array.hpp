// The memory of parameters that lie one after the other, as layers use them: values and gradients.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/precision.hpp"
#include "plait/device/buffer.hpp"
#include "plait/nn/parameter/terms.hpp"

namespace plait {

/// Values and gradients of one or several parameters, one after the other, so that one product can use them all. The
/// memory is the caller's, or the array's own, which is made when it is first needed, or lent by whoever moves the
/// parameters of several arrays together.
template <class Precision, compute_device Device>
class parameter_array {
 public:
  using weight_type = weight_of<Precision>;
  using gradient_type = gradient_of<Precision>;

  /// `size` elements; where `values` or `gradients` are not null, they are the caller's.
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
  /// Whether memory is lent to it, which it then neither makes nor releases.
  bool lent() const { return lender_ != nullptr; }
  const std::shared_ptr<void>& lender() const { return lender_; }
  /// Whether any of its parameters has a gradient.
  bool trainable() const { return trainable_ > 0; }

  /// The values, which are made here unless they are lent or the caller's; null while they are lent and away.
  weight_type* values() {
    if (!values_ && !lent()) {
      own_values_ = make_collective_buffer<weight_type>(*device_, static_cast<std::size_t>(size_));
      values_ = own_values_.template data<weight_type>();
    }
    return values_;
  }
  /// Whether `values` would make none.
  bool has_values() const { return values_ != nullptr; }
  /// The values that are there; null where none are made yet.
  const weight_type* existing_values() const { return values_; }
  /// The gradients, likewise; null where all parameters are frozen.
  gradient_type* gradients() {
    if (!gradients_ && !lent() && trainable()) {
      own_gradients_ = make_collective_buffer<gradient_type>(*device_, static_cast<std::size_t>(size_));
      gradients_ = own_gradients_.template data<gradient_type>();
    }
    return gradients_;
  }

  /// Whether the gradients have memory, or will be given some when it is asked for.
  bool can_have_gradients() const { return gradients_ != nullptr || !lent(); }

  /// A parameter begins to lie in it; `freeze` says that one has no gradient any more.
  void add_parameter() { ++trainable_; }
  void freeze_parameter() {
    if (--trainable_ > 0) return;
    own_gradients_.reset();
    if (!lent()) gradients_ = nullptr;
  }

  /// Puts what is the caller's into other memory of the caller's; the rest stays.
  void rebind(weight_type* values, gradient_type* gradients) {
    if (callers_values_) values_ = values;
    if (callers_gradients_ && trainable()) gradients_ = gradients;
  }

  /// From now on its memory is what `lender`, which it keeps alive, has it use: `use_values` and `use_gradients` say
  /// where. Memory of its own is released.
  void lend(std::shared_ptr<void> lender) {
    if (callers_values_ || callers_gradients_) fail("parameter_array: the caller's memory cannot be replaced");
    lender_ = std::move(lender);
    values_ = nullptr;
    gradients_ = nullptr;
    own_values_.reset();
    own_gradients_.reset();
  }
  /// The canonical sums of what layers add to the gradients; none under usual numerics.
  using terms_type = gradient_terms<Precision, Device>;
  const std::vector<std::unique_ptr<terms_type>>& terms() const { return terms_; }
  /// A layer that uses these parameters begins to have a sum of its own here.
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

/// Where a parameter lies in an array that a layer has made for several. Without an array, it has one of its own.
template <class Precision, compute_device Device>
struct parameter_place {
  parameter_place() = default;
  parameter_place(std::shared_ptr<parameter_array<Precision, Device>> where, std::int64_t at,
                  master_of<Precision>* callers_master = nullptr)
      : array(std::move(where)), offset(at), master(callers_master) {}
  /// For a parameter alone: in the caller's memory, where that is not null.
  parameter_place(Device& device, std::int64_t size, weight_of<Precision>* value, gradient_of<Precision>* gradient,
                  master_of<Precision>* callers_master = nullptr)
      : array(std::make_shared<parameter_array<Precision, Device>>(device, size, value, gradient)),
        master(callers_master) {}

  std::shared_ptr<parameter_array<Precision, Device>> array;
  std::int64_t offset = 0;
  master_of<Precision>* master = nullptr;  ///< the caller's, if not null: as the parameter is stored
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
