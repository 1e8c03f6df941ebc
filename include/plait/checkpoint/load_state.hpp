// Loads a saved training state into a model and its optimizer, on any mesh, with any schedule, data parallelism and
// precision.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "plait/checkpoint/agree.hpp"
#include "plait/checkpoint/boxes.hpp"
#include "plait/checkpoint/held_state.hpp"
#include "plait/checkpoint/manifest.hpp"
#include "plait/checkpoint/step_data.hpp"
#include "plait/checkpoint/step_directory.hpp"
#include "plait/comm/host_values.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/tensor_names.hpp"
#include "plait/core/text.hpp"
#include "plait/device/device.hpp"
#include "plait/io/byte_buffer.hpp"
#include "plait/io/crc32c.hpp"
#include "plait/io/posix_file_system.hpp"
#include "plait/tensor/check_values.hpp"

namespace plait {

namespace detail {

/// Returns a set of axes as a number with one bit per axis. The number is equal on every rank.
inline unsigned number_of_axes(const mesh_shape& mesh, const axis_list& axes) {
  unsigned number = 0;
  for (std::size_t i = 0; i < mesh.axes.size(); ++i) number |= unsigned{axes.contains(mesh.axes[i])} << i;
  return number;
}

/// A tensor to load, and how this rank reads its share.
struct tensor_to_load {
  const held_tensor* held;
  const stored_tensor* stored;
  std::int64_t begin, end;            ///< this rank's share (`own_share`)
  std::vector<planned_read> reads{};  ///< of this share, and for other ranks
  std::byte* slot = nullptr;          ///< destination of all reads, in the order of `reads`
  bool in_place = false;              ///< whether `slot` is the share's final place
  bool early = false;                 ///< whether ranks send the share while they read other tensors

  std::size_t bytes_of(const box& b) const { return static_cast<std::size_t>(b.local_size()) * held->element_bytes(); }
  std::size_t share_bytes() const { return static_cast<std::size_t>(end - begin) * held->element_bytes(); }
  std::size_t read_bytes() const {
    std::size_t bytes = 0;
    for (const planned_read& r : reads) bytes += bytes_of(r.read());
    return bytes;
  }
  bool by_rows() const {
    return std::any_of(reads.begin(), reads.end(), [](const planned_read& r) { return r.by_rows(); });
  }
};

/// Sends data that ranks have read to the ranks that need it, with many tensors in one collective: first parts of rows,
/// then shares of replicated tensors. All ranks of a group must add tensors of equal names in one order. Tensors of
/// different groups may be added between them.
template <compute_device Device>
class share_exchange {
 public:
  /// Sends about `most` bytes of a rank at once. A larger tensor is sent alone.
  share_exchange(const context<Device>& ctx, std::size_t most) : ctx_(ctx), most_(most) {}

  /// Adds a tensor that ranks read by rows. After the exchange, its slot begins with this rank's share, with zeros for
  /// padding.
  void add_rows(const tensor_to_load& t) {
    std::size_t bytes = 0;  // equal on every rank of the group
    for (const planned_read& r : t.reads)
      for (const box& part : r.parts) bytes += t.bytes_of(part);
    const axis_list& across = t.held->across;
    bytes /= static_cast<std::size_t>(ctx_.ranks.shape().size(across));
    add(rows_, across, t, bytes, [&](batch& all) { exchange_rows(all); });
  }
  void finish_rows() {
    for (auto& [key, one] : rows_) exchange_rows(one);
  }

  /// Completes this rank's part of a tensor with the shares of the ranks that hold copies, at once or in a batch with
  /// other tensors.
  void add_copies(const tensor_to_load& t) {
    const held_tensor& h = *t.held;
    const mesh_shape& mesh = ctx_.ranks.shape();
    const std::int64_t copies = mesh.size(h.copies);
    if (copies == 1 || h.size() == 0) return t.in_place ? void() : h.write(t.slot);
    const std::size_t most = share_bytes(h, copies), all = most * static_cast<std::size_t>(copies);
    const bool even = all == static_cast<std::size_t>(h.size()) * h.element_bytes();
    if (even && h.target && (all >= most_ / 16 || most >= own_collective_bytes)) {  // directly to its final place
      const auto own = static_cast<std::size_t>(mesh.index_in(ctx_.ranks.rank(), h.copies));
      std::byte* const to = h.target();
      any_communicator& group = ctx_.ranks.group(h.copies);
      if constexpr (std::is_same_v<Device, cpu>) return group.all_gather(t.slot, to, most, dtype::u8);
      ctx_.device.upload(to + own * most, t.slot, most, ctx_.device.main_stream());
      return group.all_gather(to + own * most, to, most, dtype::u8);
    }
    add(copies_, h.copies, t, all, [&](batch& some) { exchange_copies(some); });
  }
  void finish_copies() {
    for (auto& [key, one] : copies_) exchange_copies(one);
  }

 private:
  /// A share of this many bytes takes longer to copy than to start a collective for it.
  static constexpr std::size_t own_collective_bytes = std::size_t{128} << 10;

  struct batch {
    axis_list axes;
    std::vector<const tensor_to_load*> entries;
    std::size_t bytes = 0;
  };
  using batches = std::map<unsigned, batch>;

  /// Adds a tensor to the batch for `axes`. If the batch would become too large, calls `exchange` for it first.
  template <class Exchange>
  void add(batches& all, const axis_list& axes, const tensor_to_load& t, std::size_t bytes, Exchange&& exchange) {
    batch& to = all[number_of_axes(ctx_.ranks.shape(), axes)];
    to.axes = axes;
    if (!to.entries.empty() && to.bytes + bytes > most_) exchange(to);
    to.entries.push_back(&t);
    to.bytes += bytes;
  }
  /// Returns the bytes of the largest share.
  static std::size_t share_bytes(const held_tensor& h, std::int64_t copies) {
    return static_cast<std::size_t>((h.size() + copies - 1) / copies) * h.element_bytes();
  }
  /// Returns host memory for sends and receives: the device's memory itself, or a copy of it.
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

  void exchange_rows(batch& all) {
    if (all.entries.empty()) return;
    any_communicator& group = ctx_.ranks.group(all.axes);
    const auto ranks = static_cast<std::size_t>(group.size());
    std::vector<std::size_t> send(ranks, 0), receive(ranks, 0), send_at(ranks, 0), receive_at(ranks, 0);
    for (const tensor_to_load* e : all.entries)
      for (const planned_read& r : e->reads)
        for (std::size_t i = 0; r.by_rows() && i < ranks; ++i) {
          send[i] += e->bytes_of(part_in(r.parts[i], r.slabs[r.self]));
          receive[i] += e->bytes_of(part_in(r.own.where, r.slabs[i]));
        }
    std::size_t out = 0, in = 0;
    for (std::size_t i = 0; i < ranks; ++i) {
      send_at[i] = std::exchange(out, out + send[i]);
      receive_at[i] = std::exchange(in, in + receive[i]);
    }
    std::byte* const here = staged(out + in);
    std::vector<std::size_t> next = send_at;
    for (const tensor_to_load* e : all.entries) pack(*e, here, next);
    to_device(0, out);
    group.all_to_all_v(there(), send, send_at, there() + out, receive, receive_at, dtype::u8);
    to_host(out, in);
    next = receive_at;
    for (const tensor_to_load* e : all.entries) unpack(*e, here + out, next);
    all.entries.clear();
    all.bytes = 0;
  }
  /// Returns the rows of `part` that are in `slab`.
  static box part_in(box part, const box& slab) {
    part.offset[0] = slab.offset[0];
    part.local[0] = slab.local[0];
    return part;
  }
  static void pack(const tensor_to_load& e, std::byte* out, std::vector<std::size_t>& next) {
    const std::byte* at = e.slot;
    const std::size_t width = e.held->element_bytes();
    for (const planned_read& r : e.reads) {
      for (std::size_t i = 0; i < r.parts.size(); ++i) {
        const box part = part_in(r.parts[i], r.read());
        each_common_run(part, r.read(), part, [&](std::int64_t from, std::int64_t to, std::int64_t n) {
          std::memcpy(out + next[i] + static_cast<std::size_t>(to) * width, at + static_cast<std::size_t>(from) * width,
                      static_cast<std::size_t>(n) * width);
        });
        next[i] += e.bytes_of(part);
      }
      at += e.bytes_of(r.read());
    }
  }
  void unpack(const tensor_to_load& e, const std::byte* in, std::vector<std::size_t>& next) {
    kept_.assign(e.slot, e.slot + e.read_bytes());  // boxes not read by rows move too, and may overlap
    const std::byte* from = kept_.data();
    std::memset(e.slot, 0, e.share_bytes());
    for (const planned_read& r : e.reads) {
      std::byte* to = e.slot + static_cast<std::size_t>(r.own.at) * e.held->element_bytes();
      if (!r.by_rows()) std::memcpy(to, from, e.bytes_of(r.own.where));
      for (std::size_t i = 0; i < r.slabs.size(); ++i) {
        const std::size_t bytes = e.bytes_of(part_in(r.own.where, r.slabs[i]));
        std::memcpy(to, in + next[i], bytes);
        next[i] += bytes;
        to += bytes;
      }
      from += e.bytes_of(r.read());
    }
  }

  void exchange_copies(batch& all) {
    if (all.entries.empty()) return;
    const mesh_shape& mesh = ctx_.ranks.shape();
    const std::int64_t copies = mesh.size(all.axes), own = mesh.index_in(ctx_.ranks.rank(), all.axes);
    const auto first = [&](const held_tensor& h, std::int64_t i) {  // first byte of the i-th share
      return static_cast<std::size_t>(h.size() * i / copies) * h.element_bytes();
    };
    std::size_t room = 0;  // bytes of one rank's shares
    for (const tensor_to_load* e : all.entries) room += share_bytes(*e->held, copies);
    std::byte* const here = staged(room * static_cast<std::size_t>(copies));
    std::size_t at = room * static_cast<std::size_t>(own);
    const std::size_t mine = at;
    for (const tensor_to_load* e : all.entries) {
      std::memcpy(here + at, e->slot, first(*e->held, own + 1) - first(*e->held, own));
      at += share_bytes(*e->held, copies);
    }
    to_device(mine, room);
    ctx_.ranks.group(all.axes).all_gather(there() + mine, there(), room, dtype::u8);
    to_host(0, room * static_cast<std::size_t>(copies));
    at = 0;
    for (const tensor_to_load* e : all.entries) {
      const held_tensor& h = *e->held;
      const bool to_target = std::is_same_v<Device, cpu> && h.target;
      if (!to_target && kept_.size() < first(h, copies)) kept_.resize(first(h, copies));
      std::byte* const to = to_target ? h.target() : kept_.data();
      for (std::int64_t i = 0; i < copies; ++i) {
        const std::byte* const from = i == own ? e->slot : here + room * static_cast<std::size_t>(i) + at;
        if (to + first(h, i) != from) std::memcpy(to + first(h, i), from, first(h, i + 1) - first(h, i));
      }
      if (!to_target) h.write(to);
      at += share_bytes(h, copies);
    }
    all.entries.clear();
    all.bytes = 0;
  }

  const context<Device>& ctx_;
  std::size_t most_;
  batches rows_, copies_;
  std::optional<buffer<Device>> there_;
  byte_buffer here_;
  std::vector<std::byte> kept_;
};

}  // namespace detail

/// A state that has been loaded.
struct loaded_state {
  std::uint64_t step = 0;
  std::string path;                                          ///< directory of the step
  saved_scalars scalars{};                                   ///< as they were saved
  std::vector<std::pair<std::string, std::string>> blobs{};  ///< as they were saved, on every rank
  std::uint64_t bytes = 0;                                   ///< read by this rank
  std::vector<invalid_step> invalid_steps{};                 ///< damaged newer steps in the directory; on rank 0

  /// Returns the scalar of this name and type, or nothing.
  template <class T>
  std::optional<T> find_scalar(std::string_view name) const {
    for (const auto& [key, value] : scalars)
      if (key == name)
        if (const T* const found = std::get_if<T>(&value)) return *found;
    return std::nullopt;
  }
  /// Returns the scalar of this name. Throws `error` that names it if it does not exist.
  template <class T>
  T scalar(std::string_view name) const {
    if (const std::optional<T> found = find_scalar<T>(name)) return *found;
    fail({"'", path, "' has no scalar '", name, "' of this type"});
  }
  /// Returns the bytes of a blob. Throws `error` that names it if it does not exist.
  const std::string& blob(std::string_view name) const {
    for (const auto& [key, bytes_of_it] : blobs)
      if (key == name) return bytes_of_it;
    fail({"'", path, "' has no blob '", name, "'"});
  }
};

/// Thrown on every rank if a run should resume from a step that has only weights.
class no_optimizer_state : public error_of_all {
 public:
  using error_of_all::error_of_all;
};

/// Rules for differences between a step's tensors and a model's tensors. A name is a parameter's, or
/// "optim.PARAMETER.exp_avg" and the like, so a rule sees both. Without a rule, no such difference is allowed.
struct load_rules {
  std::vector<held_tensor> tensors{};  ///< tensors of the program, in addition to the model's and the optimizer's
  std::function<std::string(const std::string&)> stored_name{};  ///< returns the name in the step of a model's tensor
  /// Which tensors of the model may be absent in the step. They keep their values.
  std::function<bool(const std::string&)> may_miss{};
  std::function<bool(const std::string&)> may_ignore{};  ///< which tensors of the step may be absent in the model
  std::size_t exchange_bytes = std::size_t{64} << 20;    ///< the most bytes of a rank that are sent at once
  /// Whether bytes are read directly to their final place, where that is host memory. It needs no second copy of the
  /// state, and half of the time. After an error the tensors' values are undefined, so the program must end then.
  bool in_place = false;
  read_sizes read_ahead{};  ///< how much of the files a rank reads in advance
};

namespace detail {

/// The checksums of boxes that no single rank has read whole. Ranks combine the sums of the parts that they have read,
/// and read the rest.
class sums_of_parts {
 public:
  /// Adds the part of a box that this rank has read for a tensor.
  void add(const manifest& saved, const held_tensor& h, const partly_read& part) {
    if (!h.counts) return;  // another stage reads this tensor
    const auto tensor = static_cast<std::uint64_t>(part.tensor - saved.tensors.data());
    add({tensor << 32 | part.box, crc32c(std::as_bytes(std::span(h.name)))}, part.sum, part.bytes);
  }
  /// Adds the sums of all ranks. Collective over `ranks`.
  template <compute_device Device>
  void gather(const context<Device>& ctx, any_communicator& ranks) {
    constexpr std::size_t width = 4;  // the box, the tensor it was read for, sum, bytes
    std::vector<std::uint64_t> mine;
    for (const auto& [key, sum] : sums_) mine.insert(mine.end(), {key.first, key.second, sum.sum, sum.bytes});
    sums_.clear();
    const double most = all_reduce_scalar(ctx.device, ranks, static_cast<double>(mine.size()), reduce_op::max);
    if (most == 0) return;
    const std::vector<std::uint64_t> all =
        gather_all(ctx.device, ranks, std::move(mine), static_cast<std::size_t>(most));
    for (std::size_t i = 0; i < all.size(); i += width)
      if (all[i + 3] != 0)  // all ranks get equal numbers
        add({all[i], all[i + 1]}, static_cast<std::uint32_t>(all[i + 2]), all[i + 3]);
  }
  /// Compares the sums after `gather`. If parts of a box were not read, one rank reads the box again; ranks take turns.
  /// Throws `error` that names a box whose checksum differs.
  void compare(const manifest& saved, step_data& data, std::size_t rank, std::size_t ranks) const {
    std::size_t turn = 0;
    for (const auto& [key, sum] : sums_) {
      const stored_tensor& t = saved.tensors[key.first >> 32];
      const stored_box& b = t.boxes[static_cast<std::uint32_t>(key.first)];
      if (sum.bytes == b.stored.bytes) {
        if (sum.sum != b.stored.crc32c) data.damaged(t, b);
      } else if (turn++ % ranks == rank && !data.is_whole(b.stored)) {
        data.damaged(t, b);
      }
    }
  }
  bool empty() const { return sums_.empty(); }

 private:
  struct sum_of_part {
    std::uint32_t sum = 0;
    std::uint64_t bytes = 0;
  };
  using key_of_part = std::pair<std::uint64_t, std::uint64_t>;  ///< a box, and the tensor that it was read for

  void add(const key_of_part& key, std::uint32_t sum, std::uint64_t bytes) {
    sum_of_part& all = sums_[key];
    all.sum ^= sum;
    all.bytes += bytes;
  }

  std::map<key_of_part, sum_of_part> sums_;
};

/// Reads the shares of all ranks and exchanges them.
template <compute_device Device>
class state_loader {
 public:
  state_loader(const context<Device>& ctx, any_communicator& ranks, file_system& files, const std::string& path,
               load_rules rules)
      : ctx_(ctx), ranks_(ranks), files_(files), rules_(std::move(rules)) {
    path_ = text_of_rank_0(ctx.device, ranks, "checkpoint: ", [&] { return step_path(files, path, invalid_steps_); });
    attempt([&] {
      saved_ = read_step(files, path_);
      for (const stored_tensor& t : saved_.tensors) by_name_[t.name] = &t;
      data_.emplace(files, path_, saved_);
      for (const stored_blob& b : saved_.blobs) blobs_.emplace_back(b.name, data_->read(b));
    });
  }

  loaded_state state() const { return {saved_.step, path_, saved_.scalars, blobs_, data_->bytes(), invalid_steps_}; }

  /// Returns how many steps the optimizer has made. Throws `no_optimizer_state` if the step has no optimizer state.
  std::int64_t optimizer_steps() const {
    for (const auto& [key, value] : saved_.scalars)
      if (const auto* const steps = std::get_if<std::int64_t>(&value); steps && key == "optimizer.step") return *steps;
    throw no_optimizer_state(cat({"checkpoint: '", path_, "' has weights and no optimizer's state, with which no run ",
                                  "resumes; load_weights_of_step begins a new one with them"}));
  }

  /// Returns the steps that each parameter of the optimizer has missed (`adamw::missed_steps`).
  std::map<std::string, std::int64_t> missed_steps() const {
    std::map<std::string, std::int64_t> all;
    for (const auto& [key, value] : saved_.scalars)
      if (const auto* const n = std::get_if<std::int64_t>(&value); n && key.starts_with(missed_prefix))
        all.emplace(key.substr(std::string_view(missed_prefix).size()), *n);
    return all;
  }

  /// Reads this rank's shares of `held`, and changes nothing unless every rank has read all of its shares. With
  /// `load_rules::in_place`, ranks send each other tensors while they read others. A rank that has failed still sends
  /// its data, so that no rank waits for it.
  void load(std::vector<held_tensor> held) {
    for (held_tensor& h : rules_.tensors) held.push_back(std::move(h));
    check(held);
    make_groups(held);
    std::vector<tensor_to_load> all;
    byte_buffer shares;
    std::optional<reads_ahead> ahead;
    attempt([&] {
      if (const std::string fault = fault_of(rules_.read_ahead, "read_ahead.threads", "read_ahead.bytes");
          !fault.empty())
        fail(fault);
      std::vector<std::size_t> begin;
      std::size_t end = 0;
      for (const held_tensor& h : held) {
        const tensor_to_load& t = all.emplace_back(plan(h));
        begin.push_back(end + padding_before(t, end));
        if (!t.in_place) end = begin.back() + slot_bytes(t);
      }
      shares.grow(end);
      std::vector<wanted_box> wanted;
      for (std::size_t i = 0; i < all.size(); ++i) {
        all[i].slot = all[i].in_place ? own_place(all[i]) : shares.data() + begin[i];
        add_wanted(all[i], i, wanted);
      }
      ahead.emplace(saved_, *data_, std::move(wanted), rules_.read_ahead);
    });
    share_exchange<Device> exchange(ctx_, rules_.exchange_bytes);
    for (std::size_t i = 0; i < all.size(); ++i) {
      if (!all[i].early) continue;
      static_cast<void>(ahead->wait(i));  // `finish` throws the error
      exchange.add_copies(all[i]);
    }
    exchange.finish_copies();
    attempt_to_read([&] { ahead->finish(); });
    sums_of_parts sums;
    for (const auto& [i, part] : ahead->take_partly_read()) sums.add(saved_, held[i], part);
    sums.gather(ctx_, ranks_);
    if (!sums.empty())  // equal on all ranks
      attempt_to_read([&] {
        sums.compare(saved_, *data_, static_cast<std::size_t>(ranks_.rank()), static_cast<std::size_t>(ranks_.size()));
      });
    for (const tensor_to_load& t : all)
      if (t.by_rows()) exchange.add_rows(t);
    exchange.finish_rows();
    for (const tensor_to_load& t : all)
      if (!t.early) exchange.add_copies(t);
    exchange.finish_copies();
  }

 private:
  /// Calls work(). If it throws on any rank, throws on all ranks.
  template <class Work>
  void attempt(Work&& work) {
    agree(ctx_.device, ranks_, work, "checkpoint: ");
  }
  /// Calls work() that reads the step's data, as `attempt`. After an error the text names an older step.
  template <class Work>
  void attempt_to_read(Work&& work) {
    attempt([&] {
      try {
        work();
      } catch (const std::exception& e) {
        const auto older = older_step(files_, path_);
        fail({e.what(), older ? cat({"; an older step is '", older->path, "'"}) : ""});
      }
    });
  }

  std::string stored_name(const held_tensor& h) const {
    return rules_.stored_name ? rules_.stored_name(h.name) : h.name;
  }
  /// Checks the tensors against the step, and removes from `held` those that the step does not have.
  void check(std::vector<held_tensor>& held) {
    std::vector<std::string> missing, unexpected;
    std::string wrong;
    std::vector<std::uint64_t> met(saved_.tensors.size(), 0);
    std::vector<held_tensor> found_ones;
    for (held_tensor& h : held) {
      const std::string name = stored_name(h);
      const auto found = by_name_.find(name);
      if (found == by_name_.end()) {
        if (is_last_load(h.name) || (rules_.may_miss && rules_.may_miss(h.name))) continue;
        missing.push_back(name);
        continue;
      }
      found_ones.push_back(h);
      const stored_tensor& t = *found->second;
      met[static_cast<std::size_t>(&t - saved_.tensors.data())] = 1;
      if (t.shape != h.shape)
        append(wrong, {wrong.empty() ? "" : "; ", "'", h.name, "' has the shape ", shape_text(t.shape),
                       ", and the model needs ", shape_text(h.shape)});
      else if (safetensors_dtype_of(h.type) != t.dtype &&
               !(is_floating(t.dtype) && is_floating(safetensors_dtype_of(h.type))))
        append(wrong, {wrong.empty() ? "" : "; ", "'", h.name, "' holds ", name_of(t.dtype),
                       " elements, and the program's are ", name_of(safetensors_dtype_of(h.type)),
                       "; legal are F64, F32, F16 and BF16 for each other"});
    }
    const std::size_t count = met.size();
    const std::vector<std::uint64_t> all = gather_all(ctx_.device, ranks_, std::move(met), count);
    for (std::size_t i = 0; i < count; ++i) {
      bool known = false;
      for (std::size_t r = 0; r < all.size() / count; ++r) known = known || all[r * count + i] != 0;
      const std::string& name = saved_.tensors[i].name;
      const bool may_ignore = is_last_load(name) || (rules_.may_ignore && rules_.may_ignore(name));
      if (!known && !may_ignore) unexpected.push_back(name);
    }
    agree_on(ctx_.device, ranks_, mismatch_text(missing, unexpected, wrong), cat({"checkpoint: '", path_, "': "}));
    held = std::move(found_ones);
  }
  /// Makes the communicators of the needed groups. All ranks of the world must make a group, also those that hold no
  /// tensor of it. Ranks that share rows must have planned equal ranges; otherwise each reads alone.
  void make_groups(const std::vector<held_tensor>& held) {
    const mesh_shape& mesh = ctx_.ranks.shape();
    std::uint64_t sets = 0, cut = 0;  // one bit per set of axes (a number below 2^max_axes)
    std::array<std::uint64_t, 64> ranges{};
    static_assert(max_axes <= 6);
    for (const held_tensor& h : held) {
      if (mesh.size(h.copies) > 1) sets |= std::uint64_t{1} << number_of_axes(mesh, h.copies);
      if (mesh.size(h.across) == 1) continue;
      const unsigned set = number_of_axes(mesh, h.across);
      cut |= std::uint64_t{1} << set;
      ranges[set] = fnv1a(cat({ranges[set], " ", h.name, " ", h.begin, " ", h.end}));
    }
    const std::vector<std::uint64_t> all = gather_all(ctx_.device, ranks_, {sets, cut}, 2);
    for (std::size_t i = 0; i < all.size(); i += 2) sets |= all[i], cut |= all[i + 1];
    for (unsigned set = 0; set < 64; ++set) {
      if (((sets | cut) >> set & 1) == 0) continue;
      axis_list axes;
      for (std::size_t i = 0; i < mesh.axes.size(); ++i)
        if (set >> i & 1) axes.push_back(mesh.axes[i]);
      any_communicator& group = ctx_.ranks.group(axes);
      if ((cut >> set & 1) == 0) continue;
      const auto theirs = gather_all(ctx_.device, group, {ranges[set]}, 1);
      if (std::count(theirs.begin(), theirs.end(), ranges[set]) != group.size()) read_alone_.push_back(axes);
    }
  }
  /// Returns the bytes of a slot: room for this rank's share, and for all that it reads.
  static std::size_t slot_bytes(const tensor_to_load& t) { return std::max(t.share_bytes(), t.read_bytes()); }
  static std::byte* own_place(const tensor_to_load& t) {
    return t.held->target() + static_cast<std::size_t>(t.begin - t.held->begin) * t.held->element_bytes();
  }
  /// Returns the bytes of padding between `end` and a slot. A small slot begins at a multiple of 64. A large one has
  /// the page offset of its bytes in the file, so that the system can read directly into it.
  std::size_t padding_before(const tensor_to_load& t, std::size_t end) {
    constexpr std::size_t page = 4096;
    const bool large = !t.reads.empty() && slot_bytes(t) >= std::size_t{64} * page;
    if (!large || safetensors_dtype_of(t.held->type) != t.stored->dtype) return (64 - end % 64) % 64;
    const auto at = static_cast<std::size_t>(t.reads[0].own.at);
    const std::size_t first = t.by_rows() ? 0 : at * t.held->element_bytes();
    return (data_->boxes().place_of(*t.stored, t.reads[0].read()) + 2 * page - first % page - end % page) % page;
  }
  /// Plans the reads of this rank for a tensor. Opens no file.
  tensor_to_load plan(const held_tensor& h) {
    const auto [begin, end] = own_share(ctx_, h);
    tensor_to_load t{&h, by_name_.at(stored_name(h)), begin, end};
    t.reads = planned(t);
    t.in_place = std::is_same_v<Device, cpu> && rules_.in_place && h.target && !t.by_rows();
    t.early = is_sent_early(t);
    return t;
  }
  std::vector<planned_read> planned(const tensor_to_load& t) {
    const held_tensor& h = *t.held;
    const mesh_shape& mesh = ctx_.ranks.shape();
    const std::int64_t ranks = mesh.size(h.across);
    const auto alone = [&] {
      return plan_reads({boxes_of_part(h.part, t.begin, t.end, h.shape, h.name)}, 0, [](const box&) { return false; });
    };
    if (ranks == 1 || !h.part_across ||
        std::find(read_alone_.begin(), read_alone_.end(), h.across) != read_alone_.end())
      return alone();
    std::vector<std::vector<placed_box>> shares;
    for (std::int64_t i = 0; i < ranks; ++i) {
      const box part = h.part_across(i);
      if (part.local_size() != h.part.local_size()) return alone();  // the other ranks' reads are unknown here
      shares.push_back(boxes_of_part(part, t.begin, t.end, h.shape, h.name));
    }
    return plan_reads(shares, static_cast<std::size_t>(mesh.index_in(ctx_.ranks.rank(), h.across)),
                      [&](const box& b) { return data_->boxes().has_short_runs(*t.stored, b); });
  }
  /// Adds a tensor's planned boxes to `wanted`. If it is read by rows, the slot has the boxes one after the other.
  /// Otherwise each box is read to its own place.
  static void add_wanted(const tensor_to_load& t, std::size_t owner, std::vector<wanted_box>& wanted) {
    const bool in_turn = t.by_rows();
    std::size_t own = 0;
    for (const planned_read& r : t.reads) own += t.bytes_of(r.own.where);
    if (!in_turn && own < t.share_bytes()) std::memset(t.slot, 0, t.share_bytes());  // padding
    std::byte* out = t.slot;
    for (const planned_read& r : t.reads) {
      if (!in_turn) out = t.slot + static_cast<std::size_t>(r.own.at) * t.held->element_bytes();
      wanted.push_back({t.stored, r.read(), out, t.held->type, owner});
      out += t.bytes_of(r.read());
    }
  }
  /// Returns whether ranks with copies of a tensor receive it while they read other tensors. The answer is equal on all
  /// of these ranks. Tensors not written in place, read by rows, or written by a function wait until all checksums are
  /// verified.
  bool is_sent_early(const tensor_to_load& t) {
    const held_tensor& h = *t.held;
    if (!rules_.in_place || !h.target) return false;
    const std::int64_t ranks = ctx_.ranks.shape().size(h.across);
    for (std::int64_t i = 0; ranks > 1 && i < ranks; ++i) {
      if (!h.part_across) break;
      const box part = h.part_across(i);
      for (const placed_box& b : boxes_of_part(part, 0, part.local_size(), h.shape, h.name))
        if (data_->boxes().has_short_runs(*t.stored, b.where)) return false;
    }
    return true;
  }

  const context<Device>& ctx_;
  any_communicator& ranks_;
  file_system& files_;
  load_rules rules_;
  std::string path_;
  std::vector<invalid_step> invalid_steps_;
  std::vector<std::pair<std::string, std::string>> blobs_;
  manifest saved_;
  std::map<std::string, const stored_tensor*> by_name_;
  std::optional<step_data> data_;
  std::vector<axis_list> read_alone_;  ///< axes along which each rank reads alone
};

}  // namespace detail

/// Loads weights and optimizer state from the newest step in the directory `path`, or from `path` if that is a step.
/// Every rank reads a share of its part, and gets the rest from the ranks that hold copies. Collective over `ranks`,
/// the ranks of all stages. Throws `error` with one text on all ranks, and then changes nothing (except with
/// `load_rules::in_place`). Causes are a tensor that any stage lacks, that no stage wants, or that has another shape.
/// Others are unreadable or damaged data, and a step with only weights.
template <compute_device Device, class Model, class Optimizer>
loaded_state load_state(const context<Device>& ctx, any_communicator ranks, Model& model, Optimizer& optimizer,
                        const std::string& path, load_rules rules = {}, file_system& files = machine_files()) {
  detail::state_loader<Device> loader(ctx, ranks, files, path, std::move(rules));
  std::vector<held_tensor> held = held_state(ctx, model, optimizer);
  const std::int64_t steps = loader.optimizer_steps();
  loader.load(std::move(held));
  detail::arm_checks(ctx);
  if constexpr (requires { model.gather_changed(ctx); }) model.gather_changed(ctx);
  if constexpr (requires { optimizer.missed_steps(); })
    optimizer.resume(steps, loader.missed_steps());
  else
    optimizer.resume(steps);
  return loader.state();
}

/// Loads only weights, as `load_state` does. It does not read the optimizer's tensors in the step.
template <compute_device Device, class Model>
loaded_state load_weights_of_step(const context<Device>& ctx, any_communicator ranks, Model& model,
                                  const std::string& path, load_rules rules = {},
                                  file_system& files = machine_files()) {
  rules.may_ignore = [others = std::move(rules.may_ignore)](const std::string& name) {
    return is_of_optimizer(name) || (others && others(name));
  };
  detail::state_loader<Device> loader(ctx, ranks, files, path, std::move(rules));
  loader.load(held_weights(ctx, model));
  detail::arm_checks(ctx);
  if constexpr (requires { model.gather_changed(ctx); }) model.gather_changed(ctx);
  return loader.state();
}

/// Loads tensors that a program holds and saved without a model: `rules.tensors`.
template <compute_device Device>
loaded_state load_tensors(const context<Device>& ctx, any_communicator ranks, const std::string& path, load_rules rules,
                          file_system& files = machine_files()) {
  detail::state_loader<Device> loader(ctx, ranks, files, path, std::move(rules));
  loader.load({});
  return loader.state();
}

namespace detail {

/// Returns the newest whole step in `directory`, or "" if there are no steps. Throws if there are steps, and none is
/// whole.
inline std::string newest_step_or_none(file_system& files, const std::string& directory) {
  if (!files.kind_of(directory)) return {};
  std::vector<invalid_step> invalid_steps;
  if (const auto newest = newest_step(files, directory, &invalid_steps)) return newest->path;
  if (invalid_steps.empty()) return {};
  fail({"'", directory, "' has steps, and none is whole: '", invalid_steps[0].path, "': ", invalid_steps[0].reason,
        "; to begin anew, use another directory"});
}

}  // namespace detail

/// Loads the newest step in `directory`, as `load_state` does, or initializes every parameter of `model` if there is no
/// step. Rank 0 decides for all ranks. Returns the loaded state; nothing if training begins. Throws `error_of_all` if
/// there are steps and none is whole. Collective over `ranks`, the ranks of all stages.
///
///     const auto found = resume_or_initialize(ctx, ranks, model, optimizer, "steps");
///     for (std::uint64_t done = found ? found->step : 0; done < steps; ++done) ...
template <compute_device Device, class Model, class Optimizer>
std::optional<loaded_state> resume_or_initialize(const context<Device>& ctx, any_communicator ranks, Model& model,
                                                 Optimizer& optimizer, const std::string& directory,
                                                 load_rules rules = {}, file_system& files = machine_files()) {
  const std::string step =
      text_of_rank_0(ctx.device, ranks, "", [&] { return detail::newest_step_or_none(files, directory); });
  if (!step.empty()) return load_state(ctx, ranks, model, optimizer, step, std::move(rules), files);
  initialize(ctx, model);
  return std::nullopt;
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
