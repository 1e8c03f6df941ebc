// Collectives on values that each rank has on the host between steps: numbers, records, texts, and measured matrix
// products. They travel through the device's memory, and wait for its main stream.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "plait/comm/any_communicator.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/text.hpp"
#include "plait/core/types.hpp"
#include "plait/device/device.hpp"

namespace plait {

/// Memory that the ranks' collectives can use, with host values as its input and output (`make_collective_buffer`).
template <class T, compute_device Device>
class host_values {
 public:
  host_values(Device& device, std::size_t count) : device_(&device), there_(make_collective_buffer<T>(device, count)) {}

  /// The pointer for a collective.
  T* data() { return there_.template data<T>(); }
  void upload(const T* from, std::size_t count, std::size_t at = 0) {
    device_->upload(data() + at, from, count * sizeof(T), device_->main_stream());
  }
  void download(T* to, std::size_t count, std::size_t at = 0) {
    device_->download(to, data() + at, count * sizeof(T), device_->main_stream());
  }

 private:
  Device* device_;
  buffer<Device> there_;
};

/// Reduces each of `count` numbers over all of `ranks`, in place. Collective; nothing is done on one rank.
template <class T, compute_device Device>
void all_reduce_values(Device& device, any_communicator& ranks, T* values, std::size_t count, reduce_op op) {
  if (ranks.size() == 1) return;
  host_values<T, Device> there(device, count);
  there.upload(values, count);
  ranks.all_reduce(there.data(), there.data(), count, dtype_of<T>, op);
  there.download(values, count);
}

/// Returns the sum of one number of each rank, or the largest or least. Collective; nothing is done on one rank.
template <compute_device Device>
double all_reduce_scalar(Device& device, any_communicator& ranks, double value, reduce_op op) {
  all_reduce_values(device, ranks, &value, 1, op);
  return value;
}

/// Gathers `count` values of each rank into `all`, ordered by rank. If `all` is null, this rank takes part but drops
/// the result. Collective over at least two ranks.
template <class T, compute_device Device>
  requires std::is_trivially_copyable_v<T>
void gather_values(Device& device, any_communicator& ranks, const T* own, std::size_t count, T* all) {
  const std::size_t bytes = count * sizeof(T), of_all = bytes * static_cast<std::size_t>(ranks.size());
  host_values<std::byte, Device> there(device, of_all + bytes);
  there.upload(reinterpret_cast<const std::byte*>(own), bytes, of_all);
  ranks.all_gather(there.data() + of_all, there.data(), bytes, dtype::u8);
  if (all != nullptr) there.download(reinterpret_cast<std::byte*>(all), of_all);
}

/// Returns the `count` numbers of every rank, in the order of the ranks. A rank with fewer adds zeros. Collective.
template <compute_device Device>
std::vector<std::uint64_t> gather_all(Device& device, any_communicator& ranks, std::vector<std::uint64_t> own,
                                      std::size_t count) {
  own.resize(count);
  if (ranks.size() == 1) return own;
  std::vector<std::uint64_t> all(count * static_cast<std::size_t>(ranks.size()));
  gather_values(device, ranks, own.data(), count, all.data());
  return all;
}

/// Returns the records of all ranks, ordered by rank, on rank `to`; the others get nothing. At -1 all ranks get them.
/// Every rank has the same number of records. Collective: one gather.
template <class Record, compute_device Device>
  requires std::is_trivially_copyable_v<Record>
std::vector<std::vector<Record>> gather_equal_records(Device& device, any_communicator& ranks,
                                                      const std::vector<Record>& mine, int to = -1) {
  if (ranks.size() == 1) return {mine};
  const bool wanted = to < 0 || ranks.rank() == to;
  const std::size_t size = wanted ? static_cast<std::size_t>(ranks.size()) : 0;
  std::vector<std::vector<Record>> by_rank(size);
  if (mine.empty()) return by_rank;
  std::vector<Record> all(size * mine.size());
  gather_values(device, ranks, mine.data(), mine.size(), wanted ? all.data() : nullptr);
  for (std::size_t r = 0; r < size; ++r)
    by_rank[r].assign(all.data() + r * mine.size(), all.data() + (r + 1) * mine.size());
  return by_rank;
}

/// As `gather_equal_records`, for any number of records on each rank: two gathers.
template <class Record, compute_device Device>
  requires std::is_trivially_copyable_v<Record>
std::vector<std::vector<Record>> gather_records(Device& device, any_communicator& ranks,
                                                const std::vector<Record>& mine, int to = -1) {
  if (ranks.size() == 1) return {mine};
  const std::vector<std::uint64_t> counts = gather_all(device, ranks, {mine.size()}, 1);
  std::vector<Record> padded = mine;
  padded.resize(static_cast<std::size_t>(*std::max_element(counts.begin(), counts.end())));
  std::vector<std::vector<Record>> all = gather_equal_records(device, ranks, padded, to);
  for (std::size_t r = 0; r < all.size(); ++r) all[r].resize(static_cast<std::size_t>(counts[r]));
  return all;
}

/// Returns the text of rank `from` on every rank, such as the name of a directory or the reason of a failure.
/// Collective.
template <compute_device Device>
std::string broadcast_text(Device& device, any_communicator& ranks, std::string text, int from = 0) {
  if (ranks.size() == 1) return text;
  const bool own = ranks.rank() == from;
  text.resize(static_cast<std::size_t>(
      all_reduce_scalar(device, ranks, own ? static_cast<double>(text.size()) : 0.0, reduce_op::sum)));
  if (text.empty()) return text;
  host_values<char, Device> there(device, text.size());
  if (own) there.upload(text.data(), text.size());
  ranks.broadcast(there.data(), text.size(), dtype::u8, from);
  there.download(text.data(), text.size());
  return text;
}

/// Makes every rank use the same measured algorithms, because replicas compute equal bits only with equal algorithms.
/// It joins the measured products of all ranks; for a product that several have measured, the lowest rank's choice
/// wins. Returns the choices, equal on every rank, to be kept in a file. For a log, they also name the products that no
/// rank could measure (`product_choices::unmeasured_text`). Collective over `ranks`, which use the device's memory.
/// Throws on every rank if their GPUs differ.
///
///     device.measure_products(16);
///     step.run(ctx);                                       // once or twice: with every product of a step
///     const product_choices chosen = agree_on_products(device, ranks.root());
template <class Device>
auto agree_on_products(Device& device, any_communicator& ranks) {
  using choices = std::remove_cvref_t<decltype(device.products())>;
  const std::string mine = device.products().text();
  const auto all = gather_records(device, ranks, std::vector<char>(mine.begin(), mine.end()));
  choices agreed;
  for (std::size_t r = 0; r < all.size(); ++r) {
    const choices theirs = choices::parse({all[r].data(), all[r].size()}, cat({"the products of rank ", r}));
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
