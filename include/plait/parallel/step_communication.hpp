// The cost of a step's communication to all ranks, by axes: how long it was under way, and what share of it was hidden.
#pragma once

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "plait/comm/host_values.hpp"
#include "plait/comm/metrics.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"

namespace plait {

namespace detail {

/// `axis_times` as bytes that can be sent.
struct sent_axis_times {
  char axes[64];
  double seconds, waited;
};

}  // namespace detail

/// Returns the mean and the worst rank of what each rank has measured, in the order in which ranks name axes. The
/// result is equal on every rank. Collective over `ranks`, so the place to ask is between steps, and not in every one:
///
///     communication_clock clock(world.ledger());
///     step.run(ctx);
///     for (const axis_communication& c : communication_of_ranks(device, world.root(), clock.since())) ...
///
/// It takes two collectives, or one where the caller knows how many records a rank has at most. (Ranks that wait for
/// each other here wait for gathers that a step has left on their way: `training_step::on_norm` is before them.)
template <compute_device Device>
std::vector<axis_communication> communication_of_ranks(Device& device, any_communicator& ranks,
                                                       const std::vector<axis_times>& mine, std::size_t most = 0) {
  std::vector<detail::sent_axis_times> own;
  for (const axis_times& t : mine) {
    detail::sent_axis_times& s = own.emplace_back();
    if (t.axes.size() >= sizeof s.axes)
      fail({"communication_of_ranks: the label '", t.axes, "' has ", t.axes.size(), " letters; legal are up to ",
            sizeof s.axes - 1});
    std::fill(std::begin(s.axes), std::end(s.axes), '\0');
    std::copy(t.axes.begin(), t.axes.end(), s.axes);
    s.seconds = t.seconds, s.waited = t.waited;
  }
  if (own.size() < most) own.resize(most);  // records without a label
  const std::vector<std::vector<detail::sent_axis_times>> all =
      most > 0 ? gather_equal_records(device, ranks, own) : gather_records(device, ranks, own);
  std::vector<axis_communication> out;
  std::vector<double> having;
  for (std::size_t r = 0; r < all.size(); ++r)
    for (const detail::sent_axis_times& s : all[r]) {
      const std::string_view axes = s.axes;
      if (axes.empty()) continue;
      std::size_t i = 0;
      while (i < out.size() && out[i].axes != axes) ++i;
      if (i == out.size()) {
        out.push_back({std::string(axes), 0, 0, std::numeric_limits<double>::infinity()});
        having.push_back(0);
      }
      axis_communication& c = out[i];
      ++having[i];
      c.seconds += s.seconds;
      c.waited += s.waited;
      if (const double hidden = hidden_share(s.seconds, s.waited); hidden < c.worst)
        c.worst = hidden, c.worst_rank = static_cast<int>(r);
    }
  for (std::size_t i = 0; i < out.size(); ++i) {
    out[i].seconds /= having[i];
    out[i].waited /= having[i];
    if (out[i].worst_rank < 0) out[i].worst = std::numeric_limits<double>::quiet_NaN();
  }
  return out;
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
