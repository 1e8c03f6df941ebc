#include "kernel_embedding_reference.hpp"

#include "plait/kernels/cpu/embedding.hpp"

namespace plait::test {

embedded embed_on_cpu(const std::vector<std::int64_t>& ids, const std::vector<double>& table,
                      const std::vector<double>& dy, const std::vector<double>& dtable, const table_part& part) {
  cpu device;
  embedded made{std::vector<double>(dy.size()), dtable};
  const auto tokens = static_cast<std::int64_t>(ids.size());
  kernels::embedding_forward(device, ids.data(), table.data(), made.y.data(), tokens, part.width, part.first, part.rows,
                             part.vocab);
  kernels::embedding_backward(device, ids.data(), dy.data(), made.dtable.data(), tokens, part.width, part.first,
                              part.rows, part.vocab);
  return made;
}

}  // namespace plait::test
