// Measures a training step of a Llama in bf16 on one GPU, launched kernel by kernel and replayed as a graph: tokens per
// second, utilisation, the time against that of its kernels, and memory. A step has forward, loss, backward, clipping
// by the global norm and AdamW, with --microbatches N (8) of --tokens each.
#include <optional>

#include "attention.hpp"
#include "harness.hpp"
#include "kernel_times.hpp"
#include "plait/comm/threads/cuda.hpp"
#include "plait/models/llama.hpp"
#include "plait/nn/strategy.hpp"
#include "plait/parallel/graph_step.hpp"
#include "step_memory.hpp"

namespace {

using namespace bench;
using plait::context;

constexpr double peak = 989.4e12;  ///< dense bf16 operations per second of an H100 SXM, by its data sheet

static __global__ void do_nothing() {}

/// Returns the seconds between the starts of empty kernels in a graph: a graph's overhead for each kernel.
double seconds_of_a_launch(cuda& device, int kernels) {
  plait::cuda_graph graph(device);
  plait::detail::launch(device, {1, 32}, do_nothing);  // loads the kernel, which a capture must not do
  graph.record([&] {
    for (int i = 0; i < kernels; ++i) plait::detail::launch(device, {1, 32}, do_nothing);
  });
  graph.launch();
  device.synchronize();
  stopwatch watch(device);
  std::vector<double> times;
  for (int i = 0; i < 5; ++i) times.push_back(watch.seconds([&] { graph.launch(); }));
  return median(times) / kernels;
}

/// Returns the number of kernels, copies and fills that `work` puts into the main stream. They are captured and not
/// run.
template <class Work>
std::size_t count_launches(cuda& device, Work&& work) {
  const cudaStream_t stream = device.main_stream().handle();
  plait::detail::cuda_check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "beginning a graph");
  work();
  cudaGraph_t graph = nullptr;
  plait::detail::cuda_check(cudaStreamEndCapture(stream, &graph), "ending a graph");
  std::size_t nodes = 0;
  const cudaError_t status = cudaGraphGetNodes(graph, nullptr, &nodes);
  cudaGraphDestroy(graph);
  plait::detail::cuda_check(status, "counting a graph");
  return nodes;
}

/// Returns a mesh of one rank with these axes.
template <class... Axes>
plait::mesh_shape one_rank(const plait::mesh<Axes...>*) {
  return plait::mesh<Axes...>((static_cast<void>(sizeof(Axes)), 1)...).shape();
}

class measurement {
 public:
  using model_type = plait::llama<bf16, plait::megatron_sp, cuda>;

  measurement(cuda& device, plait::world& ranks, const options& o, const shapes& s, std::int64_t seq,
              const std::string& id, const std::string& attention)
      : device_(device),
        o_(o),
        s_(s),
        seq_(seq),
        microbatches_(s.microbatches),
        id_(id),
        attention_(attention),
        ctx_{device, ranks, plait::llama_sizes<plait::megatron_sp>(s.model, ranks.shape(), s.tokens / seq, seq), 7},
        model_(ctx_, s.model, plait::llama_options{}),
        step_(ctx_, model_, optimizer_, microbatches_, 1.0),
        replayed_(std::in_place, ctx_, step_) {
    model_.visit([&](auto& p) { p.initialize(ctx_); });
  }

  /// Measures 16 algorithms of each product in a step, and uses the fastest from then on.
  void choose_products() {
    device_.measure_products(16);
    one(false);
    const plait::product_choices chosen = device_.products();
    device_.use_products(chosen);
    row(id_ + ".products", static_cast<double>(chosen.size())).text("choices", chosen.text()).print();
  }

  /// Measures launched steps first, then replayed ones. A graph owns a step's temporaries, so steps in turn would need
  /// these twice. Each row is printed when it is known, and parts that may fail come last.
  void run() {
    const double tokens = static_cast<double>(s_.tokens * microbatches_);
    const plait::llama_flops flops = plait::flops_per_token(s_.model, seq_);
    const int warm_up = o_.tiny ? 1 : 2, rounds = o_.tiny ? 1 : o_.quick ? 2 : 5;
    std::vector<double> launched, replayed;
    for (int i = 0; i < warm_up; ++i) one(false);
    for (int i = 0; i < rounds; ++i) launched.push_back(one(false));
    print(".launched", launched, tokens, flops);
    for (int i = 0; i < 3; ++i) one(true);  // recorded in the third
    for (int i = 0; i < rounds; ++i) replayed.push_back(one(true));
    print("", replayed, tokens, flops);
    row(id_ + ".peak_memory", static_cast<double>(device_.peak_bytes()) / 0x1p30)
        .number("held_gib", static_cast<double>(device_.reserved_bytes()) / 0x1p30)
        .number("planned_gib", static_cast<double>(planned_bytes(s_.model, s_.tokens, seq_, microbatches_)) / 0x1p30)
        .number("loss", last_loss_)
        .print();
    replayed_.reset();
    compare_with_kernels(median(launched), median(replayed));
  }

 private:
  /// Returns the seconds of a step, from tokens on the host to the loss on the host.
  double one(bool as_graph) {
    const double begin = now();
    step_.load(ctx_, 0, [&](std::int64_t, auto& ids, auto& labels) {
      for (std::int64_t i = 0; i < ids.size(); ++i) {
        random_ = random_ * 6364136223846793005ull + 1442695040888963407ull;
        ids.data()[i] = static_cast<std::int64_t>((random_ >> 33) % static_cast<std::uint64_t>(s_.model.vocab));
        labels.data()[i] = (ids.data()[i] * 31 + 7) % s_.model.vocab;
      }
    });
    optimizer_.begin_step(ctx_, 1e-4);
    if (as_graph)
      replayed_->run(ctx_);
    else
      step_.run(ctx_);
    const plait::step_result result = step_.result(ctx_);
    const double seconds = now() - begin;
    if (!(result.loss > 0 && result.loss < 100 && result.gradient_norm > 0))
      plait::fail(id_ + ": the loss is " + std::to_string(result.loss) + " and the gradient's norm " +
                  std::to_string(result.gradient_norm));
    last_loss_ = result.loss;
    return seconds;
  }

  void print(const std::string& how, const std::vector<double>& times, double tokens, const plait::llama_flops& flops) {
    const double seconds = median(times), rate = tokens / seconds;
    row(id_ + how + ".tokens_per_second", rate)
        .number("seconds", seconds)
        .number("tokens", tokens)
        .number("microbatches", static_cast<double>(microbatches_))
        .text("attention", attention_)
        .print();
    row(id_ + how + ".mfu", rate * flops.total() / peak)
        .number("causal", rate * flops.causal() / peak)
        .number("operations_per_token", flops.total())
        .print();
  }

  /// Compares the step's time with the sum of its kernels' times. The sum is measured by CUPTI. Without CUPTI it is the
  /// time of a replay without the graph's overhead for launches.
  void compare_with_kernels(double launched, double replayed) {
    device_.synchronize();
    optimizer_.begin_step(ctx_, 1e-4);
    step_.load_again();
    const std::size_t launches = count_launches(device_, [&] { step_.run(ctx_); });
    const double gap = seconds_of_a_launch(device_, static_cast<int>(launches));
    double sum = replayed - gap * static_cast<double>(launches);
    std::string method = "replay without gaps";
    if (kernels_can_be_timed()) {
      const int steps = 2;
      start_timing_kernels();
      for (int i = 0; i < steps; ++i) one(false);
      const std::vector<kernel_time> all = stop_timing_kernels();
      sum = 0;
      for (const kernel_time& k : all) sum += k.seconds / steps;
      for (std::size_t i = 0; i < all.size() && i < 40; ++i) {
        row(id_ + ".one_kernel", all[i].seconds / steps)
            .number("count", static_cast<double>(all[i].count) / steps)
            .number("share", all[i].seconds / steps / sum)
            .text("name", all[i].name)
            .print();
      }
      method = "CUPTI";
    }
    row(id_ + ".over_kernels", replayed / sum).number("kernel_seconds", sum).text("method", method).print();
    row(id_ + ".launched.over_kernels", launched / sum)
        .number("launches", static_cast<double>(launches))
        .number("gap_seconds", gap)
        .print();
  }

  cuda& device_;
  const options& o_;
  shapes s_;
  std::int64_t seq_, microbatches_;
  std::string id_, attention_;
  context<cuda> ctx_;
  model_type model_;
  plait::adamw<bf16, cuda> optimizer_{{}};
  plait::training_step<model_type> step_;
  std::optional<plait::graph_step<plait::training_step<model_type>>> replayed_;
  std::uint64_t random_ = 1;
  double last_loss_ = 0;
};

/// Throws before anything is allocated if a step does not fit; the error has the bytes that it needs.
void require_memory(cuda& device, std::int64_t planned) {
  std::size_t free = 0, total = 0;
  plait::detail::cuda_check(cudaMemGetInfo(&free, &total), "asking for free memory");
  device.expect_bytes(static_cast<std::size_t>(planned));
  std::fprintf(stderr, "the step will take %.1f GiB of %.1f GiB that are free\n", static_cast<double>(planned) / 0x1p30,
               static_cast<double>(free) / 0x1p30);
  if (static_cast<std::size_t>(planned) > free)
    plait::fail("the step takes " + std::to_string(planned) + " bytes, and the device has " + std::to_string(free) +
                " free: give --tokens a smaller number");
}

void measure(const options& o, parts& all) {
  const std::int64_t seq = o.number("--seq", 2048);
  const std::string wanted = o.text("--attention", "automatic");
  if (wanted != "automatic" && wanted != "own")
    plait::fail("--attention is " + wanted + "; legal are automatic and own");
  const std::string sums = o.text("--attention-sums", "ordered");
  if (sums != "ordered" && sums != "any") plait::fail("--attention-sums is " + sums + "; legal are ordered and any");
  if (sums == "any" && wanted == "own")
    plait::fail("--attention-sums any is an order of cuDNN's attention, and --attention is own");
  const std::string products = o.text("--products", "heuristic");
  if (products != "heuristic" && products != "measured")
    plait::fail("--products is " + products + "; legal are heuristic and measured");
  shapes s = shapes::of(o);
  const std::int64_t length = o.tiny ? seq / 256 : seq;
  if (s.tokens % length != 0)
    plait::fail("--tokens is " + std::to_string(s.tokens) + ", must be a multiple of --seq " + std::to_string(length));
  s.model.max_position = length;
  plait::threads::run(1, cuda::options{}, [&](plait::threads::communicator c, cuda& device) {
    std::unique_ptr<plait::attention_library> cudnn;
    if (wanted == "automatic") all.run("step.cudnn", [&] { cudnn = make_cudnn_attention(sums == "ordered"); });
    device.use_attention({plait::attention_backend::automatic, cudnn.get()});
    const std::string id = "step." + std::to_string(seq) + (wanted == "own" ? ".own" : "") +
                           (products == "measured" ? ".measured" : "") + (sums == "any" ? ".any" : "");
    all.run(id, [&] {
      require_memory(device, planned_bytes(s.model, s.tokens, length, s.microbatches));
      plait::world ranks(one_rank(static_cast<const plait::megatron_sp::mesh*>(nullptr)), c);
      measurement m(device, ranks, o, s, length, id, cudnn != nullptr ? "cudnn" : "own");
      if (products == "measured") m.choose_products();
      m.run();
    });
  });
}

}  // namespace

int main(int count, char** arguments) {
  return bench::run_main(count, arguments,
                         {"--tokens", "--seq", "--microbatches", "--attention", "--attention-sums", "--products"},
                         measure);
}
