// Reads schedules by name, such as "interleaved:2", and converts them from and to the CSV of PyTorch's
// torch.distributed.pipelining.
#pragma once

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/schedule/automatic.hpp"
#include "plait/schedule/schedule.hpp"
#include "plait/schedule/verified.hpp"

namespace plait {

namespace detail {

struct stage_action {
  int rank = 0, stage = 0;
  action_kind kind = action_kind::forward;
  int microbatch = 0;
};

[[noreturn]] inline void bad_cell(int row, std::size_t column, std::string_view cell, const std::string& what) {
  const std::string excerpt = cell.size() <= 60 ? std::string(cell) : std::string(cell.substr(0, 57)) + "...";
  fail({"schedule CSV, row ", row + 1, ", cell ", column + 1, " \"", excerpt, "\": ", what});
}

inline std::string_view without_blanks(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '"')) text.remove_prefix(1);
  while (!text.empty() && (text.back() == ' ' || text.back() == '\r' || text.back() == '"')) text.remove_suffix(1);
  return text;
}

inline stage_action parse_cell(std::string_view part, int row, std::size_t column, std::string_view cell) {
  stage_action result{.rank = row, .stage = -1, .microbatch = -1};  // stays -1 if the number is too large for an int
  const char* const end = part.data() + part.size();
  const auto [letter_at, stage_error] = std::from_chars(part.data(), end, result.stage);
  const std::string_view kinds = "FBIW";
  if (stage_error != std::errc::invalid_argument && letter_at != end && kinds.find(*letter_at) != kinds.npos) {
    const auto [rest, error] = std::from_chars(letter_at + 1, end, result.microbatch);
    if (error != std::errc::invalid_argument && rest == end) {
      if (result.stage < 0 || result.stage >= max_pipeline_ranks * max_chunks)
        bad_cell(row, column, cell, cat({"stages are numbered from 0 to ", max_pipeline_ranks * max_chunks - 1}));
      if (result.microbatch < 0 || result.microbatch >= max_microbatches)
        bad_cell(row, column, cell, cat({"microbatches are numbered from 0 to ", max_microbatches - 1}));
      result.kind = static_cast<action_kind>(kinds.find(*letter_at));
      return result;
    }
  }
  bad_cell(row, column, cell,
           "an action is STAGE, then F, B, I or W, then MICROBATCH, as in 2F0; communication is derived, not given");
}

}  // namespace detail

/// Reads a schedule in the text format of PyTorch's `torch.distributed.pipelining` (`_dump_csv` and `_load_csv`, format
/// "compute_only"). It has a row per rank. Cells have the form `0F0`, `1B2`, `0I0`, `0W0` (stage, kind, microbatch),
/// and are empty if the rank idles. A pair that PyTorch overlaps, `(0F3;7B1)OVERLAP_F_B`, is read as two actions in
/// sequence.
///
/// The numbers of chunks and microbatches and the placement of stages are derived from the actions. Throws `error`,
/// with row and cell, for a cell that is not an action. Throws it also for illegal sizes, and for a placement that is
/// neither straight nor a vee. The schedule is not verified; call `verify` for this.
inline schedule schedule_from_csv(std::string_view text, std::string_view name = "csv") {
  std::vector<detail::stage_action> actions;
  int row = 0, stages = 0, microbatches = 0;
  while (!text.empty()) {
    const std::size_t newline = text.find('\n');
    std::string_view line = text.substr(0, newline);
    text = newline == text.npos ? std::string_view{} : text.substr(newline + 1);
    if (text.empty() && detail::without_blanks(line).empty()) break;  // after the last line feed
    if (row == max_pipeline_ranks)
      fail({"schedule CSV: more than ", max_pipeline_ranks, " rows, one row for each rank"});
    for (std::size_t column = 0;; ++column) {
      const std::size_t comma = line.find(',');
      const std::string_view cell = detail::without_blanks(line.substr(0, comma));
      std::string_view parts = cell;
      if (const std::size_t close = cell.find(')'); !cell.empty() && cell.front() == '(' && close != cell.npos)
        parts = cell.substr(1, close - 1);
      while (!parts.empty()) {
        const std::size_t semicolon = parts.find(';');
        actions.push_back(detail::parse_cell(detail::without_blanks(parts.substr(0, semicolon)), row, column, cell));
        parts = semicolon == parts.npos ? std::string_view{} : parts.substr(semicolon + 1);
        stages = std::max(stages, actions.back().stage + 1);
        microbatches = std::max(microbatches, actions.back().microbatch + 1);
      }
      if (comma == line.npos) break;
      line.remove_prefix(comma + 1);
    }
    ++row;
  }
  if (actions.empty()) fail("schedule CSV: no action in the text; a row for each rank with cells as in 0F0,0B0");
  if (stages > row * max_chunks)
    fail({"schedule CSV: ", stages, " stages on ", row, " rows, one row for each rank, are more than ", max_chunks,
          " chunks on each"});
  if (stages % row != 0)
    fail({"schedule CSV: ", stages, " stages do not divide evenly among ", row, " rows, one row for each rank"});

  schedule s{name, {.ranks = row, .chunks = stages / row, .microbatches = microbatches}, {}};
  detail::require_legal("schedule CSV", s.shape);
  const auto fits = [&](const detail::stage_action& a) { return s.shape.rank_of(a.stage) == a.rank; };
  if (!std::all_of(actions.begin(), actions.end(), fits)) {
    s.shape.placement = stage_placement::vee;
    if (const auto wrong = std::find_if_not(actions.begin(), actions.end(), fits); wrong != actions.end())
      fail({"schedule CSV: stage ", wrong->stage, " stands in row ", wrong->rank + 1,
            ", where neither a straight placement (row ", wrong->stage % row + 1, ") nor a vee (row ",
            s.shape.rank_of(wrong->stage) + 1, ") has it"});
  }
  s.order.resize(static_cast<std::size_t>(row));
  for (const detail::stage_action& a : actions)
    s.order[static_cast<std::size_t>(a.rank)].push_back(
        {a.kind, static_cast<std::uint8_t>(s.shape.chunk_of(a.stage)), static_cast<std::uint16_t>(a.microbatch)});
  return s;
}

/// Writes the same format, without cells for idle time; PyTorch's `_load_csv` reads it.
inline std::string to_csv(const schedule& s) {
  std::string text;
  for (std::size_t r = 0; r < s.order.size(); ++r) {
    bool first = true;
    for (const action& a : s.order[r]) {
      if (!first) text += ',';
      first = false;
      text += std::to_string(s.shape.stage_of(static_cast<int>(r), a.chunk));
      text += letter(a.kind);
      text += std::to_string(a.microbatch);
    }
    text += '\n';
  }
  return text;
}

/// The texts that `parse_schedule` accepts.
inline constexpr std::string_view schedule_names =
    "gpipe, 1f1b, interleaved:V (V chunks per rank, as in interleaved:2), zb_h1, zb_h2, zb_v, v_half, v_min, "
    "dualpipe_v, automatic, automatic:2 (two chunks in a vee), or a FILE.csv";

namespace detail {

[[noreturn]] inline void bad_schedule(std::string_view text, const std::string& what) {
  fail({"schedule ", text, ": ", what});
}

[[noreturn]] inline void refuse_schedule(std::string_view text, const schedule_verdict& v, int ranks,
                                         int microbatches) {
  bad_schedule(text, cat({"with ", ranks, " pipeline ranks and ", microbatches,
                          microbatches == 1 ? " microbatch: " : " microbatches: ", describe(v)}));
}

template <schedule_policy Policy>
schedule made(std::string_view text, int ranks, int microbatches) {
  const pipeline_shape shape = shape_of<Policy>(ranks, microbatches);
  if (const schedule_verdict v = check_shape<Policy>(shape); !v.ok()) refuse_schedule(text, v, ranks, microbatches);
  return Policy::make(shape);
}

/// Makes the hand-made schedule with this name.
template <class... Policies>
schedule made_by_name(const type_list<Policies...>&, std::string_view text, int ranks, int microbatches) {
  schedule s;
  const bool known = ((Policies::name == text && (s = made<Policies>(text, ranks, microbatches), true)) || ...);
  if (!known) bad_schedule(text, "unknown schedule; legal are " + std::string(schedule_names));
  return s;
}

inline schedule read_schedule(std::string_view text, int ranks, int microbatches) {
  std::error_code ignored;
  const auto kind = std::filesystem::status(text, ignored).type();
  if (kind == std::filesystem::file_type::directory) bad_schedule(text, "it is a folder; name a file");
  // Opening a pipe would wait for a writer, and reading a device might never end.
  if (kind != std::filesystem::file_type::regular && kind != std::filesystem::file_type::not_found)
    bad_schedule(text, "it is not a regular file; pipes and devices are not read");
  constexpr std::uintmax_t most = std::uintmax_t{256} << 20;
  if (const auto size = std::filesystem::file_size(text, ignored); !ignored && size > most)
    bad_schedule(text, cat({"the file has ", size, " bytes; a schedule has at most ", most}));
  std::ifstream file{std::string(text), std::ios::binary};
  if (!file) bad_schedule(text, "the file cannot be read");
  schedule s;
  try {
    s = schedule_from_csv(std::string(std::istreambuf_iterator<char>(file), {}));
  } catch (const error& e) {
    bad_schedule(text, e.what());
  }
  if (s.shape.ranks != ranks)
    bad_schedule(text, cat({"the file has ", s.shape.ranks, " rows, one for each pipeline rank, and there are ", ranks,
                            " ranks"}));
  if (s.shape.microbatches != microbatches)
    bad_schedule(text, cat({"the file has ", s.shape.microbatches, " microbatches, and the step has ", microbatches}));
  return s;
}

}  // namespace detail

/// Returns the schedule that the text names, one of `schedule_names`. `costs` and `options` are arguments of
/// `automatic`. The result is verified.
///
/// Throws `error` for an unknown name (with the legal names), and for sizes that the schedule does not support (with
/// the nearest legal ones). Throws also if a file cannot be read, is not a schedule of this size, or does not verify.
inline schedule parse_schedule(std::string_view text, int ranks, int microbatches, const schedule_costs& costs = {},
                               const automatic_options& options = {}) {
  if (const schedule_verdict v = detail::check_shape({.ranks = ranks, .microbatches = microbatches}); !v.ok())
    detail::refuse_schedule(text, v, ranks, microbatches);
  const std::size_t colon = text.find(':');
  const std::string_view name = text.substr(0, colon);
  schedule s;
  if (text.ends_with(".csv")) {
    s = detail::read_schedule(text, ranks, microbatches);
  } else if (name == "interleaved" || (name == "automatic" && colon != text.npos)) {
    const std::string_view value = colon == text.npos ? std::string_view{} : text.substr(colon + 1);
    pipeline_shape shape{.ranks = ranks, .chunks = 0, .microbatches = microbatches};
    const auto [end, problem] = std::from_chars(value.data(), value.data() + value.size(), shape.chunks);
    const bool number = problem == std::errc{} && end == value.data() + value.size();
    if (name == "automatic") {
      if (!number || shape.chunks < 1 || shape.chunks > 2)
        detail::bad_schedule(text, "automatic has 1 or 2 chunks per rank, as in automatic:2");
      if (shape.chunks == 2) shape.placement = stage_placement::vee;
      s = automatic(shape, costs, options);
    } else {
      if (!number || shape.chunks < 2 || shape.chunks > max_chunks)
        detail::bad_schedule(
            text, cat({"interleaved needs the number of chunks per rank, 2 to ", max_chunks, ", as in interleaved:2"}));
      schedule_verdict v = detail::check_shape(shape);
      if (v.ok()) v = interleaved<2>::check(shape);
      if (!v.ok()) detail::refuse_schedule(text, v, ranks, microbatches);
      s = detail::make_interleaved(name, shape);
    }
  } else if (text == "automatic") {
    s = automatic({.ranks = ranks, .microbatches = microbatches}, costs, options);
  } else {
    s = detail::made_by_name(detail::hand_made_policies{}, text, ranks, microbatches);
  }
  if (const schedule_verdict v = verify(s); !v.ok()) detail::refuse_schedule(text, v, ranks, microbatches);
  return s;
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
