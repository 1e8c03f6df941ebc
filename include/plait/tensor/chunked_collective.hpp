// A collective of a plan in chunks of rows, overlapped with a product that uses what it gathers or makes what it sums.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "plait/core/compiled.hpp"
#include "plait/core/error.hpp"
#include "plait/core/function_ref.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/tensor/redistribution.hpp"

namespace plait {
namespace detail {

/// Rows of a matrix, of all batches, that one product computes at a time.
struct row_range {
  std::int64_t first = 0, count = 0;
};

}  // namespace detail

/// Reductions that are under way, with the memory that they read. They end also where this is destroyed; `wait` waits
/// for them, and throws what they threw.
template <compute_device Device>
class chunks_under_way {
 public:
  void wait() {
    for (std::size_t i = 0; i < slots; ++i) going_[(next_ + i) % slots].wait();
    for (buffer<Device>& b : parts_) b.reset();
  }

 private:
  friend class chunked_collective;
  static constexpr std::size_t slots = 2;

  std::array<buffer<Device>, slots> parts_;  ///< outlive the requests, which are destroyed first
  std::array<request, slots> going_;
  std::size_t next_ = 0;
};

/// A gather of all rows that may be under way, with the memory that it writes. Destroyed or not, it ends.
template <compute_device Device>
class whole_gather {
 public:
  /// Has the rows where they are to be, in the main stream's order. Where none were gathered, nothing.
  void finish(Device& device) {
    coming_.wait();
    if (parts_.empty()) return;
    const std::int64_t run = rows_ * row_;
    kernels::copy_3d(device, parts_.data(), out_, ranks_, outers_, run, outers_ * run, run, run, ranks_ * run);
    parts_.reset();
  }

 private:
  friend class chunked_collective;
  std::int64_t ranks_ = 1, outers_ = 1, rows_ = 0, row_ = 0;  ///< `row_`: bytes
  void* out_ = nullptr;
  buffer<Device> parts_;  ///< of the ranks, where they do not lie so in the matrix; outlives the request
  request coming_;
};

/// The all-gather, reduce-scatter or all-reduce that a plan consists of, cut into chunks of a matrix's rows: a piece of
/// each rank's part at a time. Of p ranks' parts [outer, rows, width] a chunk has whole outer blocks where there are
/// enough, otherwise some rows of one; neither needs to divide. Each rank starts the chunks in one order. What is
/// gathered lies as without chunks, and each sum has the terms that it has without chunks. Two chunks are in flight at
/// a time.
class chunked_collective {
 public:
  /// No collective.
  chunked_collective() = default;
  /// `width` are the elements of a row of the matrix. Throws `plait::error` that names `where` if the plan is another
  /// one, or moves something else than whole rows, or has fewer rows than `chunks`.
  chunked_collective(const ready_plan& moves, std::int64_t width, std::int64_t chunks, std::string_view where);

  explicit operator bool() const { return comm_ != nullptr; }

  /// Gathers `in`, this rank's part, to `out`, and calls use(first row, rows) for rows of `out` that have come, in the
  /// main stream's order: for each row once, while the next chunk is on its way.
  template <compute_device Device>
  void gather(Device& device, const void* in, void* out, dtype type,
              function_ref<void(std::int64_t, std::int64_t)> use) const;

  /// Starts to gather `in`, this rank's part, to `out`, all rows at once.
  template <compute_device Device>
  whole_gather<Device> start_whole(Device& device, const void* in, void* out, dtype type) const;

  /// Reduces to `out`, this rank's part, what make(first row, rows, to) writes: rows of the matrix, each once. Returns
  /// when the last chunk is on its way.
  template <compute_device Device>
  chunks_under_way<Device> reduce(Device& device, void* out, dtype type,
                                  function_ref<void(std::int64_t, std::int64_t, void*)> make) const;

 private:
  /// Outer blocks, and rows of each rank's part in them: of several blocks, all rows.
  struct piece {
    std::int64_t outer, outers, row, rows;
  };

  void cut(std::int64_t outer, std::int64_t chunks);

  bool in_place(const piece& p) const { return p.outers == 1 && p.rows == rows_; }
  /// The first row in a rank's own part, and in the matrix of all.
  std::int64_t local_row(const piece& p) const { return p.outer * rows_ + p.row; }
  std::int64_t first_row(const piece& p) const { return p.outer * ranks_ * rows_ + p.row; }
  std::size_t count(const piece& p) const { return static_cast<std::size_t>(p.outers * p.rows * width_); }
  template <class Device>
  buffer<Device> room(Device& device, std::int64_t row) const {
    return buffer<Device>::for_collectives(device, static_cast<std::size_t>(largest_ * ranks_ * row));
  }
  /// Calls f(first row, rows, rows of the piece before it) for each run of a piece's rows in the matrix.
  template <class F>
  void each_run(const piece& p, F&& f) const {
    if (p.rows == rows_) return f(first_row(p), p.outers * ranks_ * rows_, std::int64_t{0});
    for (std::int64_t k = 0; k < ranks_; ++k) f(first_row(p) + k * rows_, p.rows, k * p.rows);
  }

  static const void* at(const void* p, std::int64_t bytes) { return static_cast<const char*>(p) + bytes; }
  static void* at(void* p, std::int64_t bytes) { return static_cast<char*>(p) + bytes; }

  transition_kind kind_ = transition_kind::relabel;
  any_communicator* comm_ = nullptr;
  std::int64_t ranks_ = 1, rows_ = 0, width_ = 1;
  std::int64_t largest_ = 0;  ///< of a piece, rows on each rank
  std::vector<piece> pieces_;
};

template <compute_device Device>
void chunked_collective::gather(Device& device, const void* in, void* out, dtype type,
                                function_ref<void(std::int64_t, std::int64_t)> use) const {
  const std::int64_t row = width_ * static_cast<std::int64_t>(size_of(type));
  struct slot {
    buffer<Device> parts;
    request coming;
  };
  std::array<slot, 2> slots;
  const auto start = [&](std::size_t i) {
    const piece& p = pieces_[i];
    slot& s = slots[i % 2];
    void* to = at(out, first_row(p) * row);
    if (!in_place(p)) {
      if (s.parts.empty()) s.parts = room(device, row);
      to = s.parts.data();
    }
    comm_->start_all_gather(at(in, local_row(p) * row), to, count(p), type).swap(s.coming);
  };
  start(0);
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    if (i + 1 < pieces_.size()) start(i + 1);
    const piece& p = pieces_[i];
    slot& s = slots[i % 2];
    s.coming.wait();
    if (!in_place(p))
      kernels::copy_3d(device, s.parts.data(), at(out, first_row(p) * row), ranks_, p.outers, p.rows * row,
                       p.outers * p.rows * row, p.rows * row, rows_ * row, ranks_ * rows_ * row);
    each_run(p, [&](std::int64_t first, std::int64_t rows, std::int64_t) { use(first, rows); });
  }
}

template <compute_device Device>
whole_gather<Device> chunked_collective::start_whole(Device& device, const void* in, void* out, dtype type) const {
  whole_gather<Device> all;
  all.ranks_ = ranks_, all.outers_ = pieces_.back().outer + pieces_.back().outers, all.rows_ = rows_;
  all.row_ = width_ * static_cast<std::int64_t>(size_of(type));
  all.out_ = out;
  const auto n = static_cast<std::size_t>(all.outers_ * rows_ * width_);
  if (all.outers_ > 1)
    all.parts_ = buffer<Device>::for_collectives(device, static_cast<std::size_t>(ranks_) * n * size_of(type));
  comm_->start_all_gather(in, all.outers_ > 1 ? all.parts_.data() : out, n, type).swap(all.coming_);
  return all;
}

template <compute_device Device>
chunks_under_way<Device> chunked_collective::reduce(Device& device, void* out, dtype type,
                                                    function_ref<void(std::int64_t, std::int64_t, void*)> make) const {
  const std::int64_t row = width_ * static_cast<std::int64_t>(size_of(type));
  chunks_under_way<Device> all;
  buffer<Device> product;
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    const piece& p = pieces_[i];
    const std::size_t mine = i % all.slots;
    all.going_[mine].wait();
    void* const to_rank = at(out, local_row(p) * row);
    if (kind_ == transition_kind::all_reduce) {
      make(p.row, p.rows, to_rank);
      comm_->start_all_reduce(to_rank, to_rank, count(p), type, reduce_op::sum).swap(all.going_[mine]);
    } else {
      buffer<Device>& parts = all.parts_[mine];
      if (parts.empty()) parts = room(device, row);
      if (p.outers > 1 && product.empty())
        product = make_buffer<char>(device, static_cast<std::size_t>(largest_ * ranks_ * row));
      void* const made = p.outers > 1 ? product.data() : parts.data();
      each_run(p, [&](std::int64_t first, std::int64_t rows, std::int64_t before) {
        make(first, rows, at(made, before * row));
      });
      if (p.outers > 1)
        kernels::copy_3d(device, made, parts.data(), ranks_, p.outers, p.rows * row, p.rows * row,
                         ranks_ * p.rows * row, p.outers * p.rows * row, p.rows * row);
      comm_->start_reduce_scatter(parts.data(), to_rank, count(p), type, reduce_op::sum).swap(all.going_[mine]);
    }
    all.next_ = (mine + 1) % all.slots;
  }
  return all;
}

PLAIT_COMPILED_TEMPLATE(void chunked_collective::gather<cpu>(cpu&, const void*, void*, dtype,
                                                             function_ref<void(std::int64_t, std::int64_t)>) const)
PLAIT_COMPILED_TEMPLATE(whole_gather<cpu> chunked_collective::start_whole<cpu>(cpu&, const void*, void*, dtype) const)
PLAIT_COMPILED_TEMPLATE(chunks_under_way<cpu> chunked_collective::reduce<cpu>(
    cpu&, void*, dtype, function_ref<void(std::int64_t, std::int64_t, void*)>) const)

#ifndef PLAIT_COMPILED
PLAIT_INLINE chunked_collective::chunked_collective(const ready_plan& moves, std::int64_t width, std::int64_t chunks,
                                                    std::string_view where) {
  if (moves.uneven())
    fail({where, ": overlap in ", chunks, " chunks needs ranks with equally many rows; a dim of this array does not ",
          "divide by the ranks that shard it"});
  const auto found = moves.single();
  if (!found || width < 1 || found->inner % width != 0)
    fail({where, ": overlap in ", chunks, " chunks is of one all-gather, reduce-scatter or all-reduce of whole rows;",
          " here it would be of ", describe_steps(moves.planned())});
  kind_ = found->kind;
  comm_ = found->comm;
  ranks_ = kind_ == transition_kind::all_reduce ? 1 : found->ranks;
  rows_ = found->rows * (found->inner / width);
  width_ = width;
  const std::int64_t most = found->outer * rows_;
  if (chunks < 1 || chunks > most)
    fail(
        {where, ": overlap in ", chunks, " chunks, of ", most, " rows on each rank; legal are 1 to ", most, " chunks"});
  cut(found->outer, chunks);
}

PLAIT_INLINE void chunked_collective::cut(std::int64_t outer, std::int64_t chunks) {
  const auto share = [](std::int64_t n, std::int64_t i, std::int64_t of) { return n * i / of; };
  if (outer >= chunks) {
    for (std::int64_t c = 0; c < chunks; ++c) {
      const std::int64_t begin = share(outer, c, chunks);
      pieces_.push_back({begin, share(outer, c + 1, chunks) - begin, 0, rows_});
    }
  } else {
    for (std::int64_t o = 0; o < outer; ++o) {
      const std::int64_t here = share(chunks, o + 1, outer) - share(chunks, o, outer);
      for (std::int64_t c = 0; c < here; ++c) {
        const std::int64_t begin = share(rows_, c, here);
        pieces_.push_back({o, 1, begin, share(rows_, c + 1, here) - begin});
      }
    }
  }
  for (const piece& p : pieces_) largest_ = std::max(largest_, p.outers * p.rows);
}
#endif

}  // namespace plait

#include "plait/core/macros_on.hpp"
