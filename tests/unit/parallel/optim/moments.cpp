// program: training_step
// AdamW with moments in bf16 and in 8 bits: the same bits on every number of data ranks, the bytes of the moments, and
// the cuts that are refused.
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "support/equal_gradients.hpp"
#include "support/on_mesh.hpp"
#include "support/texts.hpp"

using namespace plait;
using namespace plait::test;

namespace {

constexpr zero_level cutting_levels[] = {zero_level::optimizer, zero_level::gradients, zero_level::parameters};

adamw_options with(moment_type moments) {
  adamw_options o;
  o.moments = moments;
  return o;
}

template <class Precision = float>
std::string refusal_of(const made_run& how, const optimizer_options& options) {
  return text_thrown_by([&] { run_made_gradients<Precision>(how, options); });
}

}  // namespace

TEST_CASE("moments are rounded alike on every number of data ranks and at every level") {
  for (const moment_type moments : {moment_type::bf16, moment_type::int8}) {
    const made_outcome one = run_made_gradients<float>({}, with(moments));
    for (const std::int64_t ranks : {2, 4}) {
      CHECK(equal_bits(run_made_gradients<float>({.dp = ranks}, with(moments)), one));
      const bucket_cut cuts[] = {bucket_cut::blocks(256), bucket_cut::whole, bucket_cut::blocks(1024)};
      for (std::size_t i = 0; i < 3; ++i) {
        const zero_level level = cutting_levels[i];
        const bucket_cut cut = cuts[(i + static_cast<std::size_t>(ranks)) % 3];
        CAPTURE(name_of(moments));
        CAPTURE(ranks);
        CAPTURE(static_cast<int>(level));
        CAPTURE(cut.block());
        CHECK(equal_bits(run_made_gradients<float>({.dp = ranks, .level = level, .cut = cut}, with(moments)), one));
      }
    }
    if (moments != moment_type::int8)  // blocks of codes belong to the part that a tensor rank stores
      CHECK(equal_bits(run_made_gradients<float>({.dp = 2, .tp = 2}, with(moments)), one));
    CHECK(!equal_bits(run_made_gradients<float>({}, with(moment_type::full)), one));
  }
}

TEST_CASE("values without masters are rounded alike on every mesh") {
  for (const moment_type moments : {moment_type::full, moment_type::bf16, moment_type::int8}) {
    CAPTURE(name_of(moments));
    const made_outcome one = run_made_gradients<bf16_no_masters>({}, with(moments));
    for (const std::int64_t ranks : {2, 4})
      for (const zero_level level : cutting_levels) {
        CAPTURE(ranks);
        CAPTURE(static_cast<int>(level));
        const made_run cut{.dp = ranks, .level = level, .cut = bucket_cut::blocks(256)};
        CHECK(equal_bits(run_made_gradients<bf16_no_masters>(cut, with(moments)), one));
      }
    CHECK(equal_bits(run_made_gradients<bf16_no_masters>({.dp = 2}, with(moments)), one));
    if (moments == moment_type::int8) continue;  // its blocks belong to the part that a tensor rank stores
    CHECK(equal_bits(run_made_gradients<bf16_no_masters>({.tp = 2}, with(moments)), one));
    CHECK(equal_bits(run_made_gradients<bf16_no_masters>({.tp = 4}, with(moments)), one));
    CHECK(equal_bits(
        run_made_gradients<bf16_no_masters>({.dp = 2, .tp = 2, .level = zero_level::parameters}, with(moments)), one));
  }
  CHECK(has(refusal_of<bf16_no_masters>({}, muon_options{}),
            "muon: this precision has no master weights; legal are float, double and bf16, and with this one adamw"));
}

TEST_CASE("Muon's momenta in bf16 are rounded alike on every number of data ranks, and take half the bytes") {
  const muon_options narrow{.adamw = with(moment_type::bf16)};
  const made_outcome one = run_made_gradients<float>({}, narrow), full = run_made_gradients<float>({}, muon_options{});
  CHECK(!equal_bits(one, full));
  CHECK(2 * one.state_predicted == full.state_predicted);
  CHECK(one.state_bytes < full.state_bytes);
  for (const std::int64_t ranks : {2, 4}) {
    CHECK(equal_bits(run_made_gradients<float>({.dp = ranks}, narrow), one));
    for (const zero_level level : cutting_levels)
      CHECK(
          equal_bits(run_made_gradients<float>({.dp = ranks, .level = level, .cut = bucket_cut::whole}, narrow), one));
  }
  // Near the full ones: rounding changes a momentum by at most 2^-7 of itself, and a direction little.
  double squares = 0, difference = 0;
  for (std::size_t i = 0; i < one.values.size(); ++i)
    for (std::size_t k = 0; k < one.values[i].values.size(); ++k) {
      squares += std::pow(full.values[i].values[k], 2);
      difference += std::pow(one.values[i].values[k] - full.values[i].values[k], 2);
    }
  CHECK(std::sqrt(difference / squares) < 1e-2);
}

TEST_CASE("moments take the documented bytes: 8 of an element, 4, or 2 and 2 of each block") {
  made_run how;
  how.config.hidden = 96, how.config.ffn = 256;
  const auto bytes_of = [&](moment_type moments) {
    const made_outcome out = run_made_gradients<float>(how, with(moments));
    CHECK(out.state_bytes - sizeof(kernels::adamw_scalars) <= out.state_predicted + 64 * out.values.size());
    return static_cast<double>(out.state_predicted);
  };
  const double full = bytes_of(moment_type::full), half = bytes_of(moment_type::bf16),
               codes = bytes_of(moment_type::int8);
  double elements = 0;
  for (const named_values& v : run_made_gradients<float>(how, with(moment_type::full)).values)
    elements += static_cast<double>(v.values.size());
  CHECK(full >= 8 * elements);
  CHECK(full < 8.5 * elements);  // the vocabulary has padding
  CHECK(half == full / 2);
  CHECK(codes / full > 0.25);
  CHECK(codes / full < 0.253);
}

TEST_CASE("8-bit moments have no order for deterministic sums, so they are refused") {
  std::string found;
  const auto refused = [&](const context<cpu>& ctx) {
    using square_rows = spec<shard<batch, dp>, seq, hidden>;
    struct square {
      using input = square_rows;
      using weight = spec<ffn, hidden>;
      using output = spec<shard<batch, dp>, seq, ffn>;
    };
    linear<float, square> layer(ctx, "layer");
    adamw<float> optimizer(with(moment_type::int8));
    found = text_thrown_by([&] { layer.visit([&](auto& p) { optimizer.prepare(ctx, p); }); });
  };
  on_mesh(mesh<axis<dp>>(1), sizes_of<batch, seq, hidden, ffn>(2, 4, 8, 8), 1, refused, deterministic<2, 2>{});
  CHECK(found.find("adamw: deterministic sums have no order for moments = int8") == 0);
}

TEST_CASE("8-bit moments refuse a cut within blocks, and Muon refuses 8-bit momenta") {
  const made_run even{.dp = 2, .level = zero_level::optimizer};
  CHECK(has(refusal_of(even, with(moment_type::int8)),
            "adamw: moments = int8 have a scale for each 256 elements, and data parallelism cuts "
            "model.embed_tokens.weight at any multiple of 128; legal cuts are bucket_cut::blocks(n), n a multiple of "
            "256, and bucket_cut::whole, and legal moments with this one full and bf16"));
  CHECK(has(
      refusal_of({.dp = 2, .level = zero_level::parameters, .cut = bucket_cut::blocks(384)}, with(moment_type::int8)),
      "at any multiple of 384"));
  CHECK(refusal_of(even, with(moment_type::bf16)).empty());
  CHECK(has(refusal_of({}, muon_options{.adamw = with(moment_type::int8)}),
            "muon: adamw.moments = int8, must be full or bf16"));
  CHECK(has(refusal_of({}, with(static_cast<moment_type>(9))), "adamw: moments = 9, must be full, bf16 or int8"));
  for (const std::int64_t n : {0, -128, 100, 65664}) {
    CAPTURE(n);
    CHECK_THROWS_AS(bucket_cut::blocks(n), error);
  }
  CHECK(has(refusal_of({.dp = 2, .cut = bucket_cut::blocks(256)}, with(moment_type::int8)),
            "data parallelism: bucket_cut::blocks cuts nothing at zero_level::replicated; legal is even"));
}
