#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <ctime>
#include <string>
#include <vector>

#include "../examples/median.hpp"
#include "plait/core/error.hpp"

/// Functions for benchmarks of whole steps: times of runs in turn, and numbers on the command line.
namespace bench {

/// Returns the seconds of `work`.
template <class F>
double seconds(F&& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// Returns the processor seconds of `work` in the calling thread, which other programs on the machine do not lengthen.
template <class F>
double processor_seconds(F&& work) {
  const auto now = [] {
    timespec t{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
  };
  const double start = now();
  work();
  return now() - start;
}

using plait::median;

inline double least(const std::vector<double>& times) { return *std::min_element(times.begin(), times.end()); }

/// The values of `--name value` pairs, most of them positive whole numbers.
class numbers {
 public:
  numbers(int argc, char** argv) {
    for (int i = 1; i < argc; ++i) given_.emplace_back(argv[i]);
  }
  /// Returns the text after `name`, or `otherwise`.
  std::string text(const std::string& name, const std::string& otherwise) const {
    const std::string* const value = after(name);
    return value != nullptr ? *value : otherwise;
  }
  /// Returns the number after `name`, or `otherwise`. Throws `plait::error` if it is not a positive whole number.
  std::int64_t of(const std::string& name, std::int64_t otherwise) const {
    const std::string* const given = after(name);
    if (given == nullptr) return otherwise;
    char* end = nullptr;
    const std::int64_t value = std::strtoll(given->c_str(), &end, 10);
    if (*end != '\0' || value < 1) plait::fail(name + " is " + *given + ", must be a whole number of at least 1");
    return value;
  }
  /// Throws `plait::error` for a name that is not in `known`, or that has no number.
  void only(const std::vector<std::string>& known) const {
    for (std::size_t i = 0; i < given_.size(); i += 2) {
      if (std::find(known.begin(), known.end(), given_[i]) == known.end() || i + 1 == given_.size()) {
        std::string list;
        for (const std::string& k : known) list += " " + k + " N";
        plait::fail(given_[i] + " is not an option with its number; there are" + list);
      }
    }
  }

 private:
  const std::string* after(const std::string& name) const {
    for (std::size_t i = 0; i + 1 < given_.size(); i += 2)
      if (given_[i] == name) return &given_[i + 1];
    return nullptr;
  }

  std::vector<std::string> given_;
};

}  // namespace bench
