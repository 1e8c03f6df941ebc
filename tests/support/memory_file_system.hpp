#pragma once

#include <cerrno>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "plait/io/file_system.hpp"

namespace plait::test {

/// Thrown by every operation after a crash. It does not derive from `plait::error`, so no code handles it as one.
struct crashed {};

/// The unsynced changes that a crash leaves: none, all, a random choice of blocks and names, a part of a block, or
/// other bytes in its place. `none` and `all` are not random.
enum class keep { none, all, some, torn, garbage };
inline constexpr keep all_keeps[] = {keep::none, keep::all, keep::some, keep::torn, keep::garbage};

/// How an operation fails. A short write writes half of the bytes, and the next one finds no space.
enum class fault { io_error, no_space, short_write };

/// Files in memory, with the state that a disk would have. It keeps the changed blocks of a file since its last sync,
/// and each changed name of a directory since its last sync. Only a rename changes both of its names in one step.
class memory_file_system final : public file_system {
 public:
  static constexpr std::size_t block = 64;

  memory_file_system() { root_->directory = true; }

  /// Every operation from number `n` throws `crashed`.
  void crash_at(std::size_t n) {
    const std::lock_guard lock(mutex_);
    crash_at_ = n;
  }
  /// Operation number `n` fails.
  void fail_at(std::size_t n, fault kind) {
    const std::lock_guard lock(mutex_);
    fail_at_ = n;
    fault_ = kind;
  }
  /// The number of operations so far.
  std::size_t operations() const {
    const std::lock_guard lock(mutex_);
    return operations_;
  }
  bool fault_happened() const {
    const std::lock_guard lock(mutex_);
    return fault_happened_;
  }
  /// Later calls complete the writes that were started, with up to two in flight, as io_uring does.
  void defer_writes() { defers_ = true; }

  /// The file system after the machine crashes now.
  std::unique_ptr<memory_file_system> after_crash(keep mode, unsigned seed) const {
    std::mt19937 random(seed);
    const auto chance = [&] { return random() % 2 == 0; };
    auto out = std::make_unique<memory_file_system>();
    // A change is durable only if earlier changes to the same name or file are.
    std::map<const node*, std::map<std::string, std::shared_ptr<node>>> names;
    std::set<std::pair<const node*, std::string>> lost_names;
    std::set<const node*> lost_nodes;
    std::vector<const change*> kept;
    for (const change& one : pending_) {
      bool there = mode == keep::all || (mode != keep::none && chance());
      for (const auto& [directory, name, target] : one) {
        if (lost_names.count({directory.get(), name}) != 0 || (target && lost_nodes.count(target.get()) != 0))
          there = false;
      }
      if (there) {
        kept.push_back(&one);
        continue;
      }
      for (const auto& [directory, name, target] : one) {
        lost_names.insert({directory.get(), name});
        if (target) lost_nodes.insert(target.get());
      }
    }
    const auto copy = [&](const auto& self, const node& from, node& to) -> void {
      to.directory = from.directory;
      if (!from.directory) {
        to.now = to.durable = contents_after(from, mode, random);
        return;
      }
      auto entries = from.durable_names;
      for (const change* one : kept) {
        for (const auto& [directory, name, target] : *one) {
          if (directory.get() == &from) set(entries, name, target);
        }
      }
      for (const auto& [name, target] : entries) {
        auto child = std::make_shared<node>();
        self(self, *target, *child);
        to.names[name] = to.durable_names[name] = child;
      }
    };
    copy(copy, *root_, *out->root_);
    return out;
  }

  /// All names and bytes as they are now. Two file systems with equal images look the same until a crash.
  std::string image() const {
    const std::lock_guard lock(mutex_);
    std::string all;
    const auto add = [&](const auto& self, const node& n) -> void {
      all += cat({n.directory ? "d" : "f", n.directory ? n.names.size() : n.now.size(), " "});
      all += n.now;
      for (const auto& [name, child] : n.names) {
        all += cat({name.size(), " ", name});
        self(self, *child);
      }
    };
    add(add, *root_);
    return all;
  }

  /// The bytes of a file, to read or to damage.
  std::string& contents(const std::string& path) { return file_at(path, "look at")->now; }

  std::unique_ptr<open_file> create(const std::string& path) override {
    const std::lock_guard lock(mutex_);
    operation("create", path);
    const auto [directory, name] = parent("create", path);
    if (directory->names.count(name) != 0) fail_file("create", path, EEXIST);
    auto file = std::make_shared<node>();
    apply({{directory, name, file}});
    return std::make_unique<handle>(*this, path, file, true);
  }
  std::unique_ptr<open_file> open(const std::string& path) override {
    const std::lock_guard lock(mutex_);
    operation("open", path);
    return std::make_unique<handle>(*this, path, file_at(path, "open"), false);
  }
  std::optional<file_kind> kind_of(const std::string& path) override {
    const std::lock_guard lock(mutex_);
    operation("examine", path);
    const auto found = find(path);
    if (!found) return std::nullopt;
    return found->directory ? file_kind::directory : file_kind::regular;
  }
  std::vector<directory_entry> list(const std::string& path) override {
    const std::lock_guard lock(mutex_);
    operation("list", path);
    std::vector<directory_entry> out;
    for (const auto& [name, child] : directory_at(path, "list")->names) {
      out.push_back({name, child->directory ? file_kind::directory : file_kind::regular});
    }
    return out;
  }
  void make_directory(const std::string& path) override {
    const std::lock_guard lock(mutex_);
    operation("make the directory", path);
    const auto [directory, name] = parent("make the directory", path);
    if (directory->names.count(name) != 0) fail_file("make the directory", path, EEXIST);
    auto made = std::make_shared<node>();
    made->directory = true;
    apply({{directory, name, made}});
  }
  void rename(const std::string& from, const std::string& to) override {
    const std::lock_guard lock(mutex_);
    const std::string both = from + "' to '" + to;
    operation("rename", both);
    const auto [old_directory, old_name] = parent("rename", from);
    const auto [new_directory, new_name] = parent("rename", to);
    const auto moved = old_directory->names.find(old_name);
    if (moved == old_directory->names.end()) fail_file("rename", both, ENOENT);
    const auto replaced = new_directory->names.find(new_name);
    if (replaced != new_directory->names.end()) {
      if (replaced->second->directory && !moved->second->directory) fail_file("rename", both, EISDIR);
      if (!replaced->second->directory && moved->second->directory) fail_file("rename", both, ENOTDIR);
      if (!replaced->second->names.empty()) fail_file("rename", both, ENOTEMPTY);
    }
    apply({{old_directory, old_name, nullptr}, {new_directory, new_name, moved->second}});
  }
  void remove_file(const std::string& path) override { remove("remove", path, false); }
  void remove_directory(const std::string& path) override { remove("remove the directory", path, true); }
  void sync_directory(const std::string& path) override {
    const std::lock_guard lock(mutex_);
    operation("sync the directory", path);
    const auto directory = directory_at(path, "sync the directory");
    std::vector<change> rest;
    for (change& one : pending_) {
      bool touched = false;
      for (const auto& row : one) touched = touched || std::get<0>(row) == directory;
      if (!touched) {
        rest.push_back(std::move(one));
        continue;
      }
      for (const auto& [where, name, target] : one) set(where->durable_names, name, target);
    }
    pending_ = std::move(rest);
  }
  std::unique_ptr<directory_lock> lock_directory(const std::string& path) override {
    const std::lock_guard lock(mutex_);
    operation("lock", path);
    const auto directory = directory_at(path, "lock");
    if (!locked_.insert(directory).second) fail({"cannot lock '", path, "': another writer is at work in it"});
    struct held final : directory_lock {
      held(memory_file_system& f, std::shared_ptr<void> d) : files(f), directory(std::move(d)) {}
      ~held() override {
        const std::lock_guard guard(files.mutex_);
        files.locked_.erase(directory);
      }
      memory_file_system& files;
      std::shared_ptr<void> directory;
    };
    return std::make_unique<held>(*this, directory);
  }

 private:
  struct node {
    bool directory = false;
    std::string now, durable;                                           ///< of a file
    std::set<std::size_t> unsynced;                                     ///< blocks of `now`
    std::map<std::string, std::shared_ptr<node>> names, durable_names;  ///< of a directory
  };
  /// The entries that a change sets: directory, name, and the target, or null to remove the name.
  using change = std::vector<std::tuple<std::shared_ptr<node>, std::string, std::shared_ptr<node>>>;

  class handle final : public open_file {
   public:
    handle(memory_file_system& files, const std::string& path, std::shared_ptr<node> file, bool writable)
        : open_file(path), files_(files), file_(std::move(file)), writable_(writable) {}
    ~handle() override {
      try {
        finish_writes();
      } catch (...) {  // a destructor must not throw
      }
    }
    std::uint64_t size() const override {
      const std::lock_guard lock(files_.mutex_);
      files_.operation("examine", path());
      return file_->now.size();
    }
    void start_write(std::uint64_t offset, std::span<const std::byte> bytes) override {
      if (!files_.defers_) return write(offset, bytes);
      if (begun_.size() == 2) end_one();
      begun_.emplace_back(offset, bytes);
    }
    void finish_writes() override {
      while (!begun_.empty()) end_one();
    }

   private:
    void end_one() {
      const auto [offset, bytes] = begun_.front();
      begun_.pop_front();
      write(offset, bytes);
    }
    std::size_t write_some(std::uint64_t offset, std::span<const std::byte> bytes) override {
      const std::lock_guard lock(files_.mutex_);
      if (!writable_) fail_file("write", path(), EBADF);
      const std::size_t n = files_.operation("write", path(), bytes.size());
      file_->now.resize(std::max<std::size_t>(file_->now.size(), offset + n));
      std::memcpy(file_->now.data() + offset, bytes.data(), n);
      for (std::size_t b = offset / block; b * block < offset + n; ++b) file_->unsynced.insert(b);
      return n;
    }
    std::size_t read_some(std::uint64_t offset, std::span<std::byte> bytes) const override {
      const std::lock_guard lock(files_.mutex_);
      files_.operation("read", path());
      const std::size_t n = offset >= file_->now.size() ? 0 : std::min(bytes.size(), file_->now.size() - offset);
      if (n != 0) std::memcpy(bytes.data(), file_->now.data() + offset, n);
      return n;
    }
    /// As on Linux, blocks that a failed sync could not write count as written afterwards.
    void sync_once() override {
      const std::lock_guard lock(files_.mutex_);
      auto unsynced = std::exchange(file_->unsynced, {});
      try {
        files_.operation("sync", path());
      } catch (const crashed&) {
        file_->unsynced = std::move(unsynced);
        throw;
      }
      file_->durable.resize(file_->now.size());
      for (const std::size_t b : unsynced) {
        const std::size_t n = std::min(block, file_->now.size() - b * block);
        std::memcpy(file_->durable.data() + b * block, file_->now.data() + b * block, n);
      }
    }

    memory_file_system& files_;
    std::shared_ptr<node> file_;
    bool writable_;
    std::deque<std::pair<std::uint64_t, std::span<const std::byte>>> begun_;
  };

  static std::string contents_after(const node& file, keep mode, std::mt19937& random) {
    if (mode == keep::all) return file.now;
    std::string out = file.durable;
    if (mode == keep::none) return out;
    if (random() % 2 == 0) out.resize(file.now.size(), '\0');
    for (const std::size_t b : file.unsynced) {
      const std::size_t begin = b * block, end = std::min({begin + block, out.size(), file.now.size()});
      if (begin >= end || random() % 2 == 0) continue;
      const std::size_t taken = mode == keep::torn ? random() % (end - begin + 1) : end - begin;
      for (std::size_t i = begin; i < begin + taken; ++i) {
        out[i] = mode == keep::garbage ? static_cast<char>(random()) : file.now[i];
      }
    }
    return out;
  }
  static void set(std::map<std::string, std::shared_ptr<node>>& names, const std::string& name,
                  const std::shared_ptr<node>& target) {
    if (target)
      names[name] = target;
    else
      names.erase(name);
  }

  /// Counts an operation, and throws if it must fail or crash. Returns the number of bytes that it may write.
  std::size_t operation(const char* what, const std::string& path, std::size_t bytes = 0) {
    if (operations_ >= crash_at_) throw crashed{};
    const std::size_t number = operations_++;
    if (number == fail_at_) {
      if (fault_ == fault::short_write && bytes > 1) {
        fault_ = fault::no_space;
        fail_at_ = operations_;
        return bytes / 2;
      }
      if (fault_ != fault::short_write) {
        fault_happened_ = true;
        fail_file(what, path, fault_ == fault::no_space ? ENOSPC : EIO);
      }
    }
    return bytes;
  }
  void apply(change one) {
    for (const auto& [directory, name, target] : one) set(directory->names, name, target);
    pending_.push_back(std::move(one));
  }
  void remove(const char* what, const std::string& path, bool directory) {
    const std::lock_guard lock(mutex_);
    operation(what, path);
    const auto [where, name] = parent(what, path);
    const auto found = where->names.find(name);
    if (found == where->names.end()) fail_file(what, path, ENOENT);
    if (found->second->directory != directory) fail_file(what, path, directory ? ENOTDIR : EISDIR);
    if (!found->second->names.empty()) fail_file(what, path, ENOTEMPTY);
    apply({{where, name, nullptr}});
  }
  std::shared_ptr<node> find(const std::string& path) const {
    std::shared_ptr<node> at = root_;
    for (std::size_t begin = 0; begin < path.size();) {
      const std::size_t end = std::min(path.find('/', begin), path.size());
      if (end > begin && path.compare(begin, end - begin, ".") != 0) {
        const auto next = at->names.find(path.substr(begin, end - begin));
        if (next == at->names.end()) return nullptr;
        at = next->second;
      }
      begin = end + 1;
    }
    return at;
  }
  std::shared_ptr<node> directory_at(const std::string& path, const char* what) const {
    const auto found = find(path);
    if (!found) fail_file(what, path, ENOENT);
    if (!found->directory) fail_file(what, path, ENOTDIR);
    return found;
  }
  std::shared_ptr<node> file_at(const std::string& path, const char* what) const {
    const auto found = find(path);
    if (!found) fail_file(what, path, ENOENT);
    if (found->directory) fail_file(what, path, EISDIR);
    return found;
  }
  std::pair<std::shared_ptr<node>, std::string> parent(const char* what, const std::string& path) const {
    const std::size_t slash = path.rfind('/');
    const std::string name = path.substr(slash + 1);
    const auto directory = find(slash == path.npos ? "" : path.substr(0, slash));
    if (!directory || !directory->directory || name.empty()) fail_file(what, path, ENOENT);
    return {directory, name};
  }

  mutable std::mutex mutex_;
  std::shared_ptr<node> root_ = std::make_shared<node>();
  std::vector<change> pending_;
  std::set<std::shared_ptr<void>> locked_;
  std::size_t operations_ = 0, crash_at_ = SIZE_MAX, fail_at_ = SIZE_MAX;
  fault fault_ = fault::io_error;
  bool defers_ = false;
  bool fault_happened_ = false;
};

}  // namespace plait::test
