// A collective of a plan, cut into chunks of rows. It overlaps with the matrix product that reads the gathered rows or
// computes the rows to be summed.
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

/// The rows of a matrix, counted over all batches, that one product computes at a time.
struct row_range {
  std::int64_t first = 0, count = 0;
};

}  // namespace detail

/// Reductions in flight, with the memory that they read. The destructor completes them; `wait` does so too and throws
/// their errors.
template <compute_device Device>
class chunks_in_flight {
 public:
  void wait() {
    for (std::size_t i = 0; i < slots; ++i) requests_[(next_ + i) % slots].wait();
    for (buffer<Device>& b : parts_) b.reset();
  }

 private:
  friend class chunked_collective;
  static constexpr std::size_t slots = 2;

  std::array<buffer<Device>, slots> parts_;  ///< must outlive the requests, which are destroyed first
  std::array<request, slots> requests_;
  std::size_t next_ = 0;
};

class chunked_collective;

/// A gather of all rows that may be in flight, with the memory that it writes. The destructor completes it. The object
/// must not outlive the collective that started it.
template <compute_device Device>
class whole_gather {
 public:
  /// Moves the rows to their places, in the main stream's order. Does nothing if no gather was started.
  void finish(Device& device);

 private:
  friend class chunked_collective;
  const chunked_collective* from_ = nullptr;
  std::int64_t row_ = 0;  ///< bytes of a row
  void* out_ = nullptr;
  buffer<Device> parts_;  ///< the ranks' parts, if the matrix does not hold them contiguously; must outlive the request
  request request_;
};

/// The single all-gather, reduce-scatter or all-reduce of a plan, cut into chunks. Each chunk has a piece of every
/// rank's part, in rows of a matrix. The p ranks' parts are [outer, rows, width]. If `outer` is large enough, a chunk
/// has whole outer blocks; otherwise it has some rows of one block. The number of chunks need not divide either, and
/// parts may have different numbers of rows.
///
/// All ranks start the chunks in the same order. Gathered rows lie as without chunks, and each sum has the same terms
/// as without chunks. At most two chunks are in flight.
class chunked_collective {
 public:
  /// An object without a collective.
  chunked_collective() = default;
  /// `width` is the number of elements in a row of the matrix. Throws `plait::error` that names `where` in three cases.
  /// The plan is not a single collective of these kinds that moves whole rows; it has fewer rows than `chunks`; or
  /// parts have unequal sizes and the communicator does not take them.
  chunked_collective(const ready_plan& moves, std::int64_t width, std::int64_t chunks, std::string_view where);

  explicit operator bool() const { return comm_ != nullptr; }

  /// Gathers `in`, this rank's part, to `out`. Calls use(first row, rows) for rows of `out` that have arrived, each row
  /// once, in the main stream's order. Meanwhile the next chunk is in flight.
  template <compute_device Device>
  void gather(Device& device, const void* in, void* out, dtype type,
              function_ref<void(std::int64_t, std::int64_t)> use) const;

  /// Starts one gather of all rows from `in`, this rank's part, to `out`.
  template <compute_device Device>
  whole_gather<Device> start_whole(Device& device, const void* in, void* out, dtype type) const;

  /// Reduces rows of the matrix to `out`, this rank's part. make(first row, rows, to) writes the rows, each once.
  /// Returns when the last chunk is in flight.
  template <compute_device Device>
  chunks_in_flight<Device> reduce(Device& device, void* out, dtype type,
                                  function_ref<void(std::int64_t, std::int64_t, void*)> make) const;

 private:
  template <compute_device Device>
  friend class whole_gather;

  /// A range of outer blocks, in which each rank's part is cut into `of` pieces; this is piece `index`. With several
  /// blocks, `of` is 1.
  struct piece {
    std::int64_t outer, outers, index, of;
  };

  void cut(std::int64_t outer, std::int64_t chunks);

  static std::int64_t share(std::int64_t n, std::int64_t i, std::int64_t of) { return n * i / of; }
  /// The rows of this piece in rank k's part of a block.
  detail::row_range rows(const piece& p, std::size_t k) const {
    const std::int64_t part = begins_[k + 1] - begins_[k], first = share(part, p.index, p.of);
    return {first, share(part, p.index + 1, p.of) - first};
  }
  std::size_t ranks() const { return begins_.size() - 1; }
  /// The rows of a block, over all parts.
  std::int64_t block() const { return begins_.back(); }
  piece whole() const { return {0, pieces_.back().outer + pieces_.back().outers, 0, 1}; }

  bool in_place(const piece& p) const { return p.outers == 1 && p.of == 1; }
  /// The first row of a piece in this rank's part.
  std::int64_t local_row(const piece& p) const {
    return p.outer * (begins_[own_ + 1] - begins_[own_]) + rows(p, own_).first;
  }
  /// The messages of a piece: each rank's number of elements, and where they begin.
  struct messages {
    std::vector<std::size_t> counts, offsets;
  };
  messages messages_of(const piece& p) const;
  /// The rows of a piece, over all ranks.
  std::int64_t all_rows(const piece& p) const;
  template <class Device>
  buffer<Device> room(Device& device, std::int64_t row) const {
    return buffer<Device>::for_collectives(device, static_cast<std::size_t>(largest_ * row));
  }
  /// Calls f(first row, rows, rows of the piece before this run) for each contiguous run of a piece's rows in the
  /// matrix.
  template <class F>
  void each_run(const piece& p, F&& f) const {
    if (p.of == 1) return f(p.outer * block(), p.outers * block(), std::int64_t{0});
    std::int64_t before = 0;
    for (std::size_t k = 0; k < ranks(); ++k) {
      const detail::row_range part = rows(p, k);
      if (part.count > 0) f(p.outer * block() + begins_[k] + part.first, part.count, before);
      before += part.count;
    }
  }
  /// Copies the messages of a piece into its blocks, or out of them, in rows of `row` bytes.
  template <class Device>
  void to_blocks(Device& device, const piece& p, const void* parts, void* blocks, std::int64_t row) const {
    each_copy(p, row,
              [&](std::int64_t n, std::int64_t part, std::int64_t at_block, std::int64_t run, std::int64_t step) {
                kernels::copy_3d(device, at(parts, part), at(blocks, at_block), n, p.outers, run, p.outers * run, run,
                                 step, block() * row);
              });
  }
  template <class Device>
  void from_blocks(Device& device, const piece& p, const void* blocks, void* parts, std::int64_t row) const {
    each_copy(p, row,
              [&](std::int64_t n, std::int64_t part, std::int64_t at_block, std::int64_t run, std::int64_t step) {
                kernels::copy_3d(device, at(blocks, at_block), at(parts, part), n, p.outers, run, step, block() * row,
                                 p.outers * run, run);
              });
  }
  /// Calls f(parts, byte in the messages, byte in the blocks, bytes of a part in a block, bytes from part to part). It
  /// makes one call if parts are equal, and one call per part if not.
  template <class F>
  void each_copy(const piece& p, std::int64_t row, F&& f) const {
    const std::int64_t calls = equal_ ? 1 : static_cast<std::int64_t>(ranks());
    std::int64_t before = 0;
    for (std::int64_t k = 0; k < calls; ++k) {
      const detail::row_range part = rows(p, static_cast<std::size_t>(k));
      const std::int64_t begin = begins_[static_cast<std::size_t>(k)], step = begins_[static_cast<std::size_t>(k) + 1];
      if (part.count > 0)
        f(static_cast<std::int64_t>(ranks()) / calls, before, (begin + part.first) * row, part.count * row,
          (step - begin) * row);
      before += p.outers * part.count * row;
    }
  }
  request start_gather(const piece& p, const void* in, void* out, dtype type) const {
    const messages all = messages_of(p);
    return equal_ ? comm_->start_all_gather(in, out, all.counts[0], type)
                  : comm_->start_all_gather_v(in, out, all.counts, all.offsets, type);
  }
  request start_scatter(const piece& p, const void* in, void* out, dtype type) const {
    const messages all = messages_of(p);
    return equal_ ? comm_->start_reduce_scatter(in, out, all.counts[0], type, reduce_op::sum)
                  : comm_->start_reduce_scatter_v(in, out, all.counts, all.offsets, type, reduce_op::sum);
  }

  static const void* at(const void* p, std::int64_t bytes) { return static_cast<const char*>(p) + bytes; }
  static void* at(void* p, std::int64_t bytes) { return static_cast<char*>(p) + bytes; }

  transition_kind kind_ = transition_kind::relabel;
  any_communicator* comm_ = nullptr;
  std::vector<std::int64_t> begins_;  ///< where each rank's part of a block begins, in rows, and the block's end
  std::size_t own_ = 0;               ///< this rank's index in `begins_`
  bool equal_ = true;                 ///< whether all parts have the same number of rows
  std::int64_t width_ = 1;
  std::int64_t largest_ = 0;  ///< rows of the largest piece, over all ranks
  std::vector<piece> pieces_;
};

template <compute_device Device>
void whole_gather<Device>::finish(Device& device) {
  request_.wait();
  if (parts_.empty()) return;
  from_->to_blocks(device, from_->whole(), parts_.data(), out_, row_);
  parts_.reset();
}

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
    void* to = at(out, p.outer * block() * row);
    if (!in_place(p)) {
      if (s.parts.empty()) s.parts = room(device, row);
      to = s.parts.data();
    }
    start_gather(p, at(in, local_row(p) * row), to, type).swap(s.coming);
  };
  start(0);
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    if (i + 1 < pieces_.size()) start(i + 1);
    const piece& p = pieces_[i];
    slot& s = slots[i % 2];
    s.coming.wait();
    if (!in_place(p)) to_blocks(device, p, s.parts.data(), at(out, p.outer * block() * row), row);
    each_run(p, [&](std::int64_t first, std::int64_t rows, std::int64_t) { use(first, rows); });
  }
}

template <compute_device Device>
whole_gather<Device> chunked_collective::start_whole(Device& device, const void* in, void* out, dtype type) const {
  whole_gather<Device> all;
  const piece p = whole();
  all.from_ = this, all.out_ = out;
  all.row_ = width_ * static_cast<std::int64_t>(size_of(type));
  if (p.outers > 1)
    all.parts_ = buffer<Device>::for_collectives(device, static_cast<std::size_t>(all_rows(p) * all.row_));
  start_gather(p, in, p.outers > 1 ? all.parts_.data() : out, type).swap(all.request_);
  return all;
}

template <compute_device Device>
chunks_in_flight<Device> chunked_collective::reduce(Device& device, void* out, dtype type,
                                                    function_ref<void(std::int64_t, std::int64_t, void*)> make) const {
  const std::int64_t row = width_ * static_cast<std::int64_t>(size_of(type));
  chunks_in_flight<Device> all;
  buffer<Device> product;
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    const piece& p = pieces_[i];
    const std::size_t mine = i % all.slots;
    all.requests_[mine].wait();
    void* const to_rank = at(out, local_row(p) * row);
    if (kind_ == transition_kind::all_reduce) {
      const detail::row_range part = rows(p, own_);
      make(part.first, part.count, to_rank);
      comm_->start_all_reduce(to_rank, to_rank, static_cast<std::size_t>(part.count * width_), type, reduce_op::sum)
          .swap(all.requests_[mine]);
    } else {
      buffer<Device>& parts = all.parts_[mine];
      if (parts.empty()) parts = room(device, row);
      if (p.outers > 1 && product.empty())
        product = make_buffer<char>(device, static_cast<std::size_t>(largest_ * row));
      void* const made = p.outers > 1 ? product.data() : parts.data();
      each_run(p, [&](std::int64_t first, std::int64_t rows, std::int64_t before) {
        make(first, rows, at(made, before * row));
      });
      if (p.outers > 1) from_blocks(device, p, made, parts.data(), row);
      start_scatter(p, parts.data(), to_rank, type).swap(all.requests_[mine]);
    }
    all.next_ = (mine + 1) % all.slots;
  }
  return all;
}

PLAIT_COMPILED_TEMPLATE(void chunked_collective::gather<cpu>(cpu&, const void*, void*, dtype,
                                                             function_ref<void(std::int64_t, std::int64_t)>) const)
PLAIT_COMPILED_TEMPLATE(whole_gather<cpu> chunked_collective::start_whole<cpu>(cpu&, const void*, void*, dtype) const)
PLAIT_COMPILED_TEMPLATE(chunks_in_flight<cpu> chunked_collective::reduce<cpu>(
    cpu&, void*, dtype, function_ref<void(std::int64_t, std::int64_t, void*)>) const)

#ifndef PLAIT_COMPILED
PLAIT_INLINE chunked_collective::chunked_collective(const ready_plan& moves, std::int64_t width, std::int64_t chunks,
                                                    std::string_view where) {
  const auto found = moves.single();
  if (!found || width < 1 || found->inner % width != 0)
    fail({where, ": overlap in ", chunks, " chunks is of one all-gather, reduce-scatter or all-reduce of whole rows;",
          " here it would be of ", describe_steps(moves.planned())});
  kind_ = found->kind;
  comm_ = found->comm;
  width_ = width;
  begins_ = found->begins;
  std::int64_t least = 0;
  for (std::int64_t& row : begins_) row *= found->inner / width;
  for (std::size_t k = 0; k < ranks(); ++k) {
    const std::int64_t part = begins_[k + 1] - begins_[k];
    equal_ = equal_ && part == begins_[1];
    least = k == 0 ? part : std::min(least, part);
  }
  if (kind_ != transition_kind::all_reduce) own_ = static_cast<std::size_t>(comm_->rank());
  if (!equal_ && !comm_->unequal_parts(~std::size_t{0}))
    fail({where, ": overlap in ", chunks, " chunks of a dim that does not divide by the ranks needs a communicator ",
          "that takes parts of unequal sizes (unequal_parts), and '", comm_->label(), "' does not"});
  const std::int64_t most = found->outer * least;
  if (chunks < 1 || chunks > most)
    fail(
        {where, ": overlap in ", chunks, " chunks, of ", most, " rows on each rank; legal are 1 to ", most, " chunks"});
  cut(found->outer, chunks);
}

PLAIT_INLINE void chunked_collective::cut(std::int64_t outer, std::int64_t chunks) {
  if (outer >= chunks) {
    for (std::int64_t c = 0; c < chunks; ++c) {
      const std::int64_t begin = share(outer, c, chunks);
      pieces_.push_back({begin, share(outer, c + 1, chunks) - begin, 0, 1});
    }
  } else {
    for (std::int64_t o = 0; o < outer; ++o) {
      const std::int64_t here = share(chunks, o + 1, outer) - share(chunks, o, outer);
      for (std::int64_t c = 0; c < here; ++c) pieces_.push_back({o, 1, c, here});
    }
  }
  for (const piece& p : pieces_) largest_ = std::max(largest_, all_rows(p));
}

PLAIT_INLINE std::int64_t chunked_collective::all_rows(const piece& p) const {
  std::int64_t all = 0;
  for (std::size_t k = 0; k < ranks(); ++k) all += p.outers * rows(p, k).count;
  return all;
}

PLAIT_INLINE chunked_collective::messages chunked_collective::messages_of(const piece& p) const {
  messages all;
  std::size_t before = 0;
  for (std::size_t k = 0; k < ranks(); ++k) {
    all.counts.push_back(static_cast<std::size_t>(p.outers * rows(p, k).count * width_));
    all.offsets.push_back(before);
    before += all.counts.back();
  }
  return all;
}
#endif

}  // namespace plait

#include "plait/core/macros_on.hpp"
