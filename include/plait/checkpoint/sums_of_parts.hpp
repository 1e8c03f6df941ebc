// The checksums of boxes that no rank has read whole: ranks put together what each of them has read of one. Nothing is
// read here but what nobody needed of such a box.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "plait/checkpoint/agree.hpp"
#include "plait/checkpoint/held_state.hpp"
#include "plait/checkpoint/manifest.hpp"
#include "plait/checkpoint/step_data.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/io/crc32c.hpp"
#include "plait/tensor/all_reduce_scalar.hpp"

namespace plait::detail {

class sums_of_parts {
 public:
  /// Adds what a rank has read of a box for a tensor that it holds.
  void add(const manifest& saved, const held_tensor& h, const partly_read& part) {
    if (!h.counts) return;  // another stage reads the same
    const auto tensor = static_cast<std::uint64_t>(part.tensor - saved.tensors.data());
    add({tensor << 32 | part.box, crc32c(std::as_bytes(std::span(h.name)))}, part.sum, part.bytes);
  }
  /// Adds what all ranks have. Collective over `ranks`.
  template <compute_device Device>
  void gather(const context<Device>& ctx, any_communicator& ranks) {
    constexpr std::size_t width = 4;  // the box, for whom it was read, sum, bytes
    std::vector<std::uint64_t> mine;
    for (const auto& [key, sum] : sums_) mine.insert(mine.end(), {key.first, key.second, sum.sum, sum.bytes});
    sums_.clear();
    const double most = all_reduce_scalar(ctx.device, ranks, static_cast<double>(mine.size()), reduce_op::max);
    if (most == 0) return;
    const std::vector<std::uint64_t> all =
        gather_all(ctx.device, ranks, std::move(mine), static_cast<std::size_t>(most));
    for (std::size_t i = 0; i < all.size(); i += width)
      if (all[i + 3] != 0)  // else added to have as many as the others
        add({all[i], all[i + 1]}, static_cast<std::uint32_t>(all[i + 2]), all[i + 3]);
  }
  /// Compares, after `gather`, and reads what nobody needed of the rest of a box, in turns with the other ranks. Throws
  /// `error` that names the box whose checksum is another.
  void compare(const manifest& saved, step_data& data, std::size_t rank, std::size_t ranks) const {
    std::size_t turn = 0;
    for (const auto& [key, sum] : sums_) {
      const stored_tensor& t = saved.tensors[key.first >> 32];
      const auto box = static_cast<std::uint32_t>(key.first);
      const stored_box& b = t.boxes[box];
      if (sum.bytes == b.stored.bytes) {
        if (sum.sum != b.stored.crc32c) data.damaged(t, b);
      } else if (turn++ % ranks == rank) {
        data.verify(t, box);
      }
    }
  }
  bool empty() const { return sums_.empty(); }

 private:
  struct sum_of_part {
    std::uint32_t sum = 0;
    std::uint64_t bytes = 0;
  };
  using key_of_part = std::pair<std::uint64_t, std::uint64_t>;  ///< a box, and what it was read for

  void add(const key_of_part& key, std::uint32_t sum, std::uint64_t bytes) {
    sum_of_part& all = sums_[key];
    all.sum ^= sum;
    all.bytes += bytes;
  }

  std::map<key_of_part, sum_of_part> sums_;
};

}  // namespace plait::detail

#include "plait/core/macros_on.hpp"
