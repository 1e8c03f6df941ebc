// The loads of a machine's links at one time in a simulated step, and how much transfers on a shared link slow down.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "plan_llama/planner/training_layout.hpp"

namespace plait::planner {

/// Returns the level of the network that a group's communication crosses: the outermost level with several parts of it.
inline std::size_t outermost_level(const group_place& g) {
  for (std::size_t i = 0; i < g.levels; ++i)
    if (g.together[i] == g.size) return i;
  return g.levels - 1;
}

/// Returns the level that a message to the next rank along an axis crosses.
inline std::size_t level_of_message(const hardware& h, axis_place axis) {
  for (std::size_t i = 0; i + 1 < h.levels.size(); ++i)
    if (axis.stride < h.levels[i].ranks) return i;
  return h.levels.size() - 1;
}

/// A transfer over a link, with its time without other transfers.
struct link_transfer {
  double seconds = 0;
  std::size_t level = 0;
  double load = 1;  ///< share of its time on the link, without latencies
};

/// The loads of links by the ranks of one pipeline, which represents all: replicas, and the ranks of a stage, do the
/// same at the same time. A load is the share of time that a transfer is on the link: 1 for a message or a collective,
/// less for a pass that communicates between computations.
class link_loads {
 public:
  link_loads(const hardware& h, const training_layout& l) : places_(static_cast<std::size_t>(l.pp)) {
    const std::int64_t stride = l.pp_axis().stride;
    for (const network_level& level : h.levels) {
      auto& beside = levels_.emplace_back();
      for (std::int64_t place = 0; place < l.pp; ++place) {
        // Ranks share a link if its first rank is the same. This counts them for each place.
        const std::int64_t link = place * stride / level.shared_by;
        std::vector<neighbour> with;
        for (std::int64_t rank = link * level.shared_by; rank < std::min((link + 1) * level.shared_by, l.ranks());
             ++rank) {
          const auto of = static_cast<std::size_t>(rank / stride % l.pp);
          auto found = std::find_if(with.begin(), with.end(), [&](const neighbour& n) { return n.place == of; });
          found == with.end() ? with.push_back({of, 1.0}) : void(++found->ranks);
        }
        beside.neighbours.push_back(std::move(with));
      }
      beside.out.resize(places_), beside.in.resize(places_);
    }
  }

  /// Adds a load from one place to another, or at one place both ways.
  void add(std::size_t level, std::size_t from, std::size_t to, double load) {
    levels_[level].out[from] += load, levels_[level].in[to] += load;
  }

  /// Returns the factor by which a transfer with this load is slowed down: all transfers on a link take turns.
  double slowing(std::size_t level, std::size_t from, std::size_t to, double load) const {
    const level_loads& l = levels_[level];
    return 1 + load * std::max(0.0, std::max(sum(l.neighbours[from], l.out), sum(l.neighbours[to], l.in)) - load);
  }

 private:
  struct neighbour {
    std::size_t place;
    double ranks;
  };
  struct level_loads {
    std::vector<std::vector<neighbour>> neighbours{};  ///< of each place, itself among them
    std::vector<double> out{}, in{};                   ///< of each place
  };
  static double sum(const std::vector<neighbour>& with, const std::vector<double>& loads) {
    double all = 0;
    for (const neighbour& n : with) all += n.ranks * loads[n.place];
    return all;
  }

  std::size_t places_;
  std::vector<level_loads> levels_;
};

}  // namespace plait::planner
