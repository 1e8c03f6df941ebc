// program: layers
// Norms under any sharding: rows split, rows whole, and the last dim itself sharded. Golden values of PyTorch.
#include "plait/nn/norm.hpp"

#include <fstream>
#include <nlohmann/json.hpp>

#include "support/layer_check.hpp"
#include "support/linear_policies.hpp"
#include "support/on_mesh.hpp"
#include "support/test_data.hpp"

using namespace plait;
using namespace plait::test;

namespace {

using columns_split = spec<shard<batch, dp>, seq, shard<hidden, tp>>;
using columns_split_twice = spec<batch, seq, shard<hidden, tp, dp>>;

template <template <class, class, class> class Norm, class Spec>
void check_norm(const char* name) {
  const auto make = [](const auto& ctx) { return Norm<double, Spec, device_of<decltype(ctx)>>(ctx, 1e-5, "norm"); };
  const dim_sizes sizes = transformer_sizes();
  const layer_values& one = check_once(name, two{1, 1}, sizes, make);
  check_meshes({two{1, 2}, two{2, 1}, two{2, 2}, two{2, 4}, two{1, 8}}, sizes, one, make);
}

}  // namespace

TEST_CASE_TEMPLATE("RMSNorm", Spec, rows_split, rows_whole, rows_replicated, columns_split, columns_split_twice) {
  check_norm<rms_norm, Spec>("rms_norm");
}

TEST_CASE_TEMPLATE("LayerNorm", Spec, rows_split, rows_whole, rows_replicated, columns_split, columns_split_twice) {
  check_norm<layer_norm, Spec>("layer_norm");
}

namespace {

std::vector<double> numbers(const nlohmann::json& flat) { return flat.at("values").get<std::vector<double>>(); }

/// A golden norm on `tp_ranks` ranks that share each row.
template <class Layer>
void check_golden(const nlohmann::json& all, const nlohmann::json& golden, std::int64_t tp_ranks) {
  dim_sizes sizes;
  sizes.set(dim_of<batch>, 2), sizes.set(dim_of<seq>, 2), sizes.set(dim_of<hidden>, 12);
  on_mesh(two{1, tp_ranks}, sizes, 1, [&](const context<cpu>& ctx) {
    Layer layer(ctx, all.at("eps").get<double>());
    layer.visit([&](auto& p) {
      const auto full = numbers(all.at(p.name() == "norm.weight" ? "weight" : "bias"));
      std::copy_n(full.begin() + p.part().offset[0], p.size(), p.value());
      p.gather(ctx);
      p.zero_gradient(ctx);
    });
    const auto x = place_full<columns_split>(ctx, numbers(all.at("x")));
    const auto dy = place_full<columns_split>(ctx, numbers(all.at("dy")));
    typename Layer::saved kept;
    const auto y = layer.forward(ctx, x, &kept);
    const auto dx = layer.backward(ctx, x, kept, dy);
    check_near(collect_full(ctx, layout_v<columns_split>, y.data()), numbers(golden.at("y")), 1e-13, "y");
    check_near(collect_full(ctx, layout_v<columns_split>, dx.data()), numbers(golden.at("dx")), 1e-13, "dx");
    layer.visit([&](auto& p) {
      const auto reduced = p.reduce(ctx);
      check_near(collect_full(ctx, dual(p.stored()), reduced.data()),
                 numbers(golden.at(p.name() == "norm.weight" ? "dweight" : "dbias")), 1e-13, p.name());
    });
  });
}

}  // namespace

TEST_CASE("PyTorch's norms, with whole rows and with rows split over ranks") {
  std::ifstream file(plait::test::test_data() + "/norms.json");
  const auto all = nlohmann::json::parse(file);
  for (const std::int64_t ranks : {1, 2, 3, 4}) {
    check_golden<rms_norm<double, columns_split>>(all, all.at("rms_norm"), ranks);
    check_golden<layer_norm<double, columns_split>>(all, all.at("layer_norm"), ranks);
  }
}
