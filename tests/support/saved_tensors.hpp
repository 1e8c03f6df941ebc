#pragma once

#include <condition_variable>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "memory_file_system.hpp"
#include "plait/checkpoint/load_state.hpp"
#include "plait/checkpoint/saver.hpp"
#include "plait/comm/host_values.hpp"
#include "plait/comm/threads.hpp"
#include "temp_folder.hpp"

/// Tensors of no model, saved by in-process ranks.
namespace plait::test {

/// Calls body(context, all ranks) on dp x tp ranks.
inline void on_ranks(std::pair<int, int> mesh,
                     const std::function<void(const context<cpu>&, any_communicator&)>& body) {
  mesh_shape shape;
  shape.add(axis_of<dp>, mesh.first);
  shape.add(axis_of<tp>, mesh.second);
  threads::run(static_cast<int>(shape.size()), [&](threads::communicator c) {
    any_communicator all(c);
    world ranks(shape, any_communicator(c));
    cpu device;
    const context<cpu> ctx{device, ranks, {}, 1};
    body(ctx, all);
  });
}

/// A vector of which this rank has all elements, `n` values in the host's memory. A caller may change the shape and the
/// part; elements are counted from `begin`.
template <class T>
held_tensor held_in_memory(std::string name, T* values, std::int64_t n, std::int64_t begin = 0) {
  held_tensor h;
  h.name = std::move(name);
  h.shape = {n};
  h.part.dims = 1;
  h.part.global[0] = h.part.local[0] = n;
  h.begin = begin, h.end = begin + n;
  h.type = dtype_of<T>;
  h.read = [=](std::int64_t from, std::int64_t to, std::byte* out) {
    std::memcpy(out, values + (from - begin), static_cast<std::size_t>(to - from) * sizeof(T));
  };
  h.write = [=](const std::byte* in) { std::memcpy(values, in, static_cast<std::size_t>(n) * sizeof(T)); };
  return h;
}

/// Two tensors: a matrix whose rows tensor-parallel ranks shard, the last ranks with fewer rows, and a vector that all
/// of them have. Every element is a function of its index and a seed.
struct own_tensors {
  static constexpr std::int64_t height = 13, width = 6, elements = 15;
  static constexpr double all_bytes = 4 * (height * width + elements);

  own_tensors(const context<cpu>& ctx, std::uint64_t seed) {
    const std::int64_t ranks = ctx.ranks.shape().extent(axis_of<tp>), rank = ctx.ranks.coordinate(axis_of<tp>);
    const std::int64_t each = (height + ranks - 1) / ranks;
    part_.dims = 2;
    part_.global = {each * ranks, width};  // with padding
    part_.local = {each, width};
    part_.offset = {each * rank, 0};
    rows.resize(static_cast<std::size_t>(each * width));
    whole.resize(elements);
    fill(seed);
  }
  void fill(std::uint64_t seed) {
    const auto value = [&](std::int64_t i) { return static_cast<float>(i) + 0.125F * static_cast<float>(seed); };
    for (std::int64_t i = 0; i < part_.local_size(); ++i) {
      const std::int64_t at = part_.offset[0] * width + i;
      rows[static_cast<std::size_t>(i)] = at < height * width ? value(at) : 0;
    }
    for (std::int64_t i = 0; i < elements; ++i) whole[static_cast<std::size_t>(i)] = value(1000 + i);
  }
  std::vector<held_tensor> held(bool with_targets = false) {
    held_tensor r = held_in_memory("rows", rows.data(), part_.local_size());
    r.shape = {height, width};
    r.part = part_;
    r.copies = axis_list(axis_of<dp>);
    held_tensor w = held_in_memory("whole", whole.data(), elements);
    w.copies = axis_list(axis_of<dp>, axis_of<tp>);
    if (with_targets) {
      r.target = [this] { return reinterpret_cast<std::byte*>(rows.data()); };
      w.target = [this] { return reinterpret_cast<std::byte*>(whole.data()); };
    }
    return {r, w};
  }
  friend bool operator==(const own_tensors& a, const own_tensors& b) { return a.rows == b.rows && a.whole == b.whole; }

  std::vector<float> rows, whole;

 private:
  box part_;
};

/// One of the ranks that save tensors of their own to "steps".
struct saving_rank {
  const context<cpu>& ctx;
  any_communicator& ranks;
  own_tensors mine;
  checkpoint_saver saver;
  file_system& files;

  std::vector<finished_save> save(std::uint64_t step) { return saver.save(ctx, step, {.tensors = mine.held()}); }
  std::vector<finished_save> finished() { return saver.finished(ctx.device); }
  std::vector<finished_save> wait() { return saver.wait(ctx.device); }
  int rank() const { return ranks.rank(); }
  /// Returns after all ranks have called it.
  void meet() { all_reduce_scalar(ctx.device, ranks, 0.0, reduce_op::sum); }
  /// Loads a step into other tensors, which must be those of the seed.
  void check_load(const std::string& path, std::uint64_t seed) {
    own_tensors other(ctx, 0);
    load_tensors(ctx, ranks, path, {.tensors = other.held()}, files);
    CHECK(other == own_tensors(ctx, seed));
  }
};

/// Calls body(saving_rank&) on dp x tp ranks, whose tensors have the seed 1.
inline void on_savers(std::pair<int, int> mesh, file_system& files, saver_options how,
                      const std::function<void(saving_rank&)>& body) {
  how.directory = "steps";
  on_ranks(mesh, [&](const context<cpu>& ctx, any_communicator& ranks) {
    saving_rank rank{ctx, ranks, own_tensors(ctx, 1), checkpoint_saver(ctx.device, ranks, how, files), files};
    body(rank);
  });
}

inline std::vector<std::uint64_t> steps_in(file_system& files, const std::string& root) {
  std::vector<std::uint64_t> steps;
  for (const committed_step& s : list_steps(files, root).committed) steps.push_back(s.step);
  return steps;
}

/// Passes every call to another file system; derived classes change some operations.
class other_files : public file_system {
 public:
  explicit other_files(file_system& files) : files_(files) {}
  std::unique_ptr<open_file> create(const std::string& path) override { return files_.create(path); }
  std::unique_ptr<open_file> open(const std::string& path) override { return files_.open(path); }
  std::optional<file_kind> kind_of(const std::string& path) override { return files_.kind_of(path); }
  std::vector<directory_entry> list(const std::string& path) override { return files_.list(path); }
  void make_directory(const std::string& path) override { files_.make_directory(path); }
  void rename(const std::string& from, const std::string& to) override { files_.rename(from, to); }
  void remove_file(const std::string& path) override { files_.remove_file(path); }
  void remove_directory(const std::string& path) override { files_.remove_directory(path); }
  void sync_directory(const std::string& path) override { files_.sync_directory(path); }
  std::unique_ptr<directory_lock> lock_directory(const std::string& path) override {
    return files_.lock_directory(path);
  }

 private:
  file_system& files_;
};

/// Passes every call to another open file; derived classes observe some operations.
class other_file : public open_file {
 public:
  explicit other_file(std::unique_ptr<open_file> file) : open_file(file->path()), file_(std::move(file)) {}
  std::uint64_t size() const override { return file_->size(); }

 protected:
  std::size_t write_some(std::uint64_t offset, std::span<const std::byte> bytes) override {
    file_->write(offset, bytes);
    return bytes.size();
  }
  std::size_t read_some(std::uint64_t offset, std::span<std::byte> bytes) const override {
    file_->read(offset, bytes);
    return bytes.size();
  }
  void sync_once() override { file_->sync(); }

 private:
  std::unique_ptr<open_file> file_;
};

/// Files that are created only after the gate opens.
class gated_files final : public other_files {
 public:
  using other_files::other_files;
  /// Only files with this text in their names wait.
  void only(std::string part) { part_ = std::move(part); }
  void open_gate() {
    {
      const std::lock_guard lock(mutex_);
      is_open_ = true;
    }
    opened_.notify_all();
  }
  std::unique_ptr<open_file> create(const std::string& path) override {
    if (path.ends_with(".safetensors") && path.find(part_) != path.npos) {
      std::unique_lock lock(mutex_);
      opened_.wait(lock, [&] { return is_open_; });
    }
    return other_files::create(path);
  }

 private:
  std::string part_ = "w";
  std::mutex mutex_;
  std::condition_variable opened_;
  bool is_open_ = false;
};

/// A file system that is never destroyed: a thread that outlives its saver may use it after the test.
template <class Files, class... Args>
Files& never_destroyed(Args&... args) {
  static auto& all = *new std::vector<std::shared_ptr<void>>;
  auto made = std::make_shared<Files>(args...);
  all.push_back(made);
  return *made;
}

/// A file system on which one rank's file cannot be written.
class failing_files final : public other_files {
 public:
  failing_files(file_system& files, std::uint32_t writer) : other_files(files), writer_(writer) {}
  std::unique_ptr<open_file> create(const std::string& path) override {
    if (path.ends_with(data_file_name(writer_))) throw error("cannot write '" + path + "': no space");
    return other_files::create(path);
  }

 private:
  std::uint32_t writer_;
};

/// A race of two ranks. One lists a directory of an uncommitted step to remove it. Before it does, another rank creates
/// a file in that directory by its first name.
class crossing_files final : public other_files {
 public:
  using other_files::other_files;
  void make_directory(const std::string& path) override {
    if (path.ends_with("/data")) made_ = path;
    other_files::make_directory(path);
  }
  std::vector<directory_entry> list(const std::string& path) override {
    auto entries = other_files::list(path);
    if (path.ends_with("/data") && path.find(".tmp-") != path.npos && !std::exchange(has_met_, true)) {
      try {
        other_files::create(made_ + "/w00001.safetensors");
      } catch (const error&) {
      }
    }
    return entries;
  }
  bool has_met() const { return has_met_; }

 private:
  std::string made_;
  bool has_met_ = false;
};

/// Flips a bit in the data of one committed step: after the commit or, with `early`, when rank 1's file is first
/// opened.
class damaging_files final : public other_files {
 public:
  explicit damaging_files(memory_file_system& disk) : other_files(disk), disk_(disk) {}
  void damage(std::uint64_t step, bool early = false) {
    const std::lock_guard lock(mutex_);
    (early ? early_ : late_) = step_name(step);
  }
  std::unique_ptr<open_file> open(const std::string& path) override {
    {
      const std::lock_guard lock(mutex_);
      if (!early_.empty() && path.find(early_ + ".tmp-") != path.npos && path.ends_with(data_file_name(1))) {
        disk_.contents(path).back() ^= 4;
        early_.clear();
      }
    }
    return other_files::open(path);
  }
  void rename(const std::string& from, const std::string& to) override {
    {
      const std::lock_guard lock(mutex_);
      if (!late_.empty() && to.ends_with(late_)) disk_.contents(from + "/" + data_file_name(1)).back() ^= 4;
    }
    other_files::rename(from, to);
  }

 private:
  memory_file_system& disk_;
  std::mutex mutex_;
  std::string early_, late_;
};

/// Counts how often data files of committed steps are opened and closed.
class counting_files final : public other_files {
 public:
  using other_files::other_files;
  std::unique_ptr<open_file> open(const std::string& path) override {
    auto file = other_files::open(path);
    if (!path.ends_with(".safetensors") || path.find(".tmp-") != path.npos) return file;
    const std::lock_guard lock(mutex_);
    ++opened_[path];
    return std::make_unique<handle>(*this, std::move(file));
  }
  int opened(std::uint64_t step, std::uint32_t writer) { return count(opened_, step, writer); }
  int closed(std::uint64_t step, std::uint32_t writer) { return count(closed_, step, writer); }

 private:
  class handle final : public other_file {
   public:
    handle(counting_files& all, std::unique_ptr<open_file> file) : other_file(std::move(file)), all_(all) {}
    ~handle() override {
      const std::lock_guard lock(all_.mutex_);
      ++all_.closed_[path()];
    }

   private:
    counting_files& all_;
  };
  int count(std::map<std::string, int>& of, std::uint64_t step, std::uint32_t writer) {
    const std::lock_guard lock(mutex_);
    return of["steps/" + step_name(step) + "/" + data_file_name(writer)];
  }
  std::mutex mutex_;
  std::map<std::string, int> opened_, closed_;
};

/// Records the files that a crash before each operation would leave.
class watched_files final : public other_files {
 public:
  explicit watched_files(memory_file_system& disk) : other_files(disk), disk_(disk) {}
  void watch() { watches_ = true; }
  const std::vector<std::unique_ptr<memory_file_system>>& crashes() const { return crashes_; }

  std::unique_ptr<open_file> create(const std::string& path) override {
    return noted([&] { return std::make_unique<handle>(*this, other_files::create(path)); });
  }
  void make_directory(const std::string& path) override {
    noted([&] { other_files::make_directory(path); });
  }
  void rename(const std::string& from, const std::string& to) override {
    noted([&] { other_files::rename(from, to); });
  }
  void remove_file(const std::string& path) override {
    noted([&] { other_files::remove_file(path); });
  }
  void remove_directory(const std::string& path) override {
    noted([&] { other_files::remove_directory(path); });
  }
  void sync_directory(const std::string& path) override {
    noted([&] { other_files::sync_directory(path); });
  }

 private:
  class handle final : public other_file {
   public:
    handle(watched_files& files, std::unique_ptr<open_file> file) : other_file(std::move(file)), files_(files) {}

   protected:
    std::size_t write_some(std::uint64_t offset, std::span<const std::byte> bytes) override {
      return files_.noted([&] { return other_file::write_some(offset, bytes); });
    }
    void sync_once() override {
      files_.noted([&] { other_file::sync_once(); });
    }

   private:
    watched_files& files_;
  };

  /// Records the files that a crash would leave now, then performs an operation.
  template <class Operation>
  std::invoke_result_t<Operation> noted(Operation&& operation) {
    const std::lock_guard lock(mutex_);
    note();
    return operation();
  }
  void note() {
    if (!watches_) return;
    for (const keep mode : all_keeps)
      crashes_.push_back(disk_.after_crash(mode, static_cast<unsigned>(crashes_.size())));
  }

  memory_file_system& disk_;
  std::mutex mutex_;
  bool watches_ = false;
  std::vector<std::unique_ptr<memory_file_system>> crashes_;
};

}  // namespace plait::test
