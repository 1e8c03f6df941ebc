// The keys of a Hugging Face config.json of Llamas and related models, in lists: keys that shape the model, keys
// without an effect on numbers, and keys for which plait supports one value.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plait/core/containers.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"

namespace plait::detail {

// Typed access to the keys of a JSON object; errors name the file and the key.

/// Reads keys of one JSON object with their types. Every error names the file and the key.
class config_reader {
 public:
  config_reader(const nlohmann::json& object, std::string source, std::string prefix = "")
      : object_(object), source_(std::move(source)), prefix_(std::move(prefix)) {}

  /// Whether the key is present; its value may be null.
  bool given(const char* key) const { return object_.contains(key); }
  /// Whether the key is present and not null.
  bool has(const char* key) const {
    const auto found = object_.find(key);
    return found != object_.end() && !found->is_null();
  }
  /// Returns the value of a key, which must be present and not null.
  const nlohmann::json& at(const char* key) const {
    if (!has(key)) fail({source_, ": key '", prefix_, key, "' is missing"});
    return *object_.find(key);
  }
  std::int64_t integer(const char* key) const {
    const nlohmann::json& value = at(key);
    if (value.is_number_unsigned() && value.get<std::uint64_t>() > INT64_MAX) bad(key, value, "a smaller whole number");
    if (value.is_number_integer()) return value.get<std::int64_t>();
    bad(key, value, "a whole number");
  }
  std::int64_t integer(const char* key, std::int64_t fallback) const { return has(key) ? integer(key) : fallback; }
  double number(const char* key) const {
    const nlohmann::json& value = at(key);
    if (!value.is_number()) bad(key, value, "a number");
    return value.get<double>();
  }
  double number(const char* key, double fallback) const { return has(key) ? number(key) : fallback; }
  bool boolean(const char* key) const {
    const nlohmann::json& value = at(key);
    if (!value.is_boolean()) bad(key, value, "true or false");
    return value.get<bool>();
  }
  bool boolean(const char* key, bool fallback) const { return has(key) ? boolean(key) : fallback; }
  std::string string(const char* key) const {
    const nlohmann::json& value = at(key);
    if (!value.is_string()) bad(key, value, "a string");
    return value.get<std::string>();
  }
  std::vector<std::string> strings(const char* key) const {
    const nlohmann::json& value = at(key);
    const auto is_string = [](const nlohmann::json& element) { return element.is_string(); };
    if (!value.is_array() || !std::all_of(value.begin(), value.end(), is_string)) bad(key, value, "a list of strings");
    return value.get<std::vector<std::string>>();
  }
  config_reader object(const char* key) const {
    const nlohmann::json& value = at(key);
    if (!value.is_object()) bad(key, value, "an object");
    return {value, source_, cat({prefix_, key, "."})};
  }
  /// Refuses any value except `legal`, if the key is present.
  void only(const char* key, const nlohmann::json& legal) const {
    if (has(key) && at(key) != legal) bad(key, at(key), legal.dump());
  }
  /// Calls f(key) for each key that is not null.
  template <class F>
  void each_key(F&& f) const {
    for (const auto& [key, value] : object_.items())
      if (!value.is_null()) f(key);
  }
  bool empty() const { return object_.empty(); }
  /// Throws the error for an unknown key.
  [[noreturn]] void unknown(const std::string& key, const std::string& advice) const {
    fail({source_, ": key '", prefix_, key, "' is ", excerpt(*object_.find(key)), ", and its meaning is unknown; ",
          advice});
  }
  [[noreturn]] void bad(const char* key, const nlohmann::json& value, const std::string& legal) const {
    fail({source_, ": key '", prefix_, key, "' is ", excerpt(value), "; legal is ", legal});
  }

 private:
  static std::string excerpt(const nlohmann::json& value) {
    std::string text = value.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
    if (text.size() > 60) text = text.substr(0, 57) + "...";
    return text;
  }

  const nlohmann::json& object_;
  std::string source_;
  std::string prefix_;
};

using config_keys = static_vector<std::string_view, 80>;

/// Splits a text into words that single blanks separate.
constexpr config_keys words_of(std::string_view text) {
  config_keys words;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find(' '), text.size());
    words.push_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return words;
}

}  // namespace plait::detail

namespace plait {

/// Keys that `parse_llama_config` reads into a `llama_config`.
inline constexpr auto used_config_keys = detail::words_of(
    "attention_bias head_dim hidden_act hidden_size initializer_range intermediate_size layer_types "
    "max_position_embeddings max_window_layers mlp_bias model_type num_attention_heads num_hidden_layers "
    "num_key_value_heads original_max_position_embeddings pad_token_id qk_norm qkv_bias rms_norm_eps rope_parameters "
    "rope_scaling rope_theta sliding_window tie_word_embeddings use_sliding_window vocab_size");

/// Keys without an effect on loss and gradient: names, versions, options of generation, classification and other tools'
/// pipelines, and the storage of the directory's weights.
inline constexpr auto harmless_config_keys = detail::words_of(
    "_attn_implementation _attn_implementation_autoset _attn_implementation_internal _commit_hash "
    "_flash_attn_2_enabled _name_or_path architectures attn_implementation auto_map bad_words_ids "
    "begin_suppress_tokens bos_token_id chunk_size_feed_forward cross_attention_hidden_size custom_pipelines "
    "decoder_start_token_id diversity_penalty do_sample dtype early_stopping encoder_no_repeat_ngram_size "
    "eos_token_id exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id id2label "
    "is_decoder keys_to_ignore_at_inference label2id length_penalty max_length max_new_tokens max_sequence_length "
    "min_length neftune_noise_alpha no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences "
    "output_attentions output_hidden_states output_scores prefix problem_type remove_invalid_values "
    "repetition_penalty return_dict return_dict_in_generate router_aux_loss_coef sep_token_id suppress_tokens "
    "task_specific_params temperature tf_legacy_loss tokenizer_class top_k top_p torch_dtype torchscript "
    "transformers.js_config transformers_version typical_p unk_token_id unsloth_fixed unsloth_version use_bfloat16 "
    "use_cache");

/// Keys of models with experts that `parse_llama_config` reads; they must be null for other models.
inline constexpr auto mixture_config_keys = detail::words_of(
    "decoder_sparse_step first_k_dense_replace mlp_only_layers moe_intermediate_size moe_layer_freq n_group "
    "n_routed_experts n_shared_experts norm_topk_prob num_experts num_experts_per_tok num_local_experts "
    "routed_scaling_factor scoring_func shared_expert_intermediate_size topk_group topk_method");

/// A key whose feature plait does not compute, so it must have one value or null.
struct refused_config_key {
  std::string_view key;
  std::string_view legal;  ///< as JSON
};

/// Keys that are refused unless their value is the legal one, or null.
inline constexpr std::array refused_config_keys =
    std::to_array<refused_config_key>({{"add_cross_attention", "false"},
                                       {"attention_dropout", "0.0"},
                                       {"attention_multiplier", "null"},
                                       {"attn_logit_softcapping", "null"},
                                       {"clip_qkv", "null"},
                                       {"embedding_multiplier", "1.0"},
                                       {"final_logit_softcapping", "null"},
                                       {"is_encoder_decoder", "false"},
                                       {"is_llama_config", "true"},
                                       {"logits_scaling", "1.0"},
                                       {"no_rope_layers", "null"},
                                       {"output_router_logits", "false"},
                                       {"partial_rotary_factor", "1.0"},
                                       {"pretraining_tp", "1"},
                                       {"pruned_heads", "{}"},
                                       {"quantization_config", "null"},
                                       {"residual_multiplier", "1.0"},
                                       {"rope_interleaved", "false"},
                                       {"router_jitter_noise", "0.0"},
                                       {"tie_encoder_decoder", "false"},
                                       {"use_mrope", "false"},
                                       {"use_qk_norm", "false"}});

namespace detail {

/// For each rope type: the legal keys of "rope_scaling" and "rope_parameters", in addition to the type's name.
inline constexpr auto default_rope_keys = words_of("partial_rotary_factor rope_theta rope_type type");
inline constexpr auto llama3_rope_keys = words_of(
    "factor high_freq_factor low_freq_factor original_max_position_embeddings partial_rotary_factor rope_theta "
    "rope_type type");

/// Refuses illegal values of refused_config_keys, and keys outside all lists that are not null. `mixture`: the model
/// has experts.
inline void check_config_keys(const config_reader& c, bool mixture) {
  for (const refused_config_key& refused : refused_config_keys)
    c.only(std::string(refused.key).c_str(), nlohmann::json::parse(refused.legal));
  for (const std::string_view key : mixture_config_keys)
    if (!mixture) c.only(std::string(key).c_str(), nullptr);
  c.each_key([&](const std::string& key) {
    const auto same = [&](const refused_config_key& refused) { return refused.key == key; };
    if (used_config_keys.contains(key) || harmless_config_keys.contains(key) || mixture_config_keys.contains(key) ||
        std::any_of(refused_config_keys.begin(), refused_config_keys.end(), same))
      return;
    c.unknown(key, "if it changes no number, take it out");
  });
}

}  // namespace detail
}  // namespace plait

#include "plait/core/macros_on.hpp"
