// A fault that a kernel on a GPU found in its data, and its text. Errors of CUDA's own calls are in
// device/cuda_check.hpp.
#pragma once

#include <string>

#include "plait/core/text.hpp"

namespace plait {

/// An error that a kernel found and could not throw: the first such thing since the last synchronisation. Lies in
/// device memory.
struct device_fault {
  static constexpr int none = 0, embedding_id = 1, cross_entropy_target = 2;

  int code = none;
  int row = 0;
  long long value = 0;
  long long limit = 0;  ///< legal values are 0 to limit - 1
};

/// Returns the text of the error, in the words of the CPU's kernel.
inline std::string text_of(const device_fault& fault) {
  const std::string row = std::to_string(fault.row), value = std::to_string(fault.value);
  const std::string last = std::to_string(fault.limit - 1);
  switch (fault.code) {
    case device_fault::embedding_id:
      return cat({"embedding: token ", row, " has id ", value, ", legal are 0 to ", last});
    case device_fault::cross_entropy_target:
      return cat({"cross_entropy: row ", row, " has target ", value, ", legal are 0 to ", last, " and ignore_index"});
    default:
      return cat({"a kernel reported an unknown fault, code ", fault.code});
  }
}

}  // namespace plait
