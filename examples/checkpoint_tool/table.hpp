#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

/// Returns a text of unknown origin as it may be printed on a terminal, on one line: control characters are escaped.
std::string printable(std::string_view text);

/// Rows of text in columns as wide as they need to be; those of numbers end alike.
class table {
 public:
  enum class align { left, right };
  struct column {
    std::string title;
    align side = align::left;
  };

  explicit table(std::vector<column> columns) : columns_(std::move(columns)) {}
  /// As many cells as there are columns. They are made printable.
  void add(const std::vector<std::string>& cells);
  bool empty() const { return rows_.empty(); }
  /// Returns the titles and the rows, a line each.
  std::string text() const;

 private:
  std::vector<column> columns_;
  std::vector<std::vector<std::string>> rows_;
};
