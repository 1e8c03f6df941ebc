#pragma once

#include <vector>

#include "support/attention_pieces.hpp"

namespace plait::test {

/// What attention makes, in double: whole arrays, of which a piece's tokens are a part.
struct attention_arrays {
  std::vector<double> o, lse, dq, dk, dv;
};

/// The processor's attention and its gradients. `start` holds what the arrays hold before.
attention_arrays attention_on_cpu(const attention_piece& piece, const std::vector<double>& q,
                                  const std::vector<double>& k, const std::vector<double>& v,
                                  const std::vector<double>& d_o, const attention_arrays& start);

}  // namespace plait::test
