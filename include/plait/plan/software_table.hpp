// Programs that train, as far as facts about them change a step's time: what they store, fuse and overlap. None of it
// is fitted. The fields are explained in plan/transformer_shape.hpp; a run's own facts replace these one by one.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "plait/plan/transformer_shape.hpp"

namespace plait::planner {

/// The programs that are known by name.
inline std::vector<software> known_software() {
  software plait;  // bf16 with float masters and gradients
  std::vector<software> all{plait};
  const auto add = [&](std::string_view name, auto&& change) {
    software s;
    s.name = name;
    change(s);
    all.push_back(s);
  };
  // Narayanan et al. 2021: scores in memory, fused scale-mask-softmax, bias-GeLU and bias-dropout-add, fp16 gradients
  // reduced after the backward pass, nothing overlapped.
  const auto early = [](software& s) {
    s.attention = attention_kernel::unfused;
    s.gradient_bytes = 4, s.reduced_bytes = 4;
    s.overlaps_tensor = s.overlaps_data = s.overlaps_pipeline = false;
    s.selective_drops_scores_only = true;
  };
  add("megatron-2021", early);
  // Korthikanti et al. 2022 has the same, with sequence parallelism, which is the layout's.
  add("megatron-2022", early);
  // Megatron-Core: FlashAttention-2, float gradients, overlapped data parallelism and messages.
  add("megatron", [](software& s) {
    s.attention = attention_kernel::flash2;
    s.overlaps_tensor = false;
    s.selective_drops_scores_only = true;
  });
  // NeMo with Transformer Engine: cuDNN's attention, user buffers, bf16 gradients (of which dgxc's log of allocated
  // memory is evidence: 4 bytes for each parameter and 12 for each of the rank's share).
  add("nemo", [](software& s) {
    s.gradient_bytes = s.reduced_bytes = 2;
    s.selective_drops_scores_only = true;
  });
  // PyTorch's FSDP without a compiler: elementwise operations in kernels of their own, bf16 reductions.
  add("fsdp", [](software& s) {
    s.attention = attention_kernel::flash2;
    s.fused = false;
    s.reduced_bytes = 2;
    s.overlaps_tensor = false;
  });
  add("nanotron", [](software& s) {
    s.attention = attention_kernel::flash2;
    s.fused = false;
    s.overlaps_tensor = s.overlaps_data = s.overlaps_pipeline = false;
    s.host_seconds = 4.4e-3 / 2;
  });
  return all;
}

/// The program called `name`; `error` naming `knob` and all of them otherwise.
inline software software_called(std::string_view name, const std::string& knob) {
  std::string names;
  for (software& s : known_software()) {
    if (s.name == name) return std::move(s);
    names += (names.empty() ? "" : ", ") + s.name;
  }
  fail({knob, ": unknown program '", name, "'; known are ", names});
}

}  // namespace plait::planner
