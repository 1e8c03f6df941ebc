#pragma once

#include <cstdint>
#include <vector>

namespace plait::test {

/// Which part of a table [vocab, width] a rank holds.
struct table_part {
  std::int64_t width, first, rows, vocab;
};

/// The processor's rows of the tokens, and `dtable` with their gradients added.
struct embedded {
  std::vector<double> y, dtable;
};
embedded embed_on_cpu(const std::vector<std::int64_t>& ids, const std::vector<double>& table,
                      const std::vector<double>& dy, const std::vector<double>& dtable, const table_part& part);

}  // namespace plait::test
