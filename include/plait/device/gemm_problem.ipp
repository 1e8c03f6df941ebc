// The definitions of gemm_problem.hpp, which includes them unless they are compiled apart (core/compiled.hpp).
#pragma once

#include <cstdint>
#include <string>

#include "plait/core/compiled.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/text.hpp"

namespace plait {

PLAIT_INLINE std::string gemm_problem::text() const {
  return cat({"gemm(trans_a=", int{trans_a}, ", trans_b=", int{trans_b}, ", m=", m, ", n=", n, ", k=", k, ", lda=", lda,
              ", ldb=", ldb, ", ldc=", ldc, ")"});
}

PLAIT_INLINE void gemm_problem::check() const {
  const auto at_least = [&](const char* name, std::int64_t value, std::int64_t least) {
    if (value < least) {
      fail({text(), ": ", name, " must be at least ", least, ", the length of a stored row"});
    }
  };
  if (m < 0 || n < 0 || k < 0) fail({text(), ": m, n and k must not be negative"});
  at_least("lda", lda, trans_a ? m : k);
  at_least("ldb", ldb, trans_b ? k : n);
  at_least("ldc", ldc, n);
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
