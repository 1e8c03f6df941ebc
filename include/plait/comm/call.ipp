// The definitions of call.hpp, which includes them unless PLAIT_COMPILED is defined.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "plait/core/compiled.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"

namespace plait {

namespace detail {

PLAIT_INLINE void check_peer(const char* what, const char* role, int peer, int size) {
  if (peer < 0 || peer >= size) fail({what, ": ", role, " is ", peer, "; the group has ranks 0 to ", size - 1});
}

PLAIT_INLINE void check_pointer(const char* what, const void* data, std::size_t bytes) {
  if (data == nullptr && bytes != 0) fail({what, ": a null pointer for ", bytes, " bytes"});
}

PLAIT_INLINE void check_buffers(const char* what, const void* in, std::size_t in_bytes, const void* out,
                                std::size_t out_bytes, std::size_t place, bool may_alias) {
  check_pointer(what, in, in_bytes);
  check_pointer(what, out, out_bytes);
  if (in_bytes == 0 || out_bytes == 0) return;
  const auto a = reinterpret_cast<std::uintptr_t>(in), b = reinterpret_cast<std::uintptr_t>(out);
  if (a + in_bytes <= b || b + out_bytes <= a) return;
  if (may_alias && (in_bytes <= out_bytes ? a == b + place : b == a + place)) return;
  fail({what, ": in and out overlap",
        may_alias ? " and are not in place (the smaller buffer at its rank's own place in the larger)" : "",
        "; use separate buffers"});
}

PLAIT_INLINE void check_parts(const call& c) {
  const char* const what = c.name();
  const std::size_t size = size_of(c.type);
  check_pointer(what, c.in, call::sum(c.send_counts) * size);
  check_pointer(what, c.out, call::sum(c.receive_counts) * size);
  struct part {
    std::uintptr_t begin, end;
    bool received;
  };
  std::vector<part> parts;
  parts.reserve(2 * c.send_counts.size());
  const auto add = [&](const void* buffer, call::counts counts, call::counts offsets, bool received) {
    const auto base = reinterpret_cast<std::uintptr_t>(buffer);
    for (std::size_t k = 0; k < counts.size(); ++k)
      if (counts[k] != 0) parts.push_back({base + offsets[k] * size, base + (offsets[k] + counts[k]) * size, received});
  };
  add(c.in, c.send_counts, c.send_offsets, false);
  add(c.out, c.receive_counts, c.receive_offsets, true);
  std::sort(parts.begin(), parts.end(), [](const part& a, const part& b) { return a.begin < b.begin; });
  std::uintptr_t sent = 0, received = 0;  // the ends of what begins before
  for (const part& p : parts) {
    if (p.begin < received || (p.received && p.begin < sent))
      fail({what, p.received && p.begin < received ? ": parts that are received overlap" : ": in and out overlap",
            "; each part that is received needs a place of its own"});
    (p.received ? received : sent) = std::max(p.received ? received : sent, p.end);
  }
}

}  // namespace detail

PLAIT_INLINE void check(const call& c, int rank, int ranks) {
  const char* const what = c.name();
  const std::size_t n = static_cast<std::size_t>(ranks), part = c.count * size_of(c.type);
  const std::size_t place = part * static_cast<std::size_t>(rank);
  if ((c.kind == collective::all_reduce || c.kind == collective::reduce_scatter) && !reducible(c.type))
    fail({what, ": dtype is ", name_of(c.type), "; reductions exist for float, double, bf16, int32, int64"});
  switch (c.kind) {
    case collective::all_reduce:
      return detail::check_buffers(what, c.in, part, c.out, part, 0, true);
    case collective::all_gather:
      return detail::check_buffers(what, c.in, part, c.out, part * n, place, true);
    case collective::reduce_scatter:
      return detail::check_buffers(what, c.in, part * n, c.out, part, place, true);
    case collective::all_to_all:
      if (!c.ragged) return detail::check_buffers(what, c.in, part * n, c.out, part * n, 0, ranks == 1);
      for (const call::counts& list : {c.send_counts, c.send_offsets, c.receive_counts, c.receive_offsets})
        if (list.size() != n)
          fail({what, ": counts and offsets need one entry for each of the ", ranks, " ranks of the group"});
      return detail::check_parts(c);
    case collective::broadcast:
      detail::check_peer(what, "root", c.peer, ranks);
      return detail::check_pointer(what, c.out, part);
    case collective::send:
      detail::check_peer(what, "peer", c.peer, ranks);
      return detail::check_pointer(what, c.in, part);
    case collective::receive:
      detail::check_peer(what, "peer", c.peer, ranks);
      return detail::check_pointer(what, c.out, part);
    case collective::barrier:
      return;
  }
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
