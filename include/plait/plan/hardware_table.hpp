// The machines that the planner knows by name. Peaks and links are from data sheets and micro-benchmarks, shares are
// fitted: benchmarks/planner/README.md says on what.
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "plait/core/macros_off.hpp"
#include "plait/plan/hardware.hpp"

namespace plait::planner {

namespace detail {

inline constexpr double mebi = 1024.0 * 1024.0, gibi = 1024 * mebi;

/// All Hopper parts share these: the tensor cores (data sheet, dense), and shares fitted on step times. Memories are
/// what drivers report, in MiB, more than the name says.
inline hardware hopper() {
  hardware h;
  h.peak = {66.9e12, 989.4e12, 1978.9e12};
  h.memory = 81559 * mebi;
  h.memory_bandwidth = 3.35e12;
  h.reserved = 2.5 * gibi;
  h.fragmentation = 0.03;
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
  // 8 H100 on NVSwitch: 361 to 367 GB/s for rings and 480 with NVLS (nccl-tests on 8 H200, which have the same links);
  // one ConnectX-7 of 400 Gbit/s for each GPU: 48.5 GB/s.
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
  // 8 A100 on NVSwitch: 235 GB/s (nccl-tests); one ConnectX-6 of 200 Gbit/s for each GPU: 23.5 GB/s.
  h.levels = {{"NVLink", 8, 235e9, 1, 2e-6, 25e-6, 200e-6}, {"InfiniBand", 0, 23.5e9, 1, 6e-6, 25e-6, 200e-6}};
  return h;
}

inline hardware h100() {
  hardware h = hopper();
  h.name = "H100";
  return h;
}

/// H200 has the cores of H100, and more and faster memory.
inline hardware h200() {
  hardware h = hopper();
  h.name = "H200";
  h.memory = 143771 * mebi;
  h.memory_bandwidth = 4.8e12;
  return h;
}

/// One Hopper GPU on a Grace CPU: 4 of them on NVLink without a switch, one 200 Gbit/s Slingshot or InfiniBand port for
/// each, as in the Alps machine.
inline hardware gh200() {
  hardware h = hopper();
  h.name = "GH200";
  h.memory = 97871 * mebi;
  h.memory_bandwidth = 4.0e12;
  h.levels = {{"NVLink", 4, 300e9, 1, 1.5e-6, 12e-6, 90e-6}, {"Slingshot", 0, 23.5e9, 1, 8e-6, 25e-6, 150e-6}};
  return h;
}

/// Nothing of Blackwell is fitted on step times. What its power allows for long is far below what its best products
/// reach: products in bf16 have the share of 420 large ones that were measured one after the other (SimuMax; half of
/// them between 0.47 and 0.55), and those in fp8 less by as much, from Hopper's in proportion to the best products of
/// both (0.763 and 0.709 of the peak; ml-engineering). All else is Hopper's.
inline hardware b200() {
  hardware h = hopper();
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

/// B200 with more power, 72 of them on NVLink. Its shares are B200's in proportion to the best products (bf16 0.729 and
/// 0.776 of the peak, fp8 0.723 and 0.763; ml-engineering).
inline hardware gb200() {
  hardware h = b200();
  h.name = "GB200";
  h.peak = {80e12, 2500e12, 5000e12};
  h.product_share = {0.70, 0.48, 0.53};
  h.attention_share = 0.47;
  h.memory = 189471 * mebi;
  h.levels[0].ranks = 72;
  return h;
}

/// One core of a server as a rank of an in-process mesh. Its figures only say what magnitudes to expect; a file for
/// the machine at hand takes their place.
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

/// All machines that are known by name.
inline std::vector<hardware> known_hardware() {
  using namespace detail;
  return {a100(), h100(), h200(), gh200(), b200(), gb200(), cpu()};
}

/// The machine called `name`, in capitals or not; `error` naming `field` and all machines otherwise.
inline hardware hardware_called(std::string_view name, const std::string& field) {
  const auto lower = [](std::string_view text) {
    std::string out(text);
    for (char& c : out)
      if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
    return out;
  };
  std::string names;
  for (hardware& h : known_hardware()) {
    if (lower(h.name) == lower(name)) return std::move(h);
    names += (names.empty() ? "" : ", ") + lower(h.name);
  }
  fail({field, ": unknown hardware '", name, "'; known are ", names, "; or give the path of a description (.json)"});
}

}  // namespace plait::planner

#include "plait/core/macros_on.hpp"
