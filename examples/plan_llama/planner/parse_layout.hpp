// Reads a layout from text such as "tp=8,cp=2,pp=8,dp=8,schedule=interleaved:8,zero=1", and writes it. Whether it is
// legal for a model is checked in training_layout.hpp.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "number_text.hpp"
#include "plait/core/error.hpp"
#include "plan_llama/planner/training_layout.hpp"

namespace plait::planner {

/// The keys of a layout's text, for messages.
inline constexpr std::string_view layout_keys =
    "tp, cp, pp, dp, ep, microbatch, schedule, recompute, zero, replicate, sequence_parallel, context, offload, "
    "loss_chunks and order";

/// Reads a whole number of at least `least`. With `suffixes` it may end in K, M or G (1024, its square and cube, for
/// batches of tokens: 16M is 16 x 1024 x 1024). Throws `error` with `flag`.
inline std::int64_t parse_count(std::string_view text, const std::string& flag, std::int64_t least = 1,
                                bool suffixes = false) {
  std::int64_t unit = 1;
  std::string_view digits = text;
  if (suffixes && !digits.empty()) {
    const char last = digits.back();
    unit = last == 'K' || last == 'k' ? 1 << 10 : last == 'M' || last == 'm' ? 1 << 20 : last == 'G' ? 1 << 30 : 1;
    if (unit != 1) digits.remove_suffix(1);
  }
  const auto value = number_of<std::int64_t>(digits);
  if (!value || *value < least || *value > (std::int64_t{1} << 40) / unit)
    fail({flag, ": '", text, "' is not a whole number from ", least, " on", suffixes ? ", such as 4096 or 16M" : ""});
  return *value * unit;
}

/// Returns the value called `name` of an enumeration whose first `values` values are legal; nothing if none has it.
template <class E>
std::optional<E> value_called(std::string_view name, int values) {
  for (int i = 0; i < values; ++i)
    if (name == name_of(static_cast<E>(i))) return static_cast<E>(i);
  return {};
}

/// Sets one key of a layout. Throws `error` with `flag`, the key and the legal values.
inline void set_layout_key(training_layout& l, std::string_view key, std::string_view value, const std::string& flag) {
  // An option or a column may have the key's name.
  const bool named = flag.ends_with(cat({"-", key})) || flag.ends_with(cat({" ", key}));
  const std::string where = named ? flag : cat({flag, ": ", key});
  const auto one_of = [&](std::string_view legal) {
    fail({where, ": unknown value '", value, "'; legal are ", legal});
  };
  constexpr std::pair<std::string_view, std::int64_t training_layout::*> counts[] = {
      {"tp", &training_layout::tp},
      {"cp", &training_layout::cp},
      {"pp", &training_layout::pp},
      {"dp", &training_layout::dp},
      {"ep", &training_layout::ep},
      {"microbatch", &training_layout::microbatch},
      {"loss_chunks", &training_layout::loss_chunks}};
  for (const auto& [name, member] : counts)
    if (key == name) {
      l.*member = parse_count(value, where);
      return;
    }
  if (key == "schedule") {
    const std::string_view name = value.substr(0, value.find(':'));
    const std::string_view chunks = name.size() < value.size() ? value.substr(name.size() + 1) : std::string_view{};
    const auto kind = value_called<schedule_kind>(name, schedule_kinds);
    if (!kind) one_of("gpipe, 1f1b, interleaved:V, zb_h1, zb_h2, zb_v and automatic");
    l.schedule = *kind;
    l.chunks = l.schedule == schedule_kind::zb_v ? 2 : 1;
    if (l.schedule == schedule_kind::interleaved)
      l.chunks = parse_count(chunks, where + ": the chunks of interleaved, as in interleaved:2", 2);
    else if (!chunks.empty())
      fail({where, ": '", value, "': only interleaved has a number of chunks to choose"});
  } else if (key == "recompute") {
    const std::string_view mode = value.starts_with("every:") ? "full" : value;
    const auto policy = value_called<plait::recompute>(mode, recompute_modes);
    if (!policy) one_of("none, selective, full and every:K");
    l.recompute = *policy;
    if (mode != value) l.recompute_every = parse_count(value.substr(6), where);
  } else if (key == "zero") {
    if (value.size() != 1 || value[0] < '0' || value[0] > '3') one_of("0, 1, 2 and 3");
    l.zero = static_cast<zero_level>(value[0] - '0');
  } else if (key == "replicate") {
    l.dp_copies = 1;
    if (value == "none")
      l.replicate = replication::none;
    else if (value == "dp")
      l.replicate = replication::over_dp;
    else if (value == "cp")
      l.replicate = replication::over_cp;
    else if (value.starts_with("dp:"))
      l.replicate = replication::over_part_of_dp,
      l.dp_copies = parse_count(value.substr(3), where + ": the copies along dp, as in dp:4", 2);
    else
      one_of("none, dp, cp and dp:R");
  } else if (key == "sequence_parallel") {
    if (value != "0" && value != "1") one_of("0 and 1");
    l.sequence_parallel = value == "1";
  } else if (key == "context") {
    const auto kind = value_called<context_kind>(value, context_kinds);
    if (!kind) one_of("ring, all_gather_kv and ulysses");
    l.context = *kind;
  } else if (key == "offload") {
    if (value != "none" && value != "optimizer" && value != "activations" && value != "both")
      one_of("none, optimizer, activations and both");
    l.offload_optimizer = value == "optimizer" || value == "both";
    l.offload_activations = value == "activations" || value == "both";
  } else if (key == "order") {
    if (value != "tp-cp-dp-pp" && value != "tp-cp-pp-dp") one_of("tp-cp-dp-pp and tp-cp-pp-dp");
    l.pipeline_inside = value == "tp-cp-pp-dp";
  } else {
    fail({flag, ": unknown key '", key, "'; legal are ", layout_keys});
  }
}

/// Reads a layout from key=value pairs in any order, each key at most once. Other keys have their defaults. Throws
/// `error` with `flag`.
inline training_layout parse_layout(std::string_view text, const std::string& flag) {
  training_layout l;
  std::set<std::string_view> seen;
  while (!text.empty()) {
    std::string_view pair = text.substr(0, text.find(','));
    text.remove_prefix(std::min(text.size(), pair.size() + 1));
    while (pair.starts_with(' ')) pair.remove_prefix(1);
    while (pair.ends_with(' ')) pair.remove_suffix(1);
    const std::size_t equal = pair.find('=');
    if (pair.find(' ') != pair.npos)
      fail({flag, ": '", pair, "' has a space in it; keys are separated by commas, as in tp=8,pp=2"});
    if (equal == pair.npos || equal == 0)
      fail({flag, ": '", pair, "' is not key=value, as in tp=8; keys are ", layout_keys});
    if (!seen.insert(pair.substr(0, equal)).second) fail({flag, ": ", pair.substr(0, equal), " is given twice"});
    set_layout_key(l, pair.substr(0, equal), pair.substr(equal + 1), flag);
  }
  return l;
}

/// Returns "interleaved:8", for instance.
inline std::string schedule_text(const training_layout& l) {
  return l.schedule == schedule_kind::interleaved ? cat({name_of(l.schedule), ":", l.chunks}) : name_of(l.schedule);
}

/// Returns "none", "selective", "full" or "every:2".
inline std::string recompute_text(const training_layout& l) {
  return l.recompute_every > 1 ? cat({"every:", l.recompute_every}) : plait::name_of(l.recompute);
}

/// Returns "none", "dp", "cp" or "dp:4".
inline std::string replicate_text(const training_layout& l) {
  switch (l.replicate) {
    case replication::over_dp:
      return "dp";
    case replication::over_cp:
      return "cp";
    case replication::over_part_of_dp:
      return cat({"dp:", l.dp_copies});
    default:
      return "none";
  }
}

/// Returns "none", "optimizer", "activations" or "both".
inline const char* offload_text(const training_layout& l) {
  if (l.offload_activations) return l.offload_optimizer ? "both" : "activations";
  return l.offload_optimizer ? "optimizer" : "none";
}

/// Returns a layout as text for `parse_layout`, extents first and without default values.
inline std::string layout_text(const training_layout& l) {
  std::string out = cat({"tp=", l.tp, ",cp=", l.cp, ",pp=", l.pp, ",dp=", l.dp, ",microbatch=", l.microbatch});
  if (l.ep > 1) out += cat({",ep=", l.ep});
  if (l.pp > 1) out += ",schedule=" + schedule_text(l);
  out += cat({",recompute=", recompute_text(l), ",zero=", static_cast<int>(l.zero)});
  if (l.replicate != replication::none) out += ",replicate=" + replicate_text(l);
  if (!l.sequence_parallel) out += ",sequence_parallel=0";
  if (l.context != context_kind::ring) out += cat({",context=", name_of(l.context)});
  if (l.offload_activations || l.offload_optimizer) out += cat({",offload=", offload_text(l)});
  if (l.loss_chunks > 1) out += cat({",loss_chunks=", l.loss_chunks});
  if (l.pipeline_inside) out += ",order=tp-cp-pp-dp";
  return out;
}

}  // namespace plait::planner
