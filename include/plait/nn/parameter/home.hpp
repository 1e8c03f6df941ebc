// Where data parallelism keeps parameters between steps: the interface by which a parameter finds its piece. What moves
// them is parallel/bucket.hpp.
#pragma once

#include <algorithm>
#include <cstdint>

#include "plait/comm/any_communicator.hpp"
#include "plait/core/precision.hpp"
#include "plait/device/device.hpp"
#include "plait/layout/mesh.hpp"
#include "plait/tensor/context.hpp"

namespace plait {

template <class Precision, compute_device Device>
class parameter;
template <class Precision, compute_device Device>
class reduced_gradient;
namespace detail {
template <class Precision, compute_device Device>
class parameter_rebinding;
}  // namespace detail

/// Some elements of what a rank would store of a parameter, in row-major order.
struct parameter_piece {
  std::int64_t begin = 0, end = 0;
  std::int64_t size() const { return end - begin; }
  friend bool operator==(const parameter_piece&, const parameter_piece&) = default;
};

/// Keeps parameters side by side in one flat array, of which every rank of a group has an even piece between steps, or
/// all of it where nothing is cut.
template <class Precision, compute_device Device>
class parameter_home {
 public:
  virtual ~parameter_home() = default;
  parameter_home(const parameter_home&) = delete;
  parameter_home& operator=(const parameter_home&) = delete;

  /// Brings the values of all its parameters to where layers read them. Collective over `axes`.
  virtual void gather(const context<Device>& ctx) = 0;
  /// Waits for a gather that is under way. Asks no rank for anything.
  virtual void settle() = 0;

  /// The axes whose ranks have a piece each; none: all of it is everywhere.
  const axis_list& axes() const { return axes_; }
  /// The communicator over these axes.
  any_communicator& group() { return group_; }
  /// The piece that `rank` of that group has of `size` elements which begin at `at` in the array.
  parameter_piece piece_of(std::int64_t at, std::int64_t size, std::int64_t rank) const {
    const std::int64_t first = rank * piece_ - at;
    return {std::clamp<std::int64_t>(first, 0, size), std::clamp<std::int64_t>(first + piece_, 0, size)};
  }
  std::int64_t rank() const { return rank_; }
  /// Pieces begin and end at multiples of so many elements of a layer's array; 0: at none, arrays are whole.
  std::int64_t cuts_at() const { return cuts_at_; }

 protected:
  using parameter_type = parameter<Precision, Device>;
  using master_type = master_of<Precision>;
  using weight_type = weight_of<Precision>;
  using gradient_type = gradient_of<Precision>;
  friend parameter_type;

  parameter_home() = default;

  /// Has `p` live at `at` in this home's array, with the values that it has.
  static void move(const context<Device>& ctx, parameter_type& p, parameter_home& home, std::int64_t at) {
    p.move_to(ctx, home, at);
  }
  static void set_current(parameter_type& p, bool current) { p.set_current(current); }
  static bool rounded_current(const parameter_type& p) { return p.rounded_current_; }
  /// No pass may add to its gradient from now on.
  static void begin_reduction(parameter_type& p) {
    p.added_ = false;
    if (!p.frozen_) p.phase_ = parameter_type::phase::reducing;
  }
  static reduced_gradient<Precision, Device> complete(parameter_type& p) { return p.complete_gradient(); }
  static any_communicator& stages_of(parameter_type& p) { return p.stages_; }

  axis_list axes_;
  any_communicator group_;
  std::int64_t piece_ = 0;  ///< elements, padding included
  std::int64_t rank_ = 0;
  std::int64_t cuts_at_ = 1;
  master_type* masters_ = nullptr;      ///< of this rank's piece
  weight_type* rounded_ = nullptr;      ///< where an optimizer puts them rounded; null: they are not
  gradient_type* gradients_ = nullptr;  ///< of this rank's piece, once reduced
};

}  // namespace plait
