// The example's encoder and decoder layers have BART's values, and on every mesh those of one rank, for three steps.
#include "../../../examples/encoder_decoder.hpp"

#include <map>

#include "plait/checkpoint/model_weights.hpp"
#include "plait/checkpoint/safetensors.hpp"
#include "plait/nn/strategy.hpp"
#include "plait/parallel/optim/adamw.hpp"
#include "support/layer_check.hpp"
#include "support/on_mesh.hpp"
#include "support/test_data.hpp"

using namespace plait;
using namespace plait::test;

namespace {

using four = megatron_sp::mesh;

/// Both layers, one after the other.
template <class S, class D>
struct both {
  using encoder_type = encoder_decoder::encoder_layer<double, on_source<S>, D>;
  using decoder_type = encoder_decoder::decoder_layer<double, S, D>;
  using source = typename encoder_type::input;
  using target = typename decoder_type::input;
  template <class Spec>
  using tensor_of = tensor<double, Spec, D>;

  struct saved {
    typename encoder_type::saved encoder;
    typename decoder_type::saved decoder;
    tensor_of<source> memory;
  };
  struct gradients {
    tensor_of<dual_t<source>> x, memory;
    tensor_of<dual_t<target>> y;
  };

  encoder_type encode;
  decoder_type decode;

  explicit both(const context<D>& ctx) : encode(ctx, "encoder"), decode(ctx, "decoder") {}
  tensor_of<target> forward(const microbatch<D>& mb, const tensor_of<source>& x, const tensor_of<target>& y,
                            saved& keep) {
    keep.memory = encode.forward(mb, x, &keep.encoder);
    return decode.forward(mb, y, keep.memory, &keep.decoder);
  }
  gradients backward(const microbatch<D>& mb, const tensor_of<source>& x, const tensor_of<target>& y, saved& kept,
                     const tensor_of<dual_t<target>>& dy) {
    auto d = decode.backward(mb, y, kept.memory, kept.decoder, dy);
    auto dx = encode.backward(mb, x, kept.encoder, d.memory);
    return {std::move(dx), std::move(d.memory), std::move(d.x)};
  }
  template <class F>
  void visit(F&& f) {
    encode.visit(f);
    decode.visit(f);
  }
};

/// BART's name `out_proj` is `o_proj` in plait's attention.
std::string name_in_bart(std::string name) {
  if (const auto at = name.find(".o_proj."); at != std::string::npos) name.replace(at, 8, ".out_proj.");
  return name;
}

/// Whole tensors, by their names in the golden file.
using named_values = std::map<std::string, std::vector<double>>;

struct problem {
  dim_sizes sizes;
  named_values given;                      ///< encoder_input, decoder_input, grad.decoder_output
  std::vector<safetensors_entry> weights;  ///< empty: random ones
};

problem bart(const safetensors_reader& weights, const safetensors_reader& golden) {
  problem p{
      sizes_of<batch, seq, source_seq, hidden, heads, kv_heads, head_dim, ffn>(2, 8, 12, 32, 4, 4, 8, 48), {}, {}};
  for (const char* name : {"encoder_input", "decoder_input", "grad.decoder_output"})
    p.given[name] = golden.read<double>(name);
  for (safetensors_entry entry : weights.entries()) {
    if (const auto at = entry.name.find(".out_proj."); at != std::string::npos) entry.name.replace(at, 10, ".o_proj.");
    p.weights.push_back(entry);
  }
  return p;
}

problem small() {
  problem p{transformer_sizes(8, 8), {}, {}};
  p.sizes.set(dim_of<heads>, 8);
  p.sizes.set(dim_of<source_seq>, 16);
  using specs = transformer_specs<megatron_sp>;
  p.given["encoder_input"] = random_full(layout_v<on_source<megatron_sp>::residual>, p.sizes, 1);
  p.given["decoder_input"] = random_full(layout_v<specs::residual>, p.sizes, 2);
  p.given["grad.decoder_output"] = random_full(layout_v<specs::residual>, p.sizes, 3);
  return p;
}

/// Outputs, gradients, and weights after `steps` steps of AdamW, as every rank has them.
template <class S>
std::vector<named_values> run(const four& mesh, const problem& p, int steps) {
  std::vector<named_values> all(static_cast<std::size_t>(mesh.size()));
  on_mesh(mesh, p.sizes, 7, [&](const context<cpu>& ctx) {
    using model_type = both<S, cpu>;
    using source = typename model_type::source;
    using target = typename model_type::target;
    model_type model(ctx);
    if (p.weights.empty())
      fill_parameters(ctx, model, {});
    else
      load_weights(ctx, model, p.weights, "encoder_decoder_layer");
    const auto x = place_full<source>(ctx, p.given.at("encoder_input"));
    const auto y = place_full<target>(ctx, p.given.at("decoder_input"));
    const auto seed = place_full<dual_t<target>>(ctx, p.given.at("grad.decoder_output"));
    named_values& out = all[static_cast<std::size_t>(ctx.ranks.rank())];
    // A bias of the keys has no effect, so its gradient is only rounding error. A much smaller epsilon would make its
    // update as large as any.
    adamw<double, cpu> optimizer({.epsilon = 1e-5});
    for (int step = 0; step < std::max(1, steps); ++step) {
      gather_parameters(ctx, model);
      zero_gradients(ctx, model);
      typename model_type::saved kept;
      const auto made = model.forward(ctx, x, y, kept);
      const auto memory = collect_full(ctx, layout_v<source>, kept.memory.data());
      const auto d = model.backward(ctx, x, y, kept, seed);
      optimizer.begin_step(ctx, 0.01);
      out["encoder_output"] = memory;
      out["decoder_output"] = collect_full(ctx, layout_v<target>, made.data());
      out["grad.encoder_output"] = collect_full(ctx, dual(layout_v<source>), d.memory.data());
      out["grad.encoder_input"] = collect_full(ctx, dual(layout_v<source>), d.x.data());
      out["grad.decoder_input"] = collect_full(ctx, dual(layout_v<target>), d.y.data());
      model.visit([&](auto& parameter) {
        auto reduced = parameter.reduce(ctx);
        out["grad." + name_in_bart(parameter.name())] = collect_full(ctx, dual(parameter.stored()), reduced.data());
        if (steps > 0) optimizer.update(ctx, std::move(reduced));
      });
    }
    model.visit([&](auto& parameter) {
      out["weight." + parameter.name()] = collect_full(ctx, parameter.stored(), std::as_const(parameter).value());
    });
  });
  return all;
}

}  // namespace

TEST_CASE("an encoder layer and a decoder layer equal BART's") {
  const std::string folder = plait::test::test_data() + "/encoder_decoder_layer";
  const safetensors_reader weights(folder + "/model.safetensors"), golden(folder + "/golden.safetensors");
  const problem p = bart(weights, golden);
  const auto compare = [&](const std::vector<named_values>& ranks) {
    for (const named_values& got : ranks) {
      int compared = 0;
      for (const safetensors_entry& entry : golden.entries()) {
        if (p.given.contains(entry.name)) continue;
        REQUIRE(got.contains(entry.name));
        // A bias of the keys has no effect: its gradient is zero except for rounding errors, and is compared by
        // absolute distance.
        check_near(got.at(entry.name), golden.read<double>(entry.name), 1e-6, entry.name);
        ++compared;
      }
      CHECK(compared == 5 + 42);
    }
  };
  compare(run<megatron_sp>(four{1, 1, 1, 1}, p, 0));
  compare(run<megatron_sp>(four{2, 1, 2, 1}, p, 0));
  compare(run<megatron_tp>(four{1, 1, 4, 1}, p, 0));
}

namespace {

template <class S>
void check_strategy() {
  const problem p = small();
  const named_values one = run<S>(four{1, 1, 1, 1}, p, 3)[0];
  CHECK(one.size() == 5 + 2 * 42);
  for (const auto& [dp_ranks, tp_ranks] :
       {std::pair{1, 2}, {2, 1}, {2, 2}, {4, 1}, {1, 4}, {4, 2}, {2, 4}, {8, 1}, {1, 8}}) {
    const tensor_extents split = split_tensor_ranks(tp_ranks, p.sizes.of(dim_of<kv_heads>));
    for (const named_values& got : run<S>(four{dp_ranks, 1, split.tp, split.tp_rep}, p, 3)) {
      REQUIRE(got.size() == one.size());
      for (const auto& [name, value] : one) check_near(got.at(name), value, 1e-10, name);
    }
  }
}

}  // namespace

TEST_CASE("every mesh of up to eight ranks equals one rank, in outputs, gradients and weights after three steps") {
  check_strategy<megatron_sp>();
  check_strategy<megatron_tp>();
  check_strategy<stored_over_dp<megatron_sp>>();
}

TEST_CASE("a dry run predicts both layers") {
  const problem p = small();
  const four mesh{2, 1, 2, 1};
  const auto kept_and_sent = [&](auto& device, world& ranks) {
    using D = std::remove_cvref_t<decltype(device)>;
    const context<D> ctx{device, ranks, p.sizes, 7};
    both<megatron_sp, D> model(ctx);
    if constexpr (!only_counts<D>) model.visit([&](auto& p) { p.initialize(ctx); });
    gather_parameters(ctx, model);
    zero_gradients(ctx, model);
    const tensor<double, typename both<megatron_sp, D>::source, D> x(ctx);
    const tensor<double, typename both<megatron_sp, D>::target, D> y(ctx), dy(ctx);
    if constexpr (std::is_same_v<D, cpu>)
      for (const auto* t : {&y, &dy})
        device.zero(const_cast<double*>(t->data()), static_cast<std::size_t>(t->size()) * 8);
    if constexpr (std::is_same_v<D, cpu>)
      device.zero(const_cast<double*>(x.data()), static_cast<std::size_t>(x.size()) * 8);
    ranks.ledger().clear();
    typename both<megatron_sp, D>::saved kept;
    const std::size_t before = device.bytes_in_use();
    model.forward(ctx, x, y, kept);
    const std::size_t held = device.bytes_in_use() - before;
    model.backward(ctx, x, y, kept, dy);
    return std::pair{held, ranks.ledger()};
  };
  world counted = world::counting(mesh.shape(), 0);
  counting_device counter;
  const auto predicted = kept_and_sent(counter, counted);
  CHECK(predicted.first > 0);
  CHECK(predicted.second.total("tp").calls > 0);
  threads::run(4, [&](threads::communicator c) {
    world ranks(mesh.shape(), c);
    cpu device;
    const auto measured = kept_and_sent(device, ranks);
    if (ranks.rank() != 0) return;
    CHECK(measured.first == predicted.first);
    CHECK(compare_ledgers(measured.second, predicted.second).text() == "");
  });
}
