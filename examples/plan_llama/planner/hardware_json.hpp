// Descriptions of hardware from and to JSON files; it needs nlohmann/json. Every key is read or refused by name.
// Machines that need no file are in plan/hardware.hpp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

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
  top.number("memory", h.memory, needed);
  top.number("memory_bandwidth", h.memory_bandwidth, needed);
  top.number("reserved", h.reserved, false);
  top.number("fragmentation", h.fragmentation, false);
  top.number("host_bandwidth", h.host_bandwidth, false);
  top.number("host_memory", h.host_memory, false);
  top.number("product_depth", h.product_depth, false);
  top.number("product_area", h.product_area, false);
  top.number("adding_depth", h.adding_depth, false);
  top.number("attention_share", h.attention_share, needed);
  top.number("attention_block", h.attention_block, false);
  top.number("activation", h.activation, false);
  top.number("flash1", h.flash1, false);
  top.number("flash2", h.flash2, false);
  top.number("memory_share", h.memory_share, needed);
  top.number("launch", h.launch, needed);
  top.number("tensor_hidden", h.tensor_hidden, false);
  top.number("data_hidden", h.data_hidden, false);
  top.number("straggling", h.straggling, false);
  top.number("cores", h.cores, false);
  top.number("turn", h.turn, false);
  if (const nlohmann::json* levels = top.find("levels", needed)) {
    if (!levels->is_array()) fail({source, ": levels is of type ", levels->type_name(), "; legal is a list"});
    h.levels.clear();
    for (std::size_t i = 0; i < levels->size(); ++i) {
      network_level& level = h.levels.emplace_back();
      detail::members_reader members((*levels)[i], source, cat({"levels[", i, "]."}));
      members.text("name", level.name);
      members.number("ranks", level.ranks);
      members.number("bandwidth", level.bandwidth);
      members.number("all_reduce_share", level.all_reduce_share, false);
      members.number("latency", level.latency);
      members.number("launch", level.launch, false);
      members.number("fill", level.fill, false);
      members.number("shared_by", level.shared_by, false);
      members.number("message_latency", level.message_latency, false);
      members.number("message_bandwidth", level.message_bandwidth, false);
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
  std::vector<json_object> levels;
  for (const network_level& l : h.levels) {
    json_object& level = levels.emplace_back();
    level.add("name", l.name)
        .add("ranks", l.ranks)
        .add("bandwidth", l.bandwidth)
        .add("all_reduce_share", l.all_reduce_share)
        .add("latency", l.latency)
        .add("launch", l.launch)
        .add("fill", l.fill);
    if (l.shared_by > 1) level.add("shared_by", l.shared_by);
    if (l.message_latency > 0) level.add("message_latency", l.message_latency);
    if (l.message_bandwidth > 0) level.add("message_bandwidth", l.message_bandwidth);
  }
  json_object out;
  out.add("name", h.name)
      .add("peak", by_kind(h.peak))
      .add("memory", h.memory)
      .add("memory_bandwidth", h.memory_bandwidth)
      .add("reserved", h.reserved)
      .add("fragmentation", h.fragmentation)
      .add("host_bandwidth", h.host_bandwidth)
      .add("host_memory", h.host_memory)
      .add("product_share", by_kind(h.product_share))
      .add("product_depth", h.product_depth)
      .add("product_area", h.product_area)
      .add("adding_depth", h.adding_depth)
      .add("attention_share", h.attention_share)
      .add("attention_block", h.attention_block)
      .add("activation", h.activation)
      .add("flash1", h.flash1)
      .add("flash2", h.flash2)
      .add("memory_share", h.memory_share)
      .add("launch", h.launch)
      .add("tensor_hidden", h.tensor_hidden)
      .add("data_hidden", h.data_hidden)
      .add("straggling", h.straggling);
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
