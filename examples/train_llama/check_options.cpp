#include "check_options.hpp"

#include <fmt/format.h>

#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>

#include "number_lists.hpp"
#include "plait/core/error.hpp"
#include "recompute.hpp"
#include "strategies.hpp"

namespace {

void one_of(const char* flag, const std::string& value, std::initializer_list<const char*> legal) {
  std::string list;
  for (const char* l : legal) {
    if (value == l) return;
    list += (list.empty() ? "" : ", ") + std::string(l);
  }
  plait::fail(fmt::format("{} '{}' is unknown; legal are {}", flag, value, list));
}

void within(const char* flag, std::int64_t value, std::int64_t least, std::int64_t most) {
  if (value < least) plait::fail(fmt::format("{} is {}; at least {} is legal", flag, value, least));
  if (value > most) plait::fail(fmt::format("{} is {}; at most {} is legal", flag, value, most));
}
void in_range(const char* flag, double value, double low, double below) {
  if (!(value >= low && value < below))
    plait::fail(fmt::format("{} is {}; legal is at least {} and below {}", flag, value, low, below));
}

/// Device and backend by name, what is read, and what goes on from it.
void check_inputs(const options& opt, const given_option& given) {
  one_of("--device", opt.device, {"cpu", "cuda"});
  one_of("--backend", opt.backend, {"threads", "mpi", "nccl"});
  in_range("--deadline", opt.deadline, 0, 1e9);
  if (given("--deadline") && opt.backend == "threads")
    plait::fail("--deadline is for --backend mpi and nccl; a deadlock of threads is found without one: leave it out");
  // Empty is what a shell makes of a variable that is not set.
  const auto not_empty = [&](const char* flag, const std::string& value, const char* what) {
    if (given(flag) && value.empty()) plait::fail(fmt::format("{} is empty; name {}, or leave it out", flag, what));
  };
  if (given("--mesh") && opt.mesh.find_first_not_of(' ') == std::string::npos)
    plait::fail("--mesh is empty; name axes and extents, as in dp=2,tp=4, or leave it out");
  not_empty("--init-from", opt.init_from, "a folder");
  not_empty("--export-hf", opt.export_hf, "a folder");
  not_empty("--checkpoint-dir", opt.checkpoint_dir, "a folder");
  not_empty("--log", opt.log, "a file");
  not_empty("--plot", opt.plot, "a file");
  not_empty("--report", opt.report, "a file");
  if (!opt.report.empty() && opt.log.empty()) plait::fail("--report needs --log, the file that it is made from");
  not_empty("--trace", opt.trace, "a file");
  not_empty("--timeline", opt.timeline, "a file");
  not_empty("--products", opt.products, "a file");
  not_empty("--cluster", opt.cluster, "hardware");
  one_of("--plan", opt.plan, {"given", "auto"});
  one_of("--weights-order", opt.weights_order, {"hugging-face", "megatron", "meta"});
  one_of("--export-order", opt.export_order, {"hugging-face", "megatron", "meta"});
  if (given("--export-order") && opt.export_hf.empty())
    plait::fail("--export-order " + opt.export_order + " is for --export-hf, which names the directory to write");
  if (opt.weights_order_given && opt.init_from.empty())
    plait::fail("--weights-order " + opt.weights_order + " is for --init-from, which names a model directory");
  one_of("--documents", opt.documents, {"joined", "apart"});
  if (opt.end_of_document != -1 && !keeps_documents_apart(opt))
    plait::fail(fmt::format("--end-of-document {} is for --documents apart; joined documents have no ends",
                            opt.end_of_document));
  one_of("--on-new-data", opt.on_new_data, {"stop", "begin"});
  if (given("--on-new-data") && opt.resume == "none")
    plait::fail("--on-new-data " + opt.on_new_data + " is for --resume, which names what was trained before");
  one_of("--on-new-schedule", opt.on_new_schedule, {"stop", "follow"});
  if (given("--on-new-schedule") && opt.resume == "none")
    plait::fail("--on-new-schedule " + opt.on_new_schedule + " is for --resume, which names what was trained before");
  one_of("--keep-best", opt.keep_best, {"none", "held-out"});
  if (opt.keep_best == "held-out" && opt.held_out == 0)
    plait::fail("--keep-best held-out needs --held-out, which says what fraction of the data is kept for evaluation");
}

/// Refuses what is for a pipeline where there is none. A file may order the passes of one rank as its author likes.
void check_pipeline(const options& opt, const given_option& given) {
  if (opt.schedule.ends_with(".csv") || parse_mesh(opt).extent(plait::axis_of<plait::pp>) > 1) return;
  static_cast<void>(parse_schedule(opt, 1, 4));  // whether there is one of that name
  if (opt.schedule != "1f1b")
    plait::fail(
        "--schedule " + opt.schedule +
        " orders the stages of a pipeline, and with pp=1 there is none; legal are 1f1b, and more ranks along pp");
  if (given("--split"))
    plait::fail("--split " + opt.split +
                " shares out layers over the stages of a pipeline, and with pp=1 there is one; leave it out");
}

/// How the model, its data and its parameters are cut.
void check_layout(const options& opt, const given_option& given) {
  one_of("--strategy", opt.strategy, {"sp", "tp"});
  one_of("--data-parallel", opt.data_parallel, {"replicated", "zero1", "zero2", "zero3"});
  one_of("--shard", opt.shard, {"even", "whole", "blocks"});
  if (opt.data_parallel == "replicated" && given("--shard"))
    plait::fail("--shard " + opt.shard + " is for --data-parallel zero1 to zero3; replicated cuts nothing");
  if (opt.data_parallel != "replicated" && opt.shard != "whole" && opt.optimizer == "muon")
    plait::fail("--optimizer muon needs whole matrices, which --data-parallel " + opt.data_parallel + " with --shard " +
                opt.shard + " cuts; legal are --shard whole and --data-parallel replicated");
  one_of("--replicate-over", opt.replicate_over, {"none", "dp", "cp"});
  one_of("--reshard-after-forward", opt.reshard_after_forward, {"on", "off"});
  one_of("--overlap", opt.overlap, {"on", "off"});
  within("--prefetch", opt.prefetch, 0, 1 << 20);
  within("--tensor-overlap", opt.tensor_overlap, 1, 1 << 20);
  if (opt.data_parallel != "zero3") {
    if (given("--prefetch"))
      plait::fail(fmt::format("--prefetch {} is for --data-parallel zero3; with {} parameters stay gathered",
                              opt.prefetch, opt.data_parallel));
    if (given("--reshard-after-forward"))
      plait::fail("--reshard-after-forward " + opt.reshard_after_forward + " is for --data-parallel zero3; with " +
                  opt.data_parallel + " parameters stay gathered");
  }
  const bool level_is_planned = opt.plan == "auto" && !opt.data_parallel_given;
  if (opt.data_parallel == "replicated" && !level_is_planned && opt.replicate_over != "none")
    plait::fail("--replicate-over " + opt.replicate_over +
                " is for --data-parallel zero1 to zero3; replicated cuts nothing");
  one_of("--split", opt.split, {"flops", "measured", "even"});
  if (opt.plan != "auto" && (given("--split") || given("--schedule"))) check_pipeline(opt, given);
  one_of("--attention", opt.attention,
         {"ring", "ring:zigzag", "ring:contiguous", "all_gather_kv", "all_gather_kv:zigzag", "all_gather_kv:contiguous",
          "ulysses", "ulysses:zigzag", "ulysses:contiguous"});
}

/// Number types, and the order of sums.
void check_numerics(const options& opt) {
  one_of("--precision", opt.precision, {"float", "double", "bf16", "bf16-no-masters"});
  if (opt.precision == "bf16-no-masters" && opt.strategy != "sp")
    plait::fail("--precision bf16-no-masters is built for --strategy sp alone; here it is " + opt.strategy);
  one_of("--gradients", opt.gradients, {"full", "bf16"});
  if (has_bf16_gradients(opt) && !in_bf16(opt))
    plait::fail("--gradients bf16 is for --precision bf16 and bf16-no-masters; with " + opt.precision +
                ", full is legal");
  if (has_bf16_gradients(opt) && opt.strategy != "sp")
    plait::fail("--gradients bf16 is built for --strategy sp alone; here it is " + opt.strategy);
  one_of("--reduce-in", opt.reduce_in, {"full", "bf16", "float"});
  if (opt.reduce_in == "bf16" && opt.precision == "double")
    plait::fail("--reduce-in bf16 is for gradients in float; with --precision double, full is legal");
  if (opt.reduce_in == "bf16" && has_bf16_gradients(opt))
    plait::fail(
        "--reduce-in bf16 is for gradients in float; with --gradients bf16, full is legal, which is bf16, and float");
  if (opt.reduce_in == "float" && !has_bf16_gradients(opt))
    plait::fail(fmt::format("--reduce-in float is for --gradients bf16; here they are in {}, and legal {}",
                            opt.precision == "double" ? "double" : "float",
                            opt.precision == "double" ? "is full" : "are full and bf16"));
  if (opt.leaves) {
    const auto not_with = [](const char* flag, const std::string& value, const char* legal) {
      plait::fail(
          fmt::format("--deterministic has one order of sums, which {} {} has not; legal is {}", flag, value, legal));
    };
    if (opt.device != "cpu") not_with("--device", opt.device, "cpu");
    if (opt.threads != 1) not_with("--threads", std::to_string(opt.threads), "1");
    if (opt.tensor_overlap != 1) not_with("--tensor-overlap", std::to_string(opt.tensor_overlap), "1");
    if (opt.gradients != "full") not_with("--gradients", opt.gradients, "full");
    if (opt.reduce_in != "full") not_with("--reduce-in", opt.reduce_in, "full");
    if (opt.moments == "int8") not_with("--moments", opt.moments, "full or bf16");
  }
}

/// Sizes. With these limits no count of samples or tokens overflows.
void check_sizes(const options& opt) {
  within("--steps", opt.steps, 0, std::int64_t{1} << 32);
  if (opt.steps == 0 && !(opt.trace.empty() && opt.timeline.empty()))
    plait::fail(fmt::format("{} shows a step, and --steps 0 has none; leave it out",
                            opt.trace.empty() ? "--timeline" : "--trace"));
  if (opt.steps == 0 && !opt.report.empty()) plait::fail("--report shows steps, and --steps 0 has none; leave it out");
  within("--seq", opt.seq, 1, std::int64_t{1} << 31);
  within("--micro-batch", opt.micro_batch, 1, 1 << 20);
  within("--global-batch", opt.global_batch, 0, 1 << 24);
  within("--seed", static_cast<std::int64_t>(opt.seed), 0, std::int64_t{1} << 62);
  within("--threads", opt.threads, 1, 1024);
  within("--sample", opt.sample, 0, 1 << 24);
  within("--log-hashes", opt.log_hashes, 0, std::int64_t{1} << 32);
  if (opt.log_hashes > 0 && opt.log.empty())
    plait::fail(fmt::format("--log-hashes {} needs --log, which names the file that the hashes are written to",
                            opt.log_hashes));
  if (opt.log_gradient_hashes && opt.log_hashes == 0)
    plait::fail("--log-gradient-hashes needs --log-hashes, which says every how many steps; at least 1 is legal");
  if (opt.warmup != -1) within("--warmup", opt.warmup, 0, opt.steps);
  in_range("--temperature", opt.temperature, 0, 1e6);
  in_range("--peak-tflops", opt.peak_tflops, 0, 1e9);
  in_range("--memory-share", opt.memory_share, 1e-12, 1e9);
}

/// The loss, and how weights are updated.
void check_training(const options& opt, const given_option& given) {
  in_range("--dropout", opt.dropout, 0, 1);
  in_range("--label-smoothing", opt.label_smoothing, 0, 1);
  in_range("--z-loss", opt.z_loss, 0, 1e6);
  in_range("--clip", opt.clip, 0, 1e30);
  one_of("--on-nonfinite", opt.on_nonfinite, {"stop", "skip"});
  in_range("--weight-decay", opt.weight_decay, 0, 1e6);
  if (given("--min-lr-ratio") && opt.lr_schedule == "constant")
    plait::fail(
        fmt::format("--min-lr-ratio {} changes nothing with --lr-schedule constant; leave it out", opt.min_lr_ratio));
  one_of("--optimizer", opt.optimizer, {"adamw", "muon"});
  if (opt.optimizer == "muon" && opt.precision == "bf16-no-masters")
    plait::fail(
        "--optimizer muon needs master weights, which --precision bf16-no-masters has not; legal are --optimizer adamw "
        "and --precision float, double and bf16");
  one_of("--moments", opt.moments, {"full", "bf16", "int8"});
  if (opt.optimizer == "muon" && opt.moments == "int8")
    plait::fail("--moments int8 is for --optimizer adamw; with muon, full and bf16 are legal");
  if (opt.moments == "int8" && opt.data_parallel != "replicated" && opt.shard == "even")
    plait::fail("--moments int8 has a scale for each 256 elements, which --data-parallel " + opt.data_parallel +
                " with --shard even cuts; legal are --shard blocks, --shard whole and --data-parallel replicated");
  in_range("--muon-momentum", opt.muon_momentum, 0, 1);
  one_of("--muon-scale", opt.muon_scale, {"match_rms_adamw", "original"});
  in_range("--muon-lr-ratio", opt.muon_lr_ratio, 1e-6, 1e6);
  for (const auto& [flag, says] : {std::pair("--prompt", !opt.prompt.empty()), std::pair("--temperature", true)})
    if (opt.sample == 0 && given(flag) && says)
      plait::fail(fmt::format("{} is for the text that is sampled at the end, and --sample 0 samples none", flag));
  for (const char* flag : {"--muon-momentum", "--muon-scale", "--muon-lr-ratio"})
    if (opt.optimizer != "muon" && given(flag))
      plait::fail(fmt::format("{} is for --optimizer muon; here it is {}", flag, opt.optimizer));
}

void check_saving(const options& opt, const given_option& given) {
  if (opt.checkpoint_dir.empty()) {
    const auto needs = [](const char* option) {
      plait::fail(std::string(option) + " needs --checkpoint-dir, which names where the training state is saved");
    };
    if (given("--save-every")) needs("--save-every");
    if (given("--keep")) needs("--keep");
    if (given("--keep-every")) needs("--keep-every");
    if (given("--keep-best")) needs("--keep-best");
    if (given("--checkpoint-io")) needs("--checkpoint-io");
    if (given("--checkpoint-staging")) needs("--checkpoint-staging");
    if (opt.resume == "auto") needs("--resume auto");
  }
  one_of("--checkpoint-io", opt.checkpoint_io, {"auto", "uring", "threads"});
  one_of("--checkpoint-staging", opt.checkpoint_staging, {"pinned", "pageable"});
  if (opt.save_every < 0) plait::fail(fmt::format("--save-every is {}; at least 0 is legal", opt.save_every));
  if (opt.keep < 1) plait::fail(fmt::format("--keep is {}; at least 1 is legal", opt.keep));
  if (opt.keep_every < 0) plait::fail(fmt::format("--keep-every is {}; at least 0 is legal", opt.keep_every));
  if (opt.resume.empty()) plait::fail("--resume is empty; legal are none, auto, a saved step, or a folder of them");
}

/// Refuses options that are for another kind of device.
void check_device(const options& opt) {
  one_of("--graph", opt.graph, {"auto", "on", "off"});
  one_of("--attention-kernel", opt.attention_kernel, {"auto", "own", "cudnn"});
  one_of("--attention-sums", opt.attention_sums, {"fixed", "any"});
  one_of("--offload", opt.offload, {"none", "optimizer"});
  if (offloads(opt) && opt.device == "cpu")
    plait::fail(
        "--offload optimizer: with --device cpu the optimizer's state is in the host's memory; legal are none, "
        "and --device cuda");
  if (opt.device == "cuda") {
    if (opt.backend == "mpi")
      plait::fail(
          "--backend mpi moves the host's memory; with --device cuda, --backend nccl is legal (which mpirun may start) "
          "and threads");
    if (opt.precision == "double")
      plait::fail("--precision double is not there for --device cuda; legal are float, bf16 and bf16-no-masters");
    // What is instantiated; see cuda_float.cpp and cuda_bf16.cpp.
    if (opt.precision == "float" && opt.strategy != "sp")
      plait::fail("--device cuda --precision float is built for --strategy sp alone; here it is " + opt.strategy +
                  " (bf16 has either)");
    if (opt.tf32 && opt.precision != "float")
      plait::fail("--tf32 is for --precision float; here it is " + opt.precision);
    if (opt.attention_kernel == "cudnn" && !in_bf16(opt))
      plait::fail("--attention-kernel cudnn computes in bf16; with --precision " + opt.precision +
                  ", auto and own are legal");
    if (opt.attention_sums == "any" && (!in_bf16(opt) || opt.attention_kernel == "own"))
      plait::fail(
          "--attention-sums any is an order of cuDNN's, which computes in bf16; it needs --precision bf16 and "
          "--attention-kernel auto or cudnn, and here they are " +
          opt.precision + " and " + opt.attention_kernel);
    if (opt.graph == "on" && opt.dropout > 0)
      plait::fail(
          fmt::format("--graph on with --dropout {}: a replay would drop the same elements in every step; legal "
                      "are --graph off and --dropout 0",
                      opt.dropout));
    if (opt.threads != 1)
      plait::fail(
          fmt::format("--threads is {}, but with --device cuda no product runs on the CPU; leave it out", opt.threads));
    return;
  }
  if (opt.backend == "nccl")
    plait::fail("--backend nccl moves the memory of GPUs: give --device cuda, or --backend threads or mpi");
  if (opt.tf32) plait::fail("--tf32 needs --device cuda; the CPU computes float in full");
  if (opt.checkpoint_staging != "pinned")
    plait::fail("--checkpoint-staging " + opt.checkpoint_staging +
                " is for --device cuda; on the CPU no memory is pinned: leave it out");
  if (opt.graph == "on") plait::fail("--graph on needs --device cuda; on the CPU, auto and off are legal");
  if (!opt.products.empty())
    plait::fail("--products needs --device cuda; the libraries of the CPU choose their algorithms themselves");
  if (opt.attention_kernel != "auto")
    plait::fail("--attention-kernel " + opt.attention_kernel + " needs --device cuda; on the CPU, auto is legal");
  if (opt.attention_sums != "fixed")
    plait::fail("--attention-sums " + opt.attention_sums + " needs --device cuda; on the CPU every sum has one order");
}

}  // namespace

void check_options(const options& opt, const given_option& given) {
  check_inputs(opt, given);
  check_layout(opt, given);
  check_numerics(opt);
  parse_recompute(opt.recompute);
  check_sizes(opt);
  check_training(opt, given);
  check_saving(opt, given);
  check_device(opt);
  with_types(opt, []<class, class>() {});  // whether this program is built for them
}
