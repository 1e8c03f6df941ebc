#pragma once

#include <doctest/doctest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "plait/core/error.hpp"

/// A new folder for one test, removed at the end.
class temp_folder {
 public:
  temp_folder() {
    std::string name = (std::filesystem::temp_directory_path() / "plait-test-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("cannot make a temporary folder");
    path_ = name;
  }
  ~temp_folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  temp_folder(const temp_folder&) = delete;
  temp_folder& operator=(const temp_folder&) = delete;

  std::string operator/(std::string_view name) const { return (path_ / name).string(); }
  std::string write(std::string_view name, std::string_view contents) const {
    std::ofstream(*this / name, std::ios::binary) << contents;
    return *this / name;
  }
  std::string read(std::string_view name) const {
    std::ifstream in(*this / name, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  /// Number of entries, to check that no file is left.
  std::size_t entries() const {
    return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(path_), {}));
  }

 private:
  std::filesystem::path path_;
};

/// The text of the `plait::error` that `action` throws; the test fails without one.
template <class Action>
std::string error_of(Action&& action) {
  try {
    action();
  } catch (const plait::error& e) {
    return e.what();
  }
  FAIL_CHECK("no plait::error was thrown");
  return {};
}

inline bool contains(std::string_view text, std::string_view part) { return text.find(part) != text.npos; }

/// Fails unless the `plait::error` that `action` throws has every given part in its text.
#define CHECK_ERROR(action, ...)                                                                                  \
  do {                                                                                                            \
    const std::string text_of_error = error_of([&] { action; });                                                  \
    for (const std::string& part_of_error : std::vector<std::string>{__VA_ARGS__}) {                              \
      CHECK_MESSAGE(contains(text_of_error, part_of_error), "'", text_of_error, "' lacks '", part_of_error, "'"); \
    }                                                                                                             \
  } while (false)
