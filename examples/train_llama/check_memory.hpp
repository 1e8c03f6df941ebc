#pragma once

#include <cstdint>
#include <string>

#include "options.hpp"

/// The bytes that ranks hold at least, on their GPUs, where they have some, and in the memory of their host.
struct least_bytes {
  double gpu = 0, host = 0;
};

/// Returns what one rank holds at least, by the plan of the run.
least_bytes least_bytes_of(const setup& s, std::int64_t rank);
/// Returns what all ranks of the mesh hold together.
least_bytes least_bytes_of_all(const setup& s);

/// Returns why the run cannot start, or nothing: it needs `bytes` of `memory`, such as "this host's memory", more than
/// --memory-share of what is available.
std::string memory_fault(const setup& s, double bytes, double available, const std::string& memory);
/// The same of this host's memory.
std::string host_memory_fault(const setup& s, double bytes);
