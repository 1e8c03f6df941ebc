// The options of NCCL's communicators: deadlines, checks, and how much of the GPU collectives take. Every communicator
// of a rank, those of axes too, is made with them.
#pragma once

#include <cstddef>
#include <string>
#include <utility>

#include "plait/comm/nccl/types.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"

namespace plait::nccl {

struct options {
  double deadline = 600;  ///< seconds until an operation that has not finished ends all ranks; 0 waits for ever
  /// Seconds for NCCL to abort what has failed, and for ranks to destroy graphs that hold its calls, which NCCL waits
  /// for; after that the process ends. 0: no limit.
  double grace = 60;
  bool check_pointers = false;  ///< ask CUDA whether every buffer is device memory (about 1 us each)
  /// Least and most thread blocks of a collective; each occupies a multiprocessor while products run
  /// beside it; 0: NCCL chooses. (NCCL_MIN_CTAS and NCCL_MAX_CTAS say the same for a whole process.)
  int min_ctas = 0, max_ctas = 0;
  /// Bytes of a rank's memory that NCCL allocates and registers with all communicators of the rank (NCCL 2.27). What
  /// lies there moves without copies through NCCL's buffers. The device serves from it what
  /// collectives read and write: parameters and their gradients as layers use them, the parts that travel, and what
  /// redistributions need in between, but not activations. Too few bytes are an error that says how many are in use; 0:
  /// nothing is registered. The same on all ranks. Ranks may use different parts of it (NCCL_WIN_DEFAULT), so NCCL's
  /// symmetric kernels stay off: those are for `communication_memory`.
  std::size_t registered_bytes = 0;
  /// Whether a mesh's communicators share NCCL's buffers and channels with the first one (NCCL 2.18; a communicator of
  /// the caller's must have been made with `splitShare`). A world has one for each set of axes that its model asks for,
  /// and they take less memory and time so. In return, operations of communicators that share run one after the other:
  /// a message that comes late holds up the collectives of all of them, so leave it off for pipelines and for overlap.
  bool split_share = false;
};

namespace detail {

/// The configuration of a communicator that does not block: a rank that never comes must not hold the others inside
/// NCCL. Throws where `settings` name no number of thread blocks that NCCL knows.
inline ncclConfig_t config_of(const options& settings, [[maybe_unused]] const std::string& label) {
  constexpr int most = 64;  // NCCL's MAXCHANNELS
  for (const auto& [field, ctas] : {std::pair{"min_ctas", settings.min_ctas}, std::pair{"max_ctas", settings.max_ctas}})
    if (ctas < 0 || ctas > most) fail({"nccl::options::", field, " is ", ctas, ", must be 0 (NCCL chooses) to ", most});
  if (settings.max_ctas > 0 && settings.min_ctas > settings.max_ctas)
    fail({"nccl::options::min_ctas is ", settings.min_ctas, ", more than max_ctas, ", settings.max_ctas});
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
  config.commName = label.c_str();
#endif
  if (settings.min_ctas > 0) config.minCTAs = settings.min_ctas;
  if (settings.max_ctas > 0) config.maxCTAs = settings.max_ctas;
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 18, 0)
  if (settings.split_share) config.splitShare = 1;
#else
  if (settings.split_share)
    fail({"nccl::options::split_share needs NCCL 2.18 or later; this program is compiled with ", NCCL_MAJOR, ".",
          NCCL_MINOR});
#endif
  return config;
}

}  // namespace detail
}  // namespace plait::nccl

#include "plait/core/macros_on.hpp"
