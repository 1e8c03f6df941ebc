#pragma once

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

/// Returns how many letters must be added, removed or changed to make one text the other (Levenshtein 1966).
inline std::size_t edits_between(const std::string& a, const std::string& b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i);
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = std::exchange(row[j], std::min({row[j] + 1, row[j - 1] + 1, replaced}));
    }
  }
  return row[b.size()];
}

/// Returns "; did you mean --gradients?" for --gradient, or nothing if no option is similar.
inline std::string like(const CLI::App& app, const std::string& name) {
  std::string likest;
  std::size_t fewest = 3;
  for (const CLI::Option* o : app.get_options())
    if (const std::size_t edits = edits_between(o->get_name(), name); edits < fewest)
      fewest = edits, likest = o->get_name();
  return likest.empty() ? "" : "; did you mean " + likest + "?";
}

/// Returns an error text for a command line that CLI11 cannot read. The text names the option with the mistake.
inline std::string reading_error(const CLI::App& app, const CLI::ParseError& e, const std::vector<std::string>& words) {
  const std::string why = e.what(), unread = "Could not convert: ", name = why.substr(0, why.find(" = "));
  if (dynamic_cast<const CLI::ExtrasError*>(&e) != nullptr) {
    for (const std::string& word : words)  // the first that looks like an option but is not one
      if (word.size() > 1 && word[0] == '-' && word.find_first_of("0123456789.") != 1 &&
          app.get_option_no_throw(word.substr(0, word.find('='))) == nullptr)
        return "there is no option " + word + like(app, word.substr(0, word.find('=')));
    // A value of two words: the second belongs to no option.
    const std::string extra = app.remaining().empty() ? "" : app.remaining().front();
    for (std::size_t i = 2; i < words.size(); ++i)
      if (words[i] == extra && words[i - 1][0] != '-' && words[i - 2].starts_with("--"))
        return "'" + extra + "' belongs to no option: " + words[i - 2] + " takes one word, and has '" + words[i - 1] +
               "'; a list is one word with commas, as in " + words[i - 2] + " " + words[i - 1] + "," + extra;
  }
  if (dynamic_cast<const CLI::ConversionError*>(&e) != nullptr && name.starts_with(unread)) {
    if (const CLI::Option* const o = app.get_option_no_throw(name.substr(unread.size()))) {
      const std::string type = o->get_type_name();
      return o->get_name() + " is '" + (o->results().empty() ? std::string() : o->results().back()) + "', which is " +
             (type.starts_with("INT")     ? "not a whole number, or is too large"
              : type.starts_with("UINT")  ? "not a whole number from 0 on, or is too large"
              : type.starts_with("FLOAT") ? "not a number"
                                          : "neither true nor false");
    }
  }
  return why;
}

/// Throws an error of CLI11, for `reading_error`, if CLI11 has replaced a number by the nearest one that 64 bits hold.
inline void check_whole_numbers(const CLI::App& app) {
  for (const CLI::Option* o : app.get_options()) {
    if (o->get_type_name() != "INT") continue;
    for (const std::string& word : o->results()) {
      errno = 0;
      static_cast<void>(std::strtoll(word.c_str(), nullptr, 0));
      if (errno == ERANGE) throw CLI::ConversionError(o->get_name(), o->results());
    }
  }
}
