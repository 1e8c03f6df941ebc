#include <cupti.h>
#include <cxxabi.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>

#include "kernel_times.hpp"
#include "plait/core/error.hpp"

namespace {

std::mutex mutex;
std::map<std::string, bench::kernel_time> found;
std::size_t lost = 0;

void check(CUptiResult status, const char* doing) {
  if (status == CUPTI_SUCCESS) return;
  const char* text = nullptr;
  cuptiGetResultString(status, &text);
  plait::fail(std::string("CUPTI: ") + (text != nullptr ? text : "error " + std::to_string(status)) + ", " + doing);
}

/// Returns a function's name without return type, template arguments and parameters.
std::string short_name(const char* mangled) {
  int status = 0;
  char* const demangled = abi::__cxa_demangle(mangled, nullptr, nullptr, &status);
  std::string name = status == 0 && demangled != nullptr ? demangled : mangled;
  std::free(demangled);
  int depth = 0;
  std::string flat;
  for (const char c : name) {
    if (c == '<') ++depth;
    if (depth == 0) flat += c;
    if (c == '>') --depth;
  }
  for (std::size_t at; (at = flat.find("(anonymous namespace)::")) != std::string::npos;) flat.erase(at, 23);
  flat = flat.substr(0, flat.find('('));
  return flat.substr(flat.rfind(' ') + 1);
}

void add(const std::string& name, std::uint64_t start, std::uint64_t end) {
  bench::kernel_time& entry = found[name];
  entry.name = name;
  entry.seconds += 1e-9 * static_cast<double>(end - start);
  ++entry.count;
}

void CUPTIAPI give_buffer(std::uint8_t** memory, std::size_t* size, std::size_t* records) {
  *size = std::size_t{8} << 20;
  *memory = static_cast<std::uint8_t*>(std::aligned_alloc(8, *size));
  *records = 0;
}

void CUPTIAPI take_buffer(CUcontext, std::uint32_t, std::uint8_t* memory, std::size_t, std::size_t valid) {
  const std::lock_guard lock(mutex);
  CUpti_Activity* record = nullptr;
  while (cuptiActivityGetNextRecord(memory, valid, &record) == CUPTI_SUCCESS) {
    if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
      const auto* const kernel = reinterpret_cast<const CUpti_ActivityKernel10*>(record);
      add(short_name(kernel->name), kernel->start, kernel->end);
    } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
      const auto* const copy = reinterpret_cast<const CUpti_ActivityMemcpy6*>(record);
      add("copy", copy->start, copy->end);
    } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMSET) {
      const auto* const fill = reinterpret_cast<const CUpti_ActivityMemset4*>(record);
      add("fill", fill->start, fill->end);
    }
  }
  std::size_t dropped = 0;
  cuptiActivityGetNumDroppedRecords(nullptr, 0, &dropped);
  lost += dropped;
  std::free(memory);
}

constexpr CUpti_ActivityKind kinds[] = {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY,
                                        CUPTI_ACTIVITY_KIND_MEMSET};

}  // namespace

bool bench::kernels_can_be_timed() { return true; }

void bench::start_timing_kernels() {
  check(cuptiActivityRegisterCallbacks(give_buffer, take_buffer), "registering");
  for (const CUpti_ActivityKind kind : kinds) check(cuptiActivityEnable(kind), "starting");
}

std::vector<bench::kernel_time> bench::stop_timing_kernels() {
  check(cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED), "reading");
  for (const CUpti_ActivityKind kind : kinds) check(cuptiActivityDisable(kind), "stopping");
  const std::lock_guard lock(mutex);
  if (lost > 0) plait::fail("CUPTI lost " + std::to_string(lost) + " records");
  std::vector<kernel_time> all;
  for (const auto& [name, entry] : found) all.push_back(entry);
  found.clear();
  std::sort(all.begin(), all.end(), [](const kernel_time& a, const kernel_time& b) { return a.seconds > b.seconds; });
  return all;
}
