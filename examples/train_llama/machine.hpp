// The memory of this machine, and the peaks of GPUs.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>

#include "plait/version.hpp"

namespace plait {

/// The number types of a matrix product for which peaks differ.
enum class product_kind { f32, tf32, bf16 };

constexpr const char* name_of(product_kind kind) {
  return kind == product_kind::bf16 ? "bf16" : kind == product_kind::tf32 ? "tf32" : "float";
}

/// The peak of a GPU for dense matrices in TFLOP/s (10^12 operations in a second), from NVIDIA's data sheets: half of
/// the figures they give "with sparsity".
struct gpu_peak {
  std::string_view model;  ///< a word of the name that CUDA reports
  std::string_view form;   ///< another word that the name must have; empty: none
  double bf16 = 0, tf32 = 0, f32 = 0;
};

/// Special forms of a model come before its general form.
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

/// Returns the peak in TFLOP/s of the GPU that CUDA calls `name`, such as "NVIDIA H100 80GB HBM3"; 0 if it is not
/// known. A part of a GPU ("MIG 1g.10gb") has no known peak.
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

/// Returns the model flops utilisation (Chowdhery et al. 2022, PaLM, appendix B): the model's operations in a second
/// over the peak of all devices. Recomputed operations do not count. 0 if the peak is not known.
constexpr double model_flops_utilisation(double tokens_per_second, double flops_per_token, double tflops_of_a_device,
                                         double devices) {
  const double peak = tflops_of_a_device * 1e12 * devices;
  return peak > 0 ? tokens_per_second * flops_per_token / peak : 0;
}

}  // namespace plait

/// Returns the number after `key` in a file of lines such as "MemFree: 12 kB"; nothing if the file lacks it.
inline std::optional<double> number_in(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string name;
    double value = 0;
    if (words >> name >> value && name == key) return value;
  }
  return {};
}

/// Returns the bytes that the limit of one control group leaves; infinity if the folder has no limit. Cached pages of
/// files do not count as used, because the kernel drops them first. `total` is the prefix of names in version 1.
inline double left_by_group(const std::string& folder, const char* limit_file, const char* usage_file,
                            const std::string& total) {
  constexpr double unlimited = std::numeric_limits<double>::infinity();
  double limit = 0, used = 0;
  if (!(std::ifstream(folder + limit_file) >> limit)) return unlimited;  // "max", or there is no file
  if (!(std::ifstream(folder + usage_file) >> used)) return unlimited;
  for (const char* kind : {"active_file", "inactive_file"})
    used -= number_in(folder + "/memory.stat", total + kind).value_or(0);
  return std::max(0.0, limit - std::max(0.0, used));
}

/// Returns the bytes of host memory that programs can still take, including free swap. It is the kernel's "available"
/// memory, or less if a control group of this process, or a parent group, has a limit. Returns nothing if the system
/// has no such numbers. `root` is the folder that has proc and sys.
inline std::optional<double> available_memory(const std::string& root = "") {
  const std::optional<double> available = number_in(root + "/proc/meminfo", "MemAvailable:");
  if (!available) return {};
  double left = 1024 * *available;
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {  // number:controllers:path
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == line.npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (!controllers.empty() && controllers != "memory") continue;
    const std::string top = root + (controllers.empty() ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory");
    // In a container the path may be that of the host. Then the top folder is the container's own group.
    for (std::filesystem::path path = line.substr(second + 1);; path = path.parent_path()) {
      const std::string folder = top + (path == "/" ? "" : path.string());
      left = std::min(left, controllers.empty()
                                ? left_by_group(folder, "/memory.max", "/memory.current", "")
                                : left_by_group(folder, "/memory.limit_in_bytes", "/memory.usage_in_bytes", "total_"));
      if (path == path.parent_path()) break;
    }
  }
  return left + 1024 * number_in(root + "/proc/meminfo", "SwapFree:").value_or(0);
}
