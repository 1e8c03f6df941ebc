// A machine as the planner knows it: an accelerator's peaks and memory, what of them programs reach, and the levels of
// its network.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"

namespace plait::planner {

/// The number types of matrix products, as far as peaks differ.
enum class number_kind : std::uint8_t { f32, bf16, fp8 };
inline constexpr int number_kinds = 3;

constexpr const char* name_of(number_kind kind) {
  return kind == number_kind::f32 ? "f32" : kind == number_kind::bf16 ? "bf16" : "fp8";
}

/// Most levels that a network may have.
inline constexpr std::size_t max_levels = 6;

/// One level of a network: what joins `ranks` accelerators into a unit, such as the NVLink of a node. The levels of a
/// machine go from the inside to the outside.
struct network_level {
  std::string name;
  std::int64_t ranks = 0;       ///< accelerators in a unit of this level; 0: all there are (the outermost level only)
  double bandwidth = 0;         ///< bytes per second through one accelerator's link, as the bus bandwidth of nccl-tests
  double all_reduce_share = 1;  ///< an all-reduce's bus bandwidth over `bandwidth`: above 1 where switches add (NVLS)
  double latency = 0;           ///< seconds of one step of a collective from one accelerator to the next
  double launch = 0;            ///< seconds that a collective takes which has nothing to send
  double fill = 0;              ///< seconds that filling the links adds to a large collective; a small one takes twice
                                ///< the time of its bytes (fits nccl-tests on 8 H100 within a fifth from 1 to 1024 MB)
  double message_latency = 0;   ///< seconds of a message that has nothing to send; 0: `latency`
  double message_bandwidth = 0;  ///< bytes per second of a message; 0: `bandwidth`
  std::int64_t shared_by = 1;    ///< accelerators, neighbours, that have one link together
};

/// An accelerator and the network between many of them. Shares are of the peaks, and at most 1.
struct hardware {
  std::string name;
  std::array<double, number_kinds>
      peak{};                   ///< operations per second of dense products, by `number_kind`; 0: it has none
  double memory = 0;            ///< bytes
  double memory_bandwidth = 0;  ///< bytes per second
  double reserved = 0;          ///< bytes that a process cannot allocate: contexts, libraries, communicators' buffers
  double fragmentation = 0;     ///< share of what is allocated that the allocator wastes

  std::array<double, number_kinds> product_share{};  ///< of the peak that large products reach, in a training step
  double product_depth = 0;       ///< the contracted size at which a product reaches half of its share
  double product_area = 0;        ///< elements of a result at which a product reaches half of its share
  double adding_depth = 0;        ///< by how much `product_depth` is larger where a product adds to its result
  double attention_share = 0;     ///< of the bf16 peak that fused attention reaches, forward and backward together
  double attention_block = 0;     ///< keys of a block that causal attention computes whole, where only half is visible
  double flash1 = 1, flash2 = 1;  ///< what FlashAttention 1 and 2 reach of that, which is the fastest kernel's
  double activation = 0;          ///< seconds of one value of an activation where computing it takes longer than moving
                                  ///< it, and twice that backward: processors have no unit for exponentials
  double memory_share = 0;        ///< of the memory bandwidth that elementwise kernels reach
  double launch = 0;              ///< seconds from the end of a kernel to the start of the next
  double tensor_hidden = 0;       ///< part of tensor-parallel communication that chunked overlap hides
  double data_hidden = 0;         ///< part of a computation beside which data-parallel communication can run unnoticed
  double straggling = 0;          ///< by how much a step grows with each doubling of the units of the innermost level

  std::int64_t cores = 0;  ///< that all ranks share, taking turns where they are more; 0: each has its own
  double turn = 0;         ///< seconds for which a rank whose message has come waits for a core that another one uses

  std::vector<network_level> levels;

  double peak_of(number_kind kind) const { return peak[static_cast<std::size_t>(kind)]; }
  double share_of(number_kind kind) const { return product_share[static_cast<std::size_t>(kind)]; }
};

/// Throws `error`, its text starting with `source` and naming the key, unless `h` can be priced with.
inline void validate(const hardware& h, const std::string& source) {
  const auto positive = [&](const std::string& key, double value) {
    if (!(value > 0 && std::isfinite(value))) fail({source, ": ", key, " is ", value, "; legal is a positive number"});
  };
  const auto natural = [&](const std::string& key, double value) {
    if (!(value >= 0 && std::isfinite(value))) fail({source, ": ", key, " is ", value, "; legal is 0 or more"});
  };
  const auto speed = [&](const std::string& key, double value) {
    if (!(value >= 1e6 && std::isfinite(value)))
      fail({source, ": ", key, " is ", value, " bytes per second; legal is 1e6 or more, and 50 GB/s is 50e9"});
  };
  const auto share = [&](const std::string& key, double value) {
    if (!(value > 0 && value <= 1)) fail({source, ": ", key, " is ", value, "; legal is a share above 0, at most 1"});
  };
  const auto part = [&](const std::string& key, double value) {
    if (!(value >= 0 && value < 1)) fail({source, ": ", key, " is ", value, "; legal is 0 or more and below 1"});
  };
  if (h.name.empty()) fail({source, ": name is empty; legal is any name"});
  double most = 0;
  for (std::size_t i = 0; i < h.peak.size(); ++i) {
    const std::string kind = name_of(static_cast<number_kind>(i));
    natural("peak." + kind, h.peak[i]);
    if (h.peak[i] > 0) share("product_share." + kind, h.product_share[i]);
    most = std::max(most, h.peak[i]);
  }
  if (most == 0) fail({source, ": peak names no number type; legal are f32, bf16 and fp8"});
  positive("memory", h.memory);
  speed("memory_bandwidth", h.memory_bandwidth);
  natural("reserved", h.reserved);
  if (h.reserved >= h.memory)
    fail({source, ": reserved is ", h.reserved, " and memory ", h.memory, "; nothing is left to allocate"});
  part("fragmentation", h.fragmentation);
  natural("product_depth", h.product_depth);
  natural("product_area", h.product_area);
  natural("adding_depth", h.adding_depth);
  share("attention_share", h.attention_share);
  natural("attention_block", h.attention_block);
  natural("activation", h.activation);
  share("flash1", h.flash1);
  share("flash2", h.flash2);
  share("memory_share", h.memory_share);
  natural("launch", h.launch);
  part("tensor_hidden", h.tensor_hidden);
  part("data_hidden", h.data_hidden);
  natural("straggling", h.straggling);
  if (h.cores < 0) fail({source, ": cores is ", h.cores, "; legal is 1 or more, or 0 where each rank has its own"});
  natural("turn", h.turn);
  if (h.levels.empty()) fail({source, ": levels is empty; legal is one level or more, from the inside to the outside"});
  if (h.levels.size() > max_levels)
    fail({source, ": levels has ", h.levels.size(), " entries; legal are 1 to ", max_levels});
  for (std::size_t i = 0; i < h.levels.size(); ++i) {
    const network_level& l = h.levels[i];
    const std::string key = cat({"levels[", i, "]."});
    const bool last = i + 1 == h.levels.size();
    if (last ? l.ranks != 0 : l.ranks < 1)
      fail({source, ": ", key, "ranks is ", l.ranks, "; legal is ",
            last ? "0 for the outermost level, which joins all" : "1 or more, 0 being for the outermost level"});
    if (!last && i > 0 && (l.ranks <= h.levels[i - 1].ranks || l.ranks % h.levels[i - 1].ranks != 0))
      fail({source, ": ", key, "ranks is ", l.ranks, "; legal is a multiple of the level inside it, ",
            h.levels[i - 1].ranks});
    speed(key + "bandwidth", l.bandwidth);
    positive(key + "all_reduce_share", l.all_reduce_share);
    natural(key + "latency", l.latency);
    natural(key + "launch", l.launch);
    natural(key + "fill", l.fill);
    if (l.shared_by < 1) fail({source, ": ", key, "shared_by is ", l.shared_by, "; legal is 1 or more"});
    natural(key + "message_latency", l.message_latency);
    if (l.message_bandwidth != 0) speed(key + "message_bandwidth", l.message_bandwidth);
  }
}

}  // namespace plait::planner

#include "plait/core/macros_on.hpp"
