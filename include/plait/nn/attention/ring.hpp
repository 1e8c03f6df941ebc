// The engine of the policy `ring`, and the route of its blocks. Zigzag order (tensor/sequence_order.hpp) balances its
// work under a causal mask.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "plait/core/macros_off.hpp"
#include "plait/nn/attention/all_gather_kv.hpp"

namespace plait {

/// The route of each block of keys on a ring of ranks. Rank r holds block r at step 0. At step s it holds block r - s,
/// modulo the ranks, unless that block has stopped earlier. A block stops at the last rank that attends to some of it.
/// Under a causal mask without zigzag, block j makes c - 1 - j hops. So no rank waits for keys that it does not use.
class ring_route {
 public:
  ring_route() = default;
  ring_route(const std::vector<std::vector<token_run>>& blocks, std::size_t mine, const kernels::attention_mask& mask)
      : ranks_(static_cast<int>(blocks.size())), mine_(static_cast<int>(mine)), hops_(blocks.size()) {
    for (int j = 0; j < ranks_; ++j)
      for (int s = 1; s < ranks_; ++s)
        if (sees(blocks[at(j + s)], blocks[at(j)], mask)) hops_[at(j)] = s;
    last_ = *std::max_element(hops_.begin(), hops_.end());
  }

  int ranks() const { return ranks_; }
  int next() const { return static_cast<int>(at(mine_ + 1)); }
  int previous() const { return static_cast<int>(at(mine_ - 1)); }
  int last_step() const { return last_; }
  /// The block that may be at this rank at step s.
  std::size_t block(int s) const { return at(mine_ - s); }
  /// Whether that block reaches this rank.
  bool holds(int s) const { return s <= hops_[block(s)]; }
  /// Whether this rank sends it to the next rank.
  bool sends(int s) const { return s < hops_[block(s)]; }
  /// Whether this rank receives the block of step s + 1 from the previous rank.
  bool receives(int s) const { return s + 1 < ranks_ && holds(s + 1); }

  // The gradient of a block's keys and values begins at the first other rank that computes with it. The last one
  // returns it to the block's owner.

  /// Whether this rank sends on the gradient of step s's block, to the next rank or to its owner.
  bool gradient_leaves(int s) const { return s >= 1 && holds(s); }
  int gradient_goes_to(int s) const { return sends(s) ? next() : static_cast<int>(block(s)); }
  /// Whether this rank receives the gradient of step s + 1 from the previous rank.
  bool gradient_arrives(int s) const { return s >= 1 && receives(s); }
  /// Whether the gradient of this rank's own block returns at the end of step s, and from which rank.
  bool gradient_returns(int s) const { return s >= 1 && s == hops_[at(mine_)]; }
  int gradient_returns_from() const { return static_cast<int>(at(mine_ + hops_[at(mine_)])); }

 private:
  std::size_t at(int rank) const { return static_cast<std::size_t>((rank % ranks_ + ranks_) % ranks_); }

  int ranks_ = 1, mine_ = 0, last_ = 0;
  std::vector<int> hops_;
};

/// Ring attention: keys and values travel unexpanded (grouped heads). Two blocks exist at a time on a rank: one in use
/// and one in flight. In the backward pass they travel again, with dk and dv in the type of statistics.
///
/// It derives from the engine that gathers, which handles a single rank and finds the ends of documents. With an
/// `attention_part::chunk` the backward pass is that engine's, since on a ring sums over queries have another order.
///
/// Let B = 2 batch seq kv_heads head_dim be the elements of all keys and values of a rank's heads. In zigzag order over
/// c ranks, without a window, each rank sends (c-1)/c B elements of the activations' type forward. Backward it sends as
/// many again, and (c-1)/c B elements of the type of statistics. Without zigzag a rank sends half as much on average,
/// from 0 to (c-1)/c B.
template <class Precision, class Device>
class ring_attention : public all_gather_kv_attention<Precision, Device> {
  using T = activation_of<Precision>;
  using S = statistic_of<Precision>;
  using gathering = all_gather_kv_attention<Precision, Device>;
  static constexpr int key_tag = 0, gradient_tag = 1, home_tag = 2;

 public:
  using saved = typename gathering::saved;

  ring_attention() = default;
  ring_attention(const context<Device>& ctx, const attention_part& part, const axis_list& axes)
      : gathering(ctx, part, axes), route_(part.blocks, part.mine, part.shape.mask) {}

  void forward(const context<Device>& ctx, const attention_inputs<T>& given, T* o, saved* keep) {
    if (route_.ranks() == 1) return gathering::forward(ctx, given, o, keep);
    saved scratch;
    saved& kept = keep ? *keep : scratch;
    kept = {};  // drops the values of an earlier pass
    kept.ends = this->find_ends(ctx, given.first_visible);
    const attention_inputs<T> in = kept.with_ends(given);
    auto lse = make_buffer<S>(ctx.device, static_cast<std::size_t>(rows()));
    attention_sum<Precision, Device> sum(ctx.device, part_.shape, in, queries(), o, lse.template data<S>(),
                                         part_.chunk);
    travel(
        ctx, in, [&](int, const key_block<T>& keys) { sum.add(keys); }, [](int) {});
    sum.finish();
    kept.lse = std::move(lse);
  }

  template <class G>
  void backward(const context<Device>& ctx, const attention_inputs<T>& given, const T* o, const T* d_o, saved& kept,
                attention_gradients<G> out) {
    if (route_.ranks() == 1 || part_.chunk > 0) return gathering::backward(ctx, given, o, d_o, kept, out);
    const attention_inputs<T> in = kept.with_ends(given);
    attention_gradient_sum<Precision, Device> sum(ctx.device, part_.shape, in, queries(), o,
                                                  kept.lse.template data<S>(), d_o);
    const auto block_of_gradients = [&] { return make_buffer<S>(ctx.device, static_cast<std::size_t>(largest())); };
    buffer<Device> home = block_of_gradients(), returned, leaving, arriving, here;
    comm_group moves(*comm_);
    const auto add = [&](int s, const key_block<T>& keys) {
      buffer<Device>& into = s == 0 ? home : here;
      if (into.empty()) into = block_of_gradients();
      detail::clear(ctx.device, into.template data<S>(), block_size(s));
      sum.add(keys, into.template data<S>(), into.template data<S>() + width(), 2 * width());
    };
    const auto pass_on = [&](int s) {
      moves.wait();
      if (s >= 2 && route_.holds(s))
        kernels::accumulate(ctx.device, arriving.template data<S>(), here.template data<S>(), block_size(s));
      if (route_.gradient_leaves(s)) {
        leaving.swap(here);
        const bool goes_home = !route_.sends(s);
        moves.send(leaving.data(), block_elements(s), dtype_of<S>, route_.gradient_goes_to(s),
                   goes_home ? home_tag : gradient_tag);
      }
      if (route_.gradient_arrives(s)) {
        if (arriving.empty()) arriving = block_of_gradients();
        moves.receive(arriving.data(), block_elements(s + 1), dtype_of<S>, route_.previous(), gradient_tag);
      }
      if (route_.gradient_returns(s)) {
        returned = block_of_gradients();
        moves.receive(returned.data(), block_elements(0), dtype_of<S>, route_.gradient_returns_from(), home_tag);
      }
      moves.start();
    };
    travel(ctx, in, add, pass_on);
    moves.wait();
    if (!returned.empty())
      kernels::accumulate(ctx.device, returned.template data<S>(), home.template data<S>(), block_size(0));
    sum.finish(out.dq, out.dsinks);
    write_key_gradients(ctx.device, home.template data<S>(), part_.shape, out);
  }

 private:
  using gathering::comm_;
  using gathering::part_;
  using gathering::queries;
  using gathering::rows;
  using gathering::width;
  std::int64_t tokens(int s) const { return tokens_of(part_.blocks[route_.block(s)]); }
  /// Elements of the block of step s.
  std::int64_t block_size(int s) const { return 2 * part_.shape.batch * tokens(s) * width(); }
  std::size_t block_elements(int s) const { return static_cast<std::size_t>(block_size(s)); }
  std::int64_t largest() const {
    std::int64_t most = 0;
    for (int s = 0; s < route_.ranks(); ++s) most = std::max(most, block_size(s));
    return most;
  }

  /// Calls use(step, keys and values) for each block that arrives, while the next block is in flight, then after(step).
  template <class Use, class After>
  void travel(const context<Device>& ctx, const attention_inputs<T>& in, Use&& use, After&& after) {
    buffer<Device> current, next;
    const auto block_of_keys = [&] { return make_buffer<T>(ctx.device, static_cast<std::size_t>(largest())); };
    if (route_.sends(0)) {
      current = block_of_keys();
      pack_keys_and_values(ctx.device, in, part_.shape, current.template data<T>());
    }
    comm_group moves(*comm_);
    for (int s = 0; s <= route_.last_step(); ++s) {
      if (route_.sends(s)) moves.send(current.data(), block_elements(s), dtype_of<T>, route_.next(), key_tag);
      if (route_.receives(s)) {
        if (next.empty()) next = block_of_keys();
        moves.receive(next.data(), block_elements(s + 1), dtype_of<T>, route_.previous(), key_tag);
      }
      moves.start();
      if (s == 0) {
        use(s, local_keys(in, part_.shape, queries()));
      } else if (route_.holds(s)) {
        const T* const keys = current.template data<T>();
        use(s, key_block<T>{keys, keys + width(), 2 * width(), tokens(s), &part_.blocks[route_.block(s)]});
      }
      after(s);
      moves.wait();
      current.swap(next);
    }
  }

  ring_route route_;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
