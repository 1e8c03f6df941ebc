// Loads a saved training state into a model and its optimizer, on any mesh, with any schedule, policy of data
// parallelism and precision.
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
#include "plait/core/text.hpp"
#include "plait/device/device.hpp"
#include "plait/io/byte_buffer.hpp"
#include "plait/io/crc32c.hpp"
#include "plait/io/posix_file_system.hpp"
#include "plait/tensor/check_values.hpp"

namespace plait {

namespace detail {

/// Returns a set of axes as a number with one bit for each axis. The number is equal on every rank.
inline unsigned number_of_axes(const mesh_shape& mesh, const axis_list& axes) {
  unsigned number = 0;
  for (std::size_t i = 0; i < mesh.axes.size(); ++i) number |= unsigned{axes.contains(mesh.axes[i])} << i;
  return number;
}

/// A tensor that is loaded, and how this rank reads its share of it.
struct tensor_to_load {
  const held_tensor* held;
  const stored_tensor* stored;
  std::int64_t begin, end;            ///< this rank's share (`own_share`)
  std::vector<planned_read> reads{};  ///< of it, and for other ranks
  std::byte* slot = nullptr;          ///< where what is read goes, in the order of `reads`
  bool in_place = false;              ///< whether that is where the share belongs
  bool early = false;                 ///< whether the share is sent to other ranks while other tensors are read

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

/// Sends what ranks have read to the ranks that need it, many tensors in one collective: parts of rows, then shares of
/// replicated tensors. Ranks of a group must add tensors of equal names in one order. Tensors of different groups may
/// come between them.
template <compute_device Device>
class share_exchange {
 public:
  /// At most about `most` bytes of a rank are sent at once; a tensor that is larger goes alone.
  share_exchange(const context<Device>& ctx, std::size_t most) : ctx_(ctx), most_(most) {}

  /// After the exchange of rows the first bytes of the tensor's slot are this rank's share, with zeros for padding.
  void add_rows(const tensor_to_load& t) {
    std::size_t bytes = 0;  // as many on every rank of the group
    for (const planned_read& r : t.reads)
      for (const box& part : r.parts) bytes += t.bytes_of(part);
    const axis_list& across = t.held->across;
    bytes /= static_cast<std::size_t>(ctx_.ranks.shape().size(across));
    add(rows_, across, t, bytes, [&](batch& all) { exchange_rows(all); });
  }
  void finish_rows() {
    for (auto& [key, one] : rows_) exchange_rows(one);
  }

  /// Hands the tensor all that this rank holds: its own share, and the shares of the ranks that hold copies. It does so
  /// now, or with other tensors.
  void add_copies(const tensor_to_load& t) {
    const held_tensor& h = *t.held;
    const mesh_shape& mesh = ctx_.ranks.shape();
    const std::int64_t copies = mesh.size(h.copies);
    if (copies == 1 || h.size() == 0) return t.in_place ? void() : h.write(t.slot);
    const std::size_t most = share_bytes(h, copies), all = most * static_cast<std::size_t>(copies);
    const bool even = all == static_cast<std::size_t>(h.size()) * h.element_bytes();
    if (even && h.target && (all >= most_ / 16 || most >= own_collective_bytes)) {  // to where it belongs
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
  /// Bytes of a share that take longer to be copied than a collective of its own takes to begin.
  static constexpr std::size_t own_collective_bytes = std::size_t{128} << 10;

  struct batch {
    axis_list axes;
    std::vector<const tensor_to_load*> entries;
    std::size_t bytes = 0;
  };
  using batches = std::map<unsigned, batch>;

  /// Adds a tensor to those that are sent along `axes`, which `exchange` sends first where they would be too many.
  template <class Exchange>
  void add(batches& all, const axis_list& axes, const tensor_to_load& t, std::size_t bytes, Exchange&& exchange) {
    batch& to = all[number_of_axes(ctx_.ranks.shape(), axes)];
    to.axes = axes;
    if (!to.entries.empty() && to.bytes + bytes > most_) exchange(to);
    to.entries.push_back(&t);
    to.bytes += bytes;
  }
  /// Bytes of the largest share.
  static std::size_t share_bytes(const held_tensor& h, std::int64_t copies) {
    return static_cast<std::size_t>((h.size() + copies - 1) / copies) * h.element_bytes();
  }
  /// Host memory whose first bytes can be sent and received: the device's memory, or a copy of it.
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
  /// The rows of a part that a slab has.
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
    kept_.assign(e.slot, e.slot + e.read_bytes());  // what is not by rows goes to its place, which may lie elsewhere
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
    const auto first = [&](const held_tensor& h, std::int64_t i) {  // byte of the i-th share
      return static_cast<std::size_t>(h.size() * i / copies) * h.element_bytes();
    };
    std::size_t room = 0;  // of one rank's shares
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
  std::string path;                                          ///< the directory of the step
  saved_scalars scalars{};                                   ///< as they were saved
  std::vector<std::pair<std::string, std::string>> blobs{};  ///< as they were saved, on every rank
  std::uint64_t bytes = 0;                                   ///< that this rank has read
  std::vector<invalid_step> passed_over{};  ///< newer steps of its directory that are damaged; on rank 0

  /// Returns a scalar of this type; nothing where there is none.
  template <class T>
  std::optional<T> find_scalar(std::string_view name) const {
    for (const auto& [key, value] : scalars)
      if (key == name)
        if (const T* const found = std::get_if<T>(&value)) return *found;
    return std::nullopt;
  }
  /// Returns the scalar of this name. Throws `error` naming it where there is none.
  template <class T>
  T scalar(std::string_view name) const {
    if (const std::optional<T> found = find_scalar<T>(name)) return *found;
    fail({"'", path, "' has no scalar '", name, "' of this type"});
  }
  /// Returns the bytes of a blob. Throws `error` naming it where there is none.
  const std::string& blob(std::string_view name) const {
    for (const auto& [key, bytes_of_it] : blobs)
      if (key == name) return bytes_of_it;
    fail({"'", path, "' has no blob '", name, "'"});
  }
};

/// Thrown on every rank where a step has weights alone, and a run was to resume from it.
class no_optimizer_state : public error_of_all {
 public:
  using error_of_all::error_of_all;
};

/// Rules for how a step's tensors become a model's tensors where the two differ. Names are a parameter's or
/// "optim.PARAMETER.exp_avg" and the like, so that a rule sees both. A rule that is not given allows nothing.
struct load_rules {
  std::vector<held_tensor> tensors{};  ///< of the program's own, in addition to the model's and the optimizer's
  std::function<std::string(const std::string&)> stored_name{};  ///< what a tensor of the model is called in the step
  std::function<bool(const std::string&)> may_miss{};    ///< tensors of the model that keep what they have without one
  std::function<bool(const std::string&)> may_ignore{};  ///< tensors of the step that nothing in the model is
  std::size_t exchange_bytes = std::size_t{64} << 20;    ///< most that ranks send each other at once, of a rank
  /// Whether bytes are read to where they belong, where the host's memory is that. It takes no second copy of the state
  /// and half of the time. After an error the tensors have no values, so it is for a program that ends then.
  bool in_place = false;
  read_sizes read_ahead{};  ///< how much of the files a rank reads while it does something else
};

namespace detail {

/// The checksums of boxes that no rank has read whole. Ranks combine the sums of what each has read, and read the rest.
class sums_of_parts {
 public:
  /// Adds what a rank has read of a box for a tensor that it holds.
  void add(const manifest& saved, const held_tensor& h, const partly_read& part) {
    if (!h.counts) return;  // another stage reads this tensor
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
      if (all[i + 3] != 0)  // added otherwise, so that all ranks have equal numbers
        add({all[i], all[i + 1]}, static_cast<std::uint32_t>(all[i + 2]), all[i + 3]);
  }
  /// Compares, after `gather`, and reads the rest of each box, in turns with the other ranks. Throws
  /// `error` that names the box whose checksum is another.
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
  using key_of_part = std::pair<std::uint64_t, std::uint64_t>;  ///< a box, and what it was read for

  void add(const key_of_part& key, std::uint32_t sum, std::uint64_t bytes) {
    sum_of_part& all = sums_[key];
    all.sum ^= sum;
    all.bytes += bytes;
  }

  std::map<key_of_part, sum_of_part> sums_;
};

/// Reads and exchanges what the ranks hold.
template <compute_device Device>
class state_loader {
 public:
  state_loader(const context<Device>& ctx, any_communicator& ranks, file_system& files, const std::string& path,
               load_rules rules)
      : ctx_(ctx), ranks_(ranks), files_(files), rules_(std::move(rules)) {
    path_ = text_of_rank_0(ctx.device, ranks, "checkpoint: ", [&] { return step_path(files, path, passed_over_); });
    attempt([&] {
      saved_ = read_step(files, path_);
      for (const stored_tensor& t : saved_.tensors) by_name_[t.name] = &t;
      data_.emplace(files, path_, saved_);
      for (const stored_blob& b : saved_.blobs) blobs_.emplace_back(b.name, data_->read(b));
    });
  }

  loaded_state state() const { return {saved_.step, path_, saved_.scalars, blobs_, data_->bytes(), passed_over_}; }

  /// Returns how many steps the optimizer had made. Throws `no_optimizer_state` where the step has no optimizer.
  std::int64_t optimizer_steps() const {
    for (const auto& [key, value] : saved_.scalars)
      if (const auto* const steps = std::get_if<std::int64_t>(&value); steps && key == "optimizer.step") return *steps;
    throw no_optimizer_state(cat({"checkpoint: '", path_, "' has weights and no optimizer's state, with which no run ",
                                  "resumes; load_weights_of_step begins a new one with them"}));
  }

  /// Returns the steps that the optimizer's parameters had missed (`adamw::missed_steps`).
  std::map<std::string, std::int64_t> missed_steps() const {
    std::map<std::string, std::int64_t> all;
    for (const auto& [key, value] : saved_.scalars)
      if (const auto* const n = std::get_if<std::int64_t>(&value); n && key.starts_with(missed_prefix))
        all.emplace(key.substr(std::string_view(missed_prefix).size()), *n);
    return all;
  }

  /// Reads this rank's shares of what it holds, and changes nothing unless every rank has read all of its own. With
  /// `load_rules::in_place`, ranks send each other tensors while they read others. A rank that has failed still sends
  /// what it has, so that no rank waits for it.
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
      static_cast<void>(ahead->wait(i));  // `finish` throws what has failed
      exchange.add_copies(all[i]);
    }
    exchange.finish_copies();
    attempt_to_read([&] { ahead->finish(); });
    sums_of_parts sums;
    for (const auto& [i, part] : ahead->take_partly_read()) sums.add(saved_, held[i], part);
    sums.gather(ctx_, ranks_);
    if (!sums.empty())  // on all ranks or on none
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
  /// Does what may fail on some ranks, and then throws on all of them.
  template <class Work>
  void attempt(Work&& work) {
    agree(ctx_.device, ranks_, work, "checkpoint: ");
  }
  /// Does what reads the step's data, as `attempt`, and names an older step where it fails.
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
  /// Removes the tensors from `held` that the step does not have.
  void check(std::vector<held_tensor>& held) {
    std::vector<std::string> missing, unexpected;
    std::string wrong;
    std::vector<std::uint64_t> met(saved_.tensors.size(), 0);
    std::vector<held_tensor> found_ones;
    for (held_tensor& h : held) {
      const std::string name = stored_name(h);
      const auto found = by_name_.find(name);
      if (found == by_name_.end()) {
        if (rules_.may_miss && rules_.may_miss(h.name)) continue;
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
      if (!known && !(rules_.may_ignore && rules_.may_ignore(name))) unexpected.push_back(name);
    }
    agree_on(ctx_.device, ranks_, mismatch_text(missing, unexpected, wrong), cat({"checkpoint: '", path_, "': "}));
    held = std::move(found_ones);
  }
  /// Makes the groups that are needed. All ranks of a world make a group, and a rank may hold nothing that the others
  /// of its group do. Where ranks that hold parts of rows would read different rows, each reads for itself.
  void make_groups(const std::vector<held_tensor>& held) {
    const mesh_shape& mesh = ctx_.ranks.shape();
    std::uint64_t sets = 0, cut = 0;  // one bit for each set of axes, which is a number below 2^max_axes
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
  /// Returns the bytes of this rank's share, and of what it reads of it and for others.
  static std::size_t slot_bytes(const tensor_to_load& t) { return std::max(t.share_bytes(), t.read_bytes()); }
  static std::byte* own_place(const tensor_to_load& t) {
    return t.held->target() + static_cast<std::size_t>(t.begin - t.held->begin) * t.held->element_bytes();
  }
  /// Returns how many bytes after `end` a slot begins. A small one begins on a multiple of 64. A large one has the page
  /// offset of its bytes in the file, so that the system can read it to where it belongs.
  std::size_t padding_before(const tensor_to_load& t, std::size_t end) {
    constexpr std::size_t page = 4096;
    const bool large = !t.reads.empty() && slot_bytes(t) >= std::size_t{64} * page;
    if (!large || safetensors_dtype_of(t.held->type) != t.stored->dtype) return (64 - end % 64) % 64;
    const auto at = static_cast<std::size_t>(t.reads[0].own.at);
    const std::size_t first = t.by_rows() ? 0 : at * t.held->element_bytes();
    return (data_->boxes().place_of(*t.stored, t.reads[0].read()) + 2 * page - first % page - end % page) % page;
  }
  /// Returns what this rank reads for a tensor. No file is opened.
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
      if (part.local_size() != h.part.local_size()) return alone();  // which ranks read what is not known here
      shares.push_back(boxes_of_part(part, t.begin, t.end, h.shape, h.name));
    }
    return plan_reads(shares, static_cast<std::size_t>(mesh.index_in(ctx_.ranks.rank(), h.across)),
                      [&](const box& b) { return data_->boxes().has_short_runs(*t.stored, b); });
  }
  /// Adds what is planned for a tensor, each box where it belongs, or one after the other where some of them are for
  /// others too.
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
  /// Returns whether a tensor is sent to the ranks that hold copies while other tensors are read. All of these ranks
  /// get one answer. Other tensors wait until every checksum is right: what is not written in place, rows read for
  /// other ranks, and tensors that a function writes.
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
  std::vector<invalid_step> passed_over_;
  std::vector<std::pair<std::string, std::string>> blobs_;
  manifest saved_;
  std::map<std::string, const stored_tensor*> by_name_;
  std::optional<step_data> data_;
  std::vector<axis_list> read_alone_;  ///< along which each rank reads for itself
};

}  // namespace detail

/// Loads weights and what the optimizer keeps, from the newest step in the directory `path`, or from `path` if that is
/// a step. Every rank reads its share of what it holds and gets the rest from the ranks that hold copies. Collective
/// over `ranks`, the ranks of all stages. Throws `error` on all ranks alike, and changes nothing (but see
/// `load_rules::in_place`). Reasons are a tensor that is missing on any stage, wanted by none, of another shape,
/// unreadable or damaged, and a step with weights alone.
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

/// Loads weights alone, as `load_state` does. The optimizer's tensors in the step are not read.
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

/// Loads what a program holds and saved without a model: `rules.tensors`.
template <compute_device Device>
loaded_state load_tensors(const context<Device>& ctx, any_communicator ranks, const std::string& path, load_rules rules,
                          file_system& files = machine_files()) {
  detail::state_loader<Device> loader(ctx, ranks, files, path, std::move(rules));
  loader.load({});
  return loader.state();
}

namespace detail {

/// Returns the newest step in `directory`, or "" where there is none. Throws where there are steps, and none is whole.
inline std::string newest_step_or_none(file_system& files, const std::string& directory) {
  if (!files.kind_of(directory)) return {};
  std::vector<invalid_step> passed_over;
  if (const auto newest = newest_step(files, directory, &passed_over)) return newest->path;
  if (passed_over.empty()) return {};
  fail({"'", directory, "' has steps, and none is whole: '", passed_over[0].path, "': ", passed_over[0].reason,
        "; to begin anew, use another directory"});
}

}  // namespace detail

/// Loads the newest step in `directory`, as `load_state` does, or initializes every parameter of `model` where there is
/// none; rank 0 decides which, for all. Returns what was loaded; nothing where training begins. Throws `error_of_all`
/// where steps are there and none is whole. Collective over `ranks`, the ranks of all stages.
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
