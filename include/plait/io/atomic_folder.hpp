// A folder that appears under its name with all its files, or not at all. Single files: io/atomic_file.hpp. Files that
// several ranks write together: io/file_of_parts.hpp.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <string>
#include <system_error>
#include <utility>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"

namespace plait {

/// A new folder: files go into `temporary()`, beside where it will be, and `commit` renames that. Destroyed before
/// `commit`, it leaves no trace; where `commit` cannot rename it, it stays under the name that the error has.
class atomic_folder {
 public:
  /// `field` is what the user set to name this folder; every error text starts with it. Throws `error` when there is
  /// something under that name but an empty folder that can be replaced, or a link to one, or its own folder does not
  /// exist or is not writable.
  atomic_folder(const std::string& path, std::string field) : field_(std::move(field)), path_(normal(path)) {
    if (path_.empty()) fail({field_, ": the name of the folder to write is empty"});
    const std::filesystem::path name = std::filesystem::path(path_).filename();
    std::error_code error;
    // A rename would take the folder away from under this process.
    if (name == "." || name == ".." || std::filesystem::equivalent(path_, ".", error))
      fail({field_, ": '", path, "' is the folder that this runs in, or one above it; name a new one"});
    if (is_taken()) fail({field_, taken_text()});
    if (std::filesystem::is_symlink(path_, error)) {  // a rename would meet the link, not the folder
      path_ = std::filesystem::canonical(path_, error).string();
      if (error) fail({field_, ": cannot follow the link '", path, "': ", error.message()});
    }
    make_temporary();
    if (!std::filesystem::exists(path_, error)) return;
    if (::rename(temporary_.c_str(), path_.c_str()) != 0) {  // tried here, and not first when all is written
      const int why = errno;
      std::filesystem::remove(temporary_, error);
      fail({field_, ": the folder '", path_, "' cannot be replaced, as where something is mounted on it: ",
            std::strerror(why), "; name a new folder in it"});
    }
    make_temporary();
  }
  ~atomic_folder() {
    std::error_code ignored;
    if (!temporary_.empty()) std::filesystem::remove_all(temporary_, ignored);
  }
  atomic_folder(const atomic_folder&) = delete;
  atomic_folder& operator=(const atomic_folder&) = delete;

  const std::string& temporary() const { return temporary_; }

  /// Makes the folder visible under its name, once its files are on the disk. At most once.
  void commit() {
    sync(temporary_);
    const bool taken = is_taken();
    if (taken || ::rename(temporary_.c_str(), path_.c_str()) != 0) {
      const std::string why = taken ? taken_text() : cat({": cannot make '", path_, "': ", std::strerror(errno)});
      fail({field_, why, "; the finished folder is '", std::exchange(temporary_, {}), "'"});
    }
    temporary_.clear();
    const std::filesystem::path parent = std::filesystem::path(path_).parent_path();
    sync(parent.empty() ? "." : parent.string());
  }

 private:
  static std::string normal(const std::string& path) {
    const std::filesystem::path plain = std::filesystem::path(path).lexically_normal();
    return (plain.has_filename() ? plain : plain.parent_path()).string();
  }
  /// Whether there is something under the name but an empty folder.
  bool is_taken() const {
    std::error_code ignored;
    const bool empty_folder =
        std::filesystem::is_directory(path_, ignored) && std::filesystem::is_empty(path_, ignored);
    return !empty_folder && std::filesystem::exists(std::filesystem::symlink_status(path_, ignored));
  }
  std::string taken_text() const {
    return cat({": '", path_, "' is there already; name a folder that is not, or is empty"});
  }
  void make_temporary() {
    static std::atomic<unsigned> count{0};
    std::error_code error;
    do {  // ranks on other machines, and runs that were killed, may have had this process's number
      temporary_ = cat({path_, ".tmp-", ::getpid(), "-", count++});
    } while (!std::filesystem::create_directory(temporary_, error) && !error);
    if (error) fail({field_, ": cannot make the folder '", path_, "': ", error.message()});
  }
  void sync(const std::string& folder) const {
    const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (descriptor < 0) fail_with("cannot open the folder", folder);
    const int synced = ::fsync(descriptor);
    const int why = errno;
    ::close(descriptor);
    errno = why;
    if (synced != 0) fail_with("cannot sync the folder", folder);
  }
  [[noreturn]] void fail_with(const char* what, const std::string& folder) const {
    fail({field_, ": ", what, " '", folder, "': ", std::strerror(errno)});
  }

  std::string field_, path_, temporary_;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
