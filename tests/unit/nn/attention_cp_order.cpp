// program: context_order
// Zigzag order: positions of tokens, even shares of causal work, distances that blocks travel, and errors.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>
#include <type_traits>
#include <vector>

#include "plait/comm/threads.hpp"
#include "plait/device/counting.hpp"
#include "plait/kernels/counting.hpp"
#include "plait/nn/attention/all_gather_kv.hpp"
#include "plait/nn/attention/chosen.hpp"
#include "plait/nn/attention/ring.hpp"
#include "plait/nn/attention/ulysses.hpp"
#include "plait/nn/pointwise.hpp"
#include "plait/nn/strategy.hpp"
#include "support/naive_attention.hpp"
#include "support/on_mesh.hpp"
#include "support/texts.hpp"
#include "support/token_runs.hpp"

using namespace plait;
using namespace plait::test;

namespace {

/// The positions of four tokens from `first` and of four from `second`.
std::vector<std::int64_t> two_pieces(std::int64_t first, std::int64_t second) {
  std::vector<std::int64_t> all(8);
  std::iota(all.begin(), all.begin() + 4, first);
  std::iota(all.begin() + 4, all.end(), second);
  return all;
}

}  // namespace

TEST_CASE("rank r of c has piece r and piece 2c - 1 - r") {
  const sequence_order order = sequence_order::zigzag(24, 3);  // six pieces of four tokens
  CHECK(order.positions(0, 8) == two_pieces(0, 20));
  CHECK(order.positions(8, 8) == two_pieces(4, 16));
  CHECK(order.positions(16, 8) == two_pieces(8, 12));
  CHECK(order.runs(0, 8) == runs_of{{0, 0, 4}, {4, 20, 4}});
  CHECK(order.runs(16, 8) == runs_of{{0, 8, 8}});              // its two pieces are neighbours
  CHECK(order.runs(10, 4) == runs_of{{0, 6, 2}, {2, 16, 2}});  // a part of a part, as with tensor parallelism
  CHECK(sequence_order::original(24).runs(8, 8) == runs_of{{0, 8, 8}});
}

TEST_CASE("pieces of whole blocks") {
  const sequence_order order = sequence_order::zigzag(24, 3, "seq", "ranks of cp", 3);  // eight blocks: 2, 3, 3
  CHECK(order.runs(0, 6) == runs_of{{0, 0, 3}, {3, 21, 3}});
  CHECK(order.runs(6, 9) == runs_of{{0, 3, 6}, {6, 18, 3}});
  CHECK(order.runs(15, 9) == runs_of{{0, 9, 9}});
  CHECK(sequence_order::zigzag(24, 1, "seq", "ranks of cp", 3) == sequence_order::original(24));
}

TEST_CASE("zigzag order has every position once") {
  CHECK(sequence_order::zigzag(7, 1) == sequence_order::original(7));
  for (const std::int64_t ranks : {2, 3, 4, 7, 8})
    for (const std::int64_t length : {48, 49, 50, 51, 53, 8}) {
      const sequence_order o = sequence_order::zigzag(length, ranks);
      std::vector<std::int64_t> all = o.positions(0, length), every(static_cast<std::size_t>(length));
      std::iota(every.begin(), every.end(), 0);
      CHECK((all != every || length == ranks));
      std::sort(all.begin(), all.end());
      CHECK(all == every);
      for (const runs_of& block : blocks_of(o, ranks)) CHECK(block.size() <= 2);
    }
}

TEST_CASE("the busiest rank's causal work in zigzag order is within 1 % of the mean") {
  for (const std::int64_t ranks : {2, 4, 8, 16}) {
    const std::int64_t length = 4099;  // the ranks do not divide it
    const std::vector<std::int64_t> zig = attention_work(sequence_order::zigzag(length, ranks), ranks);
    const std::vector<std::int64_t> text = attention_work(sequence_order::original(length), ranks);
    const std::int64_t pairs = length * (length + 1) / 2;
    CHECK(std::accumulate(zig.begin(), zig.end(), std::int64_t{0}) == pairs);
    CHECK(std::accumulate(text.begin(), text.end(), std::int64_t{0}) == pairs);
    const double mean = static_cast<double>(pairs) / static_cast<double>(ranks);
    CHECK(static_cast<double>(*std::max_element(zig.begin(), zig.end())) <= 1.01 * mean);
    CHECK(static_cast<double>(*std::max_element(text.begin(), text.end())) >= 1.4 * mean);
  }
}

namespace {

/// The number of (query, key) pairs that rank `r` multiplies, as attention counts them there.
template <class Policy>
std::int64_t counted_pairs(const sequence_order& order, std::int64_t ranks, std::int64_t r,
                           const kernels::attention_mask& mask) {
  world w = world::counting(plait::mesh<axis<cp>>(ranks).shape(), r);
  counting_device device;
  const context<counting_device> ctx{device, w, {}, 1};
  const kernels::attention_shape shape{.batch = 1, .heads = 1, .kv_heads = 1, .head_dim = 1, .scale = 1, .mask = mask};
  context_attention<float, Policy, counting_device> attention(ctx, shape, order);
  std::vector<float> q(static_cast<std::size_t>(order.length())), k(q), v(q), o(q);
  attention.forward(ctx, {q.data(), k.data(), v.data()}, o.data(), nullptr);
  return static_cast<std::int64_t>(device.operations()) / 4;
}

}  // namespace

TEST_CASE("each rank has the predicted work, and zigzag order gives the busiest no more, except for two masks") {
  using masks = kernels::attention_mask;
  const auto busiest = [](const std::vector<std::int64_t>& work) {
    return *std::max_element(work.begin(), work.end());
  };
  for (const std::int64_t ranks : {2, 3, 4, 8})
    for (const masks& mask :
         {masks::causal(), masks::full(), masks::window(9), masks::window(60), masks::window(100), masks::prefix_lm(30),
          masks::local(masks::all, 9), masks::local(20, masks::all), masks::local(7, 12), masks::local(20, 20)}) {
      INFO(ranks << " ranks, " << kernels::describe(mask));
      const sequence_order text = sequence_order::original(128), zig = sequence_order::zigzag(128, ranks);
      for (const sequence_order& order : {text, zig}) {
        const std::vector<std::int64_t> work = attention_work(order, ranks, mask);
        for (std::int64_t r = 0; r < ranks; ++r) {
          const std::int64_t pairs = work[static_cast<std::size_t>(r)];
          CHECK(counted_pairs<ring<cp>>(order, ranks, r, mask) == pairs);
          CHECK(counted_pairs<all_gather_kv<cp>>(order, ranks, r, mask) == pairs);
        }
      }
      const std::int64_t in_text = busiest(attention_work(text, ranks, mask));
      const bool two_sided = mask.before != mask.all && mask.after > 0 && mask.after != mask.all;
      CHECK((busiest(attention_work(zig, ranks, mask)) <= in_text || two_sided));
      if (mask.sees_all()) CHECK(busiest(attention_work(zig, ranks, mask)) == in_text);
    }
}

TEST_CASE("zigzag order is refused if it gives the busiest rank over an eighth more work") {
  const kernels::attention_mask wide = kernels::attention_mask::local(50, 50);
  const std::string text = text_thrown_by([&] { counted_pairs<ring<cp>>(sequence_order::zigzag(128, 2), 2, 0, wide); });
  CHECK(
      text ==
      "attention: under the mask local 50 before and 50 after, zigzag order gives the busiest of 2 ranks 6122 pairs of "
      "a query and a key in each sequence, and the order of the text 5189; use that order (plait::contiguous)");
  CHECK(text_thrown_by([&] { counted_pairs<all_gather_kv<cp>>(sequence_order::zigzag(128, 2), 2, 0, wide); }) == text);
  CHECK(text_thrown_by([&] { counted_pairs<ring<cp>>(sequence_order::original(128), 2, 0, wide); }).empty());
  CHECK(text_thrown_by([&] { counted_pairs<ring<cp>>(sequence_order::zigzag(128, 4), 4, 0, wide); }).empty());
}

TEST_CASE("a block travels to the last rank that sees it, and every message has both ends") {
  for (const std::int64_t ranks : {2, 3, 4, 8})
    for (const bool zig : {false, true})
      for (const kernels::attention_mask mask :
           {kernels::attention_mask::causal(), kernels::attention_mask::window(5), kernels::attention_mask::window(20),
            kernels::attention_mask::full(), kernels::attention_mask::local(3, 7),
            kernels::attention_mask::prefix_lm(17)}) {
        const auto blocks = blocks_of(zig ? sequence_order::zigzag(49, ranks) : sequence_order::original(49), ranks);
        std::vector<ring_route> routes;
        for (std::size_t r = 0; r < blocks.size(); ++r) routes.emplace_back(blocks, r, mask);
        std::int64_t messages = 0, gradients = 0, home = 0;
        for (std::size_t r = 0; r < blocks.size(); ++r) {
          const ring_route& here = routes[r];
          for (int s = 0; s <= here.last_step(); ++s) {
            const ring_route& next = routes[static_cast<std::size_t>(here.next())];
            CHECK(here.sends(s) == next.receives(s));
            messages += here.sends(s);
            if (here.gradient_leaves(s)) {
              const auto to = static_cast<std::size_t>(here.gradient_goes_to(s));
              CHECK((here.sends(s) ? routes[to].gradient_arrives(s) : routes[to].gradient_returns(s)));
              if (!here.sends(s)) CHECK(routes[to].gradient_returns_from() == static_cast<int>(r));
              ++(here.sends(s) ? gradients : home);
            }
            if (!here.holds(s)) CHECK(!sees(blocks[r], blocks[here.block(s)], mask));
          }
          for (int s = here.last_step() + 1; s < here.ranks(); ++s)
            CHECK(!sees(blocks[r], blocks[here.block(s)], mask));
        }
        CHECK(gradients + home == messages);  // a gradient makes as many hops as its block
        if (mask == kernels::attention_mask::causal())
          CHECK(messages == (zig ? ranks * (ranks - 1) : ranks * (ranks - 1) / 2));
        if (mask.sees_all()) CHECK(messages == ranks * (ranks - 1));
      }
}

TEST_CASE("sequences of fewer tokens than ranks are refused") {
  const std::string text = text_thrown_by([] { sequence_order::zigzag(3, 4, "seq", "ranks of cp"); });
  CHECK(text == "seq is 3; in zigzag order over 4 ranks of cp the least length is 4");
  CHECK(text_thrown_by([] { sequence_order::zigzag(9, 4, "seq", "ranks of cp", 3); }) ==
        "seq is 9; in zigzag order over 4 ranks of cp the least length is 12");
  CHECK(has(text_thrown_by([] { sequence_order::zigzag(8, 0); }), "at least 1 is legal"));
  using zig = context_parallel<megatron_sp, ring<cp>, zigzag>;
  dim_sizes sizes;
  sizes.set(dim_of<seq>, 3);
  const mesh_shape mesh = zig::mesh{1, 4, 1, 1}.shape();
  CHECK(text_thrown_by([&] { sequence_order_of<zig>(mesh, sizes); }) == "the context gives no size for the dim zseq");
  sizes.set(dim_of<zseq>, 3);
  CHECK(text_thrown_by([&] {
          sequence_order_of<zig>(mesh, sizes);
        }).find("seq is 3; in zigzag order over 4 ranks of cp") == 0);
  CHECK(sequence_order_of<megatron_sp>(mesh, sizes) == sequence_order::original(3));
}

TEST_CASE("values have a separate stride, with every policy") {
  const auto outputs = []<class Policy>(std::type_identity<Policy>, int ranks) {
    std::vector<double> all(4);
    on_mesh(plait::mesh<axis<cp>>(ranks), {}, 1, [&](const context<cpu>& ctx) {
      kernels::attention_shape shape{.batch = 1, .heads = 1, .kv_heads = 1, .head_dim = 1, .scale = 1};
      shape.k_stride = 2;
      context_attention<double, Policy> attention(ctx, shape, sequence_order::original(4));
      const auto own = static_cast<std::size_t>(4 / ranks), first = own * static_cast<std::size_t>(ctx.ranks.rank());
      const std::vector<double> q(own, 0.0), k(2 * own, 0.0);
      std::vector<double> v(2 * own, 1000.0);  // the array continues after the values
      for (std::size_t i = 0; i < own; ++i) v[i] = 10.0 * static_cast<double>(first + i + 1);
      attention.forward(ctx, {q.data(), k.data(), v.data()}, all.data() + first, nullptr);
    });
    return all;
  };
  const std::vector<double> expected{10, 15, 20, 25};
  CHECK(outputs(std::type_identity<whole_sequence>(), 1) == expected);
  CHECK(outputs(std::type_identity<ring<cp>>(), 2) == expected);
  CHECK(outputs(std::type_identity<all_gather_kv<cp>>(), 2) == expected);
}

TEST_CASE("gaps in an output are refused") {
  const auto made = []<class Policy>(std::type_identity<Policy>, int ranks, kernels::attention_shape shape) {
    shape.batch = 1, shape.heads = shape.kv_heads = 2, shape.head_dim = 2, shape.scale = 1;
    return text_thrown_by([&] {
      on_mesh(plait::mesh<axis<cp>>(ranks), {}, 1, [&](const context<cpu>& ctx) {
        context_attention<double, Policy> attention(ctx, shape, sequence_order::original(4));
        const std::vector<double> x(4 * 4, 1.0);
        std::vector<double> o(4 * 4);
        attention.forward(ctx, {x.data(), x.data(), x.data()}, o.data(), nullptr);
      });
    });
  };
  const std::type_identity<ulysses<cp>> exchanged;
  CHECK(made(exchanged, 2, {.o_stride = 4, .do_stride = 4}) == "");  // heads * head_dim: no gaps
  CHECK(has(made(exchanged, 2, {.o_stride = 5}), "o_stride or do_stride is 5; "));
  CHECK(has(made(std::type_identity<whole_sequence>(), 1, {.do_stride = 8}), "legal are 0 and 4"));
}

namespace {

/// Arrays of context_attention on one rank, of 4 tokens with 2 heads and 1 kv head of 2 elements.
struct own_arrays {
  std::vector<double> q = std::vector<double>(16, 0.1), k = std::vector<double>(8, 0.2), v = k, o = q, d_o = q, dq = q,
                      dk = k, dv = k;
  std::vector<std::int32_t> starts{0, 0, 2, 2};
  attention_inputs<double> in{q.data(), k.data(), v.data()};
  double* to = o.data();
  const double *from = o.data(), *gradient = d_o.data();
  attention_gradients<double> out{dq.data(), dk.data(), dv.data()};
};
/// Returns the text of what the first refused call throws, after the given changes to the calls' arguments.
template <class Policy = whole_sequence, class Before, class After>
std::string refused_arrays(Before&& before_forward, After&& before_backward, bool documents = false,
                           kernels::attention_shape shape = {}) {
  shape.heads = 2, shape.head_dim = 2, shape.scale = 1;
  std::string text;
  on_mesh(plait::mesh<axis<cp>>(1), {}, 1, [&](const context<cpu>& ctx) {
    context_attention<double, Policy> attention(ctx, shape, sequence_order::original(4), documents, "mine");
    typename context_attention<double, Policy>::saved kept;
    own_arrays a;
    before_forward(a);
    text = text_thrown_by([&] { attention.forward(ctx, a.in, a.to, &kept); });
    if (!text.empty()) return;
    before_backward(a);
    text = text_thrown_by([&] { attention.backward(ctx, a.in, a.from, a.gradient, kept, a.out); });
  });
  return text;
}

}  // namespace

TEST_CASE("arrays with document starts and attention without them are refused, and the reverse") {
  const auto give = [](own_arrays& a) { a.in.first_visible = a.starts.data(); };
  const auto take = [](own_arrays& a) { a.in.first_visible = nullptr; };
  const auto keep = [](own_arrays&) {};
  const std::string ignored =
      "mine: attention_inputs::first_visible is given, but its constructor's `documents` is not true: pass true, or "
      "leave first_visible null";
  const std::string forgotten =
      "mine: its constructor's `documents` is true, but attention_inputs::first_visible is null: give in each call the "
      "position where each token's document begins";
  CHECK(refused_arrays(keep, keep, false) == "");
  CHECK(refused_arrays(give, keep, true) == "");
  CHECK(refused_arrays(give, take, false) == ignored);
  CHECK(refused_arrays(keep, give, false) == ignored);
  CHECK(refused_arrays(keep, give, true) == forgotten);
  CHECK(refused_arrays(give, take, true) == forgotten);
  CHECK(refused_arrays<ring<cp>>(give, take, true) == forgotten);
}

TEST_CASE("missing and shared arrays of attention are refused") {
  const auto keep = [](own_arrays&) {};
  const auto forward = [&](auto change) { return refused_arrays([&](own_arrays& a) { change(a); }, keep); };
  const auto backward = [&](auto change) { return refused_arrays(keep, change); };
  const std::string other = ": give each an array of its own", one = ", and both are one array" + other;
  const auto null = [](const std::string& name, int size) {
    return "mine: " + name + " is a null pointer; it must point to this rank's " + std::to_string(size) + " elements";
  };
  CHECK(forward([](own_arrays& a) { a.in.q = nullptr; }) == null("q", 16));
  CHECK(forward([](own_arrays& a) { a.in.k = nullptr; }) == null("k", 8));
  CHECK(forward([](own_arrays& a) { a.in.v = nullptr; }) == null("v", 8));
  CHECK(forward([](own_arrays& a) { a.to = nullptr; }) == null("o", 16));
  CHECK(forward([](own_arrays& a) { a.to = a.q.data(); }) == "mine: forward writes o while it still reads q" + one);
  CHECK(forward([](own_arrays& a) { a.in.v = a.to + 8; }) ==
        "mine: forward writes o while it still reads v, and they overlap" + other);
  CHECK(forward([](own_arrays& a) { a.in.v = a.in.k; }) == "");

  CHECK(backward([](own_arrays& a) { a.in.k = nullptr; }) == null("k", 8));
  CHECK(backward([](own_arrays& a) { a.from = nullptr; }) == null("o", 16));
  CHECK(backward([](own_arrays& a) { a.gradient = nullptr; }) == null("d_o", 16));
  CHECK(backward([](own_arrays& a) { a.out.dq = nullptr; }) == null("dq", 16));
  CHECK(backward([](own_arrays& a) { a.out.dk = nullptr; }) == null("dk", 8));
  CHECK(backward([](own_arrays& a) { a.out.dv = nullptr; }) == null("dv", 8));
  CHECK(backward([](own_arrays& a) { a.out.dv = a.out.dk; }) == "mine: backward writes dk and dv" + one);
  CHECK(backward([](own_arrays& a) { a.out.dk = a.k.data(); }) ==
        "mine: backward writes dk while it still reads k" + one);
  CHECK(backward([](own_arrays& a) { a.out.dq = a.d_o.data(); }) ==
        "mine: backward writes dq while it still reads d_o" + one);
  CHECK(backward([](own_arrays& a) { a.out.dv = a.out.dk + 4; }) ==
        "mine: backward writes dk and dv, and they overlap" + other);

  // Tokens of q, k and v side by side, and so their gradients.
  std::vector<double> packed(4 * 8, 0.1), gradients(packed);
  const auto pack = [&](own_arrays& a) {
    a.in = {packed.data(), packed.data() + 4, packed.data() + 6};
    a.out = {gradients.data(), gradients.data() + 4, gradients.data() + 6};
  };
  const kernels::attention_shape side_by_side{.q_stride = 8, .k_stride = 8, .v_stride = 8};
  CHECK(refused_arrays(pack, keep, false, side_by_side) == "");
  CHECK(refused_arrays(
            pack, [](own_arrays& a) { --a.out.dv; }, false, side_by_side) ==
        "mine: backward writes dk and dv, and they overlap" + other);
}

namespace {

constexpr std::int64_t packed_tokens = 40;
/// Three documents.
std::int64_t packed_start(std::int64_t position) { return position < 13 ? 0 : position < 29 ? 13 : 29; }
bool same_document(std::int64_t query, std::int64_t key) { return packed_start(query) == packed_start(key); }

struct attention_values {
  std::vector<double> o, dq, dk, dv;
};

/// Attention within packed documents on some ranks, in original order; d_o is q.
template <class Policy>
attention_values attend_in_documents(int ranks, bool zig, const kernels::attention_mask& mask,
                                     const attention_values& in, const deterministic_leaves& leaves = {}) {
  attention_values all{std::vector<double>(in.dq.size()), in.dq, in.dk, in.dv};
  const sequence_order order =
      zig ? sequence_order::zigzag(packed_tokens, ranks) : sequence_order::original(packed_tokens);
  threads::run(ranks, [&](threads::communicator c) {
    world w(plait::mesh<axis<cp>>(ranks).shape(), c);
    cpu device({.deterministic = static_cast<bool>(leaves)});
    const context<cpu> ctx{device, w, {}, 1, leaves};
    context_attention<double, Policy> attention(
        ctx, {.batch = 1, .heads = 4, .kv_heads = 2, .head_dim = 3, .scale = 0.7, .mask = mask}, order, true);
    const auto each = [&](std::int64_t width, auto&& f) {
      for (std::size_t i = 0; i < attention.positions().size() * static_cast<std::size_t>(width); ++i) {
        const auto token = static_cast<std::int64_t>(i) / width, column = static_cast<std::int64_t>(i) % width;
        f(i, static_cast<std::size_t>(attention.positions()[static_cast<std::size_t>(token)] * width + column));
      }
    };
    const std::size_t tokens = attention.positions().size();
    std::vector<double> q(tokens * 12), k(tokens * 6), v(k), o(q), dq(q), dk(k), dv(k);
    std::vector<std::int32_t> starts;
    for (const std::int64_t p : attention.positions()) starts.push_back(static_cast<std::int32_t>(packed_start(p)));
    each(12, [&](std::size_t here, std::size_t text) { q[here] = in.dq[text]; });
    each(6, [&](std::size_t here, std::size_t text) { k[here] = in.dk[text], v[here] = in.dv[text]; });
    typename context_attention<double, Policy>::saved kept;
    const attention_inputs<double> args{q.data(), k.data(), v.data(), starts.data()};
    attention.forward(ctx, args, o.data(), &kept);
    attention.backward(ctx, args, o.data(), q.data(), kept, {dq.data(), dk.data(), dv.data()});
    each(12, [&](std::size_t here, std::size_t text) { all.o[text] = o[here], all.dq[text] = dq[here]; });
    each(6, [&](std::size_t here, std::size_t text) { all.dk[text] = dk[here], all.dv[text] = dv[here]; });
  });
  return all;
}

attention_values packed_inputs() {
  attention_values in;
  for (std::size_t i = 0; i < packed_tokens * 12; ++i) in.dq.push_back(std::sin(0.7 * static_cast<double>(i)));
  for (std::size_t i = 0; i < packed_tokens * 6; ++i) {
    in.dk.push_back(std::sin(1.3 * static_cast<double>(i)));
    in.dv.push_back(std::cos(2.1 * static_cast<double>(i)));
  }
  return in;
}

}  // namespace

TEST_CASE("queries that see later keys stay in their document, with every policy") {
  using masks = kernels::attention_mask;
  const attention_values in = packed_inputs();
  for (const masks& mask : {masks::full(), masks::local(4, 7), masks::local(masks::all, 3), masks::prefix_lm(20),
                            masks::causal(), masks::window(6)}) {
    INFO(kernels::describe(mask));
    kernels::attention_shape shape{.batch = 1, .heads = 4, .kv_heads = 2, .head_dim = 3, .scale = 0.7};
    shape.q_len = shape.k_len = packed_tokens;
    shape.mask = mask.where(same_document);
    attention_values expected{std::vector<double>(in.dq.size()), in.dq, in.dk, in.dv};
    std::vector<double> lse(packed_tokens * 4);
    naive_attention(shape, {in.dq.data(), in.dk.data(), in.dv.data(), in.dq.data(), expected.o.data(), lse.data(),
                            expected.dq.data(), expected.dk.data(), expected.dv.data()});
    const auto check = [&](const attention_values& got) {
      for (const auto part :
           {&attention_values::o, &attention_values::dq, &attention_values::dk, &attention_values::dv})
        for (std::size_t i = 0; i < (expected.*part).size(); ++i)
          CHECK((got.*part)[i] == doctest::Approx((expected.*part)[i]).epsilon(1e-10));
    };
    check(attend_in_documents<whole_sequence>(1, false, mask, in));
    for (const bool zig : {false, true}) {
      check(attend_in_documents<ring<cp>>(3, zig, mask, in));
      check(attend_in_documents<all_gather_kv<cp>>(3, zig, mask, in));
      check(attend_in_documents<ulysses<cp>>(2, zig, mask, in));
    }
  }
}

TEST_CASE("queries that see later keys in documents have the same bits on any ranks, with deterministic sums") {
  using masks = kernels::attention_mask;
  const attention_values in = packed_inputs();
  const deterministic_leaves leaves{.features = 1, .samples = 1, .sequence = 20};
  for (const masks& mask : {masks::full(), masks::local(4, 7), masks::prefix_lm(20)}) {
    INFO(kernels::describe(mask));
    const attention_values one = attend_in_documents<whole_sequence>(1, false, mask, in, leaves);
    const attention_values fast = attend_in_documents<whole_sequence>(1, false, mask, in);
    for (std::size_t i = 0; i < one.o.size(); ++i) CHECK(one.o[i] == doctest::Approx(fast.o[i]).epsilon(1e-10));
    const auto check = [&](const attention_values& got) {
      for (const auto part :
           {&attention_values::o, &attention_values::dq, &attention_values::dk, &attention_values::dv})
        CHECK(got.*part == one.*part);
    };
    for (const bool zig : {false, true}) {
      check(attend_in_documents<ring<cp>>(2, zig, mask, in, leaves));
      check(attend_in_documents<all_gather_kv<cp>>(2, zig, mask, in, leaves));
      check(attend_in_documents<ulysses<cp>>(2, zig, mask, in, leaves));
    }
    check(attend_in_documents<ring<cp>>(4, false, mask, in, leaves));
  }
}

TEST_CASE("properties derived from a strategy's policy") {
  using zig = context_parallel<megatron_tp, ulysses<tp, ring<cp>>, zigzag>;
  CHECK(context_axes<zig::attention> == axis_list(axis_of<cp>, axis_of<tp>));
  CHECK(std::is_same_v<context_parallel<megatron_sp, ring<cp>>::residual, megatron_sp::residual>);
  CHECK(std::is_same_v<context_parallel<megatron_tp, whole_sequence>::residual,
                       spec<shard<batch, dp>, seq, hidden, invariant<cp, tp, tp_rep>>>);
  CHECK(std::is_same_v<context_parallel<megatron_sp, all_gather_kv<cp>, zigzag>::residual,
                       spec<shard<batch, dp>, shard<zseq, cp, tp, tp_rep>, hidden>>);
  CHECK(!equivalent(layout_v<megatron_sp::residual>,
                    layout_v<context_parallel<megatron_sp, ring<cp>, zigzag>::residual>));
}

TEST_CASE("blocks are joined in original order and split again") {
  cpu device;
  for (const std::int64_t length : {24, 22})
    for (const bool zig : {false, true}) {
      const sequence_order order = zig ? sequence_order::zigzag(length, 3) : sequence_order::original(length);
      const detail::text_assembly text(blocks_of(order, 3), 0, 3);
      CHECK(text.length() == length);
      CHECK(text.largest() == 8);
      CHECK(text.runs() == runs_of{{0, 0, length}});
      // [block, batch, token]: 100 batch + position; 0 where a block has room for one more token.
      std::vector<std::int64_t> blocks, joined(static_cast<std::size_t>(2 * length)), pieces(48);
      for (std::int64_t block = 0; block < 3; ++block) {
        const std::int64_t begin = part_begin(length, 3, block), end = part_begin(length, 3, block + 1);
        for (std::int64_t b = 0; b < 2; ++b)
          for (const std::int64_t p : order.positions(begin, end - begin)) blocks.push_back(100 * b + p);
        blocks.resize(static_cast<std::size_t>(16 * (block + 1)));
      }
      text.join(device, blocks.data(), joined.data(), 2, 8);
      for (std::int64_t i = 0; i < 2 * length; ++i)
        CHECK(joined[static_cast<std::size_t>(i)] == i / length * 100 + i % length);
      text.split(device, joined.data(), pieces.data(), 2, 8);
      CHECK(pieces == blocks);
    }
  const detail::text_assembly two(blocks_of(sequence_order::zigzag(32, 4), 4), 0, 2);
  CHECK(two.runs() == runs_of{{0, 0, 8}, {8, 24, 8}});  // the ring's runs after the exchange of heads
}

TEST_CASE("dropout drops the same elements in zigzag as in original order") {
  using zig = spec<shard<batch, dp>, shard<zseq, cp, tp>, hidden>;
  using text = spec<batch, seq, hidden>;
  dim_sizes sizes;
  sizes.set(dim_of<batch>, 4);
  sizes.set(dim_of<seq>, 24);
  sizes.set(dim_of<zseq>, 24);
  sizes.set(dim_of<hidden>, 3);
  cpu device;
  const auto fill = [](auto& x) { std::fill_n(x.data(), x.size(), 1.0); };
  world one = world::counting(mesh<axis<dp>>{1}.shape(), 0);
  const context<cpu> alone{device, one, sizes, 7};
  microbatch<cpu> all(alone);
  all.first_sample = 12;
  tensor<double, text> whole(alone);
  fill(whole);
  dropout<double, text>(0.5, "layer").forward(all, whole);
  const mesh_shape shape = mesh<axis<dp>, axis<cp>, axis<tp>>{2, 3, 2}.shape();
  const sequence_order order = sequence_order::zigzag(24, 3);
  std::int64_t kept = 0;
  for (std::int64_t r = 0; r < shape.size(); ++r) {
    world ranks = world::counting(shape, r);
    const context<cpu> ctx{device, ranks, sizes, 7};
    microbatch<cpu> mb(ctx);
    mb.first_sample = 12;
    tensor<double, zig> x(ctx), dy(ctx);
    fill(x), fill(dy);
    const dropout<double, zig> drop(0.5, "layer", order);
    drop.forward(mb, x);
    drop.backward(mb, dy);
    const box& part = x.part();
    const std::int64_t width = part.local[2];
    for (std::int64_t i = 0; i < x.size(); ++i) {
      const std::int64_t sample = part.offset[0] + i / width / part.local[1];
      const std::int64_t position = order.position(part.offset[1] + i / width % part.local[1]);
      const double expected = whole.data()[(sample * 24 + position) * width + i % width];
      CHECK(x.data()[i] == expected);
      CHECK(dy.data()[i] == expected);
      kept += expected != 0;
    }
  }
  CHECK(kept > 100);
  CHECK(kept < 188);
  CHECK(text_thrown_by([] { dropout<double, zig>(0.1, "layer"); }) ==
        "layer: dropout of tokens in zigzag order needs their sequence_order");
  CHECK(text_thrown_by([] { dropout<double, zig>(0, "layer"); }).empty());
}

TEST_CASE("blocks may arrive in any order, or not at all") {
  constexpr std::int64_t length = 32, ranks = 4, own = length / ranks, d = 4;
  cpu device;
  const sequence_order order = sequence_order::zigzag(length, ranks);
  const auto blocks = blocks_of(order, ranks);
  const auto numbers = [](std::int64_t n, double step) {
    std::vector<double> v;
    for (std::int64_t i = 0; i < n; ++i) v.push_back(std::sin(step * static_cast<double>(i)));
    return v;
  };
  const std::vector<double> q = numbers(length * d, 0.7), k = numbers(length * d, 1.3), v = numbers(length * d, 2.1);
  const std::vector<double> output_gradient = numbers(length * d, 0.3);
  kernels::attention_shape shape;
  shape.head_dim = d, shape.q_len = shape.k_len = length;
  std::vector<double> o(q.size()), lse(length), dq(q.size()), dk(q.size()), dv(q.size());
  kernels::attention_forward(device, q.data(), k.data(), v.data(), o.data(), lse.data(), shape);
  kernels::attention_backward(device, q.data(), k.data(), v.data(), o.data(), lse.data(), output_gradient.data(),
                              dq.data(), dk.data(), dv.data(), shape);
  const auto taken = [&](const std::vector<double>& all, std::int64_t rank, std::int64_t width) {
    std::vector<double> mine;
    for (const std::int64_t p : order.positions(rank * own, own))
      for (std::int64_t i = 0; i < width; ++i) mine.push_back(all[static_cast<std::size_t>(p * width + i)]);
    return mine;
  };
  const auto near = [](const std::vector<double>& a, const std::vector<double>& b) {
    for (std::size_t i = 0; i < a.size(); ++i) CHECK(a[i] == doctest::Approx(b[i]).epsilon(1e-12));
  };
  shape.q_len = shape.k_len = own;
  std::vector<double> dk_sum(k.size()), dv_sum(k.size());  // by rank
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    const std::vector<double> mine = taken(q, rank, d), my_output_gradient = taken(output_gradient, rank, d);
    std::vector<double> got(mine.size()), got_lse(own), got_dq(mine.size());
    const attention_inputs<double> in{mine.data(), nullptr, nullptr};
    const auto& queries = blocks[static_cast<std::size_t>(rank)];
    attention_sum<double, cpu> sum(device, shape, in, queries, got.data(), got_lse.data());
    const auto each_block = [&](auto&& use) {
      for (std::int64_t i = 0; i < ranks; ++i) {
        const std::int64_t block =
            (i + ranks - 1) % ranks;  // only some runs of queries see the last one, which arrives first
        const std::vector<double> keys = taken(k, block, d), values = taken(v, block, d);
        use(block, key_block<double>{keys.data(), values.data(), d, own, &blocks[static_cast<std::size_t>(block)]});
      }
    };
    each_block([&](std::int64_t, const key_block<double>& b) { sum.add(b); });
    sum.finish();
    near(got, taken(o, rank, d));
    near(got_lse, taken(lse, rank, 1));
    attention_gradient_sum<double, cpu> back(device, shape, in, queries, got.data(), got_lse.data(),
                                             my_output_gradient.data());
    each_block([&](std::int64_t block, const key_block<double>& b) {
      back.add(b, dk_sum.data() + block * own * d, dv_sum.data() + block * own * d, d);
    });
    back.finish(got_dq.data());
    near(got_dq, taken(dq, rank, d));

    attention_sum<double, cpu> nothing(device, shape, in, queries, got.data(), got_lse.data());
    nothing.finish();
    CHECK(got == std::vector<double>(got.size()));
    CHECK(got_lse == std::vector<double>(got_lse.size(), -std::numeric_limits<double>::infinity()));
  }
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    const auto part = [&](const std::vector<double>& all) {
      return std::vector<double>(all.begin() + rank * own * d, all.begin() + (rank + 1) * own * d);
    };
    near(part(dk_sum), taken(dk, rank, d));
    near(part(dv_sum), taken(dv, rank, d));
  }
}
