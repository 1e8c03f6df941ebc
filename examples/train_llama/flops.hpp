// The peaks of GPUs, and the share of them that a training run uses. It does not count a model's operations:
// `flops_per_token` in models/llama_config.hpp does.
#pragma once

#include <array>
#include <cstddef>
#include <string_view>

#include "plait/version.hpp"

namespace plait {

/// The number types of a matrix product, as far as peaks differ.
enum class product_kind { f32, tf32, bf16 };

constexpr const char* name_of(product_kind kind) {
  return kind == product_kind::bf16 ? "bf16" : kind == product_kind::tf32 ? "tf32" : "float";
}

/// The peak of a GPU for dense matrices in TFLOP/s (10^12 operations in a second), from NVIDIA's data sheets: half of
/// the figures they give "with sparsity".
struct gpu_peak {
  std::string_view model;  ///< a word of the name that CUDA reports
  std::string_view form;   ///< another word that it must have; empty: none
  double bf16 = 0, tf32 = 0, f32 = 0;
};

/// The more special form comes before the general one.
inline constexpr std::array<gpu_peak, 18> gpu_peaks{{
    {"A100", "", 312, 156, 19.5},
    {"A800", "", 312, 156, 19.5},
    {"A30", "", 165, 82, 10.3},
    {"A40", "", 149.7, 74.8, 37.4},
    {"A10", "", 125, 62.5, 31.2},
    {"L4", "", 121, 60, 30.3},
    {"L40", "", 181, 90.5, 90.5},
    {"L40S", "", 362, 183, 91.6},
    {"H100", "PCIe", 756, 378, 51.2},
    {"H100", "NVL", 835, 417.5, 60},
    {"H100", "", 989, 494.7, 66.9},
    {"H800", "PCIe", 756, 378, 51.2},
    {"H800", "", 989, 494.7, 66.9},
    {"H20", "", 148, 74, 44},
    {"H200", "NVL", 835, 417.5, 60},
    {"H200", "", 989, 494.7, 66.9},
    {"GH200", "", 989, 494.7, 66.9},
    {"B200", "", 2250, 1125, 75},
}};

/// The peak in TFLOP/s of the GPU that CUDA calls `name`, such as "NVIDIA H100 80GB HBM3"; 0 where it is not known. A
/// part of a GPU ("MIG 1g.10gb") has no known peak.
constexpr double known_peak_tflops(std::string_view name, product_kind kind) {
  const auto has = [name](std::string_view wanted) {
    for (std::size_t at = name.find(wanted); at != name.npos; at = name.find(wanted, at + 1)) {
      const std::size_t end = at + wanted.size();
      const auto edge = [](char c) { return c == ' ' || c == '-'; };
      if ((at == 0 || edge(name[at - 1])) && (end == name.size() || edge(name[end]))) return true;
    }
    return false;
  };
  if (has("MIG")) return 0;
  for (const gpu_peak& peak : gpu_peaks)
    if (has(peak.model) && (peak.form.empty() || has(peak.form)))
      return kind == product_kind::bf16 ? peak.bf16 : kind == product_kind::tf32 ? peak.tf32 : peak.f32;
  return 0;
}

/// Model flops utilisation (Chowdhery et al. 2022, PaLM, appendix B): the operations that the model needs in a second,
/// over what all devices can do. Recomputed operations are not the model's. 0 where the peak is not known.
constexpr double model_flops_utilisation(double tokens_per_second, double flops_per_token, double tflops_of_a_device,
                                         double devices) {
  const double peak = tflops_of_a_device * 1e12 * devices;
  return peak > 0 ? tokens_per_second * flops_per_token / peak : 0;
}

}  // namespace plait
