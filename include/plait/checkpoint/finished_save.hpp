// The outcome of a save of a training state.
#pragma once

#include <cstdint>
#include <string>

#include "plait/version.hpp"

namespace plait {

/// A save that has come to its end.
struct finished_save {
  std::uint64_t step = 0;
  std::string failure{};    ///< empty: the step is committed
  std::uint64_t bytes = 0;  ///< that this rank has written
  double stall = 0;         ///< seconds from the call of `save` until the rank's state was copied
  double background = 0;    ///< seconds from then until the step was committed, on rank 0; else until its file was
  std::string warning{};    ///< such as that LATEST could not be written, or why nothing old was removed; on rank 0
  std::string damage{};     ///< what was wrong with the committed step, where it was read again; on rank 0
};

}  // namespace plait
