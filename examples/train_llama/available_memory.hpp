#pragma once

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <string>

/// Returns the number behind `key` in a file of lines such as "MemFree: 12 kB"; nothing where the file lacks it.
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

/// Returns the bytes that the limit of one control group leaves: infinity where the folder names no limit. Pages of
/// files do not count as used, as the kernel drops them first. `total` begins the names of version 1.
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

/// Returns the bytes of this host's memory that programs can still take, free swap included: what the kernel calls
/// available, or less where a control group of this process, or one around it, has a limit. Nothing where the system
/// does not say. `root` is the folder that holds proc and sys.
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
    // In a container the path may be that of the host; then the top is the container's own group.
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
