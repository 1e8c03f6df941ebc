// Plans run on real arrays: every kind of step, dims that are not outermost, and several axes, compared with boxes.
#include <array>
#include <random>

#include "plait/layout/cost.hpp"
#include "plait/layout/plan.hpp"
#include "support/equal_parts_only.hpp"
#include "support/layer_check.hpp"
#include "support/on_mesh.hpp"

using namespace plait;
using namespace plait::test;

namespace {

struct ax : axis_tag<"ax"> {};
struct bx : axis_tag<"bx"> {};
struct cx : axis_tag<"cx"> {};
using cube = plait::mesh<axis<ax>, axis<bx>, axis<cx>>;

/// Local parts of the full tensor `full` with layout `a`, over all ranks. Along partial axes the terms are uneven, with
/// the right sum.
std::vector<std::int64_t> local_part(const layout& a, const world& w, const dim_sizes& sizes,
                                     const std::vector<std::int64_t>& full) {
  const box b = local_box(a, w.shape(), sizes, w.rank());
  std::vector<std::int64_t> out;
  std::int64_t terms = 1;
  bool first = true;
  for (axis_id axis : a.partial) {
    terms *= w.shape().extent(axis);
    first = first && w.coordinate(axis) == 0;
  }
  for (std::int64_t i = 0; i < b.local[0]; ++i)
    for (std::int64_t j = 0; j < b.local[1]; ++j)
      for (std::int64_t k = 0; k < b.local[2]; ++k) {
        const std::int64_t at = ((b.offset[0] + i) * b.global[1] + b.offset[1] + j) * b.global[2] + b.offset[2] + k;
        const std::int64_t value = full[static_cast<std::size_t>(at)];
        out.push_back(terms == 1 ? value : first ? value - 3 * (terms - 1) : 3);
      }
  return out;
}

/// Checks a rank's values after a move to `a`: they must be exact if `a` has no partial axis. Otherwise the sum over
/// the partial axes must be right, after a further move to invariant.
/// A dry run counts the same calls and bytes, under the communicators' rule for parts of unequal sizes.
void check_move(const layout& from, const layout& to, world& w, const dim_sizes& sizes,
                const std::vector<std::int64_t>& full, unequal_parts_rule unequal_parts = nullptr) {
  cpu device;
  const ready_plan moves(from, to, w, sizes, "test");
  const std::vector<std::int64_t> in = local_part(from, w, sizes, full);
  std::vector<std::int64_t> out(static_cast<std::size_t>(moves.target().local_size()), -1);
  w.ledger().clear();
  moves.run(device, in.data(), out.data(), dtype::i64);
  const ledger measured = w.ledger();
  ledger predicted;
  const plan& p = moves.planned();
  for (std::size_t i = 0; i < p.steps.size(); ++i)
    if (communicates(p.steps[i].kind)) {
      const collective_cost c = cost(p, i, w.shape(), sizes, sizeof(std::int64_t), w.rank());
      predicted.of(label_of(w.pruned(c.axes))).kinds[static_cast<std::size_t>(c.kind)] += {1, c.payload, c.wire, 0.0};
    }
  if (unequal_parts == nullptr) CHECK(compare_ledgers(measured, predicted).text() == "");
  world counted = world::counting(w.shape(), w.rank(), {}, unequal_parts);
  counting_device counter;
  ready_plan(from, to, counted, sizes, "test").run(counter, in.data(), out.data(), dtype::i64);
  CHECK(compare_ledgers(measured, counted.ledger()).text() == "");
  layout complete = to;
  complete.partial = {};
  if (!to.partial.empty()) {
    const ready_plan finish(to, complete, w, sizes, "test");
    std::vector<std::int64_t> sum(out.size());
    finish.run(device, out.data(), sum.data(), dtype::i64);
    out = sum;
  }
  INFO(describe(moves.planned()));
  CHECK(out == local_part(complete, w, sizes, full));
}

layout random_layout(std::mt19937& random, bool shuffled_axes) {
  layout a;
  a.dims.push_back({dim_of<batch>, {}});
  a.dims.push_back({dim_of<seq>, {}});
  a.dims.push_back({dim_of<hidden>, {}});
  std::vector<axis_id> axes{axis_of<ax>, axis_of<bx>, axis_of<cx>};
  if (shuffled_axes) std::shuffle(axes.begin(), axes.end(), random);
  for (axis_id axis : axes) {
    const auto choice = random() % 6;
    if (choice < 3)
      a.append(a.dims[choice].dim, axis);
    else
      a.set(axis, choice == 3 ? state::invariant : choice == 4 ? state::replicated : state::partial);
  }
  return a;
}

}  // namespace

TEST_CASE("random redistributions of a 3-d tensor on three axes, which divide its dims or not") {
  std::mt19937 random(11);
  int kinds_seen[8] = {};
  for (const std::array<std::int64_t, 3>& shape : {std::array<std::int64_t, 3>{24, 24, 24}, {13, 19, 15}}) {
    dim_sizes sizes;
    sizes.set(dim_of<batch>, shape[0]), sizes.set(dim_of<seq>, shape[1]), sizes.set(dim_of<hidden>, shape[2]);
    if (shape[2] == 15) sizes.set(dim_of<hidden>, 36, 3);
    std::vector<std::int64_t> full(static_cast<std::size_t>(shape[0] * shape[1] * sizes.of(dim_of<hidden>)));
    for (std::size_t i = 0; i < full.size(); ++i) full[i] = static_cast<std::int64_t>(i * 2654435761u % 100003);
    for (const auto& mesh :
         {cube{2, 2, 2}, cube{3, 2, 1}, cube{1, 4, 3}, cube{2, 3, 2}, cube{5, 1, 1}, cube{1, 7, 1}}) {
      std::vector<std::pair<layout, layout>> cases;
      while (cases.size() < 60) {
        const layout from = random_layout(random, true), to = random_layout(random, true);
        const plan p = make_plan(from, to, mesh.shape(), sizes);
        if (!p.verdict.ok()) continue;
        for (const redistribution_step& s : p.steps) ++kinds_seen[static_cast<int>(s.kind)];
        cases.emplace_back(from, to);
      }
      threads::run(static_cast<int>(mesh.size()), [&](threads::communicator c) {
        world w(mesh.shape(), c), padded(mesh.shape(), equal_parts_only(c));
        for (std::size_t i = 0; i < cases.size(); ++i) {
          const auto& [from, to] = cases[i];
          if (i % 2 == 0)
            check_move(from, to, w, sizes, full);
          else
            check_move(from, to, padded, sizes, full, [](std::size_t) { return false; });
        }
      });
    }
  }
  for (int kind = 0; kind < 8; ++kind) {
    INFO(name_of(static_cast<transition_kind>(kind)));
    CHECK(kinds_seen[kind] > 0);
  }
}

TEST_CASE("all-to-all between any two of three dims") {
  dim_sizes sizes;
  sizes.set(dim_of<batch>, 8), sizes.set(dim_of<seq>, 12), sizes.set(dim_of<hidden>, 4);
  std::vector<std::int64_t> full(8 * 12 * 4);
  for (std::size_t i = 0; i < full.size(); ++i) full[i] = static_cast<std::int64_t>(i);
  threads::run(4, [&](threads::communicator c) {
    world w(cube{4, 1, 1}.shape(), c);
    const layout places[3] = {layout_v<spec<shard<batch, ax>, seq, hidden, invariant<bx, cx>>>,
                              layout_v<spec<batch, shard<seq, ax>, hidden, invariant<bx, cx>>>,
                              layout_v<spec<batch, seq, shard<hidden, ax>, invariant<bx, cx>>>};
    for (const layout& from : places)
      for (const layout& to : places) {
        check_move(from, to, w, sizes, full);
        const ready_plan moves(from, to, w, sizes, "test");
        CHECK(moves.planned().steps.size() == (from == to ? 0u : 1u));
        if (!(from == to)) CHECK(moves.planned().steps[0].kind == transition_kind::all_to_all);
      }
  });
}

TEST_CASE("a sum over several axes uses the communicator with the mesh's order") {
  const mesh_shape shape = plait::mesh<axis<cx>, axis<ax>>{2, 2}.shape();  // partial axes are ordered by name
  threads::run(4, [&](threads::communicator c) {
    world w(shape, c);
    dim_sizes sizes;
    sizes.set(dim_of<seq>, 4);
    const ready_plan sum(layout_v<spec<partial<ax, cx>, seq>>, layout_v<spec<invariant<ax, cx>, seq>>, w, sizes,
                         "test");
    cpu device;
    std::vector<double> x(4, 1.0), y(4);
    sum.run(device, x.data(), y.data(), dtype::f64);
    CHECK(y[3] == 4);
    CHECK(w.ledger().total("cx+ax").calls == 1);
    CHECK(w.ledger().total("ax+cx").calls == 0);  // it would have its own communicator
  });
}

TEST_CASE("a program's arrays are gathered and scattered along any dim") {
  using rows = spec<batch, shard<seq, ax>, hidden, invariant<bx, cx>>;
  using columns = spec<batch, seq, shard<hidden, ax>, invariant<bx, cx>>;
  using whole = spec<batch, seq, hidden, invariant<ax, bx, cx>>;
  using terms = spec<batch, seq, hidden, partial<ax>, invariant<bx, cx>>;
  on_mesh(cube{2, 1, 1}, sizes_of<batch, seq, hidden>(2, 4, 6), 1, [&](const context<cpu>& ctx) {
    std::vector<double> x(24), y(48), z(24), sums(48, 1.0);
    const part<double, rows> in(ctx, x.data());
    for (std::size_t i = 0; i < x.size(); ++i) {  // each element is its global index
      const std::size_t b = i / 12, s = i / 6 % 2, h = i % 6;
      x[i] = static_cast<double>((b * 4 + s + 2 * static_cast<std::size_t>(ctx.ranks.rank())) * 6 + h);
    }
    const part<double, whole> all = redistribute(ctx, in, part<double, whole>(ctx, y.data()));
    for (std::size_t i = 0; i < y.size(); ++i) CHECK(y[i] == static_cast<double>(i));
    redistribute(ctx, all, part<double, columns>(ctx, z.data()));
    CHECK(z[3] == 6 + 3 * ctx.ranks.rank());
    redistribute(ctx, part<double, terms>(ctx, sums.data()), part<double, whole>(ctx, sums.data()));  // in place
    CHECK(sums[47] == 2);
    redistribute(ctx, part<const double, terms>(ctx, y.data()), in);  // reduce-scatter along the second dim
    CHECK(x[12] == 2 * (24 + 12 * ctx.ranks.rank()));
    CHECK(has(test::text_thrown_by([&] { redistribute(ctx, in, part<double, columns>(ctx, x.data() + 1)); }),
              "redistribute: in and out overlap, and the plan between them is "));
    const context<cpu> other{ctx.device, ctx.ranks, sizes_of<batch, seq, hidden>(2, 4, 8), 1};
    CHECK(has(test::text_thrown_by([&] { redistribute(other, in, part<double, whole>(other, y.data())); }),
              "redistribute: in has 24 elements, and in this context there are 32"));
  });
}

TEST_CASE("a dim with fewer elements than ranks, and dims that differ, are refused by name") {
  threads::run(4, [](threads::communicator c) {
    world w(cube{4, 1, 1}.shape(), c);
    dim_sizes sizes;
    sizes.set(dim_of<batch>, 3), sizes.set(dim_of<seq>, 2), sizes.set(dim_of<hidden>, 2);
    const layout whole = layout_v<spec<batch, seq, hidden, invariant<ax, bx, cx>>>;
    const auto text_of_move = [&](const layout& to) {
      return test::text_thrown_by([&] { ready_plan(whole, to, w, sizes, "activations"); });
    };
    const layout rows = layout_v<spec<shard<batch, ax>, seq, hidden>>;
    CHECK(text_of_move(rows) ==
          "activations: a dim has fewer elements than there are ranks that shard it: batch is 3, sharded over ax=4 = 4 "
          "ranks; it must be at least 4");
    sizes.set(dim_of<batch>, 6, 2);
    CHECK(has(text_of_move(rows), "batch is 6, in blocks of 2, sharded over ax=4 = 4 ranks; it must be at least 8"));
    sizes.set(dim_of<batch>, 9, 2);
    CHECK(has(text_of_move(rows), "the dim batch has 9 elements, which are not whole blocks of 2 (dim_sizes::set)"));
    CHECK(
        text_of_move(layout_v<spec<seq, batch, hidden>>).find("activations: the dims are not the ones expected here") ==
        0);
  });
}

TEST_CASE("a buffer that is too small for a rank's part, and a dim that a tensor does not have, are refused") {
  using rows = spec<shard<batch, dp>, hidden>;
  const auto refused = [](auto&& use) {
    return test::error_on_mesh(mesh<axis<dp>>(2), sizes_of<batch, hidden>(4, 6), 1, use);
  };
  CHECK(refused([](const context<cpu>& ctx) {
          const tensor<float, rows> taken(ctx, make_buffer<float>(ctx.device, 12));
          if (taken.extent(dim_of<hidden>) != 6 || taken.extent(dim_of<batch>) != 2) fail("other extents");
        }) == "");
  CHECK(has(refused([](const context<cpu>& ctx) { tensor<float, rows>(ctx, make_buffer<float>(ctx.device, 11)); }),
            "this rank's part has 48 bytes, and the buffer has 44"));
  CHECK(has(refused([](const context<cpu>& ctx) { tensor<float, rows>(ctx).extent(dim_of<ffn>); }), "has no dim ffn"));
}

TEST_CASE("an axis that the mesh does not have is refused: a sum over it would be dropped") {
  threads::run(2, [](threads::communicator c) {
    world w(plait::mesh<axis<ax>>{2}.shape(), c);
    dim_sizes sizes;
    sizes.set(dim_of<seq>, 4);
    const auto refused = [&](const layout& from, const layout& to) {
      return test::text_thrown_by([&] { ready_plan(from, to, w, sizes, "gradient of w"); });
    };
    const auto says = [](const std::string& text, const char* axis) {
      CHECK_MESSAGE(text.find(cat({"gradient of w: ", text_of(layout_error::axis_unknown), " [axis ", axis})) == 0,
                    text);
    };
    says(refused(layout_v<spec<partial<ax, bx>, seq>>, layout_v<spec<invariant<ax, bx>, seq>>), "bx");
    says(refused(layout_v<spec<partial<ax>, seq>>, layout_v<spec<invariant<ax>, seq, replicate<cx>>>), "cx");
    says(refused(layout_v<spec<shard<seq, bx>, invariant<ax>>>, layout_v<spec<seq, invariant<ax>>>), "bx");
    const plan foreign = make_plan(layout_v<spec<partial<bx>, seq>>, layout_v<spec<invariant<bx>, seq>>);
    says(test::text_thrown_by([&] { ready_plan(foreign, w, sizes, "gradient of w"); }), "bx");
    CHECK(refused(layout_v<spec<partial<ax>, seq>>, layout_v<spec<seq>>) == "");  // a spec need not name axes
  });
}
