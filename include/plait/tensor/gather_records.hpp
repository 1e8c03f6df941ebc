// Records of any number that each rank has on the host, brought to all ranks or to one: for reports between steps. No
// layer uses it, because it waits for the device. For a number of each rank there is tensor/all_reduce_scalar.hpp.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "plait/comm/any_communicator.hpp"
#include "plait/device/device.hpp"

namespace plait {

/// Returns the records of each rank, equally many on all, by rank: on rank `to` alone, and nothing on the
/// others, or on all where it is -1. They travel through the device's memory, in one collective over `ranks`.
template <class Record, compute_device Device>
  requires std::is_trivially_copyable_v<Record>
std::vector<std::vector<Record>> gather_equal_records(Device& device, any_communicator& ranks,
                                                      const std::vector<Record>& mine, int to = -1) {
  if (ranks.size() == 1) return {mine};
  const auto main = device.main_stream();
  const auto size = static_cast<std::size_t>(ranks.size());
  const bool mine_to_have = to < 0 || ranks.rank() == to;
  if (mine.empty()) return std::vector<std::vector<Record>>(mine_to_have ? size : 0);
  const std::size_t room = mine.size() * sizeof(Record);
  auto there = make_buffer<std::uint8_t>(device, room * (size + 1));
  auto* const own = there.template data<std::uint8_t>() + room * size;
  device.upload(own, mine.data(), room, main);
  ranks.all_gather(own, there.data(), room, dtype::u8);
  if (!mine_to_have) return {};
  std::vector<std::vector<Record>> all(size, std::vector<Record>(mine.size()));
  for (std::size_t r = 0; r < size; ++r)
    device.download(all[r].data(), there.template data<std::uint8_t>() + room * r, room, main);
  return all;
}

/// As `gather_equal_records`, for any number of records on each rank, in two collectives.
template <class Record, compute_device Device>
  requires std::is_trivially_copyable_v<Record>
std::vector<std::vector<Record>> gather_records(Device& device, any_communicator& ranks,
                                                const std::vector<Record>& mine, int to = -1) {
  if (ranks.size() == 1) return {mine};
  const auto main = device.main_stream();
  const auto size = static_cast<std::size_t>(ranks.size());
  auto counts = make_buffer<std::int64_t>(device, size + 1);
  auto* const own_count = counts.template data<std::int64_t>() + size;
  const auto here = static_cast<std::int64_t>(mine.size());
  device.upload(own_count, &here, sizeof here, main);
  ranks.all_gather(own_count, counts.data(), 1, dtype::i64);
  std::vector<std::int64_t> count(size);
  device.download(count.data(), counts.data(), size * sizeof(std::int64_t), main);
  const auto most = static_cast<std::size_t>(*std::max_element(count.begin(), count.end()));
  std::vector<Record> padded = mine;
  padded.resize(most);
  std::vector<std::vector<Record>> all = gather_equal_records(device, ranks, padded, to);
  for (std::size_t r = 0; r < all.size(); ++r) all[r].resize(static_cast<std::size_t>(count[r]));
  return all;
}

}  // namespace plait
