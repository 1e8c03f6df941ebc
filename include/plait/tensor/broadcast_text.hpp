// A text that one rank knows, for all of them: the name of a directory, the reason of a failure. It waits for the
// device, as what is in tensor/all_reduce_scalar.hpp does.
#pragma once

#include <cstdint>
#include <string>

#include "plait/comm/any_communicator.hpp"
#include "plait/tensor/all_reduce_scalar.hpp"

namespace plait {

/// Returns the text that rank `from` has. Collective.
template <compute_device Device>
std::string broadcast_text(Device& device, any_communicator& ranks, std::string text, int from = 0) {
  if (ranks.size() == 1) return text;
  const bool own = ranks.rank() == from;
  text.resize(static_cast<std::size_t>(
      all_reduce_scalar(device, ranks, own ? static_cast<double>(text.size()) : 0.0, reduce_op::sum)));
  if (text.empty()) return text;
  auto there = make_collective_buffer<char>(device, text.size());
  if (own) device.upload(there.data(), text.data(), text.size(), device.main_stream());
  ranks.broadcast(there.data(), text.size(), dtype::u8, from);
  device.download(text.data(), there.data(), text.size(), device.main_stream());
  return text;
}

}  // namespace plait
