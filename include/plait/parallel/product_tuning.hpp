// Measured choices of matrix products for all ranks: replicas compute the same bits only by the same algorithms. The
// program decides what is measured, and when: `cuda::measure_products`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "plait/comm/any_communicator.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/device/buffer.hpp"
#include "plait/device/product_choices.hpp"

namespace plait {

/// Has every rank use what the ranks have measured: all products of all ranks, the lowest rank's choice where several
/// have measured one. Returns the choices, the same on every rank, for a file, and for a log which products no rank
/// could measure (`product_choices::unmeasured_text`). Collective over `ranks`, which use the device's memory. Throws
/// on every rank where their GPUs differ.
///
///     device.measure_products(16);
///     step.run(ctx);                                       // once or twice: with every product of a step
///     const product_choices chosen = agree_on_products(device, ranks.root());
template <class Device>
product_choices agree_on_products(Device& device, any_communicator& ranks) {
  const std::string mine = device.products().text();
  const auto stream = device.main_stream();
  auto sizes = make_buffer<std::int64_t>(device, 1);
  auto most = static_cast<std::int64_t>(mine.size());
  device.upload(sizes.data(), &most, sizeof most, stream);
  ranks.all_reduce(sizes.data(), sizes.data(), 1, dtype::i64, reduce_op::max);
  device.download(&most, sizes.data(), sizeof most, stream);

  const auto record = static_cast<std::size_t>(most) + 1, count = static_cast<std::size_t>(ranks.size());
  std::string out = mine, all(record * count, '\0');
  out.resize(record, '\0');  // which ends each text
  buffer<Device> here(device, record), gathered(device, all.size());
  device.upload(here.data(), out.data(), record, stream);
  ranks.all_gather(here.data(), gathered.data(), record, dtype::u8);
  device.download(all.data(), gathered.data(), all.size(), stream);
  product_choices agreed;
  for (std::size_t r = 0; r < count; ++r) {
    const std::string_view text(all.data() + r * record, std::strlen(all.data() + r * record));
    const product_choices theirs = product_choices::parse(text, cat({"the products of rank ", r}));
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
