// A model directory as one value: its shape from Hugging Face's config.json, and all weights under the names of a
// `llama`'s parameters, for any order of the stored tensors.
#pragma once

#include <algorithm>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plait/checkpoint/weight_files.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/models/llama_config_json.hpp"
#include "plait/models/weights_order.hpp"

namespace plait {

/// A directory read by `open_model_directory`. The entries keep their files open.
struct model_directory {
  llama_config config;
  std::vector<weight_tensor> entries;
  safetensors_directory files;
  bool untied = false;  ///< config.json ties the head but the weights have a different one, so `config` does not tie it

  /// Returns the beginning of messages about the weights.
  std::string source() const { return files.source(); }
};

namespace detail {

inline constexpr std::string_view head_name = "lm_head.weight", table_name = "model.embed_tokens.weight";

inline weight_tensor* entry_of(std::vector<weight_tensor>& entries, std::string_view name) {
  const auto found = std::find_if(entries.begin(), entries.end(), [&](const auto& e) { return e.name == name; });
  return found == entries.end() ? nullptr : &*found;
}

/// Whether a tensor is a buffer of old files that is computed from the configuration.
inline bool is_rotary_buffer(const weight_tensor& entry) {
  return entry.name.ends_with(".rotary_emb.inv_freq") || entry.name.ends_with(".rotary_emb.cos_cached") ||
         entry.name.ends_with(".rotary_emb.sin_cached");
}

/// Completes the names of a base model (transformers' LlamaModel): its tensors lack the prefix, and it has no head. It
/// is a whole model if the head is tied.
inline void name_base_model(model_directory& d) {
  if (!entry_of(d.entries, "embed_tokens.weight")) return;
  for (weight_tensor& e : d.entries) {
    if (e.name.starts_with("model."))
      fail({d.source(), ": it has the tensors 'embed_tokens.weight', of a base model, and '", e.name,
            "', of a language model; legal is the one or the other"});
    if (e.name != head_name) e.name = "model." + e.name;
  }
  if (!d.config.tie_embeddings && !entry_of(d.entries, head_name))
    fail({d.source(),
          ": this is a base model without a head (no name begins with 'model.', and there is no 'lm_head.weight'), and "
          "its config.json does not tie one to the embedding; save it with its head, as transformers' "
          "AutoModelForCausalLM does"});
}

/// Decides which head to load if the configuration ties it. A stored head that equals the embedding is left out. A
/// different stored head unties the model, as in transformers. A head that is stored without an embedding serves as
/// both.
inline void settle_head(model_directory& d) {
  weight_tensor* const head = entry_of(d.entries, head_name);
  if (!d.config.tie_embeddings || !head) return;
  const weight_tensor* const table = entry_of(d.entries, table_name);
  if (!table) {
    head->name = table_name;
  } else if (same_elements(*table, *head)) {
    d.entries.erase(d.entries.begin() + (head - d.entries.data()));
  } else {
    d.config.tie_embeddings = false;
    d.untied = true;
  }
}

}  // namespace detail

/// Opens the directory `path`: Hugging Face's config.json, and model.safetensors or shards with an index, whose tensors
/// have the names and order of `order`. Buffers of old files are left out, and names of a base model are completed. The
/// stored tensors decide whether the head is tied. It reads only headers, and both tables if a tied head is also
/// stored. Throws the errors of `safetensors_directory`, `parse_llama_config` and `weights_in_order`, with `field` or
/// `order_field`.
inline model_directory open_model_directory(const std::string& path, const std::string& field = "path",
                                            weights_order order = weights_order::hugging_face,
                                            const std::string& order_field = "order") {
  safetensors_directory files(path, field);
  const std::string config = (std::filesystem::path(path) / "config.json").string();
  model_directory d{read_llama_config(config, field), {}, std::move(files)};
  for (const weight_tensor& e : d.files.entries())
    if (!detail::is_rotary_buffer(e)) d.entries.push_back(e);
  d.entries = weights_in_order(std::move(d.entries), order, d.config, d.source(), order_field);
  detail::name_base_model(d);
  if (d.config.mixture.experts > 0) d.entries = weights_of_experts(d.entries, d.config, d.source());
  detail::settle_head(d);
  return d;
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
