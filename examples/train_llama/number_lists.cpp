#include "number_lists.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "plait/core/error.hpp"
#include "plait/layout/parse.hpp"

namespace {

/// Calls f(), whose errors begin with the name of the option without its hyphens.
template <class F>
auto by_option(F&& f) {
  try {
    return f();
  } catch (const plait::error& e) {
    plait::fail({"--", e.what()});
  }
}

}  // namespace

plait::mesh_shape parse_mesh(const options& opt, std::int64_t ranks) {
  return by_option([&] { return plait::parse_mesh<user_mesh>(opt.mesh, ranks); });
}

plait::schedule parse_schedule(const options& opt, int ranks, int microbatches, const plait::schedule_costs& costs) {
  return by_option([&] { return plait::parse_schedule(opt.schedule, ranks, microbatches, costs); });
}

std::vector<double> parse_weights(const std::string& text, std::size_t sources) {
  std::vector<double> weights;
  for (std::size_t at = 0; !text.empty() && at <= text.size();) {
    const std::size_t end = std::min(text.find(',', at), text.size());
    const std::string word = text.substr(at, end - at);
    char* rest = nullptr;
    weights.push_back(std::strtod(word.c_str(), &rest));
    if (word.empty() || *rest != '\0')
      plait::fail(fmt::format("--data-weights {}: '{}' is no number; legal is as in 0.7,0.3", text, word));
    at = end + 1;
  }
  if (!weights.empty() && weights.size() != sources)
    plait::fail(fmt::format("--data-weights {}: {} weights for {} --data; give one for each, as in 0.7,0.3", text,
                            weights.size(), sources));
  return weights;
}

plait::deterministic_leaves parse_deterministic(const std::string& text) {
  if (text == "off") return {};
  std::vector<std::int64_t> leaves;
  for (std::size_t at = 0; at <= text.size();) {
    const std::size_t end = std::min(text.find(',', at), text.size());
    const std::string word = text.substr(at, end - at);
    char* rest = nullptr;
    const long long n = std::strtoll(word.c_str(), &rest, 10);
    if (word.empty() || *rest != '\0' || n < 1 || n > 4096 || leaves.size() == 3)
      plait::fail(fmt::format(
          "--deterministic {}: legal are off, and one to three numbers of leaves from 1 to 4096, as in 8,16,4", text));
    leaves.push_back(n);
    at = end + 1;
  }
  return {leaves[0], leaves.size() > 1 ? leaves[1] : leaves[0], leaves.size() > 2 ? leaves[2] : 1};
}

plait::value_check parse_check(const std::string& text) {
  const auto refuse = [&] {
    plait::fail(
        fmt::format("--check {}: legal are first, off, always and every:N, N at least 1, each with a tolerance at "
                    "least 0 and below "
                    "1 behind it, as in every:100:1e-5",
                    text));
  };
  const auto number = [&](const std::string& word) {
    char* rest = nullptr;
    const double n = std::strtod(word.c_str(), &rest);
    if (word.empty() || *rest != '\0') refuse();
    return n;
  };
  std::size_t end = text.find(':');
  const std::string kind = text.substr(0, end);
  plait::value_check how = plait::value_check::first;
  if (kind == "every") {
    const std::size_t begin = std::min(end, text.size() - 1) + 1;
    end = text.find(':', begin);
    const double n = number(text.substr(begin, end == text.npos ? end : end - begin));
    if (!(n >= 1 && n <= 1e15 && n == static_cast<double>(static_cast<std::int64_t>(n)))) refuse();
    how = plait::value_check::every(static_cast<std::int64_t>(n));
  } else if (kind == "off" || kind == "always") {
    how = kind == "off" ? plait::value_check::off : plait::value_check::always;
  } else if (kind != "first") {
    refuse();
  }
  if (end == text.npos) return how;
  const double tolerance = number(text.substr(end + 1));
  if (!(tolerance >= 0 && tolerance < 1)) refuse();
  return how.within(tolerance);
}
