// A collective or message that in-process ranks share: its signature, the part of each rank, its progress, and its
// work. Work on the host's memory is split into units that waiting ranks share. An engine does the work on a device's
// memory (comm/threads/cuda.hpp).
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "plait/comm/communicator.hpp"
#include "plait/comm/metrics.hpp"
#include "plait/comm/reduce.hpp"
#include "plait/core/collective.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/text.hpp"
#include "plait/core/types.hpp"
#include "plait/version.hpp"

namespace plait::threads {

namespace detail {
struct operation;
struct part;
}  // namespace detail

/// A point in a stream. An operation keeps it for its next use.
class device_mark {
 public:
  virtual ~device_mark() = default;
};

/// Does the work of operations on device memory. Each rank has one, and only the rank's thread calls it. Ranks still
/// meet on the host; no call waits for the device.
class device_engine {
 public:
  virtual ~device_engine() = default;

  /// Throws `plait::error` unless the device can use `data`; `what` names the operation.
  virtual void check(const char* what, const void* data) const = 0;
  /// Marks the current end of this rank's stream in `mine`; the operation runs after it. Called with the run's mutex
  /// held.
  virtual void arrive(detail::part& mine) = 0;
  /// Enqueues all of the operation's work after the marks of all parts, and marks its end. One rank calls it.
  virtual void run(detail::operation& op) = 0;
  /// Makes this rank's stream wait for the end of the operation.
  virtual void leave(detail::operation& op) = 0;
  /// Whether the device has reached the end of the operation.
  virtual bool reached(detail::operation& op) const = 0;
};

}  // namespace plait::threads

namespace plait::threads::detail {

struct group;

/// The values on which the ranks of one operation must agree. `count` is the call's count. For a ragged call it is 0,
/// and counts are compared for each pair of ranks.
struct signature {
  collective kind = collective::barrier;  ///< `send` for a message, also on its receiver
  std::size_t count = 0;
  dtype type = dtype::u8;
  reduce_op op = reduce_op::sum;
  int root = 0;  ///< of a broadcast; for a message, its tag
  bool ragged = false, is_split = false, on_device = false;
  bool operator==(const signature&) const = default;

  bool is_message() const { return kind == collective::send; }
  const char* name() const {
    return is_split ? "split" : is_message() ? "message" : ragged ? ragged_name_of(kind) : name_of(kind);
  }
  /// The collective whose division of work is used: a ragged all_gather is divided like an exchange between all pairs.
  collective work_kind() const { return ragged && kind == collective::all_gather ? collective::all_to_all : kind; }
};

/// A signature as text, such as "all_reduce(1024 float, sum)".
inline std::string text(const signature& s) {
  std::string out = s.name();
  if (s.kind == collective::barrier) return out;
  out += "(";
  if (!s.ragged) append(out, {s.count, " "});
  out += name_of(s.type);
  if (s.kind == collective::all_reduce || s.kind == collective::reduce_scatter) append(out, {", ", name_of(s.op)});
  if (s.kind == collective::broadcast) append(out, {", root ", s.root});
  return out + (s.on_device ? ") on a device" : ")");
}

/// One rank's part of an operation.
struct part {
  const std::byte* in = nullptr;
  std::byte* out = nullptr;
  bool here = false;
  bool starts = false;       ///< asynchronous: the rank waits later
  std::uint64_t ticket = 0;  ///< in the rank's flight recorder
  // Members for a ragged call: counts and offsets per peer, in elements. The vectors keep their memory for reuse.
  std::vector<std::size_t> send_counts, send_offsets, receive_counts, receive_offsets;
  // Members for a split.
  int color = 0, key = 0;
  std::string label;
  std::shared_ptr<group> child;
  int child_rank = -1;
  std::unique_ptr<device_mark> mark;  ///< on a device: what the rank enqueued before

  void fill(const call& c) {
    in = static_cast<const std::byte*>(c.in);
    out = static_cast<std::byte*>(c.out);
    if (!c.ragged) return;
    send_counts.assign(c.send_counts.begin(), c.send_counts.end());
    send_offsets.assign(c.send_offsets.begin(), c.send_offsets.end());
    receive_counts.assign(c.receive_counts.begin(), c.receive_counts.end());
    receive_offsets.assign(c.receive_offsets.begin(), c.receive_offsets.end());
  }
};

/// One collective, or one message (part 0 sends, part 1 receives). `word` holds its state. Filling: ranks join. Open:
/// all ranks have joined, and waiting ranks may take units of work. Finished: the work is done. Operations are reused,
/// so the steady state allocates nothing.
struct operation {
  static constexpr std::uint32_t open = 1, finished = 2;

  std::atomic<std::uint32_t> word{0};
  std::atomic<std::size_t> next_unit{0};
  std::atomic<std::size_t> units_left{0};
  std::atomic<int> left{0};  ///< ranks that have left it
  std::size_t units = 0;
  signature what;
  std::uint64_t sequence = 0;
  int arrived = 0;
  int source = 0, target = 0;  ///< of a message: ranks in the group
  const group* home = nullptr;
  std::vector<part> parts;
  std::vector<int> world_ranks;      ///< by part
  std::unique_ptr<device_mark> end;  ///< on a device: the end of the work
  bool broken = false;               ///< the device refused the work
  double through = 0;                ///< time of completion, in seconds of comm_clock

  bool complete() const { return arrived == static_cast<int>(parts.size()); }
  /// Whether some rank may ask for the completion time.
  bool started() const {
    return std::any_of(parts.begin(), parts.end(), [](const part& p) { return p.starts; });
  }
  /// Completion time if `started`; 0: not complete.
  double finished_at() const { return (word.load(std::memory_order_acquire) & finished) != 0 ? through : 0; }

  void begin(const signature& s, std::uint64_t seq, const group* g) {
    word.store(0, std::memory_order_relaxed);
    left.store(0, std::memory_order_relaxed);
    what = s;
    sequence = seq;
    arrived = 0;
    home = g;
    broken = false;
    for (part& p : parts) p.here = p.starts = false;
  }
};

// Bytes of one unit of shared work. It is large enough that taking a unit (an atomic add) costs little. It is small
// enough that ranks which start at different times finish together, and a source block stays in cache for its last
// reader.
inline constexpr std::size_t grain = std::size_t{64} << 10;
// Up to this many bytes, summed over ranks, the last arriver does all of an operation's work: waking a helper costs
// more than it saves (measured with 2 to 8 ranks on 2 cores; see benchmarks/all_reduce_threads.cpp).
inline constexpr std::size_t solo_bytes = std::size_t{1} << 20;

inline std::size_t divide_up(std::size_t a, std::size_t b) { return (a + b - 1) / b; }

inline void copy(std::byte* to, const std::byte* from, std::size_t n) {
  if (n != 0 && to != from) std::memcpy(to, from, n);
}

/// Splits an operation into units, and does the work of a unit. Requires that all ranks have joined.
class work {
 public:
  explicit work(operation& op)
      : op_(op), n_(op.parts.size()), size_(size_of(op.what.type)), bytes_(op.what.count * size_) {
    if (op.what.ragged) {
      bytes_ = 0;
      for (const part& p : op.parts) {
        for (const std::size_t c : p.send_counts) bytes_ = std::max(bytes_, c * size_);
      }
    }
    pieces_ = divide_up(bytes_, grain);
  }

  std::size_t units() const { return blocks() * pieces_; }

  /// Bytes that all units write in total.
  std::size_t bytes() const {
    const collective kind = op_.what.work_kind();
    const bool to_all =
        kind == collective::all_reduce || kind == collective::broadcast || kind == collective::all_gather;
    return blocks() * bytes_ * (to_all ? n_ : 1);
  }

  void run(std::size_t unit) const {
    const std::size_t begin = unit % pieces_ * grain;
    const std::size_t end = std::min(bytes_, begin + grain);
    const std::size_t who = unit / pieces_;
    const std::byte* from = nullptr;
    std::size_t shift = 0;  // position in the outputs of a block that goes to all ranks
    switch (op_.what.work_kind()) {
      case collective::all_reduce:
        return reduce(0, begin, end, 0, n_);
      case collective::reduce_scatter: {
        if (!op_.what.ragged) return reduce(who * bytes_, begin, end, who, who + 1);
        const part& own = op_.parts[who];
        const std::size_t total = own.send_counts[who] * size_;
        if (begin < total) reduce(own.send_offsets[who] * size_, begin, std::min(total, end), who, who + 1);
        return;
      }
      case collective::send:
        return copy(op_.parts[1].out + begin, op_.parts[0].in + begin, end - begin);
      case collective::broadcast:
        from = op_.parts[static_cast<std::size_t>(op_.what.root)].in;
        break;
      case collective::all_gather:
        from = op_.parts[who].in;
        shift = who * bytes_;
        break;
      case collective::all_to_all: {
        const std::size_t sender = who / n_, to = who % n_;
        const part &f = op_.parts[sender], &t = op_.parts[to];
        if (!op_.what.ragged) return copy(t.out + sender * bytes_ + begin, f.in + to * bytes_ + begin, end - begin);
        const std::size_t total = f.send_counts[to] * size_;
        if (begin >= total) return;
        return copy(t.out + t.receive_offsets[sender] * size_ + begin, f.in + f.send_offsets[to] * size_ + begin,
                    std::min(total, end) - begin);
      }
      case collective::receive:
      case collective::barrier:
        return;
    }
    for (std::size_t at = begin; at < end; at += 16384) {
      const std::size_t n = std::min<std::size_t>(16384, end - at);
      for (const part& p : op_.parts)
        if (std::byte* const to = p.out + shift + at; to != from + at) std::memcpy(to, from + at, n);
    }
  }

 private:
  /// The blocks of `bytes_` that are split into pieces.
  std::size_t blocks() const {
    switch (op_.what.work_kind()) {
      case collective::all_reduce:
      case collective::broadcast:
      case collective::send:
        return 1;
      case collective::all_gather:
      case collective::reduce_scatter:
        return n_;
      case collective::all_to_all:
        return n_ * n_;
      case collective::receive:
      case collective::barrier:
        break;
    }
    return 0;
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
