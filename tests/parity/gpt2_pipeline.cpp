// timeout: 300
// program: gpt2
// GPT-2 as a pipeline equals one rank in double. Its embedding is tied to the head in another stage or another chunk.
#include <doctest/doctest.h>

#include "plait/schedule/generators.hpp"
#include "support/gpt2_parity.hpp"

using namespace plait;
using namespace plait::test;

namespace {

mesh_shape pipeline_shape_of(std::int64_t d, std::int64_t p, std::int64_t k, std::int64_t t) {
  return mesh<axis<dp>, axis<pp>, axis<cp>, axis<tp>, axis<tp_rep>>{d, p, k, t, 1}.shape();
}

template <class Policy>
void check(const gpt2::config& c, std::initializer_list<mesh_shape> meshes, language_model_options options = {}) {
  using S = megatron_sp;
  const model_setup how = gpt2_setup<S>(c, 4);
  auto make = make_gpt2<S>(c, options);
  findings found;
  const model_outcome one = train_alone(S::mesh{1, 1, 1, 1}.shape(), how, make, found);
  for (const mesh_shape& m : meshes) {
    const schedule plan = make_schedule<Policy>(static_cast<int>(m.extent(axis_of<pp>)), 4);
    found.add(check_model_on(m, how, one, make, &plan), "pipeline");
  }
  CHECK(found.text() == "");
}

}  // namespace

TEST_CASE("1F1B: the table and its copy are on two ranks") {
  const auto meshes = {pipeline_shape_of(1, 2, 1, 1), pipeline_shape_of(1, 4, 1, 2), pipeline_shape_of(2, 2, 2, 2)};
  check<one_f_one_b>(tiny_gpt2(5), meshes);
  check<one_f_one_b>(tiny_gpt2(5), meshes, {.keep = recompute::full});
}

TEST_CASE("ZB-V: one rank has both ends of the pipeline, and weight gradients are deferred") {
  const auto meshes = {pipeline_shape_of(1, 2, 1, 1), pipeline_shape_of(2, 2, 1, 2), pipeline_shape_of(1, 4, 2, 2)};
  check<zb_v>(tiny_gpt2(9), meshes);
  check<zb_v>(tiny_gpt2(9), meshes, {.keep = recompute::full});
}
