// Layers of one type in a row, as many as are there at run time, such as the blocks of a model. Layers of different
// types are a sequential: nn/combinators/sequential.hpp.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "plait/layout/errors.hpp"
#include "plait/nn/layer.hpp"
#include "plait/nn/layer/names.hpp"
#include "plait/nn/layer/open_sum.hpp"
#include "plait/nn/layer/other_arrays.hpp"

namespace plait {

/// Any number of layers of one kind, known at run time: y = block_n(... block_1(x)). Each is a unit of parameters of
/// its own, and announced as one (`microbatch::enter`). How much is kept, each block has for itself
/// (`microbatch::policies`): under `recompute::full` nothing, and the backward pass runs its forward pass again.
template <class Block>
class stack : public detail::refused_layer<Block, Block> {
  static_assert(detail::all_layers<Block>);

 public:
  stack() = default;
  explicit stack(std::vector<Block>) {}
};
template <class Block>
stack(std::vector<Block>) -> stack<Block>;

template <layer Block>
class stack<Block> : public other_arrays_between<stack<Block>, Block, Block> {
  using arrays = other_arrays_between<stack, Block, Block>;

 public:
  using arrays::backward;
  using arrays::forward;
  using first_layer = Block;
  using value_type = typename Block::value_type;
  using device = typename Block::device;
  using input = typename Block::input;
  using output = typename Block::input;
  static_assert(equivalent(layout_v<input>, layout_v<typename Block::output>),
                "the blocks of a stack must end as they begin: input and output need one spec");
  template <class Spec>
  using tensor_of = tensor<value_type, Spec, device>;

  struct saved {
    std::vector<tensor_of<input>> inputs;  ///< of all blocks but the first, whose input the caller holds
    std::vector<typename Block::saved> blocks;
  };

  stack() = default;
  explicit stack(std::vector<Block> blocks) : blocks_(std::move(blocks)) {}

  std::size_t size() const { return names_.checked(blocks_).size(); }
  Block& operator[](std::size_t i) { return names_.checked(blocks_)[i]; }

  /// With no block at all, a copy of x.
  tensor_of<output> forward(const microbatch<device>& mb, const tensor_of<input>& x, saved* keep = nullptr) {
    if (keep) *keep = {}, keep->blocks.resize(size());
    if (size() == 0) return copy(mb, x);
    const auto run = [&](std::size_t i, auto& in) {
      const microbatch<device> here = mb.at_block(i);
      auto* const kept = keep && here.policy != recompute::full ? &keep->blocks[i] : nullptr;
      return blocks_[i].forward(here, in, kept).template as<input>();
    };
    if constexpr (leaves_sums<Block>) {  // which the next block adds up
      auto current = detail::closed_view(mb, x);
      for (std::size_t i = 0; i < blocks_.size(); ++i) {
        auto y = run(i, current);
        tensor_of<input> in = std::move(current).take(mb.ctx.device);
        if (keep && i > 0)
          keep->inputs.push_back(std::move(in));
        else if (i > 0)
          y.hold(std::move(in));
        current = std::move(y);
      }
      return std::move(current).take(mb.ctx.device);
    } else {
      tensor_of<input> current = run(0, x);
      for (std::size_t i = 1; i < blocks_.size(); ++i) {
        tensor_of<input> y = run(i, current);
        if (keep) keep->inputs.push_back(std::move(current));
        current = std::move(y);
      }
      return current;
    }
  }
  template <spec_like Gradient>
  tensor_of<dual_t<input>> backward(const microbatch<device>& mb, const tensor_of<input>& x, saved& kept,
                                    const tensor_of<Gradient>& dy) {
    if (size() == 0) return copy(mb, dy);
    tensor_of<dual_t<input>> d;
    for (std::size_t i = blocks_.size(); i-- > 0;) {
      const tensor_of<input>& in = i == 0 ? x : kept.inputs[i - 1];
      const microbatch<device> mine = mb.at_block(i);
      const bool again = mine.policy == recompute::full;
      const microbatch<device> here = again ? mine.keeping(recompute::none) : mine;
      if (again) blocks_[i].forward(here, in, &kept.blocks[i]);
      d = (i + 1 == blocks_.size()
               ? blocks_[i].backward(here, in, kept.blocks[i], dy.template view_as<dual_t<typename Block::output>>())
               : blocks_[i].backward(here, in, kept.blocks[i], d.template view_as<dual_t<typename Block::output>>()));
      if (mb.deferred) continue;  // which read them later
      kept.blocks[i] = {};
      if (i > 0) kept.inputs[i - 1].reset();
    }
    return d;
  }
  template <class F>
  void visit(F&& f) {
    for (Block& b : names_.checked(blocks_)) b.visit(f);
  }

 private:
  template <class Spec>
  static tensor_of<Spec> copy(const microbatch<device>& mb, const tensor_of<Spec>& x) {
    tensor_of<Spec> y(mb.ctx);
    device& d = mb.ctx.device;
    d.copy(y.data(), x.data(), static_cast<std::size_t>(x.size()) * sizeof(value_type), d.main_stream());
    return y;
  }

  detail::layer_names names_{"a stack of layers"};
  std::vector<Block> blocks_;
};

}  // namespace plait
