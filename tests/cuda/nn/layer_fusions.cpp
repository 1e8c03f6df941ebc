// program: layers
// Fusions of layers: biases, residual sums and sums of gradients that other kernels and products compute. Each test
// records the work as a graph and counts its nodes, so a lost fusion is a failure.
#include "cuda/nn/fusion_checks.hpp"

namespace plait::test::fusions {

TEST_CASE("fusions: the product for the weight's gradient also computes the bias's") {
  on_one_rank([](context<cuda>& ctx) {
    for (const bool defer : {false, true}) {
      check_bias_gradient<float>(ctx, true, defer);
      check_bias_gradient<bf16>(ctx, true, defer);
      check_bias_gradient<double>(ctx, false, defer);
    }
  });
}

#ifdef PLAIT_CUDA_STAND_IN
TEST_CASE("fusions: a kernel computes a bias's gradient if cuBLASLt has no product with sums") {
  stand_in::no_sums = true;
  on_one_rank([](context<cuda>& ctx) {
    check_bias_gradient<float>(ctx, false, false);
    check_bias_gradient<bf16>(ctx, false, false);
  });
  stand_in::no_sums = false;
}
#endif

TEST_CASE("fusions: gradients of biases of linears that share an input are one sum, without frozen ones") {
  on_one_rank([](context<cuda>& ctx) {
    using policy = up_policy<gathered, true>;
    using three = detail::linear_value<policy, policy, policy>;
    const auto branch = [](const std::string& name) {
      return linear_branch{{name + ".weight", {64, 32}, {}, true},
                           layout_v<policy::weight>,
                           true,
                           {name + ".bias", {64}, {}, false},
                           detail::stored_bias<policy>::value};
    };
    linear_core<float, cuda> core(ctx, three::derivation, {branch("a"), branch("b"), branch("c")});
    fill(ctx, core);
    const auto x = random_tensor<gathered>(ctx, 1);
    std::vector<float> host(32 * 192);
    values sums(192);
    for (std::size_t i = 0; i < host.size(); ++i) {
      host[i] = static_cast<float>(i % 13) * 0.25f - 1.0f;
      sums[i % 192] += host[i];
    }
    auto dy = make_buffer<float>(ctx.device, host.size());
    ctx.device.upload(dy.data(), host.data(), dy.bytes(), ctx.device.main_stream());
    tensor<float, dual_t<gathered>, cuda> dx(ctx);
    const auto pass = [&] {
      linear_saved<cuda> kept;
      zero_gradients(ctx, core);
      core.backward(ctx, x.data(), kept, dy.data<float>(), dx.data());
    };
    CHECK(nodes(ctx.device, pass) == 2);  // the products of the input's and of the weights' gradients
    const auto same = [&](std::size_t i) {
      const values gradient = read(ctx, core.bias(i)->gradient(), 64);
      for (std::size_t c = 0; c < 64; ++c)
        if (gradient[c] != static_cast<float>(sums[i * 64 + c])) return false;
      return true;
    };
    CHECK((same(0) && same(1) && same(2)));
    core.bias(1)->freeze();
    CHECK(nodes(ctx.device, pass) == 2 + 2 * 3);
    CHECK((same(0) && same(2)));
  });
}

TEST_CASE("fusions: a residual sum runs with the branch's product, its gradient with the norm's") {
  on_one_rank([](context<cuda>& ctx) {
    check_residual<rms_norm<float, rows, cuda>>(ctx, 0.0);
    check_residual<rms_norm<float, rows, cuda>>(ctx, 0.25);
    check_residual<layer_norm<float, rows, cuda>>(ctx, 0.0);
    check_residual<rms_norm<bf16, rows, cuda>>(ctx, 0.0);
  });
}

TEST_CASE("fusions: a residual sum that no product adds is added by the norm that reads it") {
  on_one_rank([](context<cuda>& ctx) {
    check_chain<rms_norm<float, rows, cuda>>(ctx);
    check_chain<layer_norm<float, rows, cuda>>(ctx);
    check_chain<rms_norm<bf16, rows, cuda>>(ctx);
  });
  threads::run(2, cuda::options{.workspace_bytes = 4 << 20}, [&](threads::communicator c, cuda& device) {
    world ranks(split::mesh{1, 2}.shape(), c);
    context<cuda> ctx = sized(device, ranks);
    check_chain_values<rms_norm<bf16, rows, cuda>>(ctx, 0.0);
    check_chain_values<layer_norm<float, rows, cuda>>(ctx, 0.0);
    device.synchronize();
  });
}

TEST_CASE("fusions: consecutive layers pass on sums that are still to be added") {
  on_one_rank([](context<cuda>& ctx) {
    using down = linear<float, down_policy, cuda>;
    using up = linear<float, up_policy<rows, false>, cuda>;
    sequential<up, down> both(up(ctx, "up"), down(ctx, "down"));
    fill(ctx, both);
    const auto x = random_tensor<rows>(ctx, 1);
    const auto dy = random_tensor<dual_t<rows>>(ctx, 2);
    sequential<up, down>::saved kept;
    tensor<float, rows, cuda> y, sum;
    tensor<float, dual_t<rows>, cuda> dx, dsum;
    const std::size_t forward = nodes(ctx.device, [&] { y = both.forward(ctx, x, &kept); });
    CHECK(nodes(ctx.device, [&] { sum = both.forward(ctx, x, &kept, &x); }) == forward);
    const std::size_t backward = nodes(ctx.device, [&] { reuse(kept), dx = both.backward(ctx, x, kept, dy); });
    CHECK(nodes(ctx.device, [&] { reuse(kept), dsum = both.backward(ctx, x, kept, dy, &dy); }) == backward);
    CHECK(difference(read(ctx, sum), plus(read(ctx, y), read(ctx, x))) < 1e-5);
    CHECK(difference(read(ctx, dsum), plus(read(ctx, dx), read(ctx, dy))) < 1e-5);
  });
}

TEST_CASE("fusions: a bias and an addend run with the product") {
  on_one_rank([](context<cuda>& ctx) {
    check_linear<float>(ctx);
    check_linear<bf16>(ctx);
    check_linear<double>(ctx);
  });
}

TEST_CASE("fusions: the product adds a bias in the caller's memory if it is on a 16-byte boundary") {
  on_one_rank([](context<cuda>& ctx) {
    check_bias_of_caller<float>(ctx);
    check_bias_of_caller<bf16>(ctx);
  });
}

TEST_CASE("fusions: branches that share their input are added by the products, and so are their gradients") {
  on_one_rank([](context<cuda>& ctx) {
    using branch = linear<float, up_policy<gathered, false>, cuda>;
    using both_type = sum<rows, branch::output, branch, branch>;
    both_type both(ctx, "both", branch(ctx, "a"), branch(ctx, "b"));
    fill(ctx, both);
    branch a(ctx, "a"), b(ctx, "b");
    fill(ctx, a);
    fill(ctx, b);
    const auto x = random_tensor<rows>(ctx, 1);
    const tensor<float, gathered, cuda> shared(ctx, const_cast<float*>(x.data()));
    const auto dy = random_tensor<dual_t<branch::output>>(ctx, 2);
    both_type::saved kept;
    linear_saved<cuda> none;
    tensor<float, branch::output, cuda> y;
    tensor<float, dual_t<rows>, cuda> dx;
    const std::size_t forward = nodes(ctx.device, [&] { y = both.forward(ctx, x, &kept); });
    CHECK(forward == 2 * nodes(ctx.device, [&] { a.forward(ctx, shared); }));
    const std::size_t backward = nodes(ctx.device, [&] { reuse(kept), dx = both.backward(ctx, x, kept, dy); });
    CHECK(backward == 2 * nodes(ctx.device, [&] { reuse(none), a.backward(ctx, shared, none, dy); }) + 1);
    // ... moving the gradient back to the boundary, on one rank a copy
    CHECK(difference(read(ctx, y), plus(read(ctx, a.forward(ctx, shared)), read(ctx, b.forward(ctx, shared)))) < 1e-5);
    linear_saved<cuda> of_a, of_b;
    CHECK(difference(read(ctx, dx), plus(read(ctx, a.backward(ctx, shared, of_a, dy)),
                                         read(ctx, b.backward(ctx, shared, of_b, dy)))) < 1e-5);
  });
}

TEST_CASE("fusions: queries and keys are rotated in one pass, or while norms of heads copy them") {
  on_one_rank([](context<cuda>& ctx) {
    for (const double norm_epsilon : {0.0, 1e-6}) {
      const auto nodes_of = [&](bool rotates) {
        using layer = self_attention<bf16, split, cuda>;
        attention_options how;
        if (rotates) how.frequencies.assign(32, 0.5);
        how.qk_norm_epsilon = norm_epsilon;
        layer attention(ctx, "attention", how);
        fill(ctx, attention);
        const auto x = random_tensor<rows, bf16>(ctx, 1);
        const auto dy = random_tensor<dual_t<rows>, bf16>(ctx, 2);
        layer::saved kept;
        const std::size_t forward = nodes(ctx.device, [&] { attention.forward(ctx, x, &kept); });
        const std::size_t backward = nodes(ctx.device, [&] { reuse(kept), attention.backward(ctx, x, kept, dy); });
        return std::pair(forward, backward);
      };
      const auto [forward, backward] = nodes_of(false);
      const std::size_t passes = norm_epsilon > 0 ? 0 : 1;
      CHECK(nodes_of(true) == std::pair(forward + passes, backward + passes));
      if (norm_epsilon > 0) continue;
      // No copies of q and k: forward has their product, attention, and the output's product. Backward has the output's
      // two products, the sums of its gradient's rows, attention's two kernels, and the projections' two products.
      CHECK(forward == 3);
      CHECK(backward == 7);
    }
  });
}

TEST_CASE("fusions: a norm's weight gradient is computed in the pass of its input's gradient") {
  on_one_rank([](context<cuda>& ctx) {
    rms_norm<float, rows, cuda> norm(ctx);
    fill(ctx, norm);
    const auto x = random_tensor<rows>(ctx, 1);
    const auto dy = random_tensor<dual_t<rows>>(ctx, 2);
    rms_norm<float, rows, cuda>::saved kept;
    norm.forward(ctx, x, &kept);
    const auto gradient = [&] {
      const values added = read(ctx, norm.weight()->gradient(), 32);
      norm.weight()->zero_gradient(ctx);
      return added;
    };
    const std::size_t at_once = nodes(ctx.device, [&] { reuse(kept), norm.backward(ctx, x, kept, dy); });
    norm.weight()->zero_gradient(ctx);
    norm.forward(ctx, x, &kept);
    norm.backward(ctx, x, kept, dy);
    norm.forward(ctx, x, &kept);
    const values expected = gradient();
    weight_work later;
    microbatch<cuda> mb = ctx;
    mb.deferred = &later;
    const std::size_t deferred = nodes(ctx.device, [&] {
      reuse(kept);
      norm.backward(mb, x, kept, dy);
      later.run();
    });
    CHECK(at_once + 1 < deferred);  // dx, and a copy of dy
    norm.weight()->zero_gradient(ctx);
    norm.forward(ctx, x, &kept);
    norm.backward(mb, x, kept, dy);
    later.run();
    CHECK(difference(gradient(), expected) < 1e-5);
  });
}

}  // namespace plait::test::fusions
