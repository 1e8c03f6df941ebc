// Pipeline schedules as data: the compiler verifies them. This program prints, compares and draws them, and adds one.
//
//   pipeline_schedule [RANKS [MICROBATCHES [SCHEDULE...]]]
//
// draws the given schedules and the one of this file to pipeline.svg, and writes a trace to pipeline.json (for
// ui.perfetto.dev). SCHEDULE is a name such as 1f1b or interleaved:2, or a CSV file of PyTorch.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <vector>

#include "plait/io/atomic_file.hpp"
#include "plait/schedule/parse.hpp"
#include "train_llama/observe/pictures.hpp"

namespace pl = plait;

// The compiler verifies a schedule: it is complete, ordered, free of deadlock, and within its memory.
static_assert(pl::verify<pl::interleaved<2>, pl::pipeline_ranks<4>, pl::microbatches<16>>());
static_assert(pl::verify<pl::zb_h1, pl::pipeline_ranks<4>, pl::microbatches<16>, pl::activations_at_most<4>>());

// A schedule is a struct with one function. This one is 1F1B with half as many forward passes in advance: it needs less
// memory and is idle more.
struct frugal {
  static constexpr std::string_view name = "frugal";
  static constexpr pl::schedule make(const pl::pipeline_shape& shape) {
    pl::schedule s{name, shape, {}};
    for (int rank = 0; rank < shape.ranks; ++rank) {
      const int ahead = std::min((shape.ranks - rank) / 2, shape.microbatches);
      std::vector<pl::action> order;
      for (int i = 0; i < shape.microbatches + ahead; ++i) {
        if (i < shape.microbatches) order.push_back(pl::forward_of(0, i));
        if (i >= ahead) order.push_back(pl::backward_of(0, i - ahead));
      }
      s.order.push_back(order);
    }
    return s;
  }
};
static_assert(pl::verify<frugal, pl::pipeline_ranks<4>, pl::microbatches<16>, pl::activations_at_most<3>>());

int main(int argc, char** argv) try {
  const int ranks = argc > 1 ? std::atoi(argv[1]) : 4;
  const int microbatches = argc > 2 ? std::atoi(argv[2]) : 8;
  std::vector<pl::schedule> schedules;
  for (int i = 3; i < argc; ++i) schedules.push_back(pl::parse_schedule(argv[i], ranks, microbatches));
  if (argc <= 3)
    for (const char* name :
         {"gpipe", "1f1b", "interleaved:2", "zb_h1", "zb_h2", "zb_v", "v_half", "v_min", "dualpipe_v"})
      schedules.push_back(pl::parse_schedule(name, ranks, microbatches));
  schedules.push_back(pl::make_schedule<frugal>(ranks, microbatches));

  // Times in milliseconds of one microbatch on one rank, for F, B, and B's halves I and W, and of a message.
  pl::schedule_costs costs;
  costs.rank_part = {.forward = 18.5, .backward = 27.4, .input_backward = 18.1, .weight_backward = 9.3};
  costs.link = 0.6;
  std::printf("%d ranks, %d microbatches of %.1f + %.1f ms, messages of %.1f ms\n\n", ranks, microbatches,
              costs.rank_part.forward, costs.rank_part.backward, costs.link);
  std::printf("%-12s %9s %7s %10s %11s %9s\n", "schedule", "ms", "idle", "span idle", "activations", "messages");
  std::vector<pl::pipeline_timeline> timelines;
  for (const pl::schedule& s : schedules) {
    pl::require_verified(s);
    const pl::simulation t = pl::simulate(s, costs);
    std::printf("%-12s %9.1f %6.1f%% %9.1f%% %11g %9zu\n", s.name.text, t.makespan, 100 * t.makespan_idle(),
                100 * t.span_idle(), pl::peak_activations(s), t.transfers.size());
    timelines.push_back(pl::timeline_of(s, costs, "ms"));
  }

  // `verify` names a mistake. Here the last rank lacks a backward pass.
  pl::schedule wrong = schedules.back();
  wrong.order.back().pop_back();
  std::printf("\na mistake      %s\n", pl::describe(pl::verify(wrong)).c_str());
  const pl::schedule small = pl::make_schedule<pl::one_f_one_b>(2, 3);
  // Messages in the order of passes may deadlock, which depends on how they are posted. The derived order never does.
  for (const auto rule : {pl::posting_rule::one_queue, pl::posting_rule::global_list})
    std::printf("%-14s %s\n", std::string(pl::name_of(rule)).c_str(),
                pl::describe(pl::verify(small, {.posting = rule})).c_str());

  // The actions and messages of rank 0 in a small pipeline.
  const auto programs = pl::rank_program(small);
  std::printf("\n1f1b, 2 ranks, 3 microbatches; the program of rank 0:\n");
  for (const pl::step_entry& step : programs[0]) std::printf("  %s\n", pl::describe(step).c_str());
  std::printf("\nThe same schedule as CSV for PyTorch's torch.distributed.pipelining:\n%s", pl::to_csv(small).c_str());

  pl::write_file_atomically("pipeline.svg", pl::pipeline_svg(timelines), "timelines");
  pl::write_file_atomically("pipeline.json", pl::to_chrome_trace(pl::trace_of(timelines.back(), 1e6)), "trace");
  std::printf("\npipeline.svg holds the timelines, pipeline.json the last one for ui.perfetto.dev\n");
} catch (const std::exception& e) {
  std::fprintf(stderr, "pipeline_schedule: %s\n", e.what());
  return 1;
}
