// program: files
// The kit for programs without plait: a hand-written MLP, right on any mesh, and wrong in ways that no type shows.
#include "plait/testing/program_parity.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/comm/threads.hpp"
#include "plait/device/counting.hpp"
#include "plait/device/cpu.hpp"
#include "support/temp_folder.hpp"

using namespace plait;
using testing::compare_runs;
using testing::program_record;
using testing::program_run;

namespace {

using net = mesh<axis<dp>, axis<tp>>;
using rows = spec<shard<batch, dp>, hidden, invariant<tp>>;
using inner = spec<shard<batch, dp>, shard<ffn, tp>>;
using product = spec<shard<batch, dp>, hidden, partial<tp>>;
using up_weight = spec<shard<ffn, tp>, hidden, replicate<dp>>;
using down_weight = spec<hidden, shard<ffn, tp>, replicate<dp>>;
using down_bias = spec<hidden, replicate<dp>, invariant<tp>>;
using sum_of_loss = spec<partial<dp>, invariant<tp>>;

constexpr std::int64_t B = 8, H = 4, F = 8;

enum class mutant {
  none,
  no_all_reduce,
  mean_of_products,
  no_gradient_reduction,
  bias_everywhere,
  scaled_gradients,
  stray_replica,
  left_out
};

/// A number from -1 to 1 of a stream.
double number(int stream, std::int64_t i) { return std::sin(static_cast<double>(stream * 100 + i * 7 + 1)); }

/// c[m, n] += the sum over k of a[m, k] b[k, n], with strides for each.
void multiply(std::int64_t m, std::int64_t n, std::int64_t k, const double* a, std::int64_t am, std::int64_t ak,
              const double* b, std::int64_t bk, std::int64_t bn, double* c) {
  for (std::int64_t i = 0; i < m; ++i)
    for (std::int64_t j = 0; j < n; ++j)
      for (std::int64_t l = 0; l < k; ++l) c[i * n + j] += a[i * am + l * ak] * b[l * bk + j * bn];
}

/// A hand-written program: y = relu(x up^T) down^T + bias, loss |y|^2 / 2 / batch, and plain gradient descent.
struct mlp {
  context<cpu>& ctx;
  mutant wrong;
  std::int64_t b = B / ctx.ranks.shape().extent(axis_of<dp>), f = F / ctx.ranks.shape().extent(axis_of<tp>);
  std::int64_t batch_at = b * ctx.ranks.coordinate(axis_of<dp>), ffn_at = f * ctx.ranks.coordinate(axis_of<tp>);
  std::vector<double> up = std::vector<double>(static_cast<std::size_t>(f * H)), down = up,
                      bias = std::vector<double>(static_cast<std::size_t>(H));

  void initialize() {
    for (std::int64_t i = 0; i < f * H; ++i) up[static_cast<std::size_t>(i)] = number(1, ffn_at * H + i);
    for (std::int64_t h = 0; h < H; ++h)
      for (std::int64_t i = 0; i < f; ++i) down[static_cast<std::size_t>(h * f + i)] = number(2, h * F + ffn_at + i);
    for (std::int64_t h = 0; h < H; ++h) bias[static_cast<std::size_t>(h)] = number(3, h);
  }
  void sum(std::vector<double>& values, axis_id over) {
    ctx.ranks.group(axis_list(over))
        .all_reduce(values.data(), values.data(), values.size(), dtype::f64, reduce_op::sum);
  }
  template <class Spec>
  void reduce_gradient(program_record<cpu>& record, const std::string& name, std::vector<double>& gradient,
                       std::vector<double>& weight) {
    record.add(name + ".terms", view<dual_t<Spec>>(ctx, gradient.data()));
    if (wrong != mutant::no_gradient_reduction || name != "up.gradient") sum(gradient, axis_of<dp>);
    if (wrong == mutant::scaled_gradients)
      for (double& g : gradient) g /= static_cast<double>(ctx.ranks.shape().extent(axis_of<dp>));
    record.add(name, plait::part<double, Spec>(ctx, gradient.data()));
    for (std::size_t i = 0; i < weight.size(); ++i) weight[i] -= 0.05 * gradient[i];
  }
  void step(program_record<cpu>& record, int i) {
    std::vector<double> x(static_cast<std::size_t>(b * H)), a(static_cast<std::size_t>(b * f)), y(x.size()),
        da(a.size());
    for (std::size_t k = 0; k < x.size(); ++k) x[k] = number(10 + i, batch_at * H + static_cast<std::int64_t>(k));
    record.step(i);
    record.add("x", view<rows>(ctx, x.data()));
    multiply(b, f, H, x.data(), H, 1, up.data(), 1, H, a.data());
    for (double& v : a) v = std::max(v, 0.0);
    if (wrong != mutant::left_out || i == 0) record.add("a", view<inner>(ctx, a.data()));
    multiply(b, H, f, a.data(), f, 1, down.data(), 1, f, y.data());
    if (wrong == mutant::bias_everywhere) add_bias(y);
    record.add("product", view<product>(ctx, static_cast<const double*>(y.data())));
    if (wrong != mutant::no_all_reduce) sum(y, axis_of<tp>);
    if (wrong == mutant::mean_of_products)
      for (double& v : y) v /= static_cast<double>(ctx.ranks.shape().extent(axis_of<tp>));
    record.add("sum", plait::part<const double, rows>(ctx, y.data()));
    if (wrong != mutant::bias_everywhere) add_bias(y);
    if (wrong == mutant::stray_replica && ctx.ranks.rank() == 2 && i == 1) y[5] += 1e-3;
    record.add("y", view<rows>(ctx, y.data()));
    double loss = 0;
    for (double& v : y) loss += v * v / 2 / B, v /= B;
    record.add_scalar<sum_of_loss>("loss", loss);
    multiply(b, f, H, y.data(), H, 1, down.data(), f, 1, da.data());
    for (std::size_t k = 0; k < a.size(); ++k) da[k] = a[k] > 0 ? da[k] : 0;
    backward(record, x, a, y, da);
  }
  void add_bias(std::vector<double>& y) {
    for (std::size_t k = 0; k < y.size(); ++k) y[k] += bias[k % H];
  }
  void backward(program_record<cpu>& record, const std::vector<double>& x, const std::vector<double>& a,
                const std::vector<double>& dy, const std::vector<double>& da) {
    std::vector<double> dup(up.size()), ddown(down.size()), dbias(bias.size());
    multiply(f, H, b, da.data(), 1, f, x.data(), H, 1, dup.data());
    multiply(H, f, b, dy.data(), 1, H, a.data(), f, 1, ddown.data());
    for (std::size_t k = 0; k < dy.size(); ++k) dbias[k % H] += dy[k];
    reduce_gradient<up_weight>(record, "up.gradient", dup, up);
    reduce_gradient<down_weight>(record, "down.gradient", ddown, down);
    reduce_gradient<down_bias>(record, "bias.gradient", dbias, bias);
    record.add("up", view<up_weight>(ctx, up.data()));
  }
};

/// Calls body(context) on each rank of a mesh.
void on_ranks(std::int64_t d, std::int64_t t, auto&& body) {
  threads::run(static_cast<int>(d * t), [&](threads::communicator comm) {
    world ranks(net(d, t).shape(), comm);
    cpu device;
    context<cpu> ctx{device, ranks, sizes_of<batch, hidden, ffn>(B, H, F), 1};
    ranks.group(axis_list(axis_of<dp>)), ranks.group(axis_list(axis_of<tp>));
    body(ctx);
  });
}

/// Trains two steps; records a run in memory or in files of a directory.
void train(std::int64_t d, std::int64_t t, auto& into, mutant wrong = mutant::none) {
  on_ranks(d, t, [&](context<cpu>& ctx) {
    program_record<cpu> record(ctx, into);
    mlp program{ctx, wrong};
    program.initialize();
    for (int i = 0; i < 2; ++i) program.step(record, i);
    record.finish();
  });
}

std::string found(std::int64_t d, std::int64_t t, mutant wrong) {
  program_run one, many;
  train(1, 1, one);
  train(d, t, many, wrong);
  return compare_runs(one, many, {.relative = 1e-12}).text();
}

/// Records on two ranks along tp what body(record, context) adds to step 0.
void record_two(program_run& into, auto&& body) {
  on_ranks(1, 2, [&](context<cpu>& ctx) {
    program_record<cpu> record(ctx, into);
    record.step(0);
    body(record, ctx);
    record.finish();
  });
}

/// Compares two such runs of [hidden] values that are equal on all ranks.
template <class T, class U>
std::string compared(const std::vector<T>& a, const std::vector<U>& b, const testing::parity_limits& limits = {}) {
  program_run one, many;
  using equal = spec<hidden, invariant<tp>, invariant<dp>>;
  record_two(one, [&](auto& record, auto& ctx) { record.add("v", view<equal>(ctx, a.data())); });
  record_two(many, [&](auto& record, auto& ctx) { record.add("v", view<equal>(ctx, b.data())); });
  return compare_runs(one, many, limits).text();
}

}  // namespace

TEST_CASE("a right program equals one rank on any mesh") {
  for (const auto& [d, t] : {std::pair{1, 4}, std::pair{4, 1}, std::pair{2, 2}, std::pair{1, 1}})
    CHECK(found(d, t, mutant::none) == "");
}

TEST_CASE("a fault on some mesh is found in the first array that has it") {
  const std::string rank_1 = "ranks 1 to 3 differ from rank 0, although ";
  CHECK(found(1, 4, mutant::no_all_reduce) ==
        "step 0, sum: in the second run, " + rank_1 +
            "<shard<batch, dp>, hidden, invariant<tp>> is invariant over tp: the element at [batch=0, hidden=0] is "
            "0.193703795 on rank 0 and 1.04819432 on rank 1; their sum over tp equals the other run: a reduction over "
            "tp is missing");
  CHECK(found(1, 4, mutant::mean_of_products) ==
        "step 0, sum: 32 of 32 elements differ by more than 2.53538878e-12; the first at [batch=0, hidden=0] is "
        "-1.08383001 in the first run (dp=1,tp=1) and -0.270957502 in the second (dp=1,tp=4); each is 1/4 of the first "
        "run's, a factor that the extent of tp gives");
  CHECK(found(1, 4, mutant::bias_everywhere) ==
        "step 0, product: 32 of 32 elements differ by more than 5.69593247e-12; the first at [batch=0, hidden=0] is "
        "-1.08383001 in the first run (dp=1,tp=1) and -3.31888621 in the second (dp=1,tp=4)");
  CHECK(
      found(1, 4, mutant::stray_replica) ==
      "step 1, y: in the second run, rank 2 differs from rank 0, although <shard<batch, dp>, hidden, invariant<tp>> "
      "is invariant over tp: the element at [batch=1, hidden=1] is -0.198955938 on rank 0 and -0.197955938 on rank 2");
  CHECK(found(4, 1, mutant::no_gradient_reduction) ==
        "step 0, up.gradient: in the second run, " + rank_1 +
            "<shard<ffn, tp>, hidden, replicate<dp>> is replicated over dp: the element at [ffn=0, hidden=0] is "
            "-0.413463457 on rank 0 and 0.13620339 on rank 1; their sum over dp equals the other run: a reduction over "
            "dp is missing");
  CHECK(found(2, 2, mutant::no_gradient_reduction).find("up.gradient: in the second run, rank 2 differs from rank 0") !=
        std::string::npos);
  CHECK(found(4, 1, mutant::scaled_gradients) ==
        "step 0, up.gradient: 32 of 32 elements differ by more than 1.45599592e-12; the first at [ffn=0, hidden=0] is "
        "-0.00945932052 in the first run (dp=1,tp=1) and -0.00236483013 in the second (dp=4,tp=1); each is 1/4 of the "
        "first run's, a factor that the extent of dp gives");
  CHECK(found(2, 2, mutant::scaled_gradients)
            .ends_with("each is 1/2 of the first run's, a factor that the extent of "
                       "dp or tp gives"));
  CHECK(found(4, 1, mutant::left_out) == "step 1, a: is in the first run alone");
}

TEST_CASE("a difference has its place and its numbers") {
  program_run one, many;
  train(1, 4, one);
  train(4, 1, many, mutant::scaled_gradients);
  const testing::program_difference d = compare_runs(one, many, {.relative = 1e-12});
  CHECK_FALSE(d.empty());
  CHECK(d.step == 0);
  CHECK(d.array == "up.gradient");
  CHECK(d.index == std::vector<std::int64_t>{0, 0});
  CHECK(d.many == doctest::Approx(d.one / 4));
  CHECK(d.ratio == 0.25);
  CHECK(d.axes == "dp or tp");
  CHECK(compare_runs(many, one).ratio == 4);
}

TEST_CASE("a wrong factor of several axes, and one between 2 and 4 ranks") {
  const auto record = [](program_run& run, std::int64_t d, std::int64_t t, double loss) {
    on_ranks(d, t, [&](context<cpu>& ctx) {
      program_record<cpu> into(ctx, run);
      into.step(0);
      into.add_scalar<spec<replicate<dp>, invariant<tp>>>("loss", loss);
      into.finish();
    });
  };
  program_run one, four, two, more;
  record(one, 1, 1, 8), record(four, 2, 2, 2), record(two, 1, 2, 4), record(more, 1, 4, 2);
  CHECK(compare_runs(one, four).text() ==
        "step 0, loss: 1 of 1 elements differ by more than 8e-05; the first is 8 in the first run (dp=1,tp=1) and 2 in "
        "the second (dp=2,tp=2); each is 1/4 of the first run's, a factor that the extent of dp*tp gives");
  CHECK(
      compare_runs(two, more).text().ends_with("each is 1/2 of the first run's, a factor that the extent of tp gives"));
  CHECK(
      compare_runs(four, one).text().ends_with("each is 4 times the first run's, a factor that the extent of dp*tp "
                                               "gives"));
}

TEST_CASE("stages of a pipeline record different arrays, and equal ones if both record them") {
  const auto record = [](program_run& run, double on_second) {
    threads::run(2, [&](threads::communicator comm) {
      threads::communicator own = comm.split(comm.rank(), 0);
      world stage(net(1, 1).shape(), own);
      stage.set_everyone(comm);
      cpu device;
      const context<cpu> ctx{device, stage, {}, 1};
      program_record<cpu> into(ctx, run);
      into.step(0);
      into.add_scalar<spec<>>(comm.rank() == 0 ? "first" : "second", 1.0);
      into.add_scalar<spec<>>("both", comm.rank() == 0 ? 1.0 : on_second);
      into.finish();
    });
  };
  program_run equal, unequal;
  record(equal, 1), record(unequal, 2);
  CHECK(compare_runs(equal, equal).text() == "");
  CHECK(compare_runs(equal, unequal).text() ==
        "step 0, both: in the second run, rank 1 differs from rank 0, although <> is the spec of one part: the element "
        "is 1 on rank 0 and 2 on rank 1");
}

TEST_CASE("records in files equal records in memory") {
  const temp_folder folder;
  program_run memory, wrong_memory;
  const std::string one = folder / "one", many = folder / "runs/many", wrong = folder / "wrong";
  train(1, 1, one);
  train(2, 2, many);
  train(2, 2, wrong, mutant::no_gradient_reduction);
  train(2, 2, memory);
  train(2, 2, wrong_memory, mutant::no_gradient_reduction);
  CHECK(compare_runs(program_run(one), program_run(many), {.relative = 1e-12}).text() == "");
  CHECK(compare_runs(memory, program_run(many), {.relative = 0}).text() == "");
  const std::string text = compare_runs(program_run(one), program_run(wrong), {.relative = 1e-12}).text();
  CHECK(text == compare_runs(program_run(one), wrong_memory, {.relative = 1e-12}).text());
  CHECK(text.find("a reduction over dp is missing") != std::string::npos);

  std::filesystem::remove(many + "/rank00003.part00001.safetensors");
  CHECK(compare_runs(program_run(one), program_run(many), {.relative = 1e-12}).text() ==
        "step 1: rank 0 of the first run records step 1 next, and rank 3 of the second run has no more steps");
  std::filesystem::remove(many + "/rank00003.part00000.safetensors");
  CHECK(compare_runs(program_run(one), program_run(many)).text() == "the second run has no record of rank 3 of 4");
}

TEST_CASE("files that are not records, or damaged ones, are refused") {
  const temp_folder folder;
  const std::string used = folder / "used", part = used + "/rank00000.part00000.safetensors";
  train(1, 1, used);
  CHECK(error_of([&] { train(1, 1, used); })
            .find("program_record: '" + used +
                  "' has a record of rank 0; remove it, or give this run a directory "
                  "of its own") != std::string::npos);
  const std::string below = folder.write("file", "text") + "/run";
  CHECK(error_of([&] { train(1, 1, below); }).find("program_record: cannot make the directory '" + below + "': ") !=
        std::string::npos);
  CHECK(error_of([&] { program_run(folder / "none"); }) ==
        "program_run: there is no record of rank 0 in '" + (folder / "none") + "'");
  write_safetensors(part, {}, {{"format", "pt"}});
  CHECK(error_of([&] { program_run{used}; }) == "program_run: '" + part + "' is not part of a program's record");
  const float values[2] = {};
  const safetensors_entry entry{"v", safetensors_dtype::f32, {2}, std::as_bytes(std::span(values))};
  const auto damaged = [&](const std::string& layout) {
    const std::string text =
        R"({"ranks": 1, "step": 0, "last": 1, "arrays": [{"name": "v", "layout": )" + json_string(layout) + "}]}";
    write_safetensors(part, {entry}, {{"plait program record", text}});
    return error_of([&] { program_run{used}; });
  };
  const std::string no_fit = "program_run: '" + part + "': the layout of 'v' does not fit its elements";
  const auto of_dim = [](const std::string& numbers) {
    return R"({"spec": "<hidden>", "mesh": [], "dims": [{"name": "hidden", "axes": [], )" + numbers + "}]}";
  };
  CHECK(damaged(of_dim(R"("global": 4, "local": 3, "offset": 0)")) == no_fit);
  CHECK(damaged(of_dim(R"("global": 4, "local": 2, "offset": 3)")) == no_fit);
  CHECK(damaged(of_dim(R"("global": 4, "locale": 2)")) ==
        "program_run: '" + part + "': found 2 as locale of a layout, where no such member is legal");
}

TEST_CASE("a record is made in order, and every array has a unique name") {
  using equal = spec<hidden, invariant<tp>, invariant<dp>>;
  const std::vector<float> v(H);
  on_ranks(1, 1, [&](context<cpu>& ctx) {
    program_run run;
    program_record<cpu> record(ctx, run);
    const auto add = [&] { record.add("v", view<equal>(ctx, v.data())); };
    CHECK(error_of(add) == "program_record: call step(number) first; arrays belong to a step");
    CHECK(error_of([&] { record.finish(); }) == "program_record: call step(number) first; arrays belong to a step");
    CHECK(error_of([&] { record.step(-1); }) == "program_record: step is -1; legal is 0 or more");
    record.step(3);
    CHECK(compare_runs(run, run).text() ==
          "rank 0 of the first run did not finish its record; call finish() after its "
          "last step");
    add();
    CHECK(error_of(add) ==
          "program_record: 'v' is recorded twice in step 3; give each array of a step a name of its own");
    CHECK(error_of([&] { record.add("w", tensor<float, equal>()); }) ==
          "program_record: 'w' is a null pointer; it must point to this rank's 1 elements");
    CHECK(error_of([&] { record.step(3); }) == "program_record: step 3 is recorded twice");
    CHECK(error_of([&] { program_record<cpu>(ctx, run); }) ==
          "program_run: there is a record of rank 0; each run takes a program_run of its own");
    CHECK(compare_runs(run, run).text().ends_with("call finish() after its last step"));
    record.finish();
    record.finish();
    CHECK(error_of([&] { record.step(4); }) == "program_record: step 4 comes after finish()");
    CHECK(error_of([&] { record.add_scalar<spec<>>("w", 1); }) == "program_record: 'w' comes after finish()");
    CHECK(compare_runs(run, run).text() == "");
  });
}

TEST_CASE("a program without a context records too") {
  const std::vector<float> v{1, 2, 3, 4};
  program_run context_run, place_run;
  record_two(context_run, [&](auto& record, auto& ctx) {
    record.add("v", plait::part<const float, spec<shard<hidden, tp>>>(ctx, v.data() + 2 * ctx.ranks.rank()));
  });
  const temp_folder folder;
  cpu device;
  for (std::int64_t rank = 0; rank < 2; ++rank) {
    const rank_place here{net(1, 2).shape(), rank, sizes_of<hidden>(H)};
    const plait::part<const float, spec<shard<hidden, tp>>> mine(here, v.data() + 2 * rank);
    program_record<cpu> memory(device, here, place_run), files(device, here, folder / "run");
    memory.step(0), files.step(0);
    memory.add("v", mine), files.add("v", mine);
    memory.finish(), files.finish();
  }
  CHECK(compare_runs(context_run, place_run, {.relative = 0}).text() == "");
  CHECK(compare_runs(context_run, program_run(folder / "run"), {.relative = 0}).text() == "");
}

TEST_CASE("a dry run records nothing") {
  const temp_folder folder;
  counting_device device;
  world ranks = world::counting(net(2, 2).shape(), 1);
  const context<counting_device> ctx{device, ranks, sizes_of<batch, hidden>(B, H), 1};
  const tensor<float, rows, counting_device> x(ctx);
  program_run run;
  program_record<counting_device> memory(ctx, run), files(ctx, folder / "run");
  for (program_record<counting_device>* record : {&memory, &files}) {
    record->step(0);
    record->add("x", x);
    record->add_scalar<sum_of_loss>("loss", 1.0);
    record->finish();
  }
  CHECK(run.by_rank().at(1).steps.at(0).arrays.empty());
  CHECK(folder.entries() == 0);
}

TEST_CASE("runs with other arrays, shapes or steps are reported") {
  const auto values = [](program_run& run, std::vector<int> steps, bool add) {
    on_ranks(1, 1, [&](context<cpu>& ctx) {
      program_record<cpu> record(ctx, run);
      for (const int i : steps) {
        record.step(i);
        if (add) record.add_scalar<spec<>>("loss", 1.0f);
      }
      record.finish();
    });
  };
  program_run a, b, none, also_none;
  CHECK(compare_runs(a, b).text() == "the first run has no record");
  values(a, {0, 1, 2}, true), values(b, {0, 2, 1}, true), values(none, {0, 1, 2}, false), values(also_none, {0}, false);
  CHECK(compare_runs(a, b).text() ==
        "step 2: rank 0 of the first run records step 1 next, and rank 0 of the second run records step 2 next");
  CHECK(compare_runs(none, a).text() == "step 0, loss: is in the second run alone");
  CHECK(compare_runs(also_none, also_none).text() == "there is nothing to compare: no array is recorded");

  program_run of_hidden, other_shape, other_spec, one_rank;
  std::vector<double> v(B * H);
  const auto add = [&]<class Spec>(std::type_identity<Spec>) {
    return [&](auto& record, auto& ctx) { record.add("v", view<Spec>(ctx, v.data())); };
  };
  record_two(of_hidden, add(std::type_identity<spec<hidden>>()));
  record_two(other_shape, add(std::type_identity<spec<batch>>()));
  record_two(other_spec, [&](auto& record, auto& ctx) {
    if (ctx.ranks.rank() == 0)
      record.add("v", view<spec<hidden>>(ctx, v.data()));
    else
      record.add("v", view<spec<hidden, replicate<tp>>>(ctx, v.data()));
  });
  record_two(one_rank, [&](auto& record, auto& ctx) {
    if (ctx.ranks.rank() == 1) record.add("v", view<spec<hidden>>(ctx, v.data()));
  });
  CHECK(compare_runs(of_hidden, other_shape).text() ==
        "step 0, v: is (hidden=4) in the first run and (batch=8) in the second");
  CHECK(compare_runs(of_hidden, other_spec).text() ==
        "step 0, v: in the second run, rank 0 records F64 <hidden> of (hidden=4) on the mesh dp=1,tp=2, and rank 1 "
        "records F64 <hidden, replicate<tp>> of (hidden=4) on the mesh dp=1,tp=2");
  CHECK(compare_runs(one_rank, of_hidden).text() ==
        "step 0, v: in the first run, only rank 1 recorded it, which are 1 of the 2 places of the mesh dp=1,tp=2");
}

TEST_CASE("numbers of all types, NaN, and limits") {
  using doubles = std::vector<double>;
  const auto rounded = [](const doubles& v) {
    std::vector<bf16> out;
    for (const double x : v) out.push_back(converted<bf16>(x));
    return out;
  };
  const std::string place = "step 0, v: 1 of 4 elements differ by more than ";
  CHECK(compared(doubles{1, 2, 3, 4}, std::vector<float>{1, 2, 3, 4}) == "");
  CHECK(compared(doubles{1, 2, 3, 4.01}, rounded({1, 2, 3, 4.01}), {.relative = 1e-2}) == "");
  CHECK(compared(doubles{1, 2, 3, 4.01}, rounded({1, 2, 3, 4.01}), {.relative = 1e-3}).starts_with(place + "0.00401"));
  CHECK(compared(doubles{1, 1e-6, 3, 4}, doubles{1, 5e-6, 3, 4}) == "");  // relative to the largest, which is 4
  CHECK(compared(doubles{0, 0, 0, 0}, doubles{0, 0, 0, 1e-9}) ==
        place + "1e-14; the first at [hidden=3] is 0 in the first run (dp=1,tp=2) and 1e-09 in the second (dp=1,tp=2)");
  CHECK(compared(doubles{0, 0, 0, 0}, doubles{0, 0, 0, 1e-9}, {.absolute = 1e-8}) == "");
  CHECK(compared(doubles{1, 2, 3, 4}, doubles{1, 2, NAN, 4}) ==
        place + "4e-05; the first at [hidden=2] is 3 in the first run (dp=1,tp=2) and nan in the second (dp=1,tp=2)");
  CHECK(compared(doubles{1, NAN, 3, 4}, doubles{1, NAN, 3, 4})
            .starts_with(place + "4e-05; the first at [hidden=1] is nan"));
  CHECK(compared(doubles{1, -INFINITY, 3, 4}, doubles{1, -INFINITY, 3, 4}) == "");
  CHECK(compared(doubles{1, -INFINITY, 3, 4}, doubles{1, INFINITY, 3, 4}).starts_with(place));
  CHECK(compared(doubles{2, 4, 0, 8}, doubles{3, 6, 0, 12}).ends_with("; each is 1.5 times the first run's"));
  CHECK(compared(doubles{2, 4, 0, 8}, doubles{3, 7, 0, 12}).ends_with("in the second (dp=1,tp=2)"));

  using integers = std::vector<std::int64_t>;
  const std::int64_t large = std::int64_t{1} << 60;
  CHECK(compared(integers{1, 2, 3, large}, integers{1, 2, 3, large}) == "");
  CHECK(compared(integers{1, 2, 3, large}, integers{1, 2, 3, large + 1}).starts_with(place));
  CHECK(compared(integers{1, 2, 3, 4}, std::vector<std::int32_t>{1, 2, 3, 4}) == "");
  CHECK(compared(integers{1, 2, 3, 4}, doubles{1, 2, 3, 4}) ==
        "step 0, v: is I64 in the first run and F64 in the second");
}

TEST_CASE("arrays that a spec declares equal are the same on all ranks, unless a limit is given") {
  program_run one, noisy;
  const auto record = [](program_run& run, double noise) {
    record_two(run, [&](auto& into, auto& ctx) {
      const std::vector<double> v(H, 1 + noise * static_cast<double>(ctx.ranks.rank()));
      into.add("v", view<spec<hidden, replicate<tp>>>(ctx, v.data()));
    });
  };
  record(one, 0), record(noisy, 1e-9);
  CHECK(compare_runs(noisy, one).text() ==
        "step 0, v: in the first run, rank 1 differs from rank 0, although <hidden, replicate<tp>> is replicated over "
        "tp: the element at [hidden=0] is 1 on rank 0 and 1.0000000010000001 on rank 1");
  CHECK(compare_runs(noisy, one, {.replicas = 1e-8}).text() == "");
}
