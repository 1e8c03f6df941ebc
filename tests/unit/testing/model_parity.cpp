// program: stages
// The kit that compares models with one rank finds the faults in models that are wrong on purpose.
#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "plait/nn/linear.hpp"
#include "plait/schedule/generators.hpp"
#include "plait/testing/layer_parity.hpp"
#include "support/gpt2_parity.hpp"
#include "support/temp_folder.hpp"

using namespace plait;
using namespace plait::test;

namespace {

struct idle : axis_tag<"idle"> {};

/// A strategy that names an axis and does not use it.
struct with_idle_axis {
  using mesh = plait::mesh<axis<dp>, axis<idle>>;
  using residual = spec<shard<batch, dp>, seq, hidden, invariant<idle>>;
  using query_heads = heads;
  using key_heads = kv_heads;
  using feed_forward = ffn;
  using vocabulary = vocab;
};
using S = with_idle_axis;

const gpt2::config config = tiny_gpt2(1);
constexpr zero_level sharded_levels[] = {zero_level::optimizer, zero_level::gradients, zero_level::parameters};

/// Adds the gradient of a penalty on the table of positions; each data rank adds its share. It reads as many values as
/// this rank stores, but ignores where they start.
template <class Device>
struct penalised : gpt2::model<double, S, Device> {
  using base = gpt2::model<double, S, Device>;
  using base::base;
  typename base::gradient backward_layers(const microbatch<Device>& mb, const typename base::tokens& ids,
                                          typename base::saved& kept, typename base::gradient dy) {
    dy = base::backward_layers(mb, ids, kept, std::move(dy));
    if constexpr (!only_counts<Device>)
      this->visit([&](auto& p) {
        if (p.name() != "wpe.weight") return;
        const double* const values = std::as_const(p).value();
        double* const sums = p.used_gradient(mb.ctx.device);
        for (std::int64_t i = 0; i < p.slice().size(); ++i)
          sums[i] += 0.1 * values[i] / static_cast<double>(mb.ctx.ranks.size());
      });
    return dy;
  }
};

mesh_shape shape(std::int64_t d, std::int64_t i) { return S::mesh{d, i}.shape(); }

template <class Make>
std::string found(std::vector<mesh_shape> meshes, const model_setup& how, Make&& make) {
  return check_model(shape(1, 1), meshes, how, make).text();
}
template <class Ctx>
constexpr bool counts = only_counts<device_of<Ctx>>;

/// A correct model, except for changes by `spoil(config, options, ctx)`.
template <class Spoil>
auto spoiled(Spoil spoil) {
  return [=](const auto& ctx, stage_layers part, auto first) {
    gpt2::config c = config;
    language_model_options options;
    spoil(c, options, ctx);
    return make_gpt2<S>(c, options)(ctx, part, first);
  };
}

}  // namespace

TEST_CASE("a right model has no findings, at any level of ZeRO") {
  model_setup how = gpt2_setup<S>(config);
  CHECK(found({shape(2, 1), shape(4, 1)}, how, make_gpt2<S>(config)) == "");
  for (const zero_level level : sharded_levels)
    for (const bucket_cut cut : {bucket_cut::even, bucket_cut::whole}) {
      CAPTURE(static_cast<int>(level));
      how.parallel.parallel = {.level = level};
      how.parallel.cut = cut;
      CHECK(found({shape(2, 1), shape(4, 1)}, how, make_gpt2<S>(config)) == "");
    }
}

TEST_CASE("a penalty that treats a rank's piece of a parameter as all of it is right only at level 0") {
  const auto make = [](const auto& ctx, stage_layers part, auto) {
    return std::make_unique<penalised<device_of<decltype(ctx)>>>(ctx, config, part);
  };
  model_setup how = gpt2_setup<S>(config);
  CHECK(found({shape(2, 1)}, how, make) == "");
  for (const zero_level level : sharded_levels) {
    CAPTURE(static_cast<int>(level));
    how.parallel.parallel.level = level;
    const std::string text = found({shape(2, 1)}, how, make);
    for (const char* what :
         {"2 dp * 1 idle, rank 0: step 0: the gradient norm differs by",
          "gradient of the first step: wpe.weight differs by", "rank 0: step 1: the loss differs by"})
      CHECK(contains(text, what));
    CHECK(!contains(text, "step 0: the loss"));
    CHECK(!contains(text, "initial"));
    CHECK(!contains(text, "first step: ln_f"));
  }
}

TEST_CASE("a level that shards nothing on a mesh is refused, as in a program") {
  model_setup how = gpt2_setup<S>(config);
  how.parallel.parallel.level = zero_level::gradients;
  CHECK_THROWS_WITH_AS(found({shape(1, 2)}, how, make_gpt2<S>(config)),
                       doctest::Contains("zero_level::gradients shards over the axes of data_axes::shard, along which "
                                         "this mesh has one rank"),
                       error);
}

TEST_CASE("an axis without an effect is found") {
  const std::string text = found({shape(2, 2)}, gpt2_setup<S>(config), make_gpt2<S>(config));
  CHECK(contains(text, "nothing is sharded or sent over idle"));
  CHECK(!contains(text, "over dp"));
}

TEST_CASE("constant weights and losses, and wrongly vanishing or not vanishing gradients, are found") {
  model_setup how = gpt2_setup<S>(config);
  how.learning_rate = 0;
  CHECK(contains(found({}, how, make_gpt2<S>(config)), "one rank: the steps do not change wte.weight"));
  how.steps = 1;
  CHECK(contains(found({}, how, make_gpt2<S>(config)), "the loss is the same in the first and the last step"));
  how = gpt2_setup<S>(config);
  how.vanishes = [](const std::string& name) { return name == "ln_f.bias"; };
  const std::string text = found({}, how, make_gpt2<S>(config));
  CHECK(contains(text, "the gradient of ln_f.bias should vanish"));
  CHECK(contains(text, "the gradient of h.0.attn.k_proj.bias is zero, so that the case shows nothing of it"));
}

TEST_CASE("a mesh with other initial weights, or another computation, is found") {
  const std::string start = found({shape(2, 1)}, gpt2_setup<S>(config), spoiled([](auto& c, auto&, const auto& ctx) {
                                    if (ctx.ranks.size() > 1) c.init.std = 0.05;
                                  }));
  CHECK(contains(start, "initial value: wte.weight differs by"));
  CHECK(contains(start, "another hash of the initial weights"));
  const std::string other = found({shape(2, 1)}, gpt2_setup<S>(config), spoiled([](auto& c, auto&, const auto& ctx) {
                                    if (ctx.ranks.size() > 1) c.epsilon = 1e-3;
                                  }));
  for (const char* what : {"step 0: the loss differs by", "step 0: the gradient norm differs by",
                           "gradient of the first step: wte.weight differs by"})
    CHECK(contains(other, what));
  CHECK(!contains(other, "initial"));
}

TEST_CASE("a wrong prediction of a dry run is found") {
  const std::string text =
      found({shape(2, 1)}, gpt2_setup<S>(config), spoiled([](auto&, auto& options, const auto& ctx) {
              if (counts<decltype(ctx)>) options.keep = recompute::full;
            }));
  CHECK(contains(text, "bytes, and the dry run said"));
}

TEST_CASE("NaN differs from everything, on either side") {
  const double nan = std::nan("");
  CHECK(testing::largest_difference({1}, {nan}) == INFINITY);
  CHECK(testing::largest_difference({nan}, {1}) == INFINITY);
  CHECK(testing::largest_difference({1, 2}, {1}) == INFINITY);
  CHECK(testing::largest_difference({1}, {2}) == 0.5);
}

struct up_policy {
  using input = spec<shard<batch, dp>, hidden>;
  using weight = spec<ffn, hidden>;
  using output = spec<shard<batch, dp>, ffn>;
};
/// A linear whose backward pass overwrites the gradient of its weight, or adds to it as it should.
template <class Device>
struct overwriting : linear<double, up_policy, Device> {
  using base = linear<double, up_policy, Device>;
  using base::base;
  bool overwrites = true;

  auto backward(const microbatch<Device>& mb, const tensor<double, up_policy::input, Device>& x,
                typename base::saved& kept, const tensor<double, dual_t<up_policy::output>, Device>& dy) {
    if (overwrites) base::visit([&](auto& p) { p.discard_gradient(mb.ctx); });
    return base::backward(mb, x, kept, dy);
  }
};

TEST_CASE("the kit for layers finds a pass that overwrites the gradient of an earlier one") {
  using data = mesh<axis<dp>>;
  for (const bool wrong : {false, true}) {
    const auto make = [wrong](const auto& ctx) {
      overwriting<testing::device_of<decltype(ctx)>> layer(ctx, "up");
      layer.overwrites = wrong;
      return layer;
    };
    const std::string found =
        testing::check_layer(data{1}, {data{2}}, sizes_of<batch, hidden, ffn>(4, 6, 10), make).text();
    CHECK((found.find("two passes of a step: the gradient of up.weight differs by 0.5") != found.npos) == wrong);
    if (!wrong) CHECK(found == "");
  }
}
