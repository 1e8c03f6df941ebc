// timeout: 300
// program: gpt2
// GPT-2, a model defined in examples/, equals one rank in double on meshes of dp x cp x tp.
#include <doctest/doctest.h>

#include "support/gpt2_parity.hpp"

using namespace plait;
using namespace plait::test;

namespace {

template <strategy S>
void check(language_model_options options = {}) {
  const gpt2::config c = tiny_gpt2(2);
  const auto shape = [](std::int64_t d, std::int64_t k, std::int64_t t) {
    return typename S::mesh{d, k, t, 1}.shape();
  };
  CHECK(check_model(shape(1, 1, 1),
                    {shape(1, 1, 1), shape(4, 1, 1), shape(1, 2, 1), shape(1, 1, 4), shape(2, 2, 2), shape(2, 2, 4)},
                    gpt2_setup<S>(c), make_gpt2<S>(c, options))
            .text() == "");
}

}  // namespace

TEST_CASE("tensor and sequence parallelism, ring attention") {
  check<megatron_sp>();
  check<megatron_sp>({.keep = recompute::full});
}
