// Attention over a sequence that four in-process ranks share, on plain arrays: first by the library's ring, then by a
// policy that this program adds. In it each rank broadcasts its keys and values, one rank after the other. Both equal
// attention on one rank, forward and backward.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <vector>

#include "plait/comm/threads.hpp"
#include "plait/nn/attention/chosen.hpp"

namespace pl = plait;
using pl::cp;

/// The engine of the policy. It communicates, and calls the library's accumulators for each block of keys.
template <class Precision, class Device>
class broadcast_attention {
  using T = pl::activation_of<Precision>;
  using S = pl::statistic_of<Precision>;

 public:
  struct saved {
    pl::buffer<Device> lse;  // log-sum-exp of each query's scores
  };

  broadcast_attention() = default;
  broadcast_attention(const pl::context<Device>& ctx, const pl::attention_part& part, const pl::axis_list& axes)
      : part_(part), axes_(axes), comm_(&ctx.ranks.group(axes)) {}

  bool keeps_inputs() const { return true; }

  void forward(const pl::context<Device>& ctx, const pl::attention_inputs<T>& in, T* o, saved* keep) {
    auto lse = pl::make_buffer<S>(ctx.device, rows());
    pl::attention_sum<Precision, Device> sum(ctx.device, part_.shape, in, queries(), o, lse.template data<S>());
    each_block(ctx, in, [&](std::size_t, const pl::key_block<T>& keys) { sum.add(keys); });
    sum.finish();
    if (keep) keep->lse = std::move(lse);
  }

  template <class G>
  void backward(const pl::context<Device>& ctx, const pl::attention_inputs<T>& in, const T* o, const T* d_o,
                saved& kept, pl::attention_gradients<G> out) {
    pl::attention_gradient_sum<Precision, Device> sum(ctx.device, part_.shape, in, queries(), o,
                                                      kept.lse.template data<S>(), d_o);
    auto gradient = pl::make_buffer<S>(ctx.device, block_size());
    S* const d = gradient.template data<S>();
    each_block(ctx, in, [&](std::size_t owner, const pl::key_block<T>& keys) {
      ctx.device.zero(d, gradient.bytes(), ctx.device.main_stream());
      sum.add(keys, d, d + width(), 2 * width());
      comm_->all_reduce(d, d, block_size(), pl::dtype_of<S>, pl::reduce_op::sum);
      if (owner == part_.mine) pl::write_key_gradients(ctx.device, d, part_.shape, out);
    });
    sum.finish(out.dq);
  }

 private:
  const std::vector<pl::token_run>& queries() const { return part_.blocks[part_.mine]; }
  std::size_t rows() const {
    return static_cast<std::size_t>(part_.shape.batch * part_.shape.heads * part_.shape.q_len);
  }
  std::int64_t width() const { return part_.shape.kv_heads * part_.shape.head_dim; }
  std::size_t block_size() const {
    return static_cast<std::size_t>(2 * part_.shape.batch * part_.shape.k_len * width());
  }

  template <class Use>
  void each_block(const pl::context<Device>& ctx, const pl::attention_inputs<T>& in, Use&& use) {
    auto block = pl::make_buffer<T>(ctx.device, block_size());
    T* const keys = block.template data<T>();
    for (std::size_t owner = 0; owner < part_.blocks.size(); ++owner) {
      if (owner == part_.mine) pl::pack_keys_and_values(ctx.device, in, part_.shape, keys);
      comm_->broadcast(keys, block_size(), pl::dtype_of<T>, static_cast<int>(owner));
      use(owner, pl::key_block<T>{keys, keys + width(), 2 * width(), part_.shape.k_len, &part_.blocks[owner]});
    }
  }

  pl::attention_part part_;
  pl::axis_list axes_;
  pl::any_communicator* comm_ = nullptr;
};

/// The policy: the axes over which the sequence stays sharded, and the engine.
template <pl::axis_like Axis>
struct broadcast_kv {
  using axes = pl::type_list<Axis>;
  template <class Precision, class Device>
  using engine = broadcast_attention<Precision, Device>;
};

constexpr std::int64_t seq = 512, heads = 8, kv_heads = 2, head_dim = 32;

double element(int which, std::int64_t i) { return std::sin(0.37 * static_cast<double>(i * (which + 2) % 9973)); }

/// Returns output and gradients of `ranks` ranks, in original order.
template <class Policy>
std::vector<double> attend(std::int64_t ranks, const char* name) {
  std::vector<double> all(seq * 2 * (heads + kv_heads) * head_dim);
  pl::threads::run(static_cast<int>(ranks), [&](pl::threads::communicator comm) {
    pl::world world(pl::mesh<pl::axis<cp>>(ranks).shape(), comm);
    pl::cpu device;
    pl::context<pl::cpu> ctx{device, world, {}};
    pl::kernels::attention_shape shape;
    shape.heads = heads, shape.kv_heads = kv_heads, shape.head_dim = head_dim, shape.scale = 1 / std::sqrt(head_dim);
    pl::context_attention<double, Policy> attention(ctx, shape, pl::sequence_order::zigzag(seq, ranks));

    const std::int64_t widths[] = {heads * head_dim, kv_heads * head_dim, kv_heads * head_dim, heads * head_dim};
    std::vector<double> in[4], out[4];  // q, k, v and the gradient of o; o, dk, dv and dq
    for (int a = 0; a < 4; ++a) {
      for (const std::int64_t p : attention.positions())
        for (std::int64_t i = 0; i < widths[a]; ++i) in[a].push_back(element(a, p * widths[a] + i));
      out[a].resize(in[a].size());
    }
    typename pl::context_attention<double, Policy>::saved kept;
    attention.forward(ctx, {in[0].data(), in[1].data(), in[2].data()}, out[0].data(), &kept);
    attention.backward(ctx, {in[0].data(), in[1].data(), in[2].data()}, out[0].data(), in[3].data(), kept,
                       {out[3].data(), out[1].data(), out[2].data()});
    std::int64_t begin = 0;
    for (int a = 0; a < 4; begin += seq * widths[a++])
      for (std::size_t row = 0; row < attention.positions().size(); ++row)
        std::copy_n(out[a].data() + static_cast<std::int64_t>(row) * widths[a], widths[a],
                    all.data() + begin + attention.positions()[row] * widths[a]);
    if (world.rank() == 0 && ranks > 1)
      std::printf("%s: %.0f kB on the wire\n", name, static_cast<double>(world.ledger().total().wire) / 1000);
  });
  return all;
}

int main() try {
  const std::vector<double> one = attend<pl::ring<cp>>(1, "");
  double worst = 0;
  for (const auto& many : {attend<pl::ring<cp>>(4, "ring"), attend<broadcast_kv<cp>>(4, "broadcasts")})
    for (std::size_t i = 0; i < one.size(); ++i) worst = std::max(worst, std::abs(many[i] - one[i]));
  std::printf("largest difference to one rank, of outputs and gradients: %.1e\n", worst);
  return worst < 1e-12 ? 0 : 1;
} catch (const std::exception& e) {
  std::fprintf(stderr, "ring_attention: %s\n", e.what());
  return 1;
}
