// The program of plain_mlp.hpp on several ranks. It keeps its arrays, activation, loss and update. Its two products
// become layers.
#include <exception>

#include "plain_mlp.hpp"
#include "plait/comm/threads.hpp"
#include "plait/nn/linear.hpp"

namespace pl = plait;
using pl::batch, pl::ffn, pl::hidden, pl::tp;
using plain::array, plain::inner, plain::rows, plain::width;

// How arrays lie: each rank has some of the inner features, and all other dims are whole.
using whole = pl::spec<batch, hidden, pl::invariant<tp>>;
using part_of_inner = pl::spec<batch, pl::shard<ffn, tp>>;
using up_policy = pl::layer_policy<whole, pl::spec<pl::shard<ffn, tp>, hidden>, part_of_inner>;
using down_policy = pl::layer_policy<part_of_inner, pl::spec<hidden, pl::shard<ffn, tp>>, whole>;

void train(int ranks) {
  pl::threads::run(ranks, [&](pl::threads::communicator all) {
    pl::world world(pl::mesh<pl::axis<tp>>(ranks).shape(), all);
    pl::cpu device;
    const pl::context<pl::cpu> ctx{device, world, pl::sizes_of<batch, hidden, ffn>(rows, width, inner)};
    const std::int64_t mine = inner / ranks;

    // The arrays have this rank's size. Each gets its layout once.
    array x = plain::numbers(rows * width, 1), y(x), dy(x), dx(x);
    array h(rows * mine), a(h), da(h), dh(h), w1(mine * width), w2(w1), dw1(w1), dw2(w1);
    const pl::part<double, whole> x_part(ctx, x.data()), y_part(ctx, y.data());
    const pl::part<double, pl::dual_t<whole>> dy_part(ctx, dy.data()), dx_part(ctx, dx.data());
    const pl::part<double, part_of_inner> h_part(ctx, h.data()), a_part(ctx, a.data());
    const pl::part<double, pl::dual_t<part_of_inner>> da_part(ctx, da.data()), dh_part(ctx, dh.data());

    // The layers, on the program's weights and gradients.
    pl::with_saved<pl::linear<double, up_policy>> up(ctx, "up", {.memory = {w1.data(), dw1.data()}});
    pl::with_saved<pl::linear<double, down_policy>> down(ctx, "down", {.memory = {w2.data(), dw2.data()}});
    pl::take_parts(ctx, plain::numbers(inner * width, 0.3), up);
    pl::take_parts(ctx, plain::numbers(width * inner, 0.3), down);

    for (int step = 0; step < plain::steps; ++step) {
      pl::gather_parameters(ctx, up, down);
      pl::zero_gradients(ctx, up, down);
      up.forward(ctx, x_part, h_part);
      pl::apply(pl::rule::nonlinear, plain::activate, a_part, h_part);
      down.forward(ctx, a_part, y_part);
      const double loss = plain::loss_of(dy.data(), y.data(), x.data());
      if (world.rank() == 0) std::printf("%d ranks  step %d  loss %.6f\n", ranks, step, loss);
      down.backward(ctx, a_part, dy_part, da_part);
      pl::apply(pl::rule::product, plain::activate_backward, dh_part, da_part, a_part);
      up.backward(ctx, x_part, dh_part, dx_part);
      pl::each_parameter([&](auto& p) { static_cast<void>(p.reduce(ctx)), p.begin_update(); }, up, down);
      plain::update(w1, dw1), plain::update(w2, dw2);
    }
  });
}

int main() try {
  plain::train();
  for (const int ranks : {1, 4}) train(ranks);
} catch (const std::exception& e) {
  std::fprintf(stderr, "13_port: %s\n", e.what());
  return 1;
}
