// timeout: 300
// program: combinators
// PaLM's block, a user-defined layer, and experts as a batched linear: finite differences, and meshes equal one rank.
#include "plait/kernels/settings.hpp"
#include "plait/nn/attention.hpp"
#include "plait/nn/combinators.hpp"
#include "plait/nn/linear.hpp"
#include "plait/nn/mlp.hpp"
#include "plait/nn/norm.hpp"
#include "plait/nn/strategy.hpp"
#include "support/layer_check.hpp"

using namespace plait;
using namespace plait::test;

namespace {

using four = megatron_sp::mesh;

template <class S, class D>
struct palm {
  using beside = in_parallel<S>;
  using stream = typename S::residual;
  using norm = rms_norm<double, stream, D>;
  using attention = self_attention<double, beside, D>;
  using mlp = swiglu_mlp<double, beside, D>;
  using branches = sum<stream, stream, attention, mlp>;
  using block = residual<norm, branches>;

  static block make(const context<D>& ctx) {
    attention_options how;
    how.frequencies = kernels::rope_inverse_frequencies(4, 100.0, {});
    return block(norm(ctx, 1e-5, "norm"), branches(ctx, "block", attention(ctx, "attention", how), mlp(ctx, "mlp")));
  }
};

template <class S>
void check_palm() {
  const auto make = [](const auto& ctx) { return palm<S, device_of<decltype(ctx)>>::make(ctx); };
  const dim_sizes sizes = transformer_sizes(2, 8);
  const layer_values& one = check_once("PaLM's block", four{1, 1, 1, 1}, sizes, make, 12);
  check_meshes({four{2, 1, 1, 1}, four{1, 1, 2, 1}, four{1, 2, 2, 1}, four{2, 1, 2, 2}, four{1, 1, 1, 4}}, sizes, one,
               make);
}

}  // namespace

TEST_CASE("a parallel block, with and without sequence parallelism") {
  check_palm<megatron_sp>();
  check_palm<megatron_tp>();
}

TEST_CASE("a parallel block gathers once and reduces once, each way") {
  const auto make = [](const auto& ctx) { return palm<megatron_sp, device_of<decltype(ctx)>>::make(ctx); };
  const layer_plan plan = dry_run(four{1, 1, 2, 1}.shape(), transformer_sizes(2, 8), 0, make);
  for (const ledger* book : {&plan.forward, &plan.backward}) {
    CHECK(book->total("tp", collective::all_gather).calls == 1);
    CHECK(book->total("tp", collective::reduce_scatter).calls == 1);
    CHECK(book->total().calls == 2);
  }
}

namespace {

// Experts: a dim of input, weight and output is a batch of products. Experts are sharded over their own axis.
using expert_mesh = plait::mesh<axis<dp>, axis<ep>, axis<tp>>;
struct expert_policy {
  using mesh = expert_mesh;
  using input = spec<shard<experts, ep>, shard<batch, dp>, hidden, invariant<tp>>;
  using weight = spec<shard<experts, ep>, shard<ffn, tp>, hidden>;
  using output = spec<shard<experts, ep>, shard<batch, dp>, shard<ffn, tp>>;
  static constexpr bool bias = true;
};

}  // namespace

TEST_CASE("a batched linear: experts over a separate axis, with gradients summed over dp only") {
  const auto make = [](const auto& ctx) {
    return linear<double, expert_policy, device_of<decltype(ctx)>>(ctx, "experts");
  };
  dim_sizes sizes = sizes_of<batch, hidden, ffn>(6, 4, 8);
  sizes.set(dim_of<experts>, 4);
  const layer_values one = check_one(expert_mesh{1, 1, 1}, sizes, make);
  check_meshes({expert_mesh{2, 1, 1}, expert_mesh{1, 4, 1}, expert_mesh{1, 2, 2}, expert_mesh{2, 2, 2}}, sizes, one,
               make);
  using layer_type = linear<double, expert_policy>;
  CHECK(dual(layer_type::derivation.branches[0].weight).partial == axis_list(axis_of<dp>));
}

namespace {

/// A user-defined layer: each feature times a learned factor. This is the complete code.
template <class Spec, class D>
class scale_features : public layer_types<double, Spec, Spec, D> {
 public:
  struct saved {};
  scale_features(const context<D>& ctx, const std::string& name) {
    const layout feature = layout_v<spec<hidden>>;
    factor_ = std::make_shared<parameter<double, D>>(
        ctx, parameter_info{name + ".factor", {ctx.sizes.of(dim_of<hidden>)}, {1, 0}, false}, feature, feature,
        layout_v<Spec>);
  }
  tensor<double, Spec, D> forward(const microbatch<D>& mb, const tensor<double, Spec, D>& x, saved*) {
    tensor<double, Spec, D> y(mb.ctx);
    multiply(x.data(), y.data(), x.size());
    return y;
  }
  tensor<double, dual_t<Spec>, D> backward(const microbatch<D>& mb, const tensor<double, Spec, D>& x, saved&,
                                           const tensor<double, dual_t<Spec>, D>& dy) {
    tensor<double, dual_t<Spec>, D> dx(mb.ctx);
    multiply(dy.data(), dx.data(), dy.size());
    // Dy is destroyed when this function returns.
    std::vector<double> terms(static_cast<std::size_t>(only_counts<D> ? 0 : x.size()));
    for (std::size_t i = 0; i < terms.size(); ++i) terms[i] = x.data()[i] * dy.data()[i];
    mb.on_weights([this, &on = mb.ctx.device, terms = std::move(terms)] {
      const auto width = static_cast<std::size_t>(factor_->used_size());
      for (std::size_t i = 0; i < terms.size(); ++i) factor_->used_gradient(on)[i % width] += terms[i];
    });
    return dx;
  }
  template <class F>
  void visit(F&& f) {
    f(*factor_);
  }

 private:
  void multiply(const double* from, double* to, std::int64_t n) const {
    if constexpr (!only_counts<D>)
      for (std::int64_t i = 0; i < n; ++i) to[i] = from[i] * factor_->used_value()[i % factor_->used_size()];
  }
  parameter_ptr<double, D> factor_;
};

template <class Spec>
void check_own_layer() {
  const auto make = [](const auto& ctx) {
    using D = device_of<decltype(ctx)>;
    using own = scale_features<Spec, D>;
    using norm = rms_norm<double, Spec, D>;
    std::vector<residual<norm, own>> blocks;
    for (const char* name : {"a", "b"})
      blocks.push_back({norm(ctx, 1e-5, std::string(name) + ".norm"), own(ctx, name)});
    return stack(std::move(blocks));
  };
  const dim_sizes sizes = transformer_sizes(2, 8);
  const layer_values& one = check_once("a user's layer", four{1, 1, 1, 1}, sizes, make);
  check_meshes({four{2, 1, 1, 1}, four{1, 1, 2, 1}, four{1, 2, 2, 1}, four{2, 2, 2, 1}}, sizes, one, make);
}

}  // namespace

TEST_CASE("a user's layer is reduced over every axis, deferred, recomputed and planned like the library's") {
  check_own_layer<megatron_sp::residual>();
  check_own_layer<megatron_tp::residual>();
}
