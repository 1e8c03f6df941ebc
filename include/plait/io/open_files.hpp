// Files of a list, opened to read when they are needed, and few of them at once: a step has one for each rank that
// wrote it, and a process may open a thousand.
#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "plait/core/macros_off.hpp"
#include "plait/io/file_system.hpp"

namespace plait {

/// Used by one thread at a time.
class open_files {
 public:
  /// Most files that are open at once.
  static constexpr std::size_t most = 64;

  open_files(file_system& files, std::vector<std::string> paths)
      : files_(files), paths_(std::move(paths)), open_(paths_.size()) {}

  /// Returns the i-th file, which stays open until `most` others have been asked for. Throws as `file_system::open`.
  const open_file& at(std::size_t i) { return *hold(i); }
  /// Returns the same file, which stays open as long as somebody holds it. Other threads may read from it.
  std::shared_ptr<const open_file> hold(std::size_t i) {
    if (open_[i]) return open_[i];
    open_[i] = files_.open(paths_[i]);
    order_.push_back(i);
    if (order_.size() > most) {
      open_[order_.front()].reset();
      order_.pop_front();
    }
    return open_[i];
  }

 private:
  file_system& files_;
  std::vector<std::string> paths_;
  std::vector<std::shared_ptr<const open_file>> open_;
  std::deque<std::size_t> order_;  ///< of those that are open, the oldest first
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
