// Descriptions of machines for the planner: an accelerator's peaks and memory, the fractions that programs reach, the
// levels of the network, and named machines.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"

namespace plait::planner {

/// The number types of matrix products with different peaks.
enum class number_kind : std::uint8_t { f32, bf16, fp8 };
inline constexpr int number_kinds = 3;

constexpr const char* name_of(number_kind kind) {
  return kind == number_kind::f32 ? "f32" : kind == number_kind::bf16 ? "bf16" : "fp8";
}

/// The most levels of a network.
inline constexpr std::size_t max_levels = 6;

/// One level of a network, which joins `ranks` accelerators into a unit, such as the NVLink of a node. The levels of a
/// machine are ordered from the inside to the outside.
struct network_level {
  std::string name;
  std::int64_t ranks = 0;       ///< accelerators in a unit of this level; 0: all (outermost level only)
  double bandwidth = 0;         ///< bytes per second through one accelerator's link, as the bus bandwidth of nccl-tests
  double all_reduce_share = 1;  ///< bus bandwidth of an all-reduce over `bandwidth`: above 1 if switches add (NVLS)
  double latency = 0;           ///< seconds of one step of a collective, from one accelerator to the next
  double launch = 0;            ///< seconds of an empty collective
  double fill = 0;              ///< seconds for filling the links in a large collective; a small one takes twice
                                ///< the time of its bytes (fits nccl-tests on 8 H100 within a fifth from 1 to 1024 MB)
  double message_latency = 0;   ///< seconds of an empty message; 0: `latency`
  double message_bandwidth = 0;  ///< bytes per second of a message; 0: `bandwidth`
  std::int64_t shared_by = 1;    ///< number of adjacent accelerators that share one link
};

/// An accelerator, and the network between many of them. Shares are fractions of the peaks, at most 1.
struct hardware {
  std::string name;
  std::array<double, number_kinds>
      peak{};                   ///< operations per second of dense products, by `number_kind`; 0: not supported
  double memory = 0;            ///< bytes
  double memory_bandwidth = 0;  ///< bytes per second
  double reserved = 0;          ///< bytes that a process cannot allocate: contexts, libraries, communicators' buffers
  double fragmentation = 0;     ///< fraction of allocated memory that the allocator wastes
  double host_bandwidth = 0;    ///< bytes per second of copies to the host's memory or back; 0: unknown
  double host_memory = 0;       ///< bytes of the host's memory per accelerator

  std::array<double, number_kinds> product_share{};  ///< fraction of the peak, for large products in a training step
  double product_depth = 0;       ///< the contracted size at which a product reaches half of its share
  double product_area = 0;        ///< elements of a result at which a product reaches half of its share
  double adding_depth = 0;        ///< increase of `product_depth` if a product adds to its result
  double attention_share = 0;     ///< fraction of the bf16 peak, for fused attention, both passes
  double attention_block = 0;     ///< keys of a block that causal attention computes whole, although only half is
                                  ///< visible
  double flash1 = 1, flash2 = 1;  ///< speeds of FlashAttention 1 and 2 relative to the fastest kernel
  double activation = 0;          ///< seconds per value of an activation if computation takes longer than moving
                                  ///< it, and twice that backward: processors have no unit for exponentials
  double memory_share = 0;        ///< fraction of the memory bandwidth, for elementwise kernels
  double launch = 0;              ///< seconds from the end of a kernel to the start of the next
  double tensor_hidden = 0;       ///< fraction of tensor-parallel communication that chunked overlap hides
  double data_hidden = 0;         ///< fraction of computation that can hide data-parallel communication
  double straggling = 0;          ///< growth of a step with each doubling of the units of the innermost level

  std::int64_t cores = 0;  ///< number of cores that all ranks share in turns; 0: each rank has its own
  double turn = 0;         ///< seconds for which a rank with an arrived message waits for a core in use

  std::vector<network_level> levels;

  double peak_of(number_kind kind) const { return peak[static_cast<std::size_t>(kind)]; }
  double share_of(number_kind kind) const { return product_share[static_cast<std::size_t>(kind)]; }
};

// The named machines. Peaks and links are from data sheets and micro-benchmarks; shares are fitted to the runs of
// benchmarks/planner/README.md.

namespace detail {

inline constexpr double mebi = 1024.0 * 1024.0, gibi = 1024 * mebi;

/// H100, whose values other Hopper GPUs share: the tensor cores (data sheet, dense), and shares fitted to step times.
/// Memory sizes are those that drivers report, in MiB, which are larger than the product's name says.
inline hardware h100() {
  hardware h;
  h.name = "H100";
  h.peak = {66.9e12, 989.4e12, 1978.9e12};
  h.memory = 81559 * mebi;
  h.memory_bandwidth = 3.35e12;
  h.reserved = 2.5 * gibi;
  h.fragmentation = 0.03;
  h.host_bandwidth = 55e9;  // PCIe 5.0 with 16 lanes, pinned memory (nvbandwidth)
  h.host_memory = 256e9;    // 2 TB for 8 GPUs (DGX)
  h.product_share = {0.70, 0.70, 0.685};
  h.product_depth = 150;
  h.product_area = 1.2e6;
  h.attention_share = 0.54;
  h.flash1 = 0.45;
  h.flash2 = 0.6;
  h.memory_share = 0.60;
  h.launch = 3e-6;
  h.tensor_hidden = 0.76;
  h.data_hidden = 0.95;
  h.straggling = 0.004;
  // 8 H100 on NVSwitch: 361 to 367 GB/s for rings and 480 with NVLS (nccl-tests on 8 H200, which have the same links).
  // One ConnectX-7 of 400 Gbit/s per GPU: 48.5 GB/s.
  h.levels = {{"NVLink", 8, 362e9, 480.0 / 362.0, 1.5e-6, 12e-6, 90e-6},
              {"InfiniBand", 0, 48.5e9, 1, 6e-6, 20e-6, 150e-6}};
  return h;
}

inline hardware a100() {
  hardware h;
  h.name = "A100";
  h.peak = {19.5e12, 312e12, 0};
  h.memory = 81920 * mebi;
  h.memory_bandwidth = 2.039e12;
  h.reserved = 2.0 * gibi;
  h.fragmentation = 0.03;
  h.host_bandwidth = 25e9;  // PCIe 4.0 with 16 lanes, pinned memory
  h.host_memory = 256e9;
  h.product_share = {0.80, 0.825, 0};
  h.product_depth = 150;  // these two: 183 products measured on A100 PCIe (SimuMax), median error 2.6 %
  h.product_area = 6.0e5;
  h.attention_share = 0.51;  // FlashAttention-2: 0.57 forward and 0.49 backward, measured on A100 PCIe (SimuMax)
  h.flash1 = 0.7;
  h.memory_share = 0.95;
  h.launch = 4e-6;
  h.tensor_hidden = 0.5;  // these two are guesses: no published step on A100 overlaps much
  h.data_hidden = 0.7;
  h.straggling = 0.004;
  // 8 A100 on NVSwitch: 235 GB/s (nccl-tests). One ConnectX-6 of 200 Gbit/s per GPU: 23.5 GB/s.
  h.levels = {{"NVLink", 8, 235e9, 1, 2e-6, 25e-6, 200e-6}, {"InfiniBand", 0, 23.5e9, 1, 6e-6, 25e-6, 200e-6}};
  return h;
}

/// H200 has the cores of H100, with more and faster memory.
inline hardware h200() {
  hardware h = h100();
  h.name = "H200";
  h.memory = 143771 * mebi;
  h.memory_bandwidth = 4.8e12;
  return h;
}

/// A Hopper GPU on a Grace CPU: 4 of them on NVLink without a switch, with one 200 Gbit/s Slingshot or InfiniBand port
/// each, as in the Alps machine.
inline hardware gh200() {
  hardware h = h100();
  h.name = "GH200";
  h.memory = 97871 * mebi;
  h.memory_bandwidth = 4.0e12;
  h.host_bandwidth = 297e9;  // NVLink-C2C to the host; 375e9 back (Schieffer et al. 2024)
  h.host_memory = 128e9;
  h.levels = {{"NVLink", 4, 300e9, 1, 1.5e-6, 12e-6, 90e-6}, {"Slingshot", 0, 23.5e9, 1, 8e-6, 25e-6, 150e-6}};
  return h;
}

/// Blackwell's values are not fitted to step times. Its power limit sustains much less than its best products reach. So
/// bf16 products have the share of 420 large ones that were measured one after another (SimuMax; half of them between
/// 0.47 and 0.55). The share of fp8 products is Hopper's times the ratio of both GPUs' best products (0.763 and 0.709
/// of the peak; ml-engineering), reduced by the same factor. All other values are Hopper's.
inline hardware b200() {
  hardware h = h100();
  h.name = "B200";
  h.peak = {80e12, 2250e12, 4500e12};
  h.memory = 183359 * mebi;
  h.product_share = {0.70, 0.51, 0.56};
  h.attention_share = 0.50;  // these two: 0.41 of the peak at 4096 tokens and 0.49 at 32768, both passes (SimuMax)
  h.attention_block = 900;
  h.memory_bandwidth = 8e12;
  h.product_area = 2.0e6;
  // 8 B200 on NVSwitch: 700 GB/s for rings, 850 with NVLS (NVIDIA's slides).
  h.levels = {{"NVLink", 8, 700e9, 850.0 / 700.0, 1.5e-6, 12e-6, 90e-6},
              {"InfiniBand", 0, 48.5e9, 1, 6e-6, 20e-6, 150e-6}};
  return h;
}

/// B200 with more power, 72 of them on NVLink. Its shares are B200's times the ratio of best products (bf16 0.729 and
/// 0.776 of the peak, fp8 0.723 and 0.763; ml-engineering).
inline hardware gb200() {
  hardware h = b200();
  h.name = "GB200";
  h.peak = {80e12, 2500e12, 5000e12};
  h.product_share = {0.70, 0.48, 0.53};
  h.attention_share = 0.47;
  h.memory = 189471 * mebi;
  h.host_bandwidth = 148e9;  // a guess: two GPUs share the NVLink-C2C of a Grace CPU, which is that of GH200
  h.host_memory = 240e9;
  h.levels[0].ranks = 72;
  return h;
}

/// One core of a server, as a rank of an in-process mesh. Its values are only orders of magnitude; use a file for a
/// real machine.
inline hardware cpu() {
  hardware h;
  h.name = "CPU";
  h.peak = {100e9, 100e9, 0};
  h.memory = 8e9;
  h.memory_bandwidth = 10e9;
  h.product_share = {0.6, 0.3, 0};
  h.product_depth = 16;
  h.product_area = 256;
  h.attention_share = 0.1;
  h.memory_share = 0.8;
  h.launch = 1e-6;
  h.straggling = 0.004;
  h.levels = {{"shared memory", 0, 2e9, 1, 5e-6, 20e-6, 0}};
  return h;
}

}  // namespace detail

/// Returns all named machines.
inline std::vector<hardware> known_hardware() {
  using namespace detail;
  return {a100(), h100(), h200(), gh200(), b200(), gb200(), cpu()};
}

namespace detail {

inline std::string in_lower_case(std::string_view text) {
  std::string out(text);
  for (char& c : out)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  return out;
}

}  // namespace detail

/// Returns the names of all machines, in lower case and separated by commas.
inline std::string hardware_names() {
  std::string names;
  for (const hardware& h : known_hardware()) names += (names.empty() ? "" : ", ") + detail::in_lower_case(h.name);
  return names;
}

/// Returns the machine called `name`, in any case. Otherwise throws `error` with `field` and all names.
inline hardware hardware_called(std::string_view name, const std::string& field) {
  for (hardware& h : known_hardware())
    if (detail::in_lower_case(h.name) == detail::in_lower_case(name)) return std::move(h);
  fail({field, ": unknown hardware '", name, "'; known are ", hardware_names(),
        "; or give the path of a description (.json)"});
}

}  // namespace plait::planner

#include "plait/core/macros_on.hpp"
