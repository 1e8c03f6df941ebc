// program: data_parallel
// Gradients reduced over data ranks in bf16: half the bytes. Results are equal on every number of ranks if one rank has
// the whole sum, and near those of gradients reduced in float.
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "support/equal_gradients.hpp"
#include "support/on_mesh.hpp"

using namespace plait;
using namespace plait::test;

namespace {

made_run over(std::int64_t ranks, zero_level level, gradient_wire wire) {
  made_run how{.dp = ranks, .level = level, .wire = wire};
  how.steps = 2;
  return how;
}

}  // namespace

TEST_CASE("gradients reduced in bf16 take half the bytes, and are rounded once") {
  const made_outcome two = run_made_gradients<float>(over(2, zero_level::replicated, gradient_wire::bf16), {});
  CHECK(!equal_bits(two, run_made_gradients<float>(over(2, zero_level::replicated, gradient_wire::full), {})));
  for (const std::int64_t ranks : {2, 4})
    for (const zero_level level : all_levels) {
      CAPTURE(ranks);
      CAPTURE(static_cast<int>(level));
      const made_outcome half = run_made_gradients<float>(over(ranks, level, gradient_wire::bf16), {});
      const made_outcome full = run_made_gradients<float>(over(ranks, level, gradient_wire::full), {});
      CHECK(equal_bits(half, two));
      CHECK(half.reduced_bytes > 0);
      CHECK(2 * half.reduced_bytes == full.reduced_bytes);
    }
}

TEST_CASE("a hybrid's copies are summed in bf16 too") {
  const made_outcome two = run_made_gradients<float>(over(2, zero_level::replicated, gradient_wire::bf16), {});
  for (const zero_level level : {zero_level::optimizer, zero_level::gradients}) {
    made_run how = over(2, level, gradient_wire::bf16);
    how.cp = 2;
    how.axes = {axis_list(axis_of<dp>), axis_list(axis_of<cp>)};
    CHECK(equal_bits(run_made_gradients<float>(how, {}), two));
  }
}

TEST_CASE("training with gradients reduced in bf16 is near the one in float") {
  scenario s{small_config(8, 4)};
  s.batch = 8, s.microbatches = 2, s.steps = 3;
  for (const zero_level level : {zero_level::replicated, zero_level::gradients}) {
    s.parallel.parallel.level = level;
    s.parallel.wire = gradient_wire::full;
    const model_outcome full = std::move(train_mesh<float, megatron_sp>(s, 4, 1)[0]);
    s.parallel.wire = gradient_wire::bf16;
    const model_outcome half = std::move(train_mesh<float, megatron_sp>(s, 4, 1)[0]);
    // Four terms and a sum, each rounded by at most 2^-9 of itself.
    check_tensors(half.first_gradients, full.first_gradients, 0x1p-8, "gradient of the first step");
    CHECK(std::abs(half.steps[0].gradient_norm - full.steps[0].gradient_norm) < 0x1p-9 * full.steps[0].gradient_norm);
    CHECK(half.steps[0].gradient_norm != full.steps[0].gradient_norm);
    CHECK(std::abs(half.steps[2].loss - full.steps[2].loss) < 1e-3 * full.steps[2].loss);
  }
}

TEST_CASE("a gradient in the caller's memory is not reduced in bf16") {
  const megatron_sp::mesh mesh{2, 1, 1, 1};
  const dim_sizes sizes = llama_sizes<megatron_sp>(small_config(8, 4), mesh.shape(), 8, 16);
  const std::string text = error_on_mesh(mesh, sizes, 1, [](const context<cpu>& ctx) {
    std::vector<float> weight(64), gradient(64);
    rms_norm<float, typename transformer_specs<megatron_sp>::residual> norm{ctx, 1e-5, "norm", weight.data(),
                                                                            gradient.data()};
    parameter_units<float, cpu> units(ctx, zero_level::replicated, {}, bucket_cut::even, gradient_wire::bf16);
    units.add(ctx, 0, [&](auto&& f) { norm.visit(f); });
  });
  CHECK(has(text,
            "gradient_wire::bf16 is for gradients that are reduced side by side, and the parameter norm.weight "
            "lies in the caller's memory; use gradient_wire::full"));
}

TEST_CASE("gradients in bf16 are reduced in float on request, with twice the bytes") {
  using precision_type = bf16_gradients_float_masters;
  for (const zero_level level : all_levels) {
    CAPTURE(static_cast<int>(level));
    const made_outcome narrow = run_made_gradients<precision_type>(over(2, level, gradient_wire::full), {});
    const made_outcome wide = run_made_gradients<precision_type>(over(2, level, gradient_wire::f32), {});
    CHECK(equal_bits(narrow, wide));  // a made sum has one term, which float represents exactly
    CHECK(narrow.reduced_bytes > 0);
    CHECK(wide.reduced_bytes == 2 * narrow.reduced_bytes);
  }
}

TEST_CASE("gradients in bf16 that are reduced in float are rounded once, for any groups of ranks") {
  const auto run = [](made_run how) {
    how.every_rank = true;
    return run_made_gradients<bf16_gradients_float_masters>(how, {});
  };
  made_run hybrid = over(2, zero_level::gradients, gradient_wire::f32);
  hybrid.cp = 2;
  hybrid.axes = {axis_list(axis_of<dp>), axis_list(axis_of<cp>)};
  const made_outcome once = run(over(4, zero_level::replicated, gradient_wire::f32));
  CHECK(equal_bits(run(hybrid), once));
  hybrid.wire = gradient_wire::full;  // rounded by the pair that shares pieces, and by its copies
  CHECK(!equal_bits(run(hybrid), once));
}

TEST_CASE("only gradients in float are reduced in bf16, and only those in bf16 in a wider type") {
  CHECK(has(text_thrown_by([] { run_made_gradients<double>(over(2, zero_level::optimizer, gradient_wire::bf16), {}); }),
            "gradient_wire::bf16 is for gradients in float, and here they are in double; legal is full"));
  CHECK(has(text_thrown_by([] { run_made_gradients<float>(over(2, zero_level::optimizer, gradient_wire::f32), {}); }),
            "gradient_wire::f32 is for gradients in bf16, and here they are in float; legal are full and bf16"));
  CHECK(has(text_thrown_by(
                [] { run_made_gradients<bf16_gradients>(over(2, zero_level::optimizer, gradient_wire::bf16), {}); }),
            "gradient_wire::bf16 is for gradients in float, and here they are in bf16; legal are full and f32"));
}
