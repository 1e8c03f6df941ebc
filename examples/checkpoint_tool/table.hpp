#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

/// Returns a text of unknown origin made safe for one line of a terminal: control characters are escaped.
std::string printable(std::string_view text);

/// Rows of text in columns as wide as needed. Columns of numbers are right-aligned.
class table {
 public:
  enum class align { left, right };
  struct column {
    std::string title;
    align side = align::left;
  };

  explicit table(std::vector<column> columns) : columns_(std::move(columns)) {}
  /// Adds a row, with one cell for each column. Cells are made printable.
  void add(const std::vector<std::string>& cells);
  bool empty() const { return rows_.empty(); }
  /// Returns the titles and the rows, one line each.
  std::string text() const;

 private:
  std::vector<column> columns_;
  std::vector<std::vector<std::string>> rows_;
};
