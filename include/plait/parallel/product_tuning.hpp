// Measured choices of matrix products for all ranks: replicas compute equal bits only by equal algorithms.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "plait/comm/any_communicator.hpp"
#include "plait/comm/host_values.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/device/product_choices.hpp"

namespace plait {

/// Makes every rank use what the ranks have measured: all products of all ranks, and the lowest rank's choice where
/// several have measured one. Returns the choices, equal on every rank, for a file. For a log they also name the
/// products that no rank could measure (`product_choices::unmeasured_text`). Collective over `ranks`, which use the
/// device's memory. Throws on every rank where their GPUs differ.
///
///     device.measure_products(16);
///     step.run(ctx);                                       // once or twice: with every product of a step
///     const product_choices chosen = agree_on_products(device, ranks.root());
template <class Device>
product_choices agree_on_products(Device& device, any_communicator& ranks) {
  const std::string mine = device.products().text();
  const auto all = gather_records(device, ranks, std::vector<char>(mine.begin(), mine.end()));
  product_choices agreed;
  for (std::size_t r = 0; r < all.size(); ++r) {
    const product_choices theirs =
        product_choices::parse({all[r].data(), all[r].size()}, cat({"the products of rank ", r}));
    if (r == 0)
      agreed = theirs;
    else
      agreed.merge(theirs);
  }
  device.use_products(agreed);
  return agreed;
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
