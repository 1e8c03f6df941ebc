// Descriptions of hardware from and to JSON files; it needs nlohmann/json. Every key is read or refused by name.
// Machines that need no file are in plan/hardware.hpp.
#pragma once

#include <algorithm>
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

/// Reads the members of one JSON object, each at most once, and complains about those that nobody read.
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
  /// Throws for a member that no call asked for.
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

/// Whether a description must have a number. Rare ones are written only where they are not the default.
enum class number_key : std::uint8_t { needed, usual, rare };

/// Calls f(key, kind, member) for each number of a machine.
template <class F>
void each_machine_number(F&& f) {
  using enum number_key;
  f("memory", needed, &hardware::memory);
  f("memory_bandwidth", needed, &hardware::memory_bandwidth);
  f("reserved", usual, &hardware::reserved);
  f("fragmentation", usual, &hardware::fragmentation);
  f("host_bandwidth", usual, &hardware::host_bandwidth);
  f("host_memory", usual, &hardware::host_memory);
  f("product_depth", usual, &hardware::product_depth);
  f("product_area", usual, &hardware::product_area);
  f("adding_depth", usual, &hardware::adding_depth);
  f("attention_share", needed, &hardware::attention_share);
  f("attention_block", usual, &hardware::attention_block);
  f("activation", usual, &hardware::activation);
  f("flash1", usual, &hardware::flash1);
  f("flash2", usual, &hardware::flash2);
  f("memory_share", needed, &hardware::memory_share);
  f("launch", needed, &hardware::launch);
  f("tensor_hidden", usual, &hardware::tensor_hidden);
  f("data_hidden", usual, &hardware::data_hidden);
  f("straggling", usual, &hardware::straggling);
}

/// Calls f(key, kind, member) for each number of a level of its network.
template <class F>
void each_level_number(F&& f) {
  using enum number_key;
  f("ranks", needed, &network_level::ranks);
  f("bandwidth", needed, &network_level::bandwidth);
  f("all_reduce_share", usual, &network_level::all_reduce_share);
  f("latency", needed, &network_level::latency);
  f("launch", usual, &network_level::launch);
  f("fill", usual, &network_level::fill);
  f("shared_by", rare, &network_level::shared_by);
  f("message_latency", rare, &network_level::message_latency);
  f("message_bandwidth", rare, &network_level::message_bandwidth);
}

}  // namespace detail

/// The hardware that the text of a description names. With "like": "h100" it begins as a known machine, and other keys
/// replace that machine's; else all keys but shares with a natural default are needed. Bandwidths are in bytes per
/// second, times in seconds. Throws `error`, its text starting with `source` and naming the key.
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
  detail::each_machine_number([&](const char* key, detail::number_key kind, auto member) {
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
      detail::each_level_number([&](const char* key, detail::number_key kind, auto member) {
        members.number(key, level.*member, kind == detail::number_key::needed);
      });
      members.finish();
    }
  }
  top.finish();
  validate(h, source);
  return h;
}

/// A description as text, which `parse_hardware` reads back unchanged.
inline std::string hardware_text(const hardware& h) {
  const auto by_kind = [](const std::array<double, number_kinds>& values) {
    json_object out;
    for (std::size_t i = 0; i < values.size(); ++i) out.add(name_of(static_cast<number_kind>(i)), values[i]);
    return out;
  };
  const auto add_to = [](json_object& out, const auto& from) {
    return [&](const char* key, detail::number_key kind, auto member) {
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

/// Returns the machine that a flag names: a known one, or that of the description at a path (which has a '/' or ends in
/// ".json").
inline hardware load_hardware(const std::string& name_or_path, const std::string& flag) {
  if (name_or_path.find('/') != std::string::npos || name_or_path.ends_with(".json"))
    return parse_hardware(read_file(name_or_path, flag), cat({flag, ": '", name_or_path, "'"}));
  return hardware_called(name_or_path, flag);
}

/// A machine and how many accelerators of it there are; 0: the text does not say.
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
