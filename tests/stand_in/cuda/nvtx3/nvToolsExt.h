// A stand-in for NVTX, for tests: the ranges that each thread pushed and popped, in order.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#define NVTX_VERSION 3
#define NVTX_EVENT_ATTRIB_STRUCT_SIZE (static_cast<std::uint16_t>(sizeof(nvtxEventAttributes_t)))
#define NVTX_PAYLOAD_TYPE_UNSIGNED_INT64 1
#define NVTX_MESSAGE_TYPE_ASCII 1

struct nvtxEventAttributes_t {
  std::uint16_t version, size;
  std::uint32_t category;
  std::int32_t colorType;
  std::uint32_t color;
  std::int32_t payloadType, reserved0;
  union {
    std::uint64_t ullValue;
    double dValue;
  } payload;
  std::int32_t messageType;
  union {
    const char* ascii;
    const wchar_t* unicode;
  } message;
};

namespace stand_in {

struct nvtx_range {
  std::string name;
  std::uint64_t payload = 0;
  int depth = 0;  // the number of open ranges around it
  bool open = true;
};

/// The ranges of a thread, in the order of their starts.
struct nvtx_thread {
  std::vector<nvtx_range> ranges;
  std::vector<std::size_t> open;
};
inline nvtx_thread& nvtx() {
  thread_local nvtx_thread mine;
  return mine;
}
inline int nvtx_push(const char* name, std::uint64_t payload) {
  nvtx_thread& t = nvtx();
  if (name == nullptr) std::abort();
  const int depth = static_cast<int>(t.open.size());
  t.open.push_back(t.ranges.size());
  t.ranges.push_back({name, payload, depth});
  return depth;
}

}  // namespace stand_in

inline int nvtxRangePushA(const char* message) { return stand_in::nvtx_push(message, 0); }
inline int nvtxRangePushEx(const nvtxEventAttributes_t* what) {
  if (what->version != NVTX_VERSION || what->size != NVTX_EVENT_ATTRIB_STRUCT_SIZE) return -1;
  if (what->messageType != NVTX_MESSAGE_TYPE_ASCII) return -1;
  const bool number = what->payloadType == NVTX_PAYLOAD_TYPE_UNSIGNED_INT64;
  return stand_in::nvtx_push(what->message.ascii, number ? what->payload.ullValue : 0);
}
inline int nvtxRangePop() {
  stand_in::nvtx_thread& t = stand_in::nvtx();
  if (t.open.empty()) std::abort();  // a pop without its push
  t.ranges[t.open.back()].open = false;
  t.open.pop_back();
  return static_cast<int>(t.open.size());
}
