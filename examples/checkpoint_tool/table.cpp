#include "table.hpp"

#include <algorithm>

#include "plait/core/error.hpp"
#include "train_llama/data/tokens.hpp"

namespace {

/// Returns the number of characters in a UTF-8 text: its bytes without continuation bytes.
std::size_t width_of(std::string_view text) {
  return static_cast<std::size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; }));
}

}  // namespace

std::string printable(std::string_view text) { return plait::printable(text, true); }

void table::add(const std::vector<std::string>& cells) {
  if (cells.size() != columns_.size()) plait::fail("a row of a table has another number of cells than it has columns");
  std::vector<std::string>& row = rows_.emplace_back();
  for (const std::string& cell : cells) row.push_back(printable(cell));
}

std::string table::text() const {
  std::vector<std::size_t> widths;
  for (std::size_t c = 0; c < columns_.size(); ++c) {
    widths.push_back(width_of(columns_[c].title));
    for (const auto& row : rows_) widths[c] = std::max(widths[c], width_of(row[c]));
  }
  std::string out;
  const auto line = [&](auto&& cell) {
    std::string text;
    for (std::size_t c = 0; c < columns_.size(); ++c) {
      const std::string& content = cell(c);
      const std::string gap(widths[c] - width_of(content), ' ');
      if (c > 0) text += "  ";
      text += columns_[c].side == align::right ? gap + content : content + gap;
    }
    out += text.substr(0, text.find_last_not_of(' ') + 1) + "\n";
  };
  line([&](std::size_t c) -> const std::string& { return columns_[c].title; });
  for (const auto& row : rows_) line([&](std::size_t c) -> const std::string& { return row[c]; });
  return out;
}
