// Work that may fail on some ranks and must then fail on all, with one text: reading and writing files. It waits for
// everybody, so that it is for what happens between steps.
#pragma once

#include <algorithm>
#include <exception>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plait/core/error.hpp"
#include "plait/tensor/gather_records.hpp"

namespace plait {

/// Returns the texts of all ranks, by rank. Collective over `ranks`.
template <compute_device Device>
std::vector<std::string> gather_texts(Device& device, any_communicator& ranks, std::string_view mine) {
  std::vector<std::string> all(static_cast<std::size_t>(ranks.size()));
  const auto texts = gather_records(device, ranks, std::vector<char>(mine.begin(), mine.end()));
  for (std::size_t r = 0; r < texts.size(); ++r) all[r].assign(texts[r].begin(), texts[r].end());
  return all;
}

/// Calls work(), and throws on every rank if it has thrown on one: the error of the lowest such rank, which is named
/// where not all have the same. Collective over `ranks`; work() must not be.
template <compute_device Device, class Work>
void agree(Device& device, any_communicator& ranks, Work&& work) {
  std::string why;
  try {
    std::forward<Work>(work)();
  } catch (const std::exception& e) {
    why = e.what();
    if (why.empty()) why = "an error without a text";
  }
  const std::vector<std::string> all = gather_texts(device, ranks, why);
  const auto first = std::find_if(all.begin(), all.end(), [](const std::string& text) { return !text.empty(); });
  if (first == all.end()) return;
  const bool alike = std::all_of(all.begin(), all.end(), [&](const std::string& text) { return text == *first; });
  throw error_of_all(alike ? *first : cat({"rank ", first - all.begin(), ": ", *first}));
}

/// Throws on every rank where some rank has something to say: `what`, and then what the ranks say, each thing once and
/// at most sixteen. Collective over `ranks`.
template <compute_device Device>
void agree_on(Device& device, any_communicator& ranks, const std::string& mine, const std::string& what) {
  std::vector<std::string> said;
  for (std::string& text : gather_texts(device, ranks, mine))
    if (!text.empty() && said.size() < 16 && std::find(said.begin(), said.end(), text) == said.end())
      said.push_back(std::move(text));
  std::string all;
  for (const std::string& text : said) append(all, {all.empty() ? "" : "; ", text});
  if (!all.empty()) throw error_of_all(what + all);
}

}  // namespace plait
