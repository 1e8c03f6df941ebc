// The runs of elements that a rank's part of a tensor and the whole tensor, as it lies in a file, have in common.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "plait/checkpoint/boxes.hpp"
#include "plait/core/box.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/nn/parameter/array.hpp"

namespace plait::detail {

/// Calls f(global index, local index, count) for each run of `part` that is contiguous in the global row-major tensor.
template <class F>
void each_run(const box& part, F&& f) {
  box whole = part;
  whole.offset = {};
  whole.local = part.global;
  each_common_run(part, whole, part, std::forward<F>(f));
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

#include "plait/core/macros_on.hpp"
