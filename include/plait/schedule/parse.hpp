// Makes the schedule that a text names, or reads it from a CSV file, and verifies it. A user's own
// policy has no name here: schedule/policy.hpp makes its schedule. Tested in tests/unit/schedule/text.cpp.
#pragma once

#include <charconv>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <system_error>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/schedule/csv.hpp"
#include "plait/schedule/search/automatic.hpp"
#include "plait/schedule/verified.hpp"

namespace plait {

/// The texts that `parse_schedule` knows.
inline constexpr std::string_view schedule_names =
    "gpipe, 1f1b, interleaved:V (V chunks per rank, as in interleaved:2), zb_h1, zb_h2, zb_v, v_half, v_min, "
    "dualpipe_v, "
    "automatic, automatic:2 (two chunks in a vee), or a FILE.csv";

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

inline schedule read_schedule(std::string_view text, int ranks, int microbatches) {
  std::error_code ignored;
  const auto kind = std::filesystem::status(text, ignored).type();
  if (kind == std::filesystem::file_type::directory) bad_schedule(text, "it is a folder; name a file");
  // Opened, a pipe would wait for a writer, and a device might never end.
  if (kind != std::filesystem::file_type::regular && kind != std::filesystem::file_type::not_found)
    bad_schedule(text, "it is no regular file; pipes and devices are not read");
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

/// The schedule that the text names: one of `schedule_names`. `costs` and `options` are those
/// of `automatic`. The result is verified.
///
/// Throws `error` for an unknown name (with the legal ones), for sizes that the schedule cannot serve (with the nearest
/// legal ones), and for a file that cannot be read, is no schedule of this size, or does not verify.
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
  } else if (text == "gpipe") {
    s = detail::made<gpipe>(text, ranks, microbatches);
  } else if (text == "1f1b") {
    s = detail::made<one_f_one_b>(text, ranks, microbatches);
  } else if (text == "zb_h1") {
    s = detail::made<zb_h1>(text, ranks, microbatches);
  } else if (text == "zb_h2") {
    s = detail::made<zb_h2>(text, ranks, microbatches);
  } else if (text == "zb_v") {
    s = detail::made<zb_v>(text, ranks, microbatches);
  } else if (text == "v_half") {
    s = detail::made<v_half>(text, ranks, microbatches);
  } else if (text == "v_min") {
    s = detail::made<v_min>(text, ranks, microbatches);
  } else if (text == "dualpipe_v") {
    s = detail::made<dualpipe_v>(text, ranks, microbatches);
  } else if (text == "automatic") {
    s = automatic({.ranks = ranks, .microbatches = microbatches}, costs, options);
  } else {
    detail::bad_schedule(text, "unknown schedule; legal are " + std::string(schedule_names));
  }
  if (const schedule_verdict v = verify(s); !v.ok()) detail::refuse_schedule(text, v, ranks, microbatches);
  return s;
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
