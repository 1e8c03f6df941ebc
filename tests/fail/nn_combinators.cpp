// errors-at-most: 1
#include "if_fixed.hpp"
#include "plait/nn/attention.hpp"
#include "plait/nn/combinators.hpp"
#include "plait/nn/linear.hpp"
#include "plait/nn/norm.hpp"
#include "plait/nn/strategy.hpp"

using namespace plait;

// case: sequential_empty
// expect: a sequential needs at least one layer
// errors-at-most: 4
// lines-at-most: 30
using layers = if_fixed<sequential<rms_norm<float, spec<shard<batch, dp>, hidden>>>, sequential<>>;
using taken = layers::input;

// case: sequential_does_not_fit
// expect: the output of a layer has another spec than the next layer's input: make their policies agree, or put a redistribution between them
// expect: on_axis<plait::tp>, plait::on_dim<plait::ffn>, plait::states<plait::state::varying, plait::state::replicated>
// expect: output_of_layer<0, plait::linear<float, up_policy
// expect: input_of_layer<1, plait::linear<float, down_policy
struct up_policy {
  using input = spec<shard<batch, dp>, hidden, invariant<tp>>;
  using weight = spec<shard<ffn, tp>, hidden>;
  using output = spec<shard<batch, dp>, shard<ffn, tp>>;
};
struct down_policy {
  using input = if_fixed<spec<shard<batch, dp>, shard<ffn, tp>>, spec<shard<batch, dp>, ffn, replicate<tp>>>;
  using weight = spec<hidden, shard<ffn, tp>>;
  using output = spec<shard<batch, dp>, hidden, invariant<tp>>;
};
using mlp = sequential<linear<float, up_policy>, linear<float, down_policy>>;
using end = mlp::output;

// case: residual_ends_elsewhere
// expect: a residual branch must have equal input and output specs: norm, layer and the residual stream need one spec
// expect: on_axis<plait::tp>, plait::on_dim<plait::seq>, plait::states<plait::state::invariant, plait::state::varying>
// expect: output_of_layer<1, plait::sequential<
// expect: input_of_layer<0, plait::rms_norm<float
using stream = spec<shard<batch, dp>, shard<seq, tp>, hidden>;
struct proj_policy {
  using input = stream;
  using weight = spec<shard<ffn, tp>, hidden>;
  using output = spec<shard<batch, dp>, seq, shard<ffn, tp>>;
};
struct back_policy {
  using input = proj_policy::output;
  using weight = spec<hidden, shard<ffn, tp>>;
  using output = if_fixed<stream, spec<shard<batch, dp>, seq, hidden, invariant<tp>>>;
};
using inner = sequential<linear<float, proj_policy>, linear<float, back_policy>>;
using branch = residual<rms_norm<float, stream>, inner>;
using end = branch::saved;

// case: attention_zigzag_for_contiguous
// expect: the output of a layer has another spec than the next layer's input: make their policies agree
// expect: expected_dims<plait::batch, plait::zseq, plait::hidden>
// One layer returns tokens in zigzag order, the next takes them in original order.
using zig = context_parallel<megatron_sp, ring<cp>, zigzag>;
using text = if_fixed<zig, megatron_sp>;
static_assert(sizeof(sequential<rms_norm<float, text::residual>, self_attention<float, zig>>) > 0);
