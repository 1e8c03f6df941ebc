// The work of an operation of in-process ranks on the host's memory, cut into units that waiting ranks may take. Who
// takes a unit is decided in comm/threads.hpp; on a GPU, comm/threads/cuda.hpp does the work.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "plait/comm/reduce.hpp"
#include "plait/comm/threads/operation.hpp"
#include "plait/core/macros_off.hpp"

namespace plait::threads::detail {

// Bytes of one unit of shared work. Large enough that taking one (an atomic add) costs little. Small enough that two
// ranks that start at different times finish together, and that a source block is still in cache for its last reader.
inline constexpr std::size_t grain = std::size_t{64} << 10;
// Bytes moved by an operation, summed over ranks, up to which the last arriver does all of it: waking a helper costs
// more than it saves (measured with 2 to 8 ranks on 2 cores; see benchmarks/all_reduce_threads.cpp).
inline constexpr std::size_t solo_bytes = std::size_t{1} << 20;

inline std::size_t divide_up(std::size_t a, std::size_t b) { return (a + b - 1) / b; }

inline void copy(std::byte* to, const std::byte* from, std::size_t n) {
  if (n != 0 && to != from) std::memcpy(to, from, n);
}

/// How an operation is cut into units, and what a unit does. Called once the operation is complete.
class work {
 public:
  explicit work(operation& op)
      : op_(op), n_(op.parts.size()), size_(size_of(op.what.type)), bytes_(op.what.count * size_) {
    if (op.what.what == action::all_to_all_v) {
      bytes_ = 0;
      for (const part& p : op.parts) {
        for (const std::size_t c : p.send_counts) bytes_ = std::max(bytes_, c * size_);
      }
    }
    pieces_ = divide_up(bytes_, grain);
  }

  std::size_t units() const {
    switch (op_.what.what) {
      case action::all_reduce:
      case action::broadcast:
      case action::message:
        return pieces_;
      case action::all_gather:
      case action::reduce_scatter:
        return n_ * pieces_;
      case action::all_to_all:
      case action::all_to_all_v:
        return n_ * n_ * pieces_;
      case action::barrier:
      case action::split:
        return 0;
    }
    return 0;
  }

  /// Bytes written by all units together.
  std::size_t bytes() const {
    switch (op_.what.what) {
      case action::all_reduce:
      case action::broadcast:
      case action::reduce_scatter:
        return n_ * bytes_;
      case action::message:
        return bytes_;
      default:
        return n_ * n_ * bytes_;
    }
  }

  void run(std::size_t unit) const {
    const std::size_t begin = unit % pieces_ * grain;
    const std::size_t end = std::min(bytes_, begin + grain);
    const std::size_t who = unit / pieces_;
    switch (op_.what.what) {
      case action::all_reduce:
        return reduce(0, begin, end, 0, n_);
      case action::reduce_scatter:
        return reduce(who * bytes_, begin, end, who, who + 1);
      case action::message:
        return copy(op_.parts[1].out + begin, op_.parts[0].in + begin, end - begin);
      case action::broadcast: {
        const auto root = static_cast<std::size_t>(op_.what.root);
        return spread(op_.parts[root].out, 0, begin, end);
      }
      case action::all_gather:
        return spread(op_.parts[who].in, who * bytes_, begin, end);
      case action::all_to_all: {
        const std::size_t from = who / n_, to = who % n_;
        return copy(op_.parts[to].out + from * bytes_ + begin, op_.parts[from].in + to * bytes_ + begin, end - begin);
      }
      case action::all_to_all_v: {
        const std::size_t from = who / n_, to = who % n_;
        const std::size_t total = op_.parts[from].send_counts[to] * size_;
        if (begin >= total) return;
        return copy(op_.parts[to].out + op_.parts[to].receive_offsets[from] * size_ + begin,
                    op_.parts[from].in + op_.parts[from].send_offsets[to] * size_ + begin,
                    std::min(total, end) - begin);
      }
      case action::barrier:
      case action::split:
        return;
    }
  }

 private:
  /// Copies bytes [begin, end) of `from` to every rank, `shift` bytes into its output.
  void spread(const std::byte* from, std::size_t shift, std::size_t begin, std::size_t end) const {
    for (std::size_t at = begin; at < end; at += 16384) {
      const std::size_t n = std::min<std::size_t>(16384, end - at);
      for (const part& p : op_.parts)
        if (std::byte* const to = p.out + shift + at; to != from + at) std::memcpy(to, from + at, n);
    }
  }

  /// Reduces bytes [begin, end), `shift` bytes into every input, into the outputs of parts [first, last).
  void reduce(std::size_t shift, std::size_t begin, std::size_t end, std::size_t first, std::size_t last) const {
    plait::detail::with_reduction(op_.what.op, op_.what.type, [&]<reduce_op Op, class T>() {
      plait::detail::reduce_range<Op, T>(
          static_cast<int>(n_), [&](int k) { return op_.parts[static_cast<std::size_t>(k)].in + shift; },
          begin / sizeof(T), end / sizeof(T),
          [&](std::size_t at, const T* block, std::size_t count) {
            for (std::size_t r = first; r < last; ++r) {
              std::memcpy(op_.parts[r].out + at * sizeof(T), block, count * sizeof(T));
            }
          });
    });
  }

  operation& op_;
  std::size_t n_, size_, bytes_, pieces_ = 0;
};

}  // namespace plait::threads::detail

#include "plait/core/macros_on.hpp"
