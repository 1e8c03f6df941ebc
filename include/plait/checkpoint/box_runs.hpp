// The runs of elements that a rank's part of a tensor and the whole tensor, as it lies in a file, have in common.
// Nothing is read or written here: checkpoint/load_weights.hpp and write_weights.hpp do.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "plait/core/box.hpp"
#include "plait/nn/parameter/home.hpp"

namespace plait::detail {

/// Calls f(global index, local index, count) for each run of `part` that is contiguous in the global row-major tensor.
template <class F>
void each_run(const box& part, F&& f) {
  std::int64_t run = 1, rows = 1, stride = 1;
  int outer = part.dims;  // dims from here on are one run
  while (outer > 0) {
    const auto d = static_cast<std::size_t>(--outer);
    run *= part.local[d];
    if (part.local[d] != part.global[d]) break;
  }
  for (int d = 0; d < outer; ++d) rows *= part.local[static_cast<std::size_t>(d)];
  for (std::int64_t row = 0; row < rows; ++row) {
    std::int64_t rest = row, at = 0;
    stride = 1;
    for (std::size_t d = static_cast<std::size_t>(part.dims); d-- > 0;) {
      std::int64_t index = part.offset[d];
      if (static_cast<int>(d) < outer) index += rest % part.local[d], rest /= part.local[d];
      at += index * stride;
      stride *= part.global[d];
    }
    f(at, row * run, run);
  }
}

/// As `each_run`, for those elements of the part that are in `piece` and have a global index below `logical`, which is
/// where the padding of the leading dim begins.
template <class F>
void each_run_of(const box& part, const parameter_piece& piece, std::int64_t logical, F&& f) {
  each_run(part, [&](std::int64_t from, std::int64_t to, std::int64_t count) {
    const std::int64_t begin = std::max(to, piece.begin);
    const std::int64_t end = std::min({to + count, piece.end, to + logical - from});
    if (begin < end) f(from + begin - to, begin, end - begin);
  });
}

}  // namespace plait::detail
