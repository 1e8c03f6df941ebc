// Collectives for file work that may fail on some ranks: then all ranks fail with one text. One function tests whether
// all ranks see one directory.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <exception>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "plait/checkpoint/step_directory.hpp"
#include "plait/comm/agreement.hpp"
#include "plait/comm/deadline.hpp"
#include "plait/comm/host_values.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/io/posix_file_system.hpp"

namespace plait {

/// Returns the texts of all ranks, ordered by rank. Collective over `ranks`.
template <compute_device Device>
std::vector<std::string> gather_texts(Device& device, any_communicator& ranks, std::string_view mine) {
  std::vector<std::string> all(static_cast<std::size_t>(ranks.size()));
  const auto texts = gather_records(device, ranks, std::vector<char>(mine.begin(), mine.end()));
  for (std::size_t r = 0; r < texts.size(); ++r) all[r].assign(texts[r].begin(), texts[r].end());
  return all;
}

/// Returns the result of work() on rank 0 to every rank: a text that does not begin with a blank. If work() throws,
/// every rank throws `what` followed by the error's text. Collective over `ranks`; work() must not be collective.
template <compute_device Device, class Work>
std::string text_of_rank_0(Device& device, any_communicator& ranks, const std::string& what, Work&& work) {
  std::string answer;  // an error begins with a blank
  try {
    if (ranks.rank() == 0) answer = std::forward<Work>(work)();
  } catch (const std::exception& e) {
    answer = cat({" ", e.what()});
  }
  answer = broadcast_text(device, ranks, answer);
  if (answer.starts_with(' ')) throw error_of_all(what + answer.substr(1));
  return answer;
}

/// Throws on every rank if any rank has a text: `what`, followed by the ranks' texts, without repeats and at most
/// sixteen. Collective over `ranks`.
template <compute_device Device>
void agree_on(Device& device, any_communicator& ranks, const std::string& mine, const std::string& what) {
  std::vector<std::string> texts;
  for (std::string& text : gather_texts(device, ranks, mine))
    if (!text.empty() && texts.size() < 16 && std::find(texts.begin(), texts.end(), text) == texts.end())
      texts.push_back(std::move(text));
  std::string all;
  for (const std::string& text : texts) append(all, {all.empty() ? "" : "; ", text});
  if (!all.empty()) throw error_of_all(what + all);
}

/// Calls work(). If it throws on any rank, every rank throws `what` followed by the errors' texts, as in `agree_on`.
/// Collective over `ranks`; work() must not be collective.
template <compute_device Device, class Work>
void agree(Device& device, any_communicator& ranks, Work&& work, const std::string& what = "") {
  std::string problem;
  try {
    std::forward<Work>(work)();
  } catch (const std::exception& e) {
    problem = e.what();
  }
  agree_on(device, ranks, problem, what);
}

namespace detail {

/// Returns whether `mark` appears in `directory` within a second. A network file system may show old contents of a
/// directory for some time.
inline bool sees_mark(file_system& files, const std::string& directory, const std::string& mark) {
  for (std::chrono::milliseconds pause(1);; pause *= 2) {
    try {
      if (files.kind_of(path_in(directory, mark))) return true;
      if (pause.count() > 512) return false;
      files.list(directory);  // refreshes the file system's view of the directory
    } catch (const error&) {  // the directory is not there
      if (pause.count() > 512) return false;
    }
    std::this_thread::sleep_for(pause);
  }
}

}  // namespace detail

/// Throws `error_of_all`, whose text begins with `what`, unless `directory` is the same directory for all ranks. Rank 0
/// makes an empty directory in it, which each rank must see within a second. The error names the ranks that do not, and
/// their hosts. Collective over `ranks`.
template <compute_device Device>
void require_one_directory(Device& device, any_communicator& ranks, const std::string& directory,
                           const std::string& what = "", file_system& files = machine_files()) {
  if (ranks.size() == 1) return;
  std::string mark;
  agree(
      device, ranks,
      [&] {
        if (ranks.rank() != 0) return;
        // If rank 0 dies before it removes this directory, the next writer removes it.
        mark = cat({step_name(0), detail::temporary_mark, detail::unguessable_suffix()});
        files.make_directory(detail::path_in(directory, mark));
      },
      what);
  mark = broadcast_text(device, ranks, mark);
  const bool seen = detail::sees_mark(files, directory, mark);
  const std::vector<std::string> blind = gather_texts(device, ranks, seen ? "" : detail::host_name());
  try {
    if (ranks.rank() == 0) files.remove_directory(detail::path_in(directory, mark));
  } catch (const error&) {  // the next writer removes it
  }
  std::vector<std::size_t> without;
  std::vector<std::string> hosts;
  for (std::size_t r = 0; r < blind.size(); ++r) {
    if (blind[r].empty()) continue;
    without.push_back(r);
    if (std::find(hosts.begin(), hosts.end(), blind[r]) == hosts.end()) hosts.push_back(blind[r]);
  }
  if (without.empty()) return;
  std::string names;
  for (std::size_t i = 0; i < std::min<std::size_t>(hosts.size(), 8); ++i)
    append(names, {i == 0 ? "" : ", ", hosts[i]});
  if (hosts.size() > 8) append(names, {" and ", hosts.size() - 8, " more"});
  throw error_of_all(
      cat({what, "'", directory, "' is not one directory for all ranks: ", detail::ranks_text(without), " on ", names,
           " cannot see what rank 0 makes in it; name a directory on a file system that ", "all hosts share"}));
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
