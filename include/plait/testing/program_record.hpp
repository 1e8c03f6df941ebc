// Records of a program's arrays: each rank's parts with their names and specs, in memory or in files.
// testing/program_parity.hpp compares two runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "plait/checkpoint/safetensors.hpp"
#include "plait/core/box.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/text.hpp"
#include "plait/core/types.hpp"
#include "plait/device/device.hpp"
#include "plait/io/json.hpp"
#include "plait/layout/layout.hpp"
#include "plait/layout/mesh.hpp"
#include "plait/layout/part.hpp"
#include "plait/layout/spec.hpp"
#include "plait/tensor/context.hpp"
#include "plait/tensor/interop.hpp"
#include "plait/tensor/tensor.hpp"

namespace plait::testing {

/// One rank's part of an array.
struct recorded_array {
  std::string name;
  safetensors_dtype type = safetensors_dtype::f32;
  exported_layout lies{};
  std::shared_ptr<const void> owner{};  ///< keeps the bytes alive: memory or a mapped file
  std::span<const std::byte> bytes{};
};

struct recorded_step {
  std::int64_t number = 0;
  std::vector<recorded_array> arrays;  ///< in the order of their recording

  const recorded_array* find(const std::string& name) const {
    for (const recorded_array& a : arrays)
      if (a.name == name) return &a;
    return nullptr;
  }
};

/// The record of one rank.
struct rank_record {
  int rank = 0, ranks = 1;
  bool finished = false;
  std::vector<recorded_step> steps;
};

/// The records of all ranks of one run. Threads may open records concurrently.
class program_run {
 public:
  program_run() = default;
  /// Reads the files that the ranks of a run have written to `directory`. Throws `error` with the name of a damaged
  /// file, or of a directory without a record.
  explicit program_run(const std::string& directory);

  /// Begins the record of a rank; the reference is valid as long as this object. Throws if the run already has one.
  rank_record& open(int rank, int ranks) {
    const std::lock_guard lock(mutex_);
    const auto [place, is_new] = by_rank_.try_emplace(rank, rank_record{rank, ranks, false, {}});
    if (!is_new) fail({"program_run: there is a record of rank ", rank, "; each run takes a program_run of its own"});
    return place->second;
  }
  const std::map<int, rank_record>& by_rank() const { return by_rank_; }

 private:
  std::mutex mutex_;
  std::map<int, rank_record> by_rank_;
};

namespace detail {

inline constexpr const char* record_key = "plait program record";

inline std::string record_file(const std::string& directory, int rank, std::size_t part) {
  char name[64];
  std::snprintf(name, sizeof name, "/rank%05d.part%05zu.safetensors", rank, part);
  return directory + name;
}

inline std::vector<std::int64_t> local_shape(const exported_layout& lies) {
  std::vector<std::int64_t> shape;
  for (const exported_layout::dim& d : lies.dims) shape.push_back(d.local);
  return shape;
}

/// Writes one step of a rank.
inline void write_part(const std::string& path, const rank_record& of, const recorded_step& step, bool last) {
  std::vector<safetensors_entry> entries;
  std::vector<json_object> arrays;
  for (const recorded_array& a : step.arrays) {
    entries.push_back({a.name, a.type, local_shape(a.lies), a.bytes});
    arrays.push_back(json_object().add("name", a.name).add("layout", a.lies.json()));
  }
  const std::string text = json_object()
                               .add("ranks", of.ranks)
                               .add("step", step.number)
                               .add("last", last ? 1 : 0)
                               .add("arrays", arrays)
                               .text();
  write_safetensors(path, std::move(entries), {{record_key, text}}, "program_record");
}

inline bool lies_within(const exported_layout& lies) {
  bool within = lies.dims.size() <= static_cast<std::size_t>(max_dims);
  for (const exported_layout::dim& d : lies.dims) within &= d.offset <= d.global && d.local <= d.global - d.offset;
  return within;
}

/// Reads one step of a rank, and whether it is the last.
inline void read_part(const std::string& path, rank_record& out) {
  const std::string source = cat({"program_run: '", path, "'"});
  const auto file = std::make_shared<const safetensors_reader>(path, "program_run");
  const std::string* text = nullptr;
  for (const auto& [key, value] : file->metadata())
    if (key == record_key) text = &value;
  if (text == nullptr) fail({source, " is not part of a program's record"});
  recorded_step& step = out.steps.emplace_back();
  json_parser in(*text, source);
  const auto number = [&](const std::string& key, std::uint64_t most) { return in.whole_number({"as ", key}, most); };
  in.object({"as a record"}, [&](const std::string& key) {
    if (key == "ranks") return static_cast<void>(out.ranks = static_cast<int>(number(key, 1 << 24)));
    if (key == "step") return static_cast<void>(step.number = static_cast<std::int64_t>(number(key, 1ull << 62)));
    if (key == "last") return static_cast<void>(out.finished = number(key, 1) == 1);
    in.list({"as ", key}, [&] {
      recorded_array& a = step.arrays.emplace_back();
      in.object({"among ", key}, [&](const std::string& member) {
        const std::string value = in.text({"as ", member, " of an array"});
        member == "name" ? static_cast<void>(a.name = value) : static_cast<void>(a.lies = parse_layout(value, source));
      });
    });
  });
  in.end();
  for (recorded_array& a : step.arrays) {
    const safetensors_entry& entry = file->at(a.name);
    if (entry.shape != local_shape(a.lies) || !lies_within(a.lies))
      fail({source, ": the layout of '", a.name, "' does not fit its elements"});
    a.type = entry.dtype, a.bytes = entry.bytes, a.owner = file;
  }
}

}  // namespace detail

inline program_run::program_run(const std::string& directory) {
  for (int rank = 0, ranks = 1; rank < ranks; ++rank) {
    rank_record read{rank, ranks, false, {}};
    while (!read.finished && std::filesystem::exists(detail::record_file(directory, rank, read.steps.size())))
      detail::read_part(detail::record_file(directory, rank, read.steps.size()), read);
    if (rank == 0 && read.steps.empty()) fail({"program_run: there is no record of rank 0 in '", directory, "'"});
    ranks = rank == 0 ? read.ranks : ranks;
    if (!read.steps.empty()) by_rank_.emplace(rank, std::move(read));
  }
}

/// Records the arrays of one rank of a run. It waits for the device's main stream, and does not communicate. On a
/// counting device it records nothing.
template <compute_device Device>
class program_record {
 public:
  /// Records to memory. `into` must outlive this.
  program_record(const context<Device>& ctx, program_run& into)
      : program_record(ctx.device, ctx.ranks.shape(), ctx.ranks.rank(), rank_of(ctx), &into, {}) {}
  /// Records to files in `directory`, one for each step and rank; creates the directory if needed. Throws if it already
  /// has a record of this rank.
  program_record(const context<Device>& ctx, std::string directory)
      : program_record(ctx.device, ctx.ranks.shape(), ctx.ranks.rank(), rank_of(ctx), nullptr, std::move(directory)) {}
  /// Records for a program without a context; the ranks of the mesh are all its ranks.
  program_record(Device& device, const rank_place& here, program_run& into)
      : program_record(device, here.mesh, here.rank, rank_of(here), &into, {}) {}
  program_record(Device& device, const rank_place& here, std::string directory)
      : program_record(device, here.mesh, here.rank, rank_of(here), nullptr, std::move(directory)) {}
  program_record(const program_record&) = delete;
  program_record& operator=(const program_record&) = delete;

  /// Begins a step. Arrays that are added later belong to it.
  void step(std::int64_t number) {
    if (log_.finished) fail({"program_record: step ", number, " comes after finish()"});
    if (number < 0) fail({"program_record: step is ", number, "; legal is 0 or more"});
    for (const recorded_step& s : log_.steps)
      if (s.number == number) fail({"program_record: step ", number, " is recorded twice"});
    write(false);
    log_.steps.push_back({number, {}});
  }
  /// Records this rank's part of an array. Names must be unique in a step, so arrays of microbatches need different
  /// names.
  template <class T, spec_like Spec>
  void add(const std::string& name, const tensor<T, Spec, Device>& x) {
    add(name, layout_v<Spec>, x.part(), x.data());
  }
  template <class T, spec_like Spec>
  void add(const std::string& name, const part<T, Spec>& x) {
    add(name, layout_v<Spec>, x.where(), x.unchecked());
  }
  /// Records an array with a layout that is known at run time, such as a parameter's `stored()`. `data` is on the
  /// device.
  template <class T>
  void add(const std::string& name, const layout& how, const box& where, const T* data) {
    plait::detail::require_array("program_record", cat({"'", name, "'"}).c_str(), data, where.local_size());
    const auto size = static_cast<std::size_t>(where.local_size());
    if (std::byte* const to = put(name, dtype_of<T>, how, where, size * sizeof(T)); to != nullptr && size > 0)
      device_.download(to, data, size * sizeof(T), device_.main_stream());
  }
  /// Records a number on the host. By `Spec` ranks hold terms of a sum or equal numbers.
  template <spec_like Spec, class T>
  void add_scalar(const std::string& name, T value) {
    static_assert(layout_v<Spec>.dims.empty(), "a scalar has a spec without dims: spec<partial<dp>>");
    if (std::byte* const to = put(name, dtype_of<T>, layout_v<Spec>, {}, sizeof value); to != nullptr)
      std::memcpy(to, &value, sizeof value);
  }
  /// Ends the record and completes its files. A comparison reports unfinished records in files.
  void finish() {
    if (log_.finished) return;
    require_step();
    write(true);
    log_.finished = true;
  }

 private:
  static rank_record rank_of(const context<Device>& ctx) {  // includes all pipeline stages
    return {ctx.ranks.everyone().rank(), ctx.ranks.everyone().size(), false, {}};
  }
  static rank_record rank_of(const rank_place& here) {
    return {static_cast<int>(here.rank), static_cast<int>(here.mesh.size()), false, {}};
  }
  program_record(Device& device, const mesh_shape& mesh, std::int64_t place, const rank_record& of, program_run* into,
                 std::string directory)
      : device_(device),
        mesh_(mesh),
        place_(place),
        directory_(std::move(directory)),
        own_(into == nullptr ? std::make_unique<rank_record>(of) : nullptr),
        log_(into == nullptr ? *own_ : into->open(of.rank, of.ranks)) {
    if (into != nullptr || only_counts<Device>) return;
    std::error_code problem;
    std::filesystem::create_directories(directory_, problem);
    if (problem) fail({"program_record: cannot make the directory '", directory_, "': ", problem.message()});
    if (std::filesystem::exists(detail::record_file(directory_, log_.rank, 0)))
      fail({"program_record: '", directory_, "' has a record of rank ", log_.rank,
            "; remove it, or give this run a directory of its own"});
  }
  void require_step() const {
    if (log_.steps.empty()) fail("program_record: call step(number) first; arrays belong to a step");
  }
  /// Returns memory for an array's bytes; null on a counting device.
  std::byte* put(const std::string& name, dtype type, const layout& how, const box& where, std::size_t bytes) {
    if constexpr (only_counts<Device>) return nullptr;
    require_step();
    if (log_.finished) fail({"program_record: '", name, "' comes after finish()"});
    recorded_step& step = log_.steps.back();
    if (step.find(name) != nullptr)
      fail({"program_record: '", name, "' is recorded twice in step ", step.number,
            "; give each array of a step a name of its own"});
    const auto memory = std::make_shared<std::vector<std::byte>>(bytes);
    step.arrays.push_back(
        {name, safetensors_dtype_of(type), export_layout(how, where, mesh_, place_), memory, *memory});
    return memory->data();
  }
  void write(bool last) {
    if (own_ == nullptr || log_.steps.empty() || only_counts<Device>) return;
    detail::write_part(detail::record_file(directory_, log_.rank, log_.steps.size() - 1), log_, log_.steps.back(),
                       last);
    log_.steps.back().arrays.clear();
  }

  Device& device_;
  mesh_shape mesh_;
  std::int64_t place_;  ///< this rank's number on the mesh
  std::string directory_;
  std::unique_ptr<rank_record> own_;  ///< if the record goes to files
  rank_record& log_;
};

}  // namespace plait::testing

#include "plait/core/macros_on.hpp"
