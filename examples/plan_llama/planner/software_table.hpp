// A table of training programs, with the facts that change a step's time: what they store, fuse and overlap. No fact is
// fitted. transformer_shape.hpp explains the fields. The facts of a run replace these one by one.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "plan_llama/planner/training_layout.hpp"
#include "plan_llama/planner/transformer_shape.hpp"

namespace plait::planner {

/// The programs that are known by name.
inline std::vector<software> known_software() {
  software plait;  // bf16 with float masters and gradients; the loss overwrites logits by gradients
  std::vector<software> all{plait};
  const auto add = [&](std::string_view name, auto&& change) {
    software s;
    s.name = name;
    s.keeps_gathered = s.packs = false;  // their sequence is the outermost dim
    s.offloads = s.chunks_loss = false;  // without a price
    s.folds_experts = true;              // Megatron-Core's default (expert_tensor_parallel_size 1)
    s.logit_bytes = 8;                   // bf16, float, and a gradient of bf16
    change(s);
    all.push_back(s);
  };
  // Narayanan et al. 2021: scores in memory; fused scale-mask-softmax, bias-GeLU and bias-dropout-add; gradients are
  // reduced after the backward pass; no overlap. The loss has one kernel for each operation on logits in float: a cast,
  // maximum, subtraction, exponential, sum and division, and backward two products and a cast. That is 52 bytes.
  add("megatron-2021", [](software& s) {
    s.attention = attention_kernel::unfused;
    s.loss_bytes = 52;
    s.overlaps_tensor = s.async_tensor = s.overlaps_data = s.overlaps_pipeline = false;
    s.selective_drops_scores_only = true;
  });
  // Korthikanti et al. 2022: the same, with reductions of input gradients during the products of weight gradients.
  add("megatron-2022", [](software& s) {
    s.attention = attention_kernel::unfused;
    s.loss_bytes = 52;
    s.overlaps_tensor = s.overlaps_data = s.overlaps_pipeline = false;
    s.selective_drops_scores_only = true;
  });
  // Megatron-Core: FlashAttention-2, float gradients, overlapped data parallelism and messages.
  add("megatron", [](software& s) {
    s.attention = attention_kernel::flash2;
    s.loss_bytes = 52;
    s.overlaps_tensor = false;
    s.selective_drops_scores_only = true;
    s.keeps_fp8 = true;  // Transformer Engine, as below
  });
  // NeMo with Transformer Engine: cuDNN's attention, user buffers, bf16 gradients. The evidence for the latter is
  // dgxc's log of allocated memory: 4 bytes for each parameter, and 12 for each one of the rank's share. Transformer
  // Engine's LayerNormLinear, LayerNormMLP and Linear keep the inputs of fp8 products in fp8.
  add("nemo", [](software& s) {
    s.gradient_bytes = s.reduced_bytes = 2;
    s.reduces_each_microbatch = true;  // Megatron-Core's FSDP
    s.bare_ends = true;                // the embedding and the head may count as layers
    s.loss_bytes = 52;
    s.selective_drops_scores_only = true;
    s.keeps_fp8 = true;
  });
  // PyTorch's FSDP without a compiler: bf16 reductions, the loss in float. A cut parameter has a float master, its
  // gradient and two moments: 16 bytes. Its bf16 form exists only while it is gathered (torch.distributed.fsdp's
  // MixedPrecision).
  const auto fsdp = [](software& s) {
    s.attention = attention_kernel::flash2;
    s.fused = false;
    s.reduces_each_microbatch = true;
    s.loss_bytes = 30;
    s.logit_bytes = 14;
    s.reduced_bytes = 2;
    s.gathers_masters = true;
    s.overlaps_tensor = s.async_tensor = false;
  };
  add("fsdp", fsdp);
  // MosaicML's LLM Foundry of 2023 on FSDP: the loss is flash-attn's fused kernel on bf16 logits, with separate bf16
  // gradients (modeling_mpt.py, loss_fn). Attention is FlashAttention 1 in Triton. Two metrics of training, cross
  // entropy and perplexity, each compute a softmax in float of each microbatch's logits, 14 bytes each, after its
  // activations are freed (LanguageCrossEntropy, Trainer._train_microbatch of composer). FSDP's backward_prefetch is
  // BACKWARD_POST, with which a gather waits until the layer before has its gradients (Composer's default;
  // torch.distributed.fsdp.BackwardPrefetch). FSDP 1 copies a unit's gradients into a flat one, casts it and divides it
  // (torch/distributed/fsdp: FlatParamHandle's views, _runtime_utils._reduce_grad).
  add("llm-foundry", [&](software& s) {
    fsdp(s);
    s.attention = attention_kernel::flash1;
    s.loss_bytes = 6 + 2 * 14;
    s.logit_bytes = 4;
    s.gathers_late = s.packs_gradients = true;
  });
  // InternEvo of 2023: flash-attn 1.0.5 and Apex (doc/en/install.md), gradients in bf16. HybridZeroOptimizer sums whole
  // gradients over all data ranks during the backward pass (_reduce_grads_stored_in_bucket, reduce_rank None). Before
  // the next step each owner broadcasts its parameters to the ranks over which the state is cut (hybrid_zero_optim.py,
  // _broadcast_params; configs/7B_sft.py: overlap_sync_param False). The loss is flash-attn's on logits in float
  // (NaiveAMPModel, output_to_fp32): two casts, and 12 bytes.
  add("internevo", [](software& s) {
    s.attention = attention_kernel::flash1;
    s.gradient_bytes = s.reduced_bytes = 2;
    s.loss_bytes = 24;
    s.overlaps_tensor = s.async_tensor = false;
    s.reduces_whole = s.broadcasts_slices = true;
  });
  // Nanotron: a layer's pass keeps the host busy for 2.2 ms (4.4 ms for both passes, from its own sweep of layouts).
  // Norms are flash-attn's Triton kernel (nn/layer_norm.py, TritonRMSNorm). A column-parallel linear gathers its input
  // again backward (config/parallelism_config.py: tp_recompute_allgather True, tp_linear_async_communication False).
  add("nanotron", [](software& s) {
    s.attention = attention_kernel::flash2;
    s.fused = false;
    s.loss_bytes = 52;
    s.overlaps_tensor = s.async_tensor = s.overlaps_data = s.overlaps_pipeline = false;
    s.host_seconds = 2.2e-3;
    s.fused_norms = s.gathers_again = true;
    s.gradient_bytes = 6;  // the bf16 gradient, and the float sum
    s.logit_bytes = 14;    // bf16, float, their exponentials and a gradient
  });
  return all;
}

/// Sets the type of a program's products. With f32 it needs no master copies of weights, and logits are f32, too.
inline void set_products(software& s, number_kind kind) {
  s.products = kind;
  if (kind == number_kind::f32) s.weight_bytes = 4, s.optimizer_bytes = 8, s.logit_bytes = s.logit_bytes == 2 ? 4 : 8;
}

/// Returns the program called `name`. Throws `error` with `flag` and all names if there is none.
inline software software_called(std::string_view name, const std::string& flag) {
  std::string names;
  for (software& s : known_software()) {
    if (s.name == name) return std::move(s);
    names += (names.empty() ? "" : ", ") + s.name;
  }
  fail({flag, ": unknown program '", name, "'; known are ", names});
}

/// Returns the schedules of a program: all schedules if its name is unknown, and none if it has no pipeline.
inline std::vector<schedule_kind> schedules_of(const software& program) {
  using enum schedule_kind;
  const std::string_view name = program.name;
  // Megatron-Core's forward_backward_pipelining_with(out)_interleaving, which NeMo calls; InternEvo's schedulers of
  // 2023.
  if (name.starts_with("megatron") || name == "nemo" || name == "internevo") return {one_f_one_b, interleaved};
  // torch.distributed.pipelining; its InterleavedZeroBubble is not ZB-H1.
  if (name == "fsdp") return {gpipe, one_f_one_b, interleaved, zb_v};
  // Nanotron's AllForwardAllBackwardPipelineEngine and OneForwardOneBackwardPipelineEngine.
  if (name == "nanotron") return {gpipe, one_f_one_b};
  if (name == "llm-foundry") return {};
  return {gpipe, one_f_one_b, interleaved, zb_h1, zb_h2, zb_v, automatic};
}

/// Returns why a program cannot run the given schedules; empty if it has them all.
inline std::string why_lacking(const software& program, const std::vector<schedule_kind>& asked) {
  const std::vector<schedule_kind> own = schedules_of(program);
  std::string names;
  for (const schedule_kind kind : own) names += cat({names.empty() ? "" : ", ", name_of(kind)});
  for (const schedule_kind kind : asked)
    if (std::find(own.begin(), own.end(), kind) == own.end())
      return cat({"the program ", program.name, " lacks the schedule ", name_of(kind), "; legal ",
                  own.empty() ? "is pp = 1, it has no pipeline" : "are " + names});
  return {};
}

}  // namespace plait::planner
