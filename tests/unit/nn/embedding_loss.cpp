// program: layers
// Embedding and cross-entropy with a sharded, padded vocabulary: finite differences, meshes, PyTorch's golden values.
#include <fstream>
#include <nlohmann/json.hpp>

#include "plait/nn/embedding.hpp"
#include "plait/nn/loss.hpp"
#include "support/layer_check.hpp"
#include "support/linear_policies.hpp"
#include "support/test_data.hpp"

using namespace plait;
using namespace plait::test;

namespace {

constexpr std::int64_t true_vocab = 11;  // of 12 rows

std::vector<std::int64_t> token_list(const context<cpu>& ctx, std::int64_t ignored_every = 0) {
  std::vector<std::int64_t> ids(static_cast<std::size_t>(ctx.sizes.of(dim_of<batch>) * ctx.sizes.of(dim_of<seq>)));
  for (std::size_t i = 0; i < ids.size(); ++i) {
    ids[i] = static_cast<std::int64_t>(i * i + 3 * i) % true_vocab;
    if (ignored_every > 0 && static_cast<std::int64_t>(i) % ignored_every == 1) ids[i] = -100;
  }
  if (ids.size() > 5) ids[5] = true_vocab - 1;
  return ids;
}

/// An embedding as a layer for the checks, with an input that has no effect.
template <class Policy, class Device>
struct lookup_layer : layer_types<double, typename Policy::output, typename Policy::output, Device> {
  using input = typename Policy::output;
  using output = typename Policy::output;
  using ids = tensor<std::int64_t, typename Policy::input, Device>;
  struct saved {};
  embedding<double, Policy, Device> table;
  ids tokens;

  explicit lookup_layer(const context<Device>& ctx) : table(ctx, true_vocab, "table"), tokens(ctx) {
    if constexpr (!only_counts<Device>) tokens = place_full<typename Policy::input>(ctx, token_list(ctx));
  }
  tensor<double, output, Device> forward(const microbatch<Device>& mb, const tensor<double, input, Device>&, saved*) {
    return table.forward(mb, tokens);
  }
  tensor<double, dual_t<input>, Device> backward(const microbatch<Device>& mb, const tensor<double, input, Device>&,
                                                 saved&, const tensor<double, dual_t<output>, Device>& dy) {
    table.backward(mb, tokens, dy);
    tensor<double, dual_t<input>, Device> dx(mb.ctx);
    mb.ctx.device.zero(dx.data(), static_cast<std::size_t>(dx.size()) * sizeof(double));
    return dx;
  }
  template <class F>
  void visit(F&& f) {
    table.visit(f);
  }
};

template <class Table, class Ids, class Output>
struct table_policy {
  using mesh = two;
  using input = Ids;
  using weight = Table;
  using output = Output;
};
using ids_whole = spec<shard<batch, dp>, seq, invariant<tp>>;
using ids_split = spec<shard<batch, dp>, shard<seq, tp>>;

template <class Policy>
void check_lookup() {
  const auto make = [](const auto& ctx) { return lookup_layer<Policy, device_of<decltype(ctx)>>(ctx); };
  const dim_sizes sizes = transformer_sizes();
  layer_values one = run_on(two{1, 1}, sizes, make)[0];
  one.dx.clear();
  for (std::int64_t i = 0; i < 96; i += 5) {
    const double up = run_on(two{1, 1}, sizes, make, {.change = {"table.weight", i, 1e-5}, .backward = false})[0].loss;
    const double down =
        run_on(two{1, 1}, sizes, make, {.change = {"table.weight", i, -1e-5}, .backward = false})[0].loss;
    CHECK(std::abs((up - down) / 2e-5 - one.gradients[0].second[static_cast<std::size_t>(i)]) < 1e-7);
  }
  for (const auto& mesh : {two{1, 2}, two{2, 1}, two{2, 2}, two{4, 4}, two{1, 1}}) {
    for (const layer_values& got : run_on(mesh, sizes, make)) {
      check_near(got.y, one.y, 1e-13, "output");
      check_near(got.gradients[0].second, one.gradients[0].second, 1e-13, "gradient of the table");
      CHECK(got.found.text() == "");
    }
  }
}

}  // namespace

TEST_CASE("a table sharded over its rows, its width, or not at all") {
  check_lookup<table_policy<spec<shard<vocab, tp>, hidden>, ids_whole, rows_split>>();
  check_lookup<table_policy<spec<shard<vocab, tp>, hidden>, ids_whole, rows_whole>>();
  check_lookup<table_policy<spec<shard<vocab, tp>, hidden>, ids_whole, rows_pending>>();
  check_lookup<
      table_policy<spec<vocab, shard<hidden, tp>>, ids_whole, spec<shard<batch, dp>, seq, shard<hidden, tp>>>>();
  check_lookup<table_policy<spec<vocab, hidden>, ids_split, rows_split>>();
}

namespace {

/// The loss of logits as a layer whose output is the sum; its gradient seed is the check's coefficient.
template <class Logits, class Labels>
struct loss_of {
  using loss = cross_entropy_loss<double, Logits, Labels>;
  double sum = 0, seed = 0.37;
  std::vector<double> dlogits;

  loss_of(world& ranks, const dim_sizes& sizes, cross_entropy_settings settings, const std::vector<double>& logits,
          const std::vector<std::int64_t>& labels_full, std::int64_t classes, bool with_gradient = true) {
    cpu device;
    const context<cpu> ctx{device, ranks, sizes, 1};
    loss layer(ctx, classes, settings);
    auto scores = place_full<Logits>(ctx, logits);
    const auto labels = place_full<Labels>(ctx, labels_full);
    typename loss::saved kept;
    ranks.ledger().clear();
    const std::size_t before = device.bytes_in_use();
    const auto total = layer.forward(ctx, scores, labels, &kept);
    const std::size_t held = device.bytes_in_use() - before;
    const ledger measured = ranks.ledger();
    {
      world same = world::counting(ranks.shape(), ranks.rank());
      counting_device counter;
      const context<counting_device> there{counter, same, sizes, 1};
      using counted = cross_entropy_loss<double, Logits, Labels, counting_device>;
      counted planned(there, classes, settings);
      const tensor<double, Logits, counting_device> no_scores(there);
      const tensor<std::int64_t, Labels, counting_device> no_labels(there);
      typename counted::saved keep;
      const std::size_t empty = counter.bytes_in_use();
      const auto nothing = planned.forward(there, no_scores, no_labels, &keep);
      CHECK(held == counter.bytes_in_use() - empty);
      CHECK(compare_ledgers(measured, same.ledger()).text() == "");
    }
    sum = collect_full(ctx, layout_v<typename loss::output>, total.data())[0];
    if (!with_gradient) return;
    const auto weight = loss_seed<typename loss::output>::weighted(ctx, seed);
    const auto d = layer.backward(ctx, std::move(scores), labels, kept, weight);
    dlogits = collect_full(ctx, layout_v<dual_t<Logits>>, d.data());
  }
};

template <class Logits, class Labels>
std::vector<loss_of<Logits, Labels>> losses_on(const two& mesh, const dim_sizes& sizes, cross_entropy_settings settings,
                                               const std::vector<double>& logits,
                                               const std::vector<std::int64_t>& labels, std::int64_t classes,
                                               bool with_gradient = true) {
  std::vector<std::unique_ptr<loss_of<Logits, Labels>>> all(static_cast<std::size_t>(mesh.size()));
  threads::run(static_cast<int>(mesh.size()), [&](threads::communicator c) {
    world ranks(mesh.shape(), c);
    all[static_cast<std::size_t>(ranks.rank())] =
        std::make_unique<loss_of<Logits, Labels>>(ranks, sizes, settings, logits, labels, classes, with_gradient);
  });
  std::vector<loss_of<Logits, Labels>> out;
  for (auto& one : all) out.push_back(*one);
  return out;
}

using logits_spec = spec<shard<batch, dp>, seq, shard<vocab, tp>>;
using labels_spec = spec<shard<batch, dp>, seq, invariant<tp>>;
using logits_rows = spec<shard<batch, dp>, shard<seq, tp>, vocab>;
using labels_rows = spec<shard<batch, dp>, shard<seq, tp>>;

}  // namespace

TEST_CASE("cross-entropy: finite differences and meshes, all options") {
  const dim_sizes sizes = transformer_sizes();
  const std::vector<double> logits = random_full(layout_v<logits_spec>, sizes, 4);
  std::vector<std::int64_t> labels(32);
  for (std::size_t i = 0; i < labels.size(); ++i)
    labels[i] = i % 5 == 1 || i < 8 ? -100 : static_cast<std::int64_t>(i * 7 % true_vocab);
  labels[9] = true_vocab - 1;
  for (const cross_entropy_settings settings :
       {cross_entropy_settings{}, {-100, 0.1, 0}, {-100, 0, 0.02}, {-100, 0.2, 0.05}}) {
    const auto one = losses_on<logits_spec, labels_spec>(two{1, 1}, sizes, settings, logits, labels, true_vocab)[0];
    for (std::size_t i = 0; i < logits.size(); i += 3) {
      std::vector<double> up = logits, down = logits;
      up[i] += 1e-5, down[i] -= 1e-5;
      const double quotient =
          (losses_on<logits_spec, labels_spec>(two{1, 1}, sizes, settings, up, labels, true_vocab, false)[0].sum -
           losses_on<logits_spec, labels_spec>(two{1, 1}, sizes, settings, down, labels, true_vocab, false)[0].sum) /
          2e-5;
      CHECK(std::abs(one.seed * quotient - one.dlogits[i]) < 1e-8);
    }
    for (const auto& mesh : {two{1, 2}, two{2, 1}, two{4, 2}, two{2, 4}, two{1, 12}})
      for (const auto& got : losses_on<logits_spec, labels_spec>(mesh, sizes, settings, logits, labels, true_vocab)) {
        CHECK(std::abs(got.sum - one.sum) < 1e-12 * one.sum);
        check_near(got.dlogits, one.dlogits, 1e-12, "gradient of the logits");
      }
    for (const auto& mesh : {two{1, 2}, two{4, 8}})
      for (const auto& got : losses_on<logits_rows, labels_rows>(mesh, sizes, settings, logits, labels, true_vocab)) {
        CHECK(std::abs(got.sum - one.sum) < 1e-12 * one.sum);
        check_near(got.dlogits, one.dlogits, 1e-12, "gradient of the logits, rows split");
      }
  }
}

TEST_CASE("PyTorch's cross-entropy, with a whole and with a sharded, padded vocabulary") {
  std::ifstream file(plait::test::test_data() + "/cross_entropy.json");
  const auto all = nlohmann::json::parse(file);
  const auto values = all.at("logits").at("values").get<std::vector<double>>();
  const auto labels = all.at("labels").get<std::vector<std::int64_t>>();
  double counted = 0;
  for (std::int64_t t : labels) counted += t != -100;
  for (const std::int64_t ranks : {1, 2, 3, 4}) {
    const std::int64_t padded = (11 + ranks - 1) / ranks * ranks;
    dim_sizes sizes;
    sizes.set(dim_of<batch>, 6), sizes.set(dim_of<seq>, 1), sizes.set(dim_of<vocab>, padded);
    std::vector<double> logits;
    for (std::size_t row = 0; row < 6; ++row)
      for (std::size_t c = 0; c < static_cast<std::size_t>(padded); ++c)
        logits.push_back(c < 11 ? values[row * 11 + c] : 50.0);  // padding must have no effect
    for (const auto& golden : all.at("cases")) {
      const cross_entropy_settings settings{-100, golden.at("label_smoothing"), golden.at("z_loss")};
      for (const auto& got : losses_on<logits_spec, labels_spec>(two{1, ranks}, sizes, settings, logits, labels, 11)) {
        CHECK(std::abs(got.sum / counted - golden.at("loss").get<double>()) < 1e-13);
        const auto expected = golden.at("dlogits").at("values").get<std::vector<double>>();
        for (std::size_t i = 0; i < got.dlogits.size(); ++i) {
          const std::size_t row = i / static_cast<std::size_t>(padded), c = i % static_cast<std::size_t>(padded);
          CHECK(std::abs(got.dlogits[i] / got.seed / counted - (c < 11 ? expected[row * 11 + c] : 0.0)) < 1e-14);
        }
      }
    }
  }
}

TEST_CASE("learned positions of tokens in zigzag order need the order") {
  threads::run(1, [](threads::communicator c) {
    cpu device;
    world ranks(two{1, 1}.shape(), c);
    const context<cpu> ctx{device, ranks, sizes_of<batch, zseq, hidden, position>(2, 4, 8, 4)};
    using in_zigzag = spec<shard<batch, dp>, zseq, hidden, invariant<tp>>;
    CHECK_THROWS_WITH((learned_positions<double, in_zigzag>(ctx, "wpe")),
                      "wpe: learned positions of tokens in zigzag order need their sequence_order");
    CHECK_NOTHROW(learned_positions<double, in_zigzag>(ctx, "wpe", sequence_order::zigzag(4, 1)));
  });
}
