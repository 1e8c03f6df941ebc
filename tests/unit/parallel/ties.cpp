// program: stages
// Stages must agree. Both stages that share a parameter must define it alike, and all others need unique names;
// otherwise making a pipeline is an error. The first step compares the data that each stage gets.
#include <doctest/doctest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "plait/comm/threads.hpp"
#include "plait/models/language_model.hpp"
#include "plait/nn/embedding.hpp"
#include "plait/nn/linear.hpp"
#include "plait/nn/norm.hpp"
#include "plait/nn/pointwise.hpp"
#include "plait/nn/strategy.hpp"
#include "plait/parallel/optim/adamw.hpp"
#include "plait/parallel/pipeline.hpp"
#include "plait/parallel/train_step.hpp"
#include "plait/parallel/units.hpp"
#include "plait/parallel/world.hpp"
#include "plait/schedule/generators.hpp"
#include "support/on_mesh.hpp"
#include "support/temp_folder.hpp"
#include "support/texts.hpp"

namespace {

using namespace plait;
using specs = transformer_specs<megatron_sp>;
using norm = rms_norm<double, specs::residual>;
using mlp = sequential<linear<double, specs::up>, linear<double, specs::down>>;
using block = residual<norm, mlp>;
using table_layer = embedding<double, specs::embedding>;
using output = linear<double, specs::head>;
using loss = cross_entropy_loss<double, specs::logits, specs::tokens>;
using stage = language_model<table_layer, block, output, loss>;

dim_sizes sizes_for(std::int64_t samples) {
  return sizes_of<batch, seq, hidden, heads, kv_heads, head_dim, ffn, vocab>(samples, 4, 8, 2, 2, 4, 8, 7);
}

/// Options of a model; the defaults are valid.
struct maker {
  std::string head_name = "wte";
  bool embedding_tied = true, head_tied = true, uses_table = true;
  double deviation = 0.02;
  std::int64_t classes = 7;  ///< of the head's copy
  std::function<std::string(std::int64_t)> block_name = [](std::int64_t i) { return "h." + std::to_string(i); };
  std::int64_t tied_block = -1;  ///< the block whose first matrix is declared as tied; -1: none
  bool frozen_table = false, frozen_head = false;

  std::unique_ptr<stage> make(const context<cpu>& ctx, stage_layers part, const stage* first) const {
    return std::make_unique<stage>(
        ctx, 7, part, language_model_options{}, first,
        [&] {
          table_layer table(ctx, 7, "wte", {.init = {0, 0.02}, .tied_across_stages = embedding_tied && !part.last});
          if (frozen_table) table.visit([](auto& p) { p.freeze(); });
          return table;
        },
        [&](std::int64_t i) {
          const std::string name = block_name(i);
          linear<double, specs::up> up(ctx, name + ".up", {.tied_across_stages = i == tied_block});
          return block(norm(ctx, 1e-5, name + ".norm"),
                       mlp(std::move(up), linear<double, specs::down>(ctx, name + ".down")));
        },
        [&](const context<cpu>& of_head, const parameter_ptr<double, cpu>& table) {
          output::options how{.shape = {classes, 8}, .init = {0, deviation}};
          if (uses_table) how.tied = table;
          how.tied_across_stages = head_tied;
          output head(of_head, head_name, how);
          if (frozen_head) head.visit([](auto& p) { p.freeze(); });
          return head;
        });
  }
};

/// Makes the model as a pipeline of `ranks` ranks; throws the ranks' error.
template <class Policy>
void construct(const maker& model, int ranks) {
  const mesh<axis<pp>, axis<dp>, axis<cp>, axis<tp>, axis<tp_rep>> shape{ranks, 1, 1, 1, 1};
  const schedule plan = make_schedule<Policy>(ranks, 2);
  threads::run(ranks, [&](threads::communicator c) {
    pipeline_world here(shape.shape(), any_communicator(c));
    cpu device;
    const context<cpu> ctx{device, here.stage(), sizes_for(2)};
    const stage_costs balance{std::vector<double>(static_cast<std::size_t>(plan.shape.stages()), 1.0), 0.0, 0.0};
    const std::vector<stage_layers> parts = split_layers(balance, plan.shape.stages());
    pipeline<stage> p(ctx, here.along(), plan, parts,
                      [&](stage_layers part, stage* first) { return model.make(ctx, part, first); });
  });
}

/// Makes a whole model on one rank.
void construct_whole(const maker& model) {
  test::on_mesh(megatron_sp::mesh{1, 1, 1, 1}, sizes_for(2), 1, [&](const context<cpu>& ctx) {
    const auto whole = model.make(ctx, {0, 2, true, true}, nullptr);
    pipeline<stage> p(ctx, *whole, 2);
  });
}

/// Data of the ranks of the second stage, on a mesh of pp 2 x dp 2.
struct given {
  std::int64_t pp = 2;
  std::uint64_t seed = 1;
  double clip = 1, rate = 1e-2;
  std::int64_t token = 3;
};
/// The text of the error if the second stage, or with `one` only its last rank, gets other data; "" without an error.
std::string error_of_stages(const given& second, bool one = false) {
  const schedule plan = make_schedule<one_f_one_b>(2, 2);
  return test::text_thrown_by([&] {
    threads::run(4, [&](threads::communicator c) {
      const given mine = (one ? c.rank() == 3 : c.rank() >= 2) ? second : given{};
      const mesh<axis<pp>, axis<dp>, axis<cp>, axis<tp>, axis<tp_rep>> shape{mine.pp, 4 / mine.pp, 1, 1, 1};
      pipeline_world here(shape.shape(), any_communicator(c));
      cpu device;
      const context<cpu> ctx{device, here.stage(), sizes_for(4), mine.seed};
      const std::vector<stage_layers> parts = split_layers({{1.0, 1.0}, 0.0, 0.0}, 2);
      pipeline<stage> model(ctx, here.along(), plan, parts,
                            [&](stage_layers part, stage* first) { return maker{}.make(ctx, part, first); });
      model.visit([&](auto& p) { p.initialize(ctx); });
      adamw<double> optimizer;
      training_step step(ctx, model, optimizer, mine.clip);
      step.load(ctx, 0, [&](std::int64_t, host_tokens& ids, host_tokens& labels) {
        ids.fill([&](std::int64_t sample, std::int64_t) { return sample + mine.token; });
        labels.fill([](std::int64_t, std::int64_t position) { return position; });
      });
      optimizer.begin_step(ctx, mine.rate);
      step.run(ctx);
      step.result(ctx);
    });
  });
}

const std::string not_alike =
    "pipeline: the first and the last stage do not have the same parameters that are tied across stages; both must "
    "make them, with one name, shape and initializer";

}  // namespace

TEST_CASE("a valid tied table is accepted") {
  CHECK_NOTHROW(construct_whole({}));
  CHECK_NOTHROW(construct<one_f_one_b>({}, 2));
  CHECK_NOTHROW(construct<one_f_one_b>({}, 4));
  CHECK_NOTHROW(construct<zb_v>({}, 2));
}

TEST_CASE("an untied head is accepted") {
  const maker untied{.head_name = "head", .embedding_tied = false, .head_tied = false, .uses_table = false};
  CHECK_NOTHROW(construct_whole(untied));
  CHECK_NOTHROW(construct<one_f_one_b>(untied, 2));
  CHECK_NOTHROW(construct<zb_v>(untied, 2));
}

TEST_CASE("on two ranks: another name, one side without tied_across_stages, another initializer or shape") {
  CHECK_ERROR(construct<one_f_one_b>({.head_name = "lm_head"}, 2), not_alike);
  CHECK_ERROR(construct<one_f_one_b>({.head_tied = false}, 2), not_alike);
  CHECK_ERROR(construct<one_f_one_b>({.head_name = "lm_head", .head_tied = false}, 4), not_alike);
  CHECK_ERROR(construct<one_f_one_b>({.embedding_tied = false}, 2), not_alike);
  CHECK_ERROR(construct<one_f_one_b>({.deviation = 0.1}, 2), not_alike);
  CHECK_ERROR(construct<one_f_one_b>({.classes = 6}, 2), not_alike);
  CHECK_ERROR(construct<one_f_one_b>({.frozen_table = true}, 2), not_alike, ", and both freeze them or neither");
  CHECK_ERROR(construct<one_f_one_b>({.frozen_head = true}, 4), not_alike);
  CHECK_NOTHROW(construct<one_f_one_b>({.frozen_table = true, .frozen_head = true}, 2));
  CHECK_ERROR(construct<one_f_one_b>({.embedding_tied = false, .head_tied = false}, 2),
              "the parameter wte.weight is on pipeline ranks", "both stages must make it with tied_across_stages");
}

TEST_CASE("on one rank: a head that makes its own table instead of using the embedding's") {
  const maker own{.head_name = "lm_head", .uses_table = false};
  const char* const text =
      "language_model: the head makes the parameter lm_head.weight with tied_across_stages, and the embedding's "
      "wte.weight is on this rank: use the table that make_head is given";
  CHECK_ERROR(construct_whole(own), text);
  CHECK_ERROR(construct<zb_v>(own, 2), text);
  CHECK_ERROR(construct<zb_v>({.head_name = "lm_head", .head_tied = false, .uses_table = false}, 2),
              "the embedding makes wte.weight with tied_across_stages, and the head does not use it");
}

TEST_CASE("two parameters of one name: in one stage, in two of a rank, on two ranks") {
  const char* const text = "pipeline: two parameters are called h.norm.weight: they would have the same initial values";
  const maker same{.block_name = [](std::int64_t) { return "h"; }};
  CHECK_ERROR(construct_whole(same), text);
  CHECK_ERROR(construct<zb_v>({.block_name = [](std::int64_t i) { return i % 3 ? std::to_string(i) : "h"; }}, 2), text);
  CHECK_ERROR(construct<one_f_one_b>(same, 2), "the parameter h.norm.weight is on pipeline ranks",
              "if not, each needs its own name");
  CHECK_ERROR(construct_whole({.embedding_tied = false, .head_tied = false, .uses_table = false}),
              "two parameters are called wte.weight");
}

TEST_CASE("only the ends of a pipeline share parameters") {
  CHECK_ERROR(construct<one_f_one_b>({.tied_block = 1}, 3),
              "the parameter h.1.up.weight is tied across stages, but only the first and the last stage can share");
}

TEST_CASE("a separate entry starts the sum over tied stages, also for a parameter in a bucket") {
  for (const int dp : {1, 2}) {  // with one rank a parameter has no neighbours
    CAPTURE(dp);
    std::vector<std::string> texts(static_cast<std::size_t>(dp));
    double sum = 0;
    threads::run(2 * dp, [&](threads::communicator c) {
      // Two "stages" of dp ranks each, which have the same table.
      threads::communicator stage_ranks = c.split(c.rank() / dp, c.rank());
      world here(megatron_sp::mesh{dp, 1, 1, 1}.shape(), stage_ranks);
      cpu device;
      const context<cpu> ctx{device, here, sizes_for(2)};
      table_layer table(ctx, 7, "wte", {.init = {0, 0.02}, .tied_across_stages = true});
      parameter_units<double, cpu> units(ctx, dp == 1 ? zero_level::replicated : zero_level::optimizer, {});
      units.add(ctx, 0, [&](auto&& f) { table.visit(f); });
      const any_communicator ends(c.split(c.rank() % dp, c.rank()));
      const auto pass = [&](auto&& finish) {
        units.begin_step(ctx);
        units.enter(ctx, 0, true);
        table.visit([&](auto& p) { kernels::fill(device, p.used_gradient(device), p.used_size(), 1.0 + c.rank()); });
        units.reduce(ctx, 0);
        typename parameter_units<double, cpu>::gradients out;
        finish(out);
        return out;
      };
      table.visit([&](auto& p) { p.initialize(ctx), p.join_stages(ends, true); });
      const auto r = static_cast<std::size_t>(c.rank());
      const auto all = pass([&](auto& out) {
        units.reduce_ties(ctx, 0);
        units.finish_reduction(ctx, 0, out);
      });
      if (r == 0) sum = all.at(0).data()[0];  // it has the first element
      const auto text = test::text_thrown_by([&] { pass([&](auto& out) { units.finish_reduction(ctx, 0, out); }); });
      if (r < texts.size()) texts[r] = text;
    });
    CHECK(sum == (dp == 1 ? 1 + 2 : 1 + 2 + 3 + 4));
    for (const std::string& text : texts)
      CHECK(test::has(text, dp == 1 ? "parameter wte.weight: finish_reduction without start_reduction(ctx)"
                                    : "parameter_bucket: start_ties is missing before finish_reduction of wte.weight"));
  }
}

TEST_CASE("data for the stages of a pipeline must be equal on all of them") {
  CHECK(error_of_stages({}) == "");
  const auto says = [](const given& second, const std::string& text) {
    INFO(text);
    const std::string message = error_of_stages(second);
    CAPTURE(message);
    CHECK(test::has(message, text));
  };
  says({.seed = 2}, "training step: ranks 2, 3 run with seed 2, ranks 0, 1 with seed 1; every rank needs");
  says({.clip = 2}, "training step: ranks 2, 3 run with clip 2, ranks 0, 1 with clip 1; every rank needs");
  says({.rate = 0.1}, "adamw::begin_step: ranks 2, 3 run with learning_rate 0.1, ranks 0, 1 with learning_rate 0.01;");
  says({.token = 2}, "training_step::load: ranks 2, 3 run with ids, labels and document starts whose hash is ");
  CHECK(test::has(error_of_stages({.pp = 4}, true),
                  "rank 3 was started with mesh pp=4,dp=1,cp=1,tp=1,tp_rep=1, ranks 0 to 2 with mesh pp=2,dp=2,"));
}
