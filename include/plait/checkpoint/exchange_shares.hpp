// Sends what ranks have read to those that need it, many tensors in one collective and no more bytes at once than a
// limit: parts of rows (checkpoint/boxes.hpp), then shares of what several ranks hold the same.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/checkpoint/boxes.hpp"
#include "plait/checkpoint/held_state.hpp"
#include "plait/device/device.hpp"
#include "plait/io/byte_buffer.hpp"

namespace plait::detail {

/// Ranks of a group must add the same tensors in the same order. Tensors of different groups may come between them.
template <compute_device Device>
class share_exchange {
 public:
  /// At most about `most` bytes of a rank are sent at once; a tensor that is larger goes alone.
  share_exchange(const context<Device>& ctx, std::size_t most) : ctx_(ctx), most_(most) {}

  /// `slot` has what `reads` say, one after the other; when the rows are exchanged, its first `share` bytes are this
  /// rank's share, zeros where that is padding.
  void add_rows(const held_tensor& h, const std::vector<planned_read>& reads, std::byte* slot, std::size_t share) {
    std::size_t bytes = 0;  // as many on every rank of the group
    for (const planned_read& r : reads)
      if (r.by_rows())
        for (const box& part : r.parts) bytes += static_cast<std::size_t>(part.local_size()) * h.element_bytes();
    bytes /= static_cast<std::size_t>(ctx_.ranks.shape().size(h.across));
    batch<rows_entry>& to = rows_[key_of(h.across)];
    to.axes = h.across;
    if (!to.entries.empty() && to.bytes + bytes > most_) exchange_rows(to);
    to.entries.push_back({&h, &reads, slot, share});
    to.bytes += bytes;
  }
  void finish_rows() {
    for (auto& [key, one] : rows_) exchange_rows(one);
  }

  /// Hands the tensor all that this rank holds, of its own share and those of the ranks that hold the same; now, or
  /// with others. `in_place`: the share lies where it belongs.
  void add_copies(const held_tensor& h, const std::byte* share, bool in_place) {
    const mesh_shape& mesh = ctx_.ranks.shape();
    const std::int64_t copies = mesh.size(h.copies);
    if (copies == 1 || h.size() == 0) return in_place ? void() : h.write(share);
    const std::size_t most = share_bytes(h, copies), all = most * static_cast<std::size_t>(copies);
    const bool even = all == static_cast<std::size_t>(h.size()) * h.element_bytes();
    if (even && h.target && (all >= most_ / 16 || most >= straight)) {  // to where it belongs
      const auto own = static_cast<std::size_t>(mesh.index_in(ctx_.ranks.rank(), h.copies));
      std::byte* const to = h.target();
      any_communicator& group = ctx_.ranks.group(h.copies);
      if constexpr (std::is_same_v<Device, cpu>) return group.all_gather(share, to, most, dtype::u8);
      ctx_.device.upload(to + own * most, share, most, ctx_.device.main_stream());
      return group.all_gather(to + own * most, to, most, dtype::u8);
    }
    batch<copies_entry>& to = copies_[key_of(h.copies)];
    to.axes = h.copies;
    if (!to.entries.empty() && to.bytes + all > most_) exchange_copies(to);
    to.entries.push_back({&h, share});
    to.bytes += all;
  }
  void finish_copies() {
    for (auto& [key, one] : copies_) exchange_copies(one);
  }

 private:
  /// Bytes of a share that take longer to be copied than a collective of its own takes to begin.
  static constexpr std::size_t straight = std::size_t{128} << 10;

  struct rows_entry {
    const held_tensor* h;
    const std::vector<planned_read>* reads;
    std::byte* slot;
    std::size_t share;
  };
  struct copies_entry {
    const held_tensor* h;
    const std::byte* share;
  };
  template <class Entry>
  struct batch {
    axis_list axes;
    std::vector<Entry> entries;
    std::size_t bytes = 0;
  };

  /// Axes as a number, one bit for each, by which batches are in the same order on every rank.
  unsigned key_of(const axis_list& axes) const {
    unsigned key = 0;
    const mesh_shape& mesh = ctx_.ranks.shape();
    for (std::size_t i = 0; i < mesh.axes.size(); ++i) key |= unsigned{axes.contains(mesh.axes[i])} << i;
    return key;
  }
  /// Bytes of the largest share.
  static std::size_t share_bytes(const held_tensor& h, std::int64_t copies) {
    return static_cast<std::size_t>((h.size() + copies - 1) / copies) * h.element_bytes();
  }
  /// Host memory whose first bytes can be sent and received: that of the device, or a copy of it.
  std::byte* staged(std::size_t bytes) {
    if (!there_ || there_->bytes() < bytes) {
      there_.reset();
      there_.emplace(make_collective_buffer<std::byte>(ctx_.device, bytes));
    }
    if constexpr (std::is_same_v<Device, cpu>) return there();
    here_.grow(bytes);
    return here_.data();
  }
  std::byte* there() { return there_->template data<std::byte>(); }
  void to_device(std::size_t from, std::size_t bytes) {
    if constexpr (!std::is_same_v<Device, cpu>)
      ctx_.device.upload(there() + from, here_.data() + from, bytes, ctx_.device.main_stream());
  }
  void to_host(std::size_t from, std::size_t bytes) {
    if constexpr (!std::is_same_v<Device, cpu>)
      ctx_.device.download(here_.data() + from, there() + from, bytes, ctx_.device.main_stream());
  }

  void exchange_rows(batch<rows_entry>& all) {
    if (all.entries.empty()) return;
    any_communicator& group = ctx_.ranks.group(all.axes);
    const auto ranks = static_cast<std::size_t>(group.size());
    std::vector<std::size_t> send(ranks, 0), receive(ranks, 0), send_at(ranks, 0), receive_at(ranks, 0);
    for (const rows_entry& e : all.entries)
      for (const planned_read& r : *e.reads)
        for (std::size_t i = 0; r.by_rows() && i < ranks; ++i) {
          send[i] += bytes_of(e, part_in(r.parts[i], r.slabs[r.self]));
          receive[i] += bytes_of(e, part_in(r.own.where, r.slabs[i]));
        }
    std::size_t out = 0, in = 0;
    for (std::size_t i = 0; i < ranks; ++i) {
      send_at[i] = std::exchange(out, out + send[i]);
      receive_at[i] = std::exchange(in, in + receive[i]);
    }
    std::byte* const here = staged(out + in);
    std::vector<std::size_t> next = send_at;
    for (const rows_entry& e : all.entries) pack(e, here, next);
    to_device(0, out);
    group.all_to_all_v(there(), send, send_at, there() + out, receive, receive_at, dtype::u8);
    to_host(out, in);
    next = receive_at;
    for (const rows_entry& e : all.entries) unpack(e, here + out, next);
    all.entries.clear();
    all.bytes = 0;
  }
  /// The rows of a part that a slab has.
  static box part_in(box part, const box& slab) {
    part.offset[0] = slab.offset[0];
    part.local[0] = slab.local[0];
    return part;
  }
  static std::size_t bytes_of(const rows_entry& e, const box& b) {
    return static_cast<std::size_t>(b.local_size()) * e.h->element_bytes();
  }
  static void pack(const rows_entry& e, std::byte* out, std::vector<std::size_t>& next) {
    const std::byte* at = e.slot;
    const std::size_t width = e.h->element_bytes();
    for (const planned_read& r : *e.reads) {
      for (std::size_t i = 0; i < r.parts.size(); ++i) {
        const box part = part_in(r.parts[i], r.read());
        each_common_run(part, r.read(), part, [&](std::int64_t from, std::int64_t to, std::int64_t n) {
          std::memcpy(out + next[i] + static_cast<std::size_t>(to) * width, at + static_cast<std::size_t>(from) * width,
                      static_cast<std::size_t>(n) * width);
        });
        next[i] += bytes_of(e, part);
      }
      at += bytes_of(e, r.read());
    }
  }
  void unpack(const rows_entry& e, const std::byte* in, std::vector<std::size_t>& next) {
    std::size_t read = 0;
    for (const planned_read& r : *e.reads) read += bytes_of(e, r.read());
    kept_.assign(e.slot, e.slot + read);  // what is not by rows goes to its place, which may lie elsewhere
    const std::byte* from = kept_.data();
    std::memset(e.slot, 0, e.share);
    for (const planned_read& r : *e.reads) {
      std::byte* to = e.slot + static_cast<std::size_t>(r.own.at) * e.h->element_bytes();
      if (!r.by_rows()) std::memcpy(to, from, bytes_of(e, r.own.where));
      for (std::size_t i = 0; i < r.slabs.size(); ++i) {
        const std::size_t bytes = bytes_of(e, part_in(r.own.where, r.slabs[i]));
        std::memcpy(to, in + next[i], bytes);
        next[i] += bytes;
        to += bytes;
      }
      from += bytes_of(e, r.read());
    }
  }

  void exchange_copies(batch<copies_entry>& all) {
    if (all.entries.empty()) return;
    const mesh_shape& mesh = ctx_.ranks.shape();
    const std::int64_t copies = mesh.size(all.axes), own = mesh.index_in(ctx_.ranks.rank(), all.axes);
    const auto first = [&](const held_tensor& h, std::int64_t i) {  // byte of the i-th share
      return static_cast<std::size_t>(h.size() * i / copies) * h.element_bytes();
    };
    std::size_t room = 0;  // of one rank's shares
    for (const copies_entry& e : all.entries) room += share_bytes(*e.h, copies);
    std::byte* const here = staged(room * static_cast<std::size_t>(copies));
    std::size_t at = room * static_cast<std::size_t>(own);
    const std::size_t mine = at;
    for (const copies_entry& e : all.entries) {
      std::memcpy(here + at, e.share, first(*e.h, own + 1) - first(*e.h, own));
      at += share_bytes(*e.h, copies);
    }
    to_device(mine, room);
    ctx_.ranks.group(all.axes).all_gather(there() + mine, there(), room, dtype::u8);
    to_host(0, room * static_cast<std::size_t>(copies));
    at = 0;
    for (const copies_entry& e : all.entries) {
      const bool to_target = std::is_same_v<Device, cpu> && e.h->target;
      if (!to_target && kept_.size() < first(*e.h, copies)) kept_.resize(first(*e.h, copies));
      std::byte* const to = to_target ? e.h->target() : kept_.data();
      for (std::int64_t i = 0; i < copies; ++i) {
        const std::byte* const from = i == own ? e.share : here + room * static_cast<std::size_t>(i) + at;
        if (to + first(*e.h, i) != from) std::memcpy(to + first(*e.h, i), from, first(*e.h, i + 1) - first(*e.h, i));
      }
      if (!to_target) e.h->write(to);
      at += share_bytes(*e.h, copies);
    }
    all.entries.clear();
    all.bytes = 0;
  }

  const context<Device>& ctx_;
  std::size_t most_;
  std::map<unsigned, batch<rows_entry>> rows_;
  std::map<unsigned, batch<copies_entry>> copies_;
  std::optional<buffer<Device>> there_;
  byte_buffer here_;
  std::vector<std::byte> kept_;
};

}  // namespace plait::detail
