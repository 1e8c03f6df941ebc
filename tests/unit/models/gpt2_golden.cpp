// program: golden
// Compares GPT-2 of examples/gpt2.hpp with transformers' GPT2LMHeadModel: scores, loss and gradients.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <span>
#include <string>
#include <vector>

#include "../../../examples/gpt2.hpp"
#include "plait/checkpoint/model_weights.hpp"
#include "plait/checkpoint/safetensors.hpp"
#include "plait/comm/threads.hpp"
#include "plait/nn/strategy.hpp"
#include "plait/parallel/train_step.hpp"
#include "plait/testing/layer_parity.hpp"
#include "support/model_parity.hpp"
#include "support/test_data.hpp"

namespace {

using namespace plait;
using S = megatron_sp;
using gpt2_type = gpt2::model<double, S>;

gpt2::config tiny() {
  gpt2::config c;
  c.vocab = 113, c.positions = 20, c.hidden = 32, c.layers = 2, c.heads = 4;
  return c;
}
constexpr std::int64_t samples = 2, sequence = 16, ffn_width = 64;

struct tensor_of_file {
  std::vector<double> values;  ///< in the model's layout
  double largest = 0;          ///< of the file's whole tensor
};

/// The tensor of the file for plait's parameter `name`. Matrices of the file are [in, out], and query, key and value
/// are columns of one matrix.
tensor_of_file read_mapped(const safetensors_reader& file, const std::string& prefix, const std::string& name) {
  std::string theirs = name;
  int third = -1;
  const auto rename = [&](const std::string& from, const std::string& to, int which) {
    if (const auto at = theirs.find(from); at != theirs.npos) theirs.replace(at, from.size(), to), third = which;
  };
  rename("q_proj", "c_attn", 0), rename("k_proj", "c_attn", 1), rename("v_proj", "c_attn", 2);
  rename("o_proj", "c_proj", -1);
  theirs = prefix + "transformer." + theirs;
  const std::vector<double> all = file.read<double>(theirs);
  const std::vector<std::int64_t> shape = file.at(theirs).shape;
  tensor_of_file found;
  for (double x : all) found.largest = std::max(found.largest, std::abs(x));
  const bool linear = theirs.find(".c_") != theirs.npos;
  const std::int64_t rows = shape.size() == 2 ? shape[0] : 1, columns = shape.back();
  if (!linear) {
    found.values = all;
    return found;
  }
  const std::int64_t width = third < 0 ? columns : columns / 3, first = third < 0 ? 0 : third * width;
  for (std::int64_t out = first; out < first + width; ++out)
    for (std::int64_t in = 0; in < rows; ++in)
      found.values.push_back(all[static_cast<std::size_t>(in * columns + out)]);
  return found;
}

double distance(const std::vector<double>& got, const std::vector<double>& golden, double largest) {
  if (got.size() != golden.size()) return INFINITY;
  double worst = 0;
  for (std::size_t i = 0; i < got.size(); ++i) worst = std::max(worst, std::abs(got[i] - golden[i]));
  return worst / largest;
}

struct outcome {
  double scores = INFINITY, loss = INFINITY;
  std::vector<std::pair<std::string, double>> gradients;
};

outcome run(std::int64_t d, std::int64_t k, std::int64_t t) {
  const std::string folder = plait::test::test_data() + "/gpt2_tiny";
  const safetensors_reader weights(folder + "/model.safetensors"), golden(folder + "/golden.safetensors");
  outcome found;
  threads::run(static_cast<int>(d * k * t), [&](threads::communicator c) {
    world ranks(S::mesh{d, k, t, 1}.shape(), c);
    cpu device;
    const gpt2::config config = tiny();
    dim_sizes sizes = gpt2::sizes<S>(config, ranks.shape(), samples, sequence);
    sizes.set(dim_of<ffn>, ffn_width);
    const context<cpu> ctx{device, ranks, sizes};
    gpt2_type model(ctx, config);
    model.visit([&](auto& p) {
      const tensor_of_file from = read_mapped(weights, "", p.name());
      load_parameter(ctx, p, {p.name(), safetensors_dtype::f64, p.info().shape, std::as_bytes(std::span(from.values))},
                     "file");
    });
    gather_parameters(ctx, model);
    const auto fill = [&](std::int64_t, host_tokens& ids, host_tokens& labels) {
      const auto all_ids = golden.read<std::int64_t>("input_ids"), all_labels = golden.read<std::int64_t>("labels");
      const auto from = [&](const auto& all) {
        return [&](std::int64_t sample, std::int64_t position) {
          return all[static_cast<std::size_t>(sample * sequence + position)];
        };
      };
      ids.fill(from(all_ids));
      labels.fill(from(all_labels));
    };
    gpt2_type::tokens ids(ctx);
    host_tokens host_ids(ids.part(), model.order()), host_labels(host_ids);
    fill(0, host_ids, host_labels);
    upload(ctx, host_ids, ids);
    const auto scores = model.score(ctx, ids);
    const auto whole = testing::collect_full(ctx, layout_v<gpt2_type::logits::spec>, scores.data());
    adamw<double> optimizer;
    const step_result step = train_step(ctx, model, optimizer, 1, 0.0, 0.0, 0, fill);
    const auto gradients = testing::gather_gradients(ctx, model);
    if (ranks.rank() != 0) return;
    std::vector<double> logits;
    const auto padded = static_cast<std::size_t>(ctx.sizes.of(dim_of<vocab>));
    for (std::size_t i = 0; i < whole.size(); ++i)
      if (i % padded < static_cast<std::size_t>(config.vocab)) logits.push_back(whole[i]);
    const auto expected = golden.read<double>("logits");
    double largest = 0;
    for (double x : expected) largest = std::max(largest, std::abs(x));
    found.scores = distance(logits, expected, largest);
    const double loss = golden.read<double>("loss")[0];
    found.loss = std::abs(step.loss - loss) / loss;
    for (const testing::named_values& g : gradients) {
      const tensor_of_file wanted = read_mapped(golden, "grad.", g.name);
      found.gradients.emplace_back(g.name, distance(g.values, wanted.values, wanted.largest));
    }
  });
  return found;
}

}  // namespace

TEST_CASE("GPT-2 equals transformers' in scores, loss and gradients, on one rank and on meshes") {
  for (const auto& [d, k, t] : {std::array{1, 1, 1}, {2, 1, 1}, {1, 2, 1}, {1, 1, 4}, {2, 2, 4}}) {
    CAPTURE(d);
    CAPTURE(k);
    CAPTURE(t);
    const outcome found = run(d, k, t);
    CHECK(found.scores < 1e-6);  // the files are float32
    CHECK(found.loss < 1e-6);
    CHECK(found.gradients.size() == 2 + 2 * 16 + 2);
    for (const auto& [name, error] : found.gradients) CHECK_MESSAGE(error < 1e-6, name << " " << error);
  }
}
