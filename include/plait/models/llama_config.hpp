// The shape of a Llama, named presets, and counts of parameters and operations.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plait/core/compiled.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/kernels/settings.hpp"

namespace plait {

enum class rope_kind { none, llama3 };

/// Rotary frequencies for contexts that are longer than in training, as in Llama 3.1. Wavelengths above
/// `original_max_position / low_freq_factor` are multiplied by `factor`. Wavelengths below `original_max_position /
/// high_freq_factor` stay. Those in between are interpolated linearly.
struct rope_scaling {
  rope_kind kind = rope_kind::none;
  double factor = 8;
  double low_freq_factor = 1;
  double high_freq_factor = 4;
  std::int64_t original_max_position = 8192;

  bool operator==(const rope_scaling&) const = default;
};

/// The mixture of experts that replaces MLPs. Experts have the width `llama_config::ffn`.
struct mixture_config {
  std::int64_t experts = 0;  ///< 0: a dense MLP
  kernels::router_settings router{};
  bool correction_bias = false;   ///< the router chooses experts by probability plus a bias, as in DeepSeek-V3
  std::int64_t shared_ffn = 0;    ///< width of the expert that processes all tokens; 0: none
  bool shared_gate = false;       ///< multiply the shared expert's output by a sigmoid, as in Qwen2-MoE
  std::int64_t dense_layers = 0;  ///< the number of first layers with an MLP instead of experts
  std::int64_t dense_ffn = 0;     ///< width of these MLPs

  bool operator==(const mixture_config&) const = default;
};

/// The shape of a Llama: token embedding, `layers` times (RMSNorm, grouped-query attention with rotary positions,
/// RMSNorm, SwiGLU), RMSNorm, output projection. Qwen2 has `qkv_bias` in addition, Qwen3 `qk_norm`, and Mistral
/// `sliding_window`. Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE and dots.llm1 have a `mixture`.
struct llama_config {
  std::int64_t vocab = 256;
  std::int64_t hidden = 128;
  std::int64_t layers = 4;
  std::int64_t heads = 8;
  std::int64_t kv_heads = 8;
  std::int64_t head_dim = 16;  ///< heads * head_dim may differ from hidden
  std::int64_t ffn = 384;      ///< width of the MLP, or of each expert
  std::int64_t max_position = 1024;
  double rms_eps = 1e-5;
  double rope_theta = 10000;
  rope_scaling rope{};
  bool tie_embeddings = false;      ///< the output projection is the embedding
  bool attention_bias = false;      ///< of q, k, v and o
  bool qkv_bias = false;            ///< of q, k and v, but not of o
  bool qk_norm = false;             ///< RMSNorm with `rms_eps` over the head_dim of every q and k, before the rotation
  bool qk_norm_over_heads = false;  ///< in addition to `qk_norm`: `attention_options::qk_norm_over_heads`
  bool mlp_bias = false;            ///< of gate, up and down
  std::int64_t sliding_window = 0;  ///< position i sees j if i - sliding_window < j <= i; 0: all j <= i
  double initializer_range = 0.02;
  std::int64_t pad_token = -1;  ///< its row of the embedding has no gradient; -1: none
  mixture_config mixture{};

  bool operator==(const llama_config&) const = default;
};

namespace detail {

/// Throws `error`, which begins with `source`, unless `value` is from 1 to `largest`.
inline void require_within(const std::string& source, const char* key, std::int64_t value, std::int64_t largest) {
  if (value < 1 || value > largest) fail({source, ": ", key, " is ", value, "; legal are 1 to ", largest});
}
inline constexpr std::int64_t most_of_a_size = 1 << 20;  // within these limits no count of values overflows 64 bits

inline void validate(const mixture_config& m, std::int64_t layers, bool mlp_bias, const std::string& source) {
  if (m.experts == 0 && m.shared_ffn != 0)
    fail({source, ": shared_expert_intermediate_size is ", m.shared_ffn,
          ", and num_experts 0; legal is 0, as a shared expert needs other experts"});
  if (m.shared_ffn == 0 && m.shared_gate)
    fail({source, ": the gate of a shared expert, and shared_expert_intermediate_size 0; legal is at least 1"});
  if (m.experts == 0) return;
  require_within(source, "num_experts", m.experts, 1 << 16);
  const kernels::router_settings& r = m.router;
  const std::int64_t smallest = r.group_scores == kernels::group_scores::two_largest ? 2 : 1;
  if (r.groups < 1 || m.experts % r.groups != 0 || m.experts / r.groups < smallest)
    fail({source, ": n_group is ", r.groups, "; legal are those that divide num_experts, which is ", m.experts, ", by ",
          smallest, " or more"});
  require_within(source, "topk_group", r.chosen_groups, r.groups);
  require_within(source, "num_experts_per_tok", r.chosen, r.chosen_groups * (m.experts / r.groups));
  if (m.shared_ffn != 0) require_within(source, "shared_expert_intermediate_size", m.shared_ffn, most_of_a_size);
  if (mlp_bias) fail({source, ": mlp_bias is true; experts have no biases, so false is legal"});
  if (!(r.scale > 0 && std::isfinite(r.scale)))
    fail({source, ": routed_scaling_factor is ", r.scale, "; legal is a positive number"});
  if (m.dense_layers < 0 || m.dense_layers >= layers)
    fail({source, ": first_k_dense_replace is ", m.dense_layers, "; legal are 0 to ", layers - 1,
          ", so that a layer has experts"});
  if (m.dense_layers > 0) require_within(source, "intermediate_size", m.dense_ffn, most_of_a_size);
}

}  // namespace detail

/// Throws `error` unless all values can make a model. Its text begins with `source` (a file or field) and names the
/// field by its Hugging Face key.
void validate(const llama_config& c, const std::string& source);
#ifndef PLAIT_COMPILED
PLAIT_INLINE void validate(const llama_config& c, const std::string& source) {
  const auto within = [&](const char* key, std::int64_t value, std::int64_t largest) {
    detail::require_within(source, key, value, largest);
  };
  const auto positive = [&](const char* key, double value) {
    if (!(value > 0 && std::isfinite(value))) {
      fail({source, ": ", key, " is ", value, "; legal is a positive number"});
    }
  };
  if (c.qk_norm_over_heads && !c.qk_norm)
    fail({source, ": qk_norm_over_heads is true, and qk_norm false; legal is false, or true for both"});
  constexpr std::int64_t widest = detail::most_of_a_size;
  within("vocab_size", c.vocab, 1 << 24);
  within("hidden_size", c.hidden, widest);
  within("num_hidden_layers", c.layers, 1 << 16);
  within("num_attention_heads", c.heads, widest);
  within("num_key_value_heads", c.kv_heads, widest);
  within("head_dim", c.head_dim, widest / c.heads);
  within("intermediate_size", c.ffn, widest);
  within("max_position_embeddings", c.max_position, std::int64_t{1} << 31);
  if (c.heads % c.kv_heads != 0) {
    fail({source, ": num_attention_heads is ", c.heads, " and num_key_value_heads ", c.kv_heads,
          "; the first must be a multiple of the second"});
  }
  if (c.head_dim % 2 != 0) {
    fail({source, ": head_dim is ", c.head_dim, "; rotary positions turn pairs, so it must be even"});
  }
  if (c.attention_bias && c.qkv_bias) {
    fail({source, ": attention_bias and qkv_bias are both true; the first means q, k, v and o, the second q, k and v"});
  }
  if (c.sliding_window < 0 || c.sliding_window > std::int64_t{1} << 31) {
    fail({source, ": sliding_window is ", c.sliding_window, "; legal are 0 (none) to 2147483648"});
  }
  if (c.pad_token < -1 || c.pad_token >= c.vocab) {
    fail({source, ": pad_token_id is ", c.pad_token, "; legal are -1 (none) to ", c.vocab - 1});
  }
  detail::validate(c.mixture, c.layers, c.mlp_bias, source);
  positive("rms_norm_eps", c.rms_eps);
  positive("rope_theta", c.rope_theta);
  positive("initializer_range", c.initializer_range);
  if (c.rope.kind == rope_kind::llama3) {
    const auto& r = c.rope;
    if (!(r.factor >= 1 && std::isfinite(r.factor))) {
      fail({source, ": rope_scaling.factor is ", r.factor, "; at least 1 is legal"});
    }
    positive("rope_scaling.low_freq_factor", r.low_freq_factor);
    positive("rope_scaling.high_freq_factor", r.high_freq_factor);
    if (r.high_freq_factor <= r.low_freq_factor) {
      fail({source, ": rope_scaling.high_freq_factor is ", r.high_freq_factor, " and low_freq_factor ",
            r.low_freq_factor, "; the first must be larger"});
    }
    within("rope_scaling.original_max_position_embeddings", r.original_max_position, std::int64_t{1} << 31);
  }
}
#endif

/// The inverse rotary frequencies, head_dim / 2 of them.
inline std::vector<double> rotary_frequencies(const llama_config& c) {
  std::optional<kernels::llama3_rope_scaling> scaling;
  if (c.rope.kind == rope_kind::llama3)
    scaling = {c.rope.factor, c.rope.low_freq_factor, c.rope.high_freq_factor,
               static_cast<double>(c.rope.original_max_position)};
  return kernels::rope_inverse_frequencies(c.head_dim, c.rope_theta, scaling);
}

namespace detail {

/// The number of parameters after attention in all layers; of a mixture's experts, `experts` are counted.
constexpr std::int64_t feed_forward_count(const llama_config& c, std::int64_t experts) {
  const std::int64_t one = 3 * c.hidden * c.ffn;
  const mixture_config& m = c.mixture;
  if (m.experts == 0) return c.layers * one;
  const std::int64_t with_experts =
      experts * one + m.experts * c.hidden + 3 * c.hidden * m.shared_ffn + (m.shared_gate ? c.hidden : 0);
  return m.dense_layers * 3 * c.hidden * m.dense_ffn + (c.layers - m.dense_layers) * with_experts;
}
constexpr std::int64_t parameter_count(const llama_config& c, std::int64_t experts) {
  const std::int64_t q = c.heads * c.head_dim;
  const std::int64_t kv = c.kv_heads * c.head_dim;
  std::int64_t layer = 2 * c.hidden + 2 * c.hidden * q + 2 * c.hidden * kv;
  if (c.attention_bias) layer += q + 2 * kv + c.hidden;
  if (c.qkv_bias) layer += q + 2 * kv;
  if (c.qk_norm) layer += c.qk_norm_over_heads ? q + kv : 2 * c.head_dim;
  if (c.mlp_bias) layer += 2 * c.ffn + c.hidden;
  return (c.tie_embeddings ? 1 : 2) * c.vocab * c.hidden + c.layers * layer + feed_forward_count(c, experts) + c.hidden;
}

}  // namespace detail

/// The number of trained parameters. A tied output projection is counted once.
constexpr std::int64_t parameter_count(const llama_config& c) { return detail::parameter_count(c, c.mixture.experts); }
/// The number of parameters that one token uses in products: all, but only the chosen experts of a mixture.
constexpr std::int64_t active_parameter_count(const llama_config& c) {
  return detail::parameter_count(c, c.mixture.experts == 0 ? 0 : c.mixture.router.chosen);
}

/// Floating-point operations of a training step, forward and backward, per token.
struct llama_flops {
  /// 6 N, where N is the number of parameters that a token is multiplied with. The input embedding is a look-up and
  /// not counted; a tied one counts as the output projection.
  double weights = 0;
  double attention =
      0;  ///< 12 layers heads head_dim seq: scores and weighted values of the full square (PaLM, appendix B)
  double visible = 0.5;  ///< the fraction of that square inside the causal mask and the sliding window

  /// The usual count for model flops utilisation.
  constexpr double total() const { return weights + attention; }
  /// The work of a causal model, in which at least half of the attention square is masked.
  constexpr double causal() const { return weights + attention * visible; }
};

constexpr llama_flops flops_per_token(const llama_config& c, std::int64_t seq) {
  const std::int64_t multiplied = active_parameter_count(c) - (c.tie_embeddings ? 0 : c.vocab * c.hidden);
  const double width = c.sliding_window == 0 || c.sliding_window >= seq
                           ? 1
                           : static_cast<double>(c.sliding_window) / static_cast<double>(seq);
  return {6.0 * static_cast<double>(multiplied),
          12.0 * static_cast<double>(c.layers) * static_cast<double>(c.heads * c.head_dim) * static_cast<double>(seq),
          width - width * width / 2};
}

struct llama_preset {
  std::string_view name;
  llama_config config;
};

namespace detail {

// Each function adds the features of a family of published models, except its sizes.

constexpr llama_config tied(llama_config c) {
  c.tie_embeddings = true;
  return c;
}
constexpr llama_config llama3(llama_config c, rope_scaling rope = {}) {
  c.rope_theta = 500000;
  c.rope = rope;
  return c;
}
constexpr llama_config mistral(llama_config c) {
  c.sliding_window = 4096;
  return c;
}
constexpr llama_config qwen(llama_config c) {
  c.rms_eps = 1e-6;
  c.rope_theta = 1000000;
  return c;
}
constexpr llama_config qwen2(llama_config c) {
  c.qkv_bias = true;
  return qwen(c);
}
constexpr llama_config qwen3(llama_config c) {
  c.qk_norm = true;
  return qwen(c);
}
constexpr llama_config olmoe(llama_config c) {
  c.qk_norm = c.qk_norm_over_heads = true;
  return c;
}
/// The router of DeepSeek-V3, with groups of experts.
constexpr llama_config dots1(llama_config c, mixture_config m) {
  c.qk_norm = true;
  m.router.scores = kernels::expert_scores::sigmoid;
  m.router.group_scores = kernels::group_scores::two_largest;
  m.correction_bias = true;
  m.dense_layers = 1;
  c.mixture = m;
  return c;
}
constexpr llama_config with_mixture(llama_config c, mixture_config m) {
  c.mixture = m;
  return c;
}

}  // namespace detail

/// Named shapes. The first ones are for bytes (vocabulary 256) and can be divided over 8 ranks. `bench-*` have the
/// shapes of benchmarks; all others are published shapes, without weights. The numbers of a row are vocab, hidden,
/// layers, heads, kv_heads, head_dim, ffn and max_position.
inline constexpr std::array<llama_preset, 26> llama_presets = [] {
  using namespace detail;
  llama_config olmoe_1b = olmoe({50304, 2048, 16, 16, 16, 128, 1024, 4096});
  olmoe_1b.pad_token = 1;
  llama_config mixtral{32000, 4096, 32, 32, 8, 128, 14336, 32768};
  mixtral.rope_theta = 1000000;
  llama_config dots{152064, 4096, 62, 32, 32, 128, 1408, 32768};
  dots.rope_theta = 10000000;
  return std::array<llama_preset, 26>{{
      {"tiny", {}},
      {"small", {.hidden = 256, .layers = 6, .head_dim = 32, .ffn = 768}},
      {"tiny-experts", {.ffn = 128, .mixture = {.experts = 8, .router = {.chosen = 2}}}},
      {"tiny-dots1", dots1({.ffn = 64}, {.experts = 8,
                                         .router = {.chosen = 2, .groups = 4, .chosen_groups = 2},
                                         .shared_ffn = 128,
                                         .dense_ffn = 256})},
      {"tiny-olmoe", with_mixture(olmoe({.ffn = 128}), {.experts = 8, .router = {.chosen = 2, .normalised = false}})},
      {"bench-128", {4096, 128, 4, 4, 4, 32, 384}},
      {"bench-512", {4096, 512, 4, 8, 8, 64, 1536}},
      {"bench-1024", {4096, 1024, 4, 16, 8, 64, 3072}},
      {"bench-experts", with_mixture({4096, 512, 4, 8, 8, 64, 768}, {.experts = 8, .router = {.chosen = 2}})},
      {"smollm-135m", tied({49152, 576, 30, 9, 3, 64, 1536, 2048})},
      {"smollm-360m", tied({49152, 960, 32, 15, 5, 64, 2560, 2048})},
      {"smollm-1.7b", tied({49152, 2048, 24, 32, 32, 64, 8192, 2048})},
      {"llama-2-7b", {32000, 4096, 32, 32, 32, 128, 11008, 4096}},
      {"llama-3-8b", llama3({128256, 4096, 32, 32, 8, 128, 14336, 8192})},
      {"llama-3.1-8b", llama3({128256, 4096, 32, 32, 8, 128, 14336, 131072}, {.kind = rope_kind::llama3})},
      {"llama-3.2-1b",
       tied(llama3({128256, 2048, 16, 32, 8, 64, 8192, 131072}, {.kind = rope_kind::llama3, .factor = 32}))},
      {"mistral-7b-v0.1", mistral({32000, 4096, 32, 32, 8, 128, 14336, 32768})},
      {"mixtral-8x7b-v0.1", with_mixture(mixtral, {.experts = 8, .router = {.chosen = 2}})},
      {"qwen1.5-moe-a2.7b",
       with_mixture(
           qwen2({151936, 2048, 24, 16, 16, 128, 1408, 8192}),
           {.experts = 60, .router = {.chosen = 4, .normalised = false}, .shared_ffn = 5632, .shared_gate = true})},
      {"qwen3-30b-a3b",
       with_mixture(qwen3({151936, 2048, 48, 32, 4, 128, 768, 40960}), {.experts = 128, .router = {.chosen = 8}})},
      {"olmoe-1b-7b", with_mixture(olmoe_1b, {.experts = 64, .router = {.chosen = 8, .normalised = false}})},
      {"dots.llm1",
       dots1(dots, {.experts = 128, .router = {.chosen = 6, .scale = 2.5}, .shared_ffn = 2816, .dense_ffn = 10944})},
      {"qwen2.5-0.5b", tied(qwen2({151936, 896, 24, 14, 2, 64, 4864, 32768}))},
      {"qwen2.5-7b", qwen2({152064, 3584, 28, 28, 4, 128, 18944, 131072})},
      {"qwen3-0.6b", tied(qwen3({151936, 1024, 28, 16, 8, 128, 3072, 40960}))},
      {"qwen3-8b", qwen3({151936, 4096, 36, 32, 8, 128, 12288, 40960})},
  }};
}();

/// Returns the names of all presets, separated by commas.
inline std::string llama_preset_names() {
  std::string names;
  for (const llama_preset& preset : llama_presets) {
    if (!names.empty()) names += ", ";
    names += preset.name;
  }
  return names;
}

/// Returns the preset called `name`, or null.
inline const llama_config* find_llama_preset(std::string_view name) {
  for (const llama_preset& preset : llama_presets) {
    if (preset.name == name) return &preset.config;
  }
  return nullptr;
}

/// Returns the preset called `name`. Otherwise throws `error` with `field` and all names.
inline llama_config llama_preset_config(std::string_view name, const std::string& field = "model") {
  if (const llama_config* config = find_llama_preset(name)) return *config;
  fail({field, ": unknown model '", name, "'; presets are ", llama_preset_names()});
}

// The numbers of tensor-parallel ranks that suit a Llama of given sizes. A checkpoint's sizes are fixed, so errors
// suggest another mesh. split_tensor_ranks in nn/strategy.hpp distributes kv heads.

/// Whether each of `tp` tensor-parallel ranks, divided by `split_tensor_ranks`, has a part of every sharded dim of this
/// model. The part must have whole groups of heads that share a kv head, or heads of one group.
constexpr bool goes_over(const llama_config& c, std::int64_t tp) {
  const bool groups = tp <= c.kv_heads || (tp % c.kv_heads == 0 && tp <= c.heads);
  return tp >= 1 && groups && c.ffn >= tp;
}

/// Returns the numbers of ranks up to `most` for which `goes_over` is true, separated by commas.
inline std::string legal_tensor_ranks(const llama_config& c, std::int64_t most = 64) {
  std::string legal;
  for (std::int64_t tp = 1; tp <= most && tp <= c.heads; ++tp)
    if (goes_over(c, tp)) append(legal, {legal.empty() ? "" : ", ", tp});
  return legal;
}

/// Throws `error`, which begins with `source`, unless `goes_over` is true for `tp`. The text has the sizes and the
/// legal numbers of ranks.
inline void check_tensor_ranks(const llama_config& c, std::int64_t tp, const std::string& source) {
  if (goes_over(c, tp)) return;
  const std::string advice =
      cat({"; the model's sizes are what they are, and the extents of tp up to 64 that suit all of them are ",
           legal_tensor_ranks(c)});
  if (tp > c.heads || c.ffn < tp)
    fail({source, ": tp=", tp, " is more than the model's ", tp > c.heads ? "num_attention_heads" : "intermediate_size",
          ", which is ", tp > c.heads ? c.heads : c.ffn, advice});
  fail({source, ": tp=", tp, " is more than num_key_value_heads, which is ", c.kv_heads,
        ", and no multiple of it: the ranks that share a kv head must be equally many", advice});
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
