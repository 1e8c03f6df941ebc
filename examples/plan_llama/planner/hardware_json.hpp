// Reads and writes descriptions of hardware as JSON, by nlohmann/json. Unknown keys are errors.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/io/json.hpp"
#include "plait/io/json_tree.hpp"
#include "plait/io/mapped_file.hpp"
#include "plait/plan/hardware.hpp"
#include "plan_llama/planner/parse_layout.hpp"

namespace plait::planner {

namespace detail {

/// Reads the members of one JSON object, each at most once. `finish` throws for members that were not read.
class members_reader {
 public:
  members_reader(const nlohmann::json& object, std::string source, std::string path)
      : object_(object), source_(std::move(source)), path_(std::move(path)) {
    if (!object.is_object())
      fail({source_, ": ", path_.empty() ? "the file" : path_.substr(0, path_.size() - 1), " is of type ",
            object.type_name(), "; legal is an object"});
  }

  void number(const char* key, double& value, bool needed = true) {
    if (const nlohmann::json* found = find(key, needed)) {
      if (!found->is_number()) fail({source_, ": ", path_, key, " is ", found->dump(), "; legal is a number"});
      value = found->get<double>();
    }
  }
  void number(const char* key, std::int64_t& value, bool needed = true) {
    if (const nlohmann::json* found = find(key, needed)) {
      if (!found->is_number_integer() && !found->is_number_unsigned())
        fail({source_, ": ", path_, key, " is ", found->dump(), "; legal is an integer"});
      if (found->is_number_unsigned() &&
          found->get<std::uint64_t>() > std::uint64_t{std::numeric_limits<std::int64_t>::max()})
        fail({source_, ": ", path_, key, " is ", found->dump(), ", which is too large"});
      value = found->get<std::int64_t>();
    }
  }
  void text(const char* key, std::string& value) {
    if (const nlohmann::json* found = find(key, true)) {
      if (!found->is_string()) fail({source_, ": ", path_, key, " is ", found->dump(), "; legal is a string"});
      value = found->get<std::string>();
    }
  }
  const nlohmann::json* find(const char* key, bool needed) {
    if (std::find(read_.begin(), read_.end(), key) == read_.end()) {
      known_ += (known_.empty() ? "" : ", ") + std::string(key);
      read_.emplace_back(key);
    }
    const auto at = object_.find(key);
    if (at != object_.end()) return &*at;
    if (needed) fail({source_, ": ", path_, key, " is missing"});
    return nullptr;
  }
  /// Throws for a member that no call has read.
  void finish() const {
    for (const auto& [key, value] : object_.items())
      if (std::find(read_.begin(), read_.end(), key) == read_.end())
        fail({source_, ": unknown key '", path_, key, "'; legal are ", known_});
  }

 private:
  const nlohmann::json& object_;
  std::string source_, path_, known_{};
  std::vector<std::string> read_{};
};

/// Whether a description must have a number. A rare number is written only if it is not the default.
enum class number_key : std::uint8_t { needed, usual, rare };

/// The legal values of a number: above 0; 0 or more; bytes per second; the same, or 0 for none; above 0 and at most 1;
/// 0 or more and below 1.
enum class number_rule : std::uint8_t { positive, natural, speed, speed_or_none, share, part };

/// Throws `error`, which begins with `source` and names the key, unless the value is legal.
inline void check_number(const std::string& source, const std::string& key, double value, number_rule rule) {
  const auto require = [&](bool legal, const char* text) {
    if (!(legal && std::isfinite(value))) fail({source, ": ", key, " is ", value, text});
  };
  switch (rule) {
    case number_rule::positive:
      return require(value > 0, "; legal is a positive number");
    case number_rule::natural:
      return require(value >= 0, "; legal is 0 or more");
    case number_rule::speed_or_none:
      if (value == 0) return;
      [[fallthrough]];
    case number_rule::speed:
      return require(value >= 1e6, " bytes per second; legal is 1e6 or more, and 50 GB/s is 50e9");
    case number_rule::share:
      return require(value > 0 && value <= 1, "; legal is a share above 0, at most 1");
    case number_rule::part:
      return require(value >= 0 && value < 1, "; legal is 0 or more and below 1");
  }
}

/// Calls f(key, kind, rule, member) for each number of a machine.
template <class F>
void each_machine_number(F&& f) {
  using enum number_key;
  using enum number_rule;
  f("memory", needed, positive, &hardware::memory);
  f("memory_bandwidth", needed, speed, &hardware::memory_bandwidth);
  f("reserved", usual, natural, &hardware::reserved);
  f("fragmentation", usual, part, &hardware::fragmentation);
  f("host_bandwidth", usual, speed_or_none, &hardware::host_bandwidth);
  f("host_memory", usual, natural, &hardware::host_memory);
  f("product_depth", usual, natural, &hardware::product_depth);
  f("product_area", usual, natural, &hardware::product_area);
  f("adding_depth", usual, natural, &hardware::adding_depth);
  f("attention_share", needed, share, &hardware::attention_share);
  f("attention_block", usual, natural, &hardware::attention_block);
  f("activation", usual, natural, &hardware::activation);
  f("flash1", usual, share, &hardware::flash1);
  f("flash2", usual, share, &hardware::flash2);
  f("memory_share", needed, share, &hardware::memory_share);
  f("launch", needed, natural, &hardware::launch);
  f("tensor_hidden", usual, part, &hardware::tensor_hidden);
  f("data_hidden", usual, part, &hardware::data_hidden);
  f("straggling", usual, natural, &hardware::straggling);
}

/// Calls f(key, kind, rule, member) for each number of a level of its network. `ranks` and `shared_by` have additional
/// rules.
template <class F>
void each_level_number(F&& f) {
  using enum number_key;
  using enum number_rule;
  f("ranks", needed, natural, &network_level::ranks);
  f("bandwidth", needed, speed, &network_level::bandwidth);
  f("all_reduce_share", usual, positive, &network_level::all_reduce_share);
  f("latency", needed, natural, &network_level::latency);
  f("launch", usual, natural, &network_level::launch);
  f("fill", usual, natural, &network_level::fill);
  f("shared_by", rare, natural, &network_level::shared_by);
  f("message_latency", rare, natural, &network_level::message_latency);
  f("message_bandwidth", rare, speed_or_none, &network_level::message_bandwidth);
}

inline void check_levels(const std::vector<network_level>& levels, const std::string& source) {
  if (levels.empty()) fail({source, ": levels is empty; legal is one level or more, from the inside to the outside"});
  if (levels.size() > max_levels)
    fail({source, ": levels has ", levels.size(), " entries; legal are 1 to ", max_levels});
  for (std::size_t i = 0; i < levels.size(); ++i) {
    const network_level& l = levels[i];
    const std::string key = cat({"levels[", i, "]."});
    const bool last = i + 1 == levels.size();
    if (last ? l.ranks != 0 : l.ranks < 1)
      fail({source, ": ", key, "ranks is ", l.ranks, "; legal is ",
            last ? "0 for the outermost level, which joins all" : "1 or more, 0 being for the outermost level"});
    if (!last && i > 0 && (l.ranks <= levels[i - 1].ranks || l.ranks % levels[i - 1].ranks != 0))
      fail({source, ": ", key, "ranks is ", l.ranks, "; legal is a multiple of the level inside it, ",
            levels[i - 1].ranks});
    if (l.shared_by < 1) fail({source, ": ", key, "shared_by is ", l.shared_by, "; legal is 1 or more"});
    each_level_number([&](const char* name, number_key, number_rule rule, auto member) {
      check_number(source, key + name, static_cast<double>(l.*member), rule);
    });
  }
}

}  // namespace detail

/// Throws `error`, which begins with `source` and names the key, unless `h` is a valid description.
inline void validate(const hardware& h, const std::string& source) {
  if (h.name.empty()) fail({source, ": name is empty; legal is any name"});
  for (std::size_t i = 0; i < h.peak.size(); ++i) {
    const std::string kind = name_of(static_cast<number_kind>(i));
    detail::check_number(source, "peak." + kind, h.peak[i], detail::number_rule::natural);
    if (h.peak[i] > 0)
      detail::check_number(source, "product_share." + kind, h.product_share[i], detail::number_rule::share);
  }
  if (*std::max_element(h.peak.begin(), h.peak.end()) == 0)
    fail({source, ": peak names no number type; legal are f32, bf16 and fp8"});
  detail::each_machine_number([&](const char* key, detail::number_key, detail::number_rule rule, auto member) {
    detail::check_number(source, key, h.*member, rule);
  });
  if (h.reserved >= h.memory)
    fail({source, ": reserved is ", h.reserved, " and memory ", h.memory, "; nothing is left to allocate"});
  if (h.cores < 0) fail({source, ": cores is ", h.cores, "; legal is 1 or more, or 0 where each rank has its own"});
  detail::check_number(source, "turn", h.turn, detail::number_rule::natural);
  detail::check_levels(h.levels, source);
}

/// Returns the hardware that a text describes. With "like": "h100" it begins as a known machine, and other keys replace
/// that machine's values. Otherwise all keys are needed, except shares with a natural default. Bandwidths are in bytes
/// per second, times in seconds. Throws `error`, which begins with `source` and names the key.
inline hardware parse_hardware(std::string_view text, const std::string& source) {
  const nlohmann::json tree = parse_json(text, source);
  detail::members_reader top(tree, source, "");
  hardware h;
  bool needed = true;
  if (top.find("like", false) != nullptr) {
    std::string like;
    top.text("like", like);
    h = hardware_called(like, source + ": like");
    needed = false;
  }
  top.text("name", h.name);
  const auto by_kind = [&](const char* key, std::array<double, number_kinds>& values) {
    if (const nlohmann::json* found = top.find(key, needed)) {
      detail::members_reader members(*found, source, std::string(key) + ".");
      for (std::size_t i = 0; i < values.size(); ++i)
        members.number(name_of(static_cast<number_kind>(i)), values[i], false);
      members.finish();
    }
  };
  by_kind("peak", h.peak);
  by_kind("product_share", h.product_share);
  detail::each_machine_number([&](const char* key, detail::number_key kind, detail::number_rule, auto member) {
    top.number(key, h.*member, needed && kind == detail::number_key::needed);
  });
  top.number("cores", h.cores, false);
  top.number("turn", h.turn, false);
  if (const nlohmann::json* levels = top.find("levels", needed)) {
    if (!levels->is_array()) fail({source, ": levels is of type ", levels->type_name(), "; legal is a list"});
    h.levels.clear();
    for (std::size_t i = 0; i < levels->size(); ++i) {
      network_level& level = h.levels.emplace_back();
      detail::members_reader members((*levels)[i], source, cat({"levels[", i, "]."}));
      members.text("name", level.name);
      detail::each_level_number([&](const char* key, detail::number_key kind, detail::number_rule, auto member) {
        members.number(key, level.*member, kind == detail::number_key::needed);
      });
      members.finish();
    }
  }
  top.finish();
  validate(h, source);
  return h;
}

/// Returns a description as text, which `parse_hardware` reads back unchanged.
inline std::string hardware_text(const hardware& h) {
  const auto by_kind = [](const std::array<double, number_kinds>& values) {
    json_object out;
    for (std::size_t i = 0; i < values.size(); ++i) out.add(name_of(static_cast<number_kind>(i)), values[i]);
    return out;
  };
  const auto add_to = [](json_object& out, const auto& from) {
    return [&](const char* key, detail::number_key kind, detail::number_rule, auto member) {
      const std::remove_cvref_t<decltype(from)> usual{};
      if (kind != detail::number_key::rare || from.*member != usual.*member) out.add(key, from.*member);
    };
  };
  std::vector<json_object> levels;
  for (const network_level& l : h.levels)
    detail::each_level_number(add_to(levels.emplace_back().add("name", l.name), l));
  json_object out;
  out.add("name", h.name).add("peak", by_kind(h.peak)).add("product_share", by_kind(h.product_share));
  detail::each_machine_number(add_to(out, h));
  if (h.cores > 0) out.add("cores", h.cores).add("turn", h.turn);
  return out.add("levels", levels).lines();
}

/// Returns the machine that a flag names: a known one, or one from a description if the text is a path, which has a '/'
/// or ends in ".json".
inline hardware load_hardware(const std::string& name_or_path, const std::string& flag) {
  if (name_or_path.find('/') != std::string::npos || name_or_path.ends_with(".json"))
    return parse_hardware(read_file(name_or_path, flag), cat({flag, ": '", name_or_path, "'"}));
  return hardware_called(name_or_path, flag);
}

/// A machine and the number of its accelerators; 0: not given.
struct cluster {
  hardware machine;
  std::int64_t accelerators = 0;
};

/// Reads "h100:16384", "my.json:64", or, without a number, "h100". Throws `error` naming `flag`.
inline cluster load_cluster(const std::string& text, const std::string& flag) {
  const std::size_t colon = text.rfind(':');
  if (colon == text.npos || text.ends_with(".json")) return {load_hardware(text, flag), 0};
  return {load_hardware(text.substr(0, colon), flag), parse_count(text.substr(colon + 1), flag)};
}

}  // namespace plait::planner
