// The settings of kernels on all devices: the shape of attention, rotary frequencies, the options of a loss, and the
// numbers of an optimizer's step.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numbers>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "plait/core/compiled.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/text.hpp"
#include "plait/core/types.hpp"
#include "plait/kernels/moments.hpp"
#include "plait/version.hpp"

namespace plait::kernels {

// ---- the shape of attention: sizes, strides and masks of one rank's arrays ---------------------------------------

/// Whether the token at position `query` may see the one at position `key`.
using attention_rule = bool (*)(std::int64_t query, std::int64_t key);

namespace detail {

#if defined(__CUDACC__) || defined(PLAIT_CUDA_KERNELS)
constexpr bool has_gpu_code = true;  // of this file: each file has its own constant
#else
constexpr bool has_gpu_code = false;
#endif

/// The GPU kernels' launchers for one rule, and those for `Rule`: kernels/cuda/attention_kernels.hpp.
struct attention_rule_kernels;
template <attention_rule Rule>
struct kernels_of_rule;

}  // namespace detail

/// The keys that a query sees, by positions in the sequence: a query at position p sees the keys from `first(p)` on and
/// before `end(p)`.
struct attention_mask {
  static constexpr std::int64_t all = std::int64_t{1} << 62;

  std::int64_t before = all;  ///< number of visible positions before the query's own
  std::int64_t after = 0;     ///< number of visible positions after the query's own
  /// Number of positions at the sequence's start that all queries see, as in a prefix LM (Raffel et al. 2020). 0 unless
  /// `before` is `all`.
  std::int64_t prefix = 0;
  /// A rule of the program: of the keys above, a query sees those that the rule allows. Null: all. `where` sets it.
  attention_rule allows = nullptr;
  /// The rule's kernels for GPUs; null for a rule that is only for the CPU. `where` sets them.
  const detail::attention_rule_kernels* gpu_kernels = nullptr;

  static constexpr attention_mask causal() { return {}; }
  static constexpr attention_mask full() { return {all, all}; }
  /// A query sees its own position and the `positions` - 1 before it.
  static constexpr attention_mask window(std::int64_t positions) { return {positions - 1, 0}; }
  /// As `window`; 0 means causal.
  static constexpr attention_mask window_or_causal(std::int64_t positions) {
    return positions == 0 ? causal() : window(positions);
  }
  static constexpr attention_mask local(std::int64_t before, std::int64_t after) { return {before, after}; }
  static constexpr attention_mask prefix_lm(std::int64_t positions) { return {all, 0, positions}; }

  constexpr std::int64_t first(std::int64_t p) const { return before == all ? -all : p - before; }
  constexpr std::int64_t end(std::int64_t p) const { return std::max(after == all ? all : p + after + 1, prefix); }
  /// Whether a query may see keys after its own position.
  constexpr bool looks_ahead() const { return after > 0 || prefix > 0; }
  constexpr bool sees_all() const { return before == all && after == all && allows == nullptr; }
  /// Whether it is neither causal nor full. Keys must then be counted by their positions.
  constexpr bool needs_positions() const {
    return before != all || prefix > 0 || (after > 0 && after != all) || allows != nullptr;
  }
  /// Returns this mask with a rule of the program that is only for the CPU.
  constexpr attention_mask where(attention_rule rule) const {
    attention_mask both = *this;
    both.allows = rule;
    both.gpu_kernels = nullptr;
    return both;
  }
  /// Returns this mask with a rule for the CPU, and also for GPUs if nvcc compiles the caller. Such a rule must be
  /// PLAIT_HOST_DEVICE. Its kernels are compiled there, so they need plait/cuda.hpp or kernels/kernels.hpp.
  template <attention_rule Rule, bool OnGpu = detail::has_gpu_code>
  constexpr attention_mask where() const {
    attention_mask both = where(Rule);
    if constexpr (OnGpu) both.gpu_kernels = &detail::kernels_of_rule<Rule>::all;
    return both;
  }

  bool operator==(const attention_mask&) const = default;
};

/// Returns "causal", "full", "window 5", "local 3 before and 2 after" or "prefix 7". With a rule, " and a rule of the
/// program's" follows.
std::string describe(const attention_mask& mask);
/// Throws `error`, which begins with `who`, for an impossible mask.
void require_legal(const attention_mask& mask, const std::string& who);
#ifndef PLAIT_COMPILED
PLAIT_INLINE void require_legal(const attention_mask& m, const std::string& who) {
  for (const auto& [name, value] : {std::pair("before", m.before), {"after", m.after}})
    if (value < 0 || value > m.all)
      fail({who, ": mask.", name, " = ", value, ", must be from 0 to 2^62, which is all"});
  if (m.prefix < 0 || m.prefix > m.all || (m.prefix > 0 && m.before != m.all))
    fail({who, ": mask.prefix = ", m.prefix, ", must be at least 0, and 0 where mask.before is not all"});
}
PLAIT_INLINE std::string describe(const attention_mask& m) {
  if (m.allows != nullptr) return describe(m.where(nullptr)) + " and a rule of the program's";
  if (m.prefix > 0) return cat({"prefix ", m.prefix});
  if (m.before == m.all && m.after == 0) return "causal";
  if (m.sees_all()) return "full";
  if (m.after == 0) return cat({"window ", m.before + 1});
  const auto text = [&](std::int64_t n) { return n == m.all ? std::string("all") : cat({n}); };
  return cat({"local ", text(m.before), " before and ", text(m.after), " after"});
}
#endif

/// Changes of the scaled score of a query and a key before the softmax: first the cap, then the bias.
struct attention_score {
  double cap = 0;      ///< the score becomes cap * tanh(score / cap), as in Gemma 2; 0: no cap
  bool alibi = false;  ///< subtracts the head's slope times the distance of the two positions (Press et al. 2022)
  /// For the slopes: the number of heads of the model, and the index of the first head here. A layer sets them. 0: all
  /// heads are here.
  std::int64_t all_heads = 0, first_head = 0;

  constexpr bool changes() const { return cap > 0 || alibi; }
  /// Returns the slope of local head `head`. If all_heads is a power of 2, it is a power of 2^(-8 / all_heads).
  /// Otherwise heads after the largest power of 2 have slopes between those of earlier heads.
  double slope(std::int64_t head) const {
    if (!alibi) return 0;
    const auto heads = static_cast<double>(power_of_heads());
    const auto h = static_cast<double>(first_head + head);
    return std::exp2(h < heads ? -8 * (h + 1) / heads : -4 * (2 * (h - heads) + 1) / heads);
  }
  /// The largest power of 2 that is at most `all_heads`.
  constexpr std::int64_t power_of_heads() const {
    return static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(all_heads)));
  }
};

/// One grouped-query attention. Queries and outputs are [batch, q_len, heads, head_dim], keys and values
/// [batch, k_len, kv_heads, head_dim]; head h attends with key head h / (heads / kv_heads). Heads and their elements
/// are contiguous. Tokens have a stride in elements, batches one of `q_batch` or `k_batch` tokens. So each array may be
/// a slice of a fused projection, and a piece of a longer sequence. A stride of 0 means: without gaps. The row stride
/// of lse [batch, heads, q_len] is `lse_stride` elements.
///
/// Token i of the queries has the position q_offset + i for `mask` and `score`, and token j of the keys k_offset + j.
/// `first_visible` and `end_visible` bound what is seen, with any mask. A query that sees nothing has output 0, lse
/// -infinity and gradient 0.
struct attention_shape {
  std::int64_t batch = 1;
  std::int64_t q_len = 0;
  std::int64_t k_len = 0;
  std::int64_t heads = 1;
  std::int64_t kv_heads = 1;
  std::int64_t head_dim = 0;
  double scale = 1.0;  ///< multiplies the scores, usually 1 / sqrt(head_dim)
  attention_mask mask{};
  attention_score score{};
  std::int64_t q_offset = 0;
  std::int64_t k_offset = 0;
  std::int64_t q_stride = 0, k_stride = 0, v_stride = 0, o_stride = 0;
  /// Strides of the gradients; 0: as the value's.
  std::int64_t dq_stride = 0, dk_stride = 0, dv_stride = 0, do_stride = 0;
  /// Tokens between batches of queries, outputs, `first_visible` and `end_visible`, and of keys and values; 0: q_len
  /// and k_len.
  std::int64_t q_batch = 0, k_batch = 0;
  /// Elements between the heads' rows of lse and delta; 0: q_len. Batches are heads * lse_stride elements apart.
  std::int64_t lse_stride = 0;
  /// [batch, q_len] in the device's memory, with batch stride q_batch: the global position of the first token that a
  /// query may see, such as the start of its document. Must not decrease along the queries of a batch. Null: no such
  /// bound.
  const std::int32_t* first_visible = nullptr;
  /// In the same layout, the global position after the last token that a query may see, such as the end of its document
  /// (`document_ends`). Must not decrease along the queries of a batch. Null: no such bound.
  const std::int32_t* end_visible = nullptr;

  std::int64_t group() const { return heads / kv_heads; }

  /// Bytes of device memory that cuDNN's backward pass with sums in a fixed order allocates. It holds the gradient of
  /// every score in bf16, with both lengths rounded up to its tiles (NVIDIA/cudnn-frontend, `use_dp_workspace` in
  /// scaled_dot_product_flash_attention.h). It grows with the square of the sequence; sums in any order need none of
  /// it.
  std::int64_t fixed_order_bytes() const {
    const auto up = [](std::int64_t length, std::int64_t tile) { return (length + tile - 1) / tile * tile; };
    return 2 * batch * heads * up(q_len, 64) * up(k_len, 128);
  }

  /// Returns this shape with every stride filled in. Throws `plait::error` for impossible sizes.
  attention_shape checked() const;

  /// Returns how many keys, from the first on, query token i sees, ignoring `end_visible`.
  std::int64_t visible(std::int64_t i) const {
    return std::clamp<std::int64_t>(mask.end(q_offset + i) - k_offset, 0, k_len);
  }

  /// Returns how many keys query token i of batch b sees. It reads `end_visible`.
  std::int64_t visible(std::int64_t b, std::int64_t i) const {
    if (end_visible == nullptr) return visible(i);
    return std::clamp<std::int64_t>(end_visible[b * q_batch + i] - k_offset, 0, visible(i));
  }

  /// Returns the first key that query token i of batch b may see, by `mask` and `first_visible` (which it reads). The
  /// query sees the keys from this one on and before `visible(b, i)`; k_len if none. The shape must be checked.
  std::int64_t first_key(std::int64_t b, std::int64_t i) const {
    std::int64_t first = mask.first(q_offset + i);
    if (first_visible != nullptr) first = std::max<std::int64_t>(first, first_visible[b * q_batch + i]);
    return std::clamp<std::int64_t>(first - k_offset, 0, k_len);
  }

 private:
  static constexpr std::int64_t most_position = std::numeric_limits<std::int32_t>::max();
};

/// Whether `attention_backward` adds to each output instead of overwriting it.
struct attention_accumulate {
  bool queries = false;
  bool keys_and_values = false;
};

#ifndef PLAIT_COMPILED
PLAIT_INLINE attention_shape attention_shape::checked() const {
  const auto refuse = [](const char* name, std::int64_t value, const std::string& legal) {
    fail({"attention: ", name, " = ", value, ", must be ", legal});
  };
  if (batch < 0) refuse("batch", batch, "at least 0");
  if (q_len < 0) refuse("q_len", q_len, "at least 0");
  if (k_len < 0) refuse("k_len", k_len, "at least 0");
  if (head_dim < 1) refuse("head_dim", head_dim, "at least 1");
  if (kv_heads < 1) refuse("kv_heads", kv_heads, "at least 1");
  if (heads < 1 || heads % kv_heads != 0) refuse("heads", heads, cat({"a multiple of kv_heads = ", kv_heads}));
  attention_shape s = *this;
  const auto settle = [&](const char* name, std::int64_t& stride, std::int64_t standard, std::int64_t least) {
    if (stride == 0) stride = standard;
    if (stride < least) refuse(name, stride, cat({"at least ", least, ", the elements of a token"}));
  };
  const std::int64_t q_token = heads * head_dim, k_token = kv_heads * head_dim;
  settle("q_stride", s.q_stride, q_token, q_token);
  settle("k_stride", s.k_stride, k_token, k_token);
  settle("v_stride", s.v_stride, k_token, k_token);
  settle("o_stride", s.o_stride, q_token, q_token);
  settle("dq_stride", s.dq_stride, s.q_stride, q_token);
  settle("dk_stride", s.dk_stride, s.k_stride, k_token);
  settle("dv_stride", s.dv_stride, s.v_stride, k_token);
  settle("do_stride", s.do_stride, s.o_stride, q_token);
  const auto settle_tokens = [&](const char* name, std::int64_t& stride, const char* tokens, std::int64_t least) {
    if (stride == 0) stride = least;
    if (stride < least) refuse(name, stride, cat({"0 or at least ", tokens, " = ", least}));
  };
  settle_tokens("q_batch", s.q_batch, "q_len", q_len);
  settle_tokens("k_batch", s.k_batch, "k_len", k_len);
  settle_tokens("lse_stride", s.lse_stride, "q_len", q_len);
  require_legal(mask, "attention");
  if (!(score.cap >= 0 && std::isfinite(score.cap)))
    fail({"attention: score.cap = ", score.cap, ", must be at least 0; 0 is no cap"});
  if (score.all_heads == 0) s.score.all_heads = heads;
  if (score.first_head < 0 || score.first_head + heads > s.score.all_heads)
    refuse("score.first_head", score.first_head, cat({"from 0 to ", s.score.all_heads - heads}));
  if ((first_visible != nullptr || end_visible != nullptr) && (k_offset < 0 || k_offset > most_position))
    refuse("k_offset", k_offset, cat({"from 0 to ", most_position, " where first_visible or end_visible is given"}));
  return s;
}
#endif

// ---- rotary position embeddings: frequencies, and the cosines and sines of positions, made on the host -----------

/// Llama 3's scaling of the rotary frequencies ("rope_type": "llama3" in a Hugging Face config.json).
struct llama3_rope_scaling {
  double factor = 8.0;
  double low_freq_factor = 1.0;
  double high_freq_factor = 4.0;
  double original_max_position_embeddings = 8192.0;
};

/// Returns the head_dim / 2 inverse frequencies of rotary position embeddings (Su et al. 2021): theta^(-2i / head_dim).
/// `scaling` stretches wavelengths beyond original / low_freq_factor by `factor`, and keeps those below original /
/// high_freq_factor. It blends those between, as transformers' modeling_rope_utils defines it. Throws `plait::error`
/// for an odd or non-positive head_dim, a non-positive theta or an impossible scaling.
std::vector<double> rope_inverse_frequencies(std::int64_t head_dim, double theta,
                                             const std::optional<llama3_rope_scaling>& scaling = {});

/// Writes cosine, sine [count, frequencies]: the rotations of the given positions, in host memory. In float the angle
/// is the product of two floats, as in transformers, so that models trained there see equal rotations.
template <class T>
void rope_rotations(const std::int64_t* positions, std::int64_t count, std::span<const double> frequencies, T* cosine,
                    T* sine) {
  const auto width = static_cast<std::int64_t>(frequencies.size());
  for (std::int64_t p = 0; p < count; ++p) {
    for (std::int64_t i = 0; i < width; ++i) {
      const T angle = static_cast<T>(positions[p]) * static_cast<T>(frequencies[static_cast<std::size_t>(i)]);
      cosine[p * width + i] = static_cast<T>(std::cos(static_cast<double>(angle)));
      sine[p * width + i] = static_cast<T>(std::sin(static_cast<double>(angle)));
    }
  }
}

#ifndef PLAIT_COMPILED
PLAIT_INLINE std::vector<double> rope_inverse_frequencies(std::int64_t head_dim, double theta,
                                                          const std::optional<llama3_rope_scaling>& scaling) {
  if (head_dim <= 0 || head_dim % 2 != 0) {
    fail({"rope: head_dim = ", head_dim, ", must be positive and even"});
  }
  if (!(theta > 0)) fail({"rope: theta = ", theta, ", must be positive"});
  std::vector<double> frequencies;
  frequencies.reserve(static_cast<std::size_t>(head_dim / 2));
  for (std::int64_t i = 0; i < head_dim; i += 2) {
    frequencies.push_back(std::pow(theta, -static_cast<double>(i) / static_cast<double>(head_dim)));
  }
  if (!scaling) return frequencies;
  const auto& s = *scaling;
  if (!(s.factor > 0) || !(s.low_freq_factor > 0) || !(s.high_freq_factor > s.low_freq_factor) ||
      !(s.original_max_position_embeddings > 0)) {
    fail(
        "rope: llama3 scaling needs factor > 0, 0 < low_freq_factor < high_freq_factor and "
        "original_max_position_embeddings > 0");
  }
  for (double& frequency : frequencies) {
    const double wavelength = 2 * std::numbers::pi / frequency;
    if (wavelength > s.original_max_position_embeddings / s.low_freq_factor) {
      frequency /= s.factor;
    } else if (wavelength >= s.original_max_position_embeddings / s.high_freq_factor) {
      const double smooth = (s.original_max_position_embeddings / wavelength - s.low_freq_factor) /
                            (s.high_freq_factor - s.low_freq_factor);
      frequency = (1 - smooth) * frequency / s.factor + smooth * frequency;
    }
  }
  return frequencies;
}
#endif

// ---- activations -------------------------------------------------------------------------------------------------

/// The function f of `activation_forward` and `activation_backward`.
enum class activation_function : std::uint8_t {
  relu,       ///< max(x, 0)
  silu,       ///< x / (1 + e^-x)
  gelu,       ///< x Phi(x) with the exact normal distribution function Phi (Hendrycks and Gimpel 2016)
  gelu_tanh,  ///< x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), the approximation of GPT-2
};

// ---- norms (kernels/cpu/norms.hpp) -------------------------------------------------------------------------------

namespace detail {

/// Calls f with a constant: whether a norm has a mean.
template <class F>
void with_centre(const void* mean, F&& f) {
  if (mean == nullptr) {
    f(std::false_type());
  } else {
    f(std::true_type());
  }
}

}  // namespace detail

// ---- a loss (its steps: kernels/cpu/cross_entropy.hpp) -----------------------------------------------------------

struct cross_entropy_settings {
  std::int64_t ignore_index = -100;  ///< rows with this target have no loss and no gradient
  double label_smoothing = 0.0;      ///< weight of the uniform distribution over the vocabulary
  double z_loss = 0.0;               ///< adds z_loss * lse^2 to a row's loss
};

/// The columns of the vocabulary that a rank's logits have.
struct vocabulary_range {
  std::int64_t columns = 0;       ///< local columns, padding included
  std::int64_t first_column = 0;  ///< global index of the first local column
  std::int64_t vocab = 0;         ///< number of tokens of the vocabulary, without padding

  /// Returns the number of local columns that are not padding.
  constexpr std::int64_t valid() const { return std::clamp<std::int64_t>(vocab - first_column, 0, columns); }
};

// ---- a choice of experts -----------------------------------------------------------------------------------------

/// How a router computes probabilities from the scores of a token's experts.
enum class expert_scores : std::uint8_t { softmax, sigmoid };

/// The score of a group of experts: the largest of its experts' scores (DeepSeek-V2), or the sum of the two largest
/// (DeepSeek-V3).
enum class group_scores : std::uint8_t { largest, two_largest };

struct router_settings {
  std::int64_t chosen = 2;  ///< number of experts per token
  expert_scores scores = expert_scores::softmax;
  bool normalised = true;  ///< the weights of a token's experts are normalised to the sum `scale`
  double scale = 1;        ///< factor of the weights
  /// Consecutive experts form groups of equal size. All experts of a token belong to its `chosen_groups` best groups.
  std::int64_t groups = 1, chosen_groups = 1;
  plait::kernels::group_scores group_scores = plait::kernels::group_scores::largest;

  bool operator==(const router_settings&) const = default;
};

/// The factors of a router's auxiliary losses. The losses are sums over tokens, and the factors include global numbers
/// of tokens, so that terms of ranks and microbatches can be added.
struct router_loss_scales {
  double balance = 0;  ///< of an expert's count times the sum of its probabilities
  double z = 0;        ///< of the squares of the log-sum-exp of scores
  double quantum = 0;  ///< each token's terms are rounded to a multiple of it, so that sums are exact; 0: not rounded
  double entropy = 0;  ///< of the entropy of a token's probabilities; only for logs, without a gradient
};

/// The parts of rows that all have a fixed size, so that rows without a token are padding.
struct padded_parts {
  const std::int32_t* begins = nullptr;  ///< [parts]: the first row of each, in the device's memory; null: not padded
  std::int64_t rows = 0;                 ///< of all parts
};

/// How the value that a router keeps for an expert changes after a step, by the counts of choices.
struct router_state_rule {
  bool is_bias = false;  ///< true: a bias that balances experts; false: the expert's load, which is 1 at the mean
  double rate = 0;       ///< of a bias

  PLAIT_HOST_DEVICE double next(double before, std::int64_t count, std::int64_t mean) const {
    if (is_bias) return before + rate * ((count < mean) - (count > mean));
    return static_cast<double>(count) / static_cast<double>(mean);
  }
};

// ---- a step of AdamW ---------------------------------------------------------------------------------------------

/// The settings of AdamW that are constant over all steps (Loshchilov and Hutter 2019).
struct adamw_settings {
  double beta1 = 0.9;
  double beta2 = 0.999;
  double epsilon = 1e-8;
};

/// The numbers of one step. They are in the device's memory, so that a norm computed there can set `gradient_scale`
/// without a synchronisation.
struct adamw_scalars {
  double learning_rate = 1e-3;
  double correction1 = 1.0;     ///< 1 - beta1^step, the bias of the first moment
  double correction2 = 1.0;     ///< 1 - beta2^step, the bias of the second
  double gradient_scale = 1.0;  ///< multiplies the gradient first (clipping)
  double update = 1.0;          ///< 0: the step is skipped, and changes nothing
  std::uint64_t rounding = 0;   ///< the seed of stochastic rounding
};

/// Returns the numbers of step `step`, counted from 1. Throws `plait::error` for step < 1.
inline adamw_scalars adamw_scalars_of(const adamw_settings& settings, double learning_rate, std::int64_t step,
                                      double gradient_scale = 1.0, std::uint64_t seed = 0) {
  if (step < 1) fail({"adamw: step = ", step, ", must be at least 1"});
  const auto power = static_cast<double>(step);
  return {learning_rate,
          1.0 - std::pow(settings.beta1, power),
          1.0 - std::pow(settings.beta2, power),
          gradient_scale,
          1.0,
          rounding_seed_of(seed, static_cast<std::uint64_t>(step))};
}

/// One tensor that a step updates: `size` elements of each array. M is the type of masters and moments, G of gradients,
/// W of the weights that layers read.
template <class M, class G, class W>
struct adamw_tensor {
  M* master = nullptr;
  const G* gradient = nullptr;
  M* m = nullptr;       ///< the first moment
  M* v = nullptr;       ///< the second moment
  W* weight = nullptr;  ///< receives the new value rounded to W; may be null
  std::int64_t size = 0;
  double weight_decay = 0.0;
};

/// As `adamw_tensor`, with moments stored as S: bf16, or std::uint8_t for codes in blocks (kernels/moments.hpp). These
/// moments, and values stored in bf16, are rounded stochastically.
template <class M, class G, class W, class S>
struct adamw_rounded_tensor {
  M* master = nullptr;
  const G* gradient = nullptr;
  S* m = nullptr;
  S* v = nullptr;
  std::uint8_t* m_scales = nullptr;  ///< for codes: one for each block that the elements overlap
  std::uint8_t* v_scales = nullptr;
  W* weight = nullptr;
  std::int64_t size = 0;
  std::int64_t begin = 0;  ///< index of the first element in its block
  double weight_decay = 0.0;
  rounded_elements elements{};
};

// ---- a step of Muon, which takes the numbers of a step of AdamW --------------------------------------------------

/// The settings of Muon's momentum, which are constant over all steps (Jordan et al. 2024).
struct muon_settings {
  double momentum = 0.95;
  bool nesterov = true;
};

/// A tensor, or a part of one, whose momentum a step updates: `size` elements of each array. G equals M, or G is bf16
/// and M float.
template <class M, class G>
struct muon_momentum_tensor {
  const G* gradient = nullptr;
  M* momentum = nullptr;
  M* direction = nullptr;  ///< receives the matrix to be orthogonalised next
  std::int64_t size = 0;
};

/// As `muon_momentum_tensor`, with momenta in bf16. They are rounded stochastically, because rounding to nearest, in
/// steps of 1/256, would lose small gradients.
template <class M, class G>
struct muon_rounded_tensor {
  const G* gradient = nullptr;
  bf16* momentum = nullptr;
  M* direction = nullptr;
  std::int64_t size = 0;
  rounded_elements elements{};
};

/// A tensor, or a part of one, whose values a step updates: `size` elements of each array.
template <class M, class W>
struct muon_tensor {
  M* master = nullptr;
  const M* direction = nullptr;
  W* weight = nullptr;  ///< receives the new value rounded to W; may be null
  std::int64_t size = 0;
  double scale = 1.0;         ///< factor of the direction, including the learning rate
  double weight_decay = 0.0;  ///< includes the learning rate
};

}  // namespace plait::kernels

#include "plait/core/macros_on.hpp"
