#include "set_parallel.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "plait/core/error.hpp"
#include "plait/kernels/moments.hpp"
#include "plait/nn/strategy.hpp"

void set_parallel(setup& s, std::int64_t dp, std::int64_t cp) {
  const options& opt = s.opt;
  using plait::zero_level;
  plait::data_parallel& how = s.parallel.parallel;
  how.level = opt.data_parallel == "zero1"   ? zero_level::optimizer
              : opt.data_parallel == "zero2" ? zero_level::gradients
              : opt.data_parallel == "zero3" ? zero_level::parameters
                                             : zero_level::replicated;
  how.prefetch = static_cast<int>(opt.prefetch);
  how.reshard_after_forward = opt.reshard_after_forward == "on";
  how.overlap = opt.overlap == "on";
  if (opt.overlap_given && dp * cp == 1)
    plait::fail("--overlap " + opt.overlap +
                " hides nothing: with dp=1 and cp=1 no gradient is reduced over data ranks; leave it out");
  if (opt.shard == "whole") s.parallel.cut = plait::bucket_cut::whole;
  if (opt.shard == "blocks") s.parallel.cut = plait::bucket_cut::blocks(plait::kernels::moment_block);
  if (opt.reduce_in != "full") {
    if (dp * cp == 1)
      plait::fail(
          "--reduce-in " + opt.reduce_in +
          " is for gradients that are summed over the ranks of dp and cp, and here there is one; legal is full");
    s.parallel.wire = opt.reduce_in == "bf16" ? plait::gradient_wire::bf16 : plait::gradient_wire::f32;
  }
  if (how.level == zero_level::replicated) return;
  const bool over_dp = opt.replicate_over != "dp" && dp > 1, over_cp = opt.replicate_over != "cp" && cp > 1;
  if (!over_dp && !over_cp)
    plait::fail(fmt::format(
        "--data-parallel {} cuts over the ranks of dp and cp{}, and with dp={} and cp={} there is one "
        "rank to cut over; legal is replicated",
        opt.data_parallel, opt.replicate_over == "none" ? "" : " but --replicate-over " + opt.replicate_over, dp, cp));
  if (opt.replicate_over != "none" && (opt.replicate_over == "dp" ? dp : cp) == 1)
    plait::fail("--replicate-over " + opt.replicate_over + " names an axis of one rank; legal is none");
  // The units of a rank: blocks, the embedding, the head.
  std::vector<std::int64_t> units(static_cast<std::size_t>(s.schedule.shape.ranks), 0);
  for (std::size_t stage = 0; stage < s.stages.size(); ++stage)
    units[static_cast<std::size_t>(s.schedule.shape.rank_of(static_cast<int>(stage)))] +=
        s.stages[stage].size() + (s.stages[stage].first ? 1 : 0) + (s.stages[stage].last ? 1 : 0);
  if (const std::int64_t fewest = *std::min_element(units.begin(), units.end()); opt.prefetch > fewest)
    plait::fail(
        fmt::format("--prefetch is {}, but a rank has {} units of parameters to gather: its blocks, the embedding "
                    "and the head; legal is 0 to {}",
                    opt.prefetch, fewest, fewest));
  plait::axis_list& cut = s.parallel.axes.shard;
  if (opt.replicate_over == "dp") cut = plait::axis_list(plait::axis_of<plait::cp>);
  if (opt.replicate_over == "cp") cut = plait::axis_list(plait::axis_of<plait::dp>);
  if (opt.replicate_over == "dp") s.parallel.axes.replicate = plait::axis_list(plait::axis_of<plait::dp>);
  if (opt.replicate_over == "cp") s.parallel.axes.replicate = plait::axis_list(plait::axis_of<plait::cp>);
}

void check_tensor_overlap(const options& opt, std::int64_t cp, std::int64_t tp) {
  if (opt.tensor_overlap == 1) return;
  if (tp == 1)
    plait::fail(
        fmt::format("--tensor-overlap {} hides nothing: with tp=1 linears send nothing; legal is 1, or more "
                    "ranks along tp",
                    opt.tensor_overlap));
  const std::int64_t tokens = opt.micro_batch * opt.seq / cp / (opt.strategy == "sp" ? tp : 1);
  if (opt.tensor_overlap > tokens)
    plait::fail(
        fmt::format("--tensor-overlap is {}, but a rank has {} tokens of a microbatch to send; legal is 1 to {}",
                    opt.tensor_overlap, tokens, tokens));
}
