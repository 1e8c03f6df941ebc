// The engine of attention without communication, where a rank has the whole sequence.
#pragma once

#include <cstdint>
#include <vector>

#include "plait/core/compiled.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/nn/attention/sums.hpp"

namespace plait {

/// Attention without communication, where the whole sequence is here.
template <class Precision, class Device>
class whole_attention {
  using T = activation_of<Precision>;
  using S = statistic_of<Precision>;

 public:
  static constexpr bool in_chunks = true;
  struct saved {
    buffer<Device> lse;  ///< [batch, heads, seq]
  };

  whole_attention() = default;
  whole_attention(const context<Device>&, const attention_part& part, const axis_list&)
      : shape_(part.shape), runs_(part.blocks[0]), chunk_(part.chunk) {
    if (part.blocks.size() != 1 || part.blocks[0].size() != 1)
      fail({part.name, ": attention over the whole sequence was given a part of it"});
    shape_.q_offset = shape_.k_offset = part.blocks[0][0].position;
  }

  bool keeps_inputs() const { return true; }

  void forward(const context<Device>& ctx, const attention_inputs<T>& in, T* o, saved* keep) {
    auto lse = make_buffer<S>(ctx.device, static_cast<std::size_t>(rows()));
    if (chunk_ > 0) {
      attention_sum<Precision, Device> sum(ctx.device, shape_, in, runs_, o, lse.template data<S>(), chunk_);
      sum.add(local_keys(in, shape_, runs_));
      sum.finish();
    } else {
      kernels::attention_forward(ctx.device, in.q, in.k, in.v, o, lse.template data<S>(), with(in));
    }
    if (keep) keep->lse = std::move(lse);
  }
  template <class G>
  void backward(const context<Device>& ctx, const attention_inputs<T>& in, const T* o, const T* d_o, saved& kept,
                attention_gradients<G> out) {
    if (chunk_ > 0) {
      const std::int64_t row = 2 * shape_.kv_heads * shape_.head_dim, elements = shape_.batch * shape_.k_len * row;
      attention_gradient_sum<Precision, Device> sum(ctx.device, shape_, in, runs_, o, kept.lse.template data<S>(), d_o,
                                                    chunk_);
      canonical_sum<S, Device> keys(elements, shape_.k_len / chunk_);
      const key_block<T> here = local_keys(in, shape_, runs_);
      sum.add_key_gradients(here, keys);
      sum.finish(out.dq);
      return write_key_gradients(ctx.device, keys.parts().values[0], shape_, out);
    }
    kernels::attention_backward(ctx.device, in.q, in.k, in.v, o, kept.lse.template data<S>(), d_o, out.dq, out.dk,
                                out.dv, with(in));
  }

 private:
  std::int64_t rows() const { return shape_.batch * shape_.heads * shape_.q_len; }
  kernels::attention_shape with(const attention_inputs<T>& in) const {
    kernels::attention_shape s = shape_;
    s.first_visible = in.first_visible;
    return s;
  }

  kernels::attention_shape shape_;
  std::vector<token_run> runs_;
  std::int64_t chunk_ = 0;
};

PLAIT_COMPILED_TEMPLATE(class whole_attention<float, cpu>)
PLAIT_COMPILED_TEMPLATE(class whole_attention<bf16, cpu>)
PLAIT_COMPILED_TEMPLATE(class whole_attention<double, cpu>)

}  // namespace plait

#include "plait/core/macros_on.hpp"
