// Programs that train, as far as facts about them change a step's time: what they store, fuse and overlap. None of it
// is fitted. The fields are explained in transformer_shape.hpp; a run's own facts replace these one by one.
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
  software plait;  // bf16 with float masters and gradients; the loss leaves gradients where logits were
  std::vector<software> all{plait};
  const auto add = [&](std::string_view name, auto&& change) {
    software s;
    s.name = name;
    s.keeps_gathered = s.packs = false;  // their sequence is the outermost dim
    s.offloads = false;                  // not priced
    s.folds_experts = true;              // Megatron-Core's default (expert_tensor_parallel_size 1)
    s.logit_bytes = 8;                   // bf16, float, and a gradient of bf16
    change(s);
    all.push_back(s);
  };
  // Narayanan et al. 2021: scores in memory, fused scale-mask-softmax, bias-GeLU and bias-dropout-add, gradients
  // reduced after the backward pass, nothing overlapped. The loss is a kernel for each operation on logits in float: a
  // cast, maximum, subtraction, exponential, sum, division, and backward two products and a cast, 52 bytes.
  add("megatron-2021", [](software& s) {
    s.attention = attention_kernel::unfused;
    s.loss_bytes = 52;
    s.overlaps_tensor = s.async_tensor = s.overlaps_data = s.overlaps_pipeline = false;
    s.selective_drops_scores_only = true;
  });
  // Korthikanti et al. 2022: the same with reductions of input gradients beside the products of weight gradients.
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
  // NeMo with Transformer Engine: cuDNN's attention, user buffers, bf16 gradients (of which dgxc's log of allocated
  // memory is evidence: 4 bytes for each parameter and 12 for each of the rank's share). What Transformer Engine's
  // LayerNormLinear, LayerNormMLP and Linear keep of a product's input in fp8 is the fp8 form.
  add("nemo", [](software& s) {
    s.gradient_bytes = s.reduced_bytes = 2;
    s.reduces_each_microbatch = true;  // Megatron-Core's FSDP
    s.bare_ends = true;                // the embedding and the head may count as layers of their own
    s.loss_bytes = 52;
    s.selective_drops_scores_only = true;
    s.keeps_fp8 = true;
  });
  // PyTorch's FSDP without a compiler: bf16 reductions, the loss in float. Of a parameter that is cut, the float
  // master, its gradient and two moments stay, 16 bytes, and bf16 exists while it is gathered (torch.distributed.fsdp's
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
  // MosaicML's LLM Foundry of 2023 on the same: the loss is flash-attn's fused kernel on bf16 logits, which leaves
  // gradients of bf16 beside them (modeling_mpt.py, loss_fn); attention is FlashAttention 1 in Triton. Two metrics of
  // training, cross entropy and perplexity, take each microbatch's logits as float through a softmax of their own, 14
  // bytes each, when its activations are gone (LanguageCrossEntropy, Trainer._train_microbatch of composer). FSDP's
  // backward_prefetch is BACKWARD_POST, with which a gather waits until the layer before has its gradients (Composer's
  // default; torch.distributed.fsdp.BackwardPrefetch). FSDP 1 puts a unit's gradients into a flat one, casts it and
  // divides it (torch/distributed/fsdp: FlatParamHandle's views, _runtime_utils._reduce_grad).
  add("llm-foundry", [&](software& s) {
    fsdp(s);
    s.attention = attention_kernel::flash1;
    s.loss_bytes = 6 + 2 * 14;
    s.logit_bytes = 4;
    s.gathers_late = s.packs_gradients = true;
  });
  // InternEvo of 2023: flash-attn 1.0.5 and Apex (doc/en/install.md), gradients in bf16. HybridZeroOptimizer sums whole
  // gradients over all data ranks, beside the backward pass (_reduce_grads_stored_in_bucket, reduce_rank None), and
  // sends each owner's parameters by a broadcast over the ranks that share the state out, before the next step
  // (hybrid_zero_optim.py, _broadcast_params; configs/7B_sft.py: overlap_sync_param False). The loss is flash-attn's on
  // logits in float (NaiveAMPModel, output_to_fp32): casts there and back, and 12 bytes.
  add("internevo", [](software& s) {
    s.attention = attention_kernel::flash1;
    s.gradient_bytes = s.reduced_bytes = 2;
    s.loss_bytes = 24;
    s.overlaps_tensor = s.async_tensor = false;
    s.reduces_whole = s.broadcasts_slices = true;
  });
  // Nanotron: a layer's pass keeps the host busy for 2.2 ms (4.4 ms for both, from its own sweep of layouts). Norms are
  // flash-attn's Triton kernel (nn/layer_norm.py, TritonRMSNorm); what a column-parallel linear gathers is gathered
  // again backward (config/parallelism_config.py: tp_recompute_allgather True, tp_linear_async_communication False).
  add("nanotron", [](software& s) {
    s.attention = attention_kernel::flash2;
    s.fused = false;
    s.loss_bytes = 52;
    s.overlaps_tensor = s.async_tensor = s.overlaps_data = s.overlaps_pipeline = false;
    s.host_seconds = 2.2e-3;
    s.fused_norms = s.gathers_again = true;
    s.gradient_bytes = 6;  // bf16 as they are computed, and the float that they are added to
    s.logit_bytes = 14;    // bf16, float, their exponentials and a gradient
  });
  return all;
}

/// Has a program compute its products in `kind`: those in f32 need no master copies of weights, and logits are as wide.
inline void set_products(software& s, number_kind kind) {
  s.products = kind;
  if (kind == number_kind::f32) s.weight_bytes = 4, s.optimizer_bytes = 8, s.logit_bytes = s.logit_bytes == 2 ? 4 : 8;
}

/// The program called `name`; `error` naming `flag` and all of them otherwise.
inline software software_called(std::string_view name, const std::string& flag) {
  std::string names;
  for (software& s : known_software()) {
    if (s.name == name) return std::move(s);
    names += (names.empty() ? "" : ", ") + s.name;
  }
  fail({flag, ": unknown program '", name, "'; known are ", names});
}

/// The schedules that a program has, by its name; all of them where the name is not known, and none where the program
/// has no pipeline.
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

/// Why a program cannot run schedules that are asked for; empty where it has them all.
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
