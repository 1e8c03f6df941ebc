#include "recompute.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <string_view>
#include <vector>

#include "plan.hpp"

namespace {

[[noreturn]] void refuse(const std::string& text) {
  plait::fail(
      fmt::format("--recompute '{}' is unknown; legal are none, selective, full, every:K (each K-th layer in full) and "
                  "budget:SIZE (bytes that a rank's layers may keep, as in budget:512M)",
                  text));
}

/// A whole number, 1 or more, and what follows it.
std::int64_t number(const std::string& text, std::string_view& rest) {
  std::int64_t value = 0;
  const auto [end, problem] = std::from_chars(rest.data(), rest.data() + rest.size(), value);
  if (problem != std::errc{} || value < 1) refuse(text);
  rest.remove_prefix(static_cast<std::size_t>(end - rest.data()));
  return value;
}

}  // namespace

recompute_request parse_recompute(const std::string& text) {
  using plait::recompute;
  for (const recompute mode : {recompute::none, recompute::selective, recompute::full})
    if (text == plait::name_of(mode)) return {mode, {}, {}};
  std::string_view rest = text;
  if (rest.starts_with("every:")) {
    rest.remove_prefix(6);
    const std::int64_t k = number(text, rest);
    if (!rest.empty()) refuse(text);
    return {plait::layer_recompute::every(k), k, {}};
  }
  if (!rest.starts_with("budget:")) refuse(text);
  rest.remove_prefix(7);
  std::int64_t bytes = number(text, rest);
  constexpr std::string_view units = "KMGT";
  if (const std::size_t unit = rest.size() == 1 ? units.find(rest[0]) : units.npos; unit != units.npos) {
    const std::int64_t factor = std::int64_t{1} << (10 * (unit + 1));
    if (bytes > std::numeric_limits<std::int64_t>::max() / 4096 / factor) refuse(text);
    bytes *= factor;
  } else if (!rest.empty() || bytes > std::numeric_limits<std::int64_t>::max() / 4096) {
    refuse(text);
  }
  return {{}, {}, bytes};
}

plait::layer_recompute recompute_of(const setup& s) {
  const recompute_request wanted = parse_recompute(s.opt.recompute);
  if (wanted.every && *wanted.every > s.config.layers)
    plait::fail(fmt::format("--recompute {} recomputes no layer of a model of {}; legal is every:1 to every:{}",
                            s.opt.recompute, s.config.layers, s.config.layers));
  if (!wanted.budget) return wanted.modes;
  if (s.opt.split == "measured" && s.stages.size() > 1)
    plait::fail("--recompute " + s.opt.recompute +
                " chooses layers before stages are measured; with it, --split flops and even are legal");
  std::vector<plait::recompute> layers(static_cast<std::size_t>(s.config.layers), plait::recompute::none);
  plait::recompute head = plait::recompute::none;
  std::int64_t least = 0;
  for (int at = 0; at < s.schedule.shape.ranks; ++at) {
    const plait::recompute_fit fit = fit_of_rank(s, at, *wanted.budget);
    least = std::max(least, fit.least);
    for (std::size_t chunk = 0; chunk < fit.stages.size(); ++chunk) {
      const plait::stage_layers& part =
          s.stages[static_cast<std::size_t>(s.schedule.shape.stage_of(at, static_cast<int>(chunk)))];
      for (std::int64_t i = part.begin; i < part.end; ++i)
        layers[static_cast<std::size_t>(i)] = fit.stages[chunk].of_layer(i);
      if (part.last) head = fit.stages[chunk].of_head();
    }
  }
  if (least > 0)
    plait::fail(
        fmt::format("--recompute {} is {} bytes, and with every layer recomputed a rank still keeps {}; the least that "
                    "is legal here is budget:{}",
                    s.opt.recompute, *wanted.budget, least, least));
  return plait::layer_recompute(std::move(layers), head);
}
