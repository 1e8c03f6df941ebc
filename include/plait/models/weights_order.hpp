// The tensors and rows of a Llama in the formats of Hugging Face, Megatron and Meta: names, fused projections, rotary
// pairs.
#pragma once

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plait/checkpoint/safetensors.hpp"
#include "plait/checkpoint/weight_files.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/models/llama_config.hpp"

namespace plait {

/// The tool whose tensor names and orders are used.
enum class weights_order : std::uint8_t { hugging_face, megatron, meta };

inline constexpr std::string_view weights_order_names[] = {"hugging-face", "megatron", "meta"};
constexpr std::string_view name_of(weights_order order) { return weights_order_names[static_cast<int>(order)]; }
/// Returns the order with this name. Otherwise throws `error`, which begins with `field`.
inline weights_order weights_order_from(std::string_view name, std::string_view field = "order") {
  for (const weights_order order : {weights_order::hugging_face, weights_order::megatron, weights_order::meta})
    if (name == name_of(order)) return order;
  fail({field, " '", name, "' is unknown; legal are hugging-face, megatron, meta"});
}

namespace detail {

/// A tensor's name in another tool and in Hugging Face's. For a layer's tensors, without the layer's prefix.
struct renamed_tensor {
  std::string_view there, here;
};

// If the other tool has two names for a tensor, both are read, and the first is written.
inline constexpr renamed_tensor megatron_top[] = {{"embedding.word_embeddings.weight", "model.embed_tokens.weight"},
                                                  {"decoder.final_layernorm.weight", "model.norm.weight"},
                                                  {"output_layer.weight", "lm_head.weight"}};
inline constexpr renamed_tensor megatron_inner[] = {
    {"self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"},
    {"input_layernorm.weight", "input_layernorm.weight"},
    {"self_attention.linear_proj.weight", "self_attn.o_proj.weight"},
    {"self_attention.linear_proj.bias", "self_attn.o_proj.bias"},
    {"self_attention.q_layernorm.weight", "self_attn.q_norm.weight"},
    {"self_attention.k_layernorm.weight", "self_attn.k_norm.weight"},
    {"mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight"},
    {"pre_mlp_layernorm.weight", "post_attention_layernorm.weight"},
    {"mlp.linear_fc2.weight", "mlp.down_proj.weight"},
    {"mlp.linear_fc2.bias", "mlp.down_proj.bias"}};
inline constexpr renamed_tensor meta_top[] = {{"tok_embeddings.weight", "model.embed_tokens.weight"},
                                              {"norm.weight", "model.norm.weight"},
                                              {"output.weight", "lm_head.weight"}};
inline constexpr renamed_tensor meta_inner[] = {
    {"attention.wv.weight", "self_attn.v_proj.weight"},  {"attention.wo.weight", "self_attn.o_proj.weight"},
    {"attention_norm.weight", "input_layernorm.weight"}, {"ffn_norm.weight", "post_attention_layernorm.weight"},
    {"feed_forward.w1.weight", "mlp.gate_proj.weight"},  {"feed_forward.w2.weight", "mlp.down_proj.weight"},
    {"feed_forward.w3.weight", "mlp.up_proj.weight"}};

/// The names of a router's weight and of an expert's matrices, in Mixtral's directories and in others.
inline constexpr std::string_view router_weight_name = "gate.weight";
inline constexpr renamed_tensor mixtral_experts[] = {{"w1", "gate_proj"}, {"w3", "up_proj"}, {"w2", "down_proj"}};
/// Whether directories of this mixture have Mixtral's names.
inline bool has_mixtral_names(const llama_config& c) { return c.mixture.experts > 0 && !c.qk_norm && !c.qkv_bias; }

/// The place of q, k or v (`which` is 0, 1, 2) in Megatron's fused tensor: for each kv head, its queries, its key, its
/// value.
inline weight_place place_in_qkv(const llama_config& c, std::string tensor, int which) {
  const std::int64_t d = c.head_dim, group = c.heads / c.kv_heads, fused = group + 2;
  if (which == 0)
    return {std::move(tensor), c.kv_heads * fused * d, [=](std::int64_t i) {
              const std::int64_t head = i / d;
              return (head / group * fused + head % group) * d + i % d;
            }};
  return {std::move(tensor), c.kv_heads * fused * d,
          [=](std::int64_t i) { return (i / d * fused + group + which - 1) * d + i % d; }};
}
/// The place of gate or up (`which` is 0, 1) in a tensor with gate above up.
inline weight_place place_in_gate_up(const llama_config& c, std::string tensor, int which) {
  return {std::move(tensor), 2 * c.ffn, [first = which * c.ffn](std::int64_t i) { return first + i; }};
}
/// The place of a head's rows for rotary positions. Meta rotates neighbours (2i, 2i + 1); Hugging Face rotates i and i
/// + head_dim / 2.
inline weight_place place_in_pairs(const llama_config& c, std::string tensor, std::int64_t heads) {
  const std::int64_t d = c.head_dim, half = d / 2;
  return {std::move(tensor), heads * d, [=](std::int64_t i) { return i / d * d + 2 * (i % d % half) + i % d / half; }};
}

/// For a name "PREFIX7.rest": the layer with its dot, and the rest. Empty if `name` does not begin with `prefix`.
inline std::pair<std::string, std::string_view> layer_and_rest(std::string_view name, std::string_view prefix) {
  if (!name.starts_with(prefix)) return {};
  name.remove_prefix(prefix.size());
  const std::size_t dot = name.find_first_not_of("0123456789");
  if (dot == 0 || dot == name.npos || name[dot] != '.') return {};
  return {std::string(name.substr(0, dot + 1)), name.substr(dot + 1)};
}
inline std::string_view renamed(std::span<const renamed_tensor> all, std::string_view name, bool to_here) {
  for (const renamed_tensor& r : all)
    if ((to_here ? r.there : r.here) == name) return to_here ? r.here : r.there;
  return {};
}

/// Returns the other name of a tensor of one of Mixtral's experts, such as "w1.weight" or "w1.lora_A.weight". Empty if
/// there is no such matrix.
inline std::string renamed_of_expert(std::string_view name, bool to_here) {
  const std::size_t dot = std::min(name.find('.'), name.size());
  const std::string_view matrix = renamed(mixtral_experts, name.substr(0, dot), to_here);
  return matrix.empty() ? std::string() : std::string(matrix) + std::string(name.substr(dot));
}

/// Returns the place of a mixture's tensor in Hugging Face's directories, where each expert has its own tensor.
inline weight_place place_in_hub(const std::string& name, const llama_config& c) {
  const auto [layer, rest] = layer_and_rest(name, "model.layers.");
  const bool mixtral = has_mixtral_names(c);
  const std::string block = "model.layers." + layer + (mixtral ? "block_sparse_moe." : "mlp.");
  if (c.mixture.experts == 0 || !rest.starts_with("mlp.")) return {name};
  const std::string_view inside = rest.substr(4);
  if (inside == router_weight_name) return {block + std::string(inside)};
  if (inside.starts_with("shared_expert.") && c.mixture.correction_bias)
    return {block + "shared_experts" + std::string(inside.substr(inside.find('.')))};
  if (!inside.starts_with("experts.")) return {name};
  const std::string_view here = inside.substr(8);
  const std::string matrix = mixtral ? renamed_of_expert(here, false) : std::string(here);
  weight_place place;
  for (std::int64_t e = 0; e < c.mixture.experts; ++e) place.parts.push_back(cat({block, "experts.", e, ".", matrix}));
  return place;
}

inline weight_place place_in_megatron(const std::string& name, const llama_config& c) {
  const auto [layer, rest] = layer_and_rest(name, "model.layers.");
  const std::string block = "decoder.layers." + layer, ending(name.substr(std::min(name.rfind('.'), name.size())));
  if (const auto whole = renamed(megatron_top, name, false); !whole.empty()) return {std::string(whole)};
  if (const auto part = renamed(megatron_inner, rest, false); !part.empty()) return {block + std::string(part)};
  for (const int which : {0, 1, 2})
    if (rest.starts_with(std::string("self_attn.") + "qkv"[which] + "_proj."))
      return place_in_qkv(c, block + "self_attention.linear_qkv" + ending, which);
  for (const int which : {0, 1})
    if (rest.starts_with(which == 0 ? "mlp.gate_proj." : "mlp.up_proj."))
      return place_in_gate_up(c, block + "mlp.linear_fc1" + ending, which);
  return {};
}
inline weight_place place_in_meta(const std::string& name, const llama_config& c) {
  const auto [layer, rest] = layer_and_rest(name, "model.layers.");
  const std::string block = "layers." + layer;
  if (const auto whole = renamed(meta_top, name, false); !whole.empty()) return {std::string(whole)};
  if (const auto part = renamed(meta_inner, rest, false); !part.empty()) return {block + std::string(part)};
  if (rest == "self_attn.q_proj.weight") return place_in_pairs(c, block + "attention.wq.weight", c.heads);
  if (rest == "self_attn.k_proj.weight") return place_in_pairs(c, block + "attention.wk.weight", c.kv_heads);
  return {};
}

}  // namespace detail

/// Throws `error`, which begins with `source`, if an order cannot store a model. Megatron's and Meta's have no tensors
/// for experts, and Meta's has none for biases and for norms of q and k.
inline void require_order(weights_order order, const llama_config& c, const std::string& source) {
  if (order == weights_order::hugging_face) return;
  if (c.mixture.experts > 0)
    fail({source, ": the order ", name_of(order), " has no tensors for experts, which this model has; legal is ",
          name_of(weights_order::hugging_face)});
  if (order != weights_order::meta) return;
  const char* const what = c.attention_bias || c.qkv_bias || c.mlp_bias ? "biases"
                           : c.qk_norm                                  ? "norms of q and k"
                                                                        : nullptr;
  if (what != nullptr)
    fail({source, ": the order meta has no tensors for ", what, ", which this model has; legal are hugging-face and ",
          "megatron"});
}

/// Returns the place of a Hugging Face tensor in another order. Throws `error`, which begins with `source`, if that
/// order has no such tensor.
inline weight_place place_in_order(const std::string& name, weights_order order, const llama_config& config,
                                   const std::string& source) {
  if (order == weights_order::hugging_face) return detail::place_in_hub(name, config);
  weight_place place =
      order == weights_order::megatron ? detail::place_in_megatron(name, config) : detail::place_in_meta(name, config);
  if (place.tensor.empty()) fail({source, ": the order ", name_of(order), " has no tensor for '", name, "'"});
  return place;
}

/// Converts a model's declarations of tensors from Hugging Face's to another order. Fused tensors take the place of
/// their first part. Throws like `require_order` and `place_in_order`.
inline std::vector<safetensors_declaration> declared_in_order(const std::vector<safetensors_declaration>& tensors,
                                                              weights_order order, const llama_config& config,
                                                              const std::string& source) {
  require_order(order, config, source);
  std::vector<safetensors_declaration> out;
  std::map<std::string, std::size_t> known;
  for (const safetensors_declaration& t : tensors) {
    const weight_place place = place_in_order(t.name, order, config, source);
    for (const std::string& part : place.parts) out.push_back({part, t.dtype, {t.shape.begin() + 1, t.shape.end()}});
    if (!place.parts.empty() || !known.emplace(place.tensor, out.size()).second) continue;
    out.push_back({place.tensor, t.dtype, t.shape});
    if (place.row_at) out.back().shape.at(0) = place.rows;
  }
  return out;
}

// Converts weights of a Llama from Megatron's and Meta's formats to the names and orders of Hugging Face. Fused
// projections are split, and rotary pairs become halves.

namespace detail {

/// Converts the tensors of one source; its errors begin with `source`.
class weight_converter {
 public:
  weight_converter(const llama_config& c, std::string source) : c_(c), source_(std::move(source)) {}

  /// Keeps a tensor under another name.
  void keep(const weight_tensor& e, std::string name) {
    out_.push_back(e);
    out_.back().name = std::move(name);
  }
  /// Adds a tensor that consists of some rows of another, which `place` describes.
  void add_rows(const weight_tensor& e, std::string name, std::int64_t rows, const weight_place& place) {
    if (e.shape.empty() || e.shape[0] != place.rows)
      fail({source_, ": tensor '", e.name, "' has ", e.shape.empty() ? 0 : e.shape[0], " rows, and the model needs ",
            place.rows});
    weight_tensor part{std::move(name), e.dtype, e.shape, {}};
    part.shape[0] = rows;
    const std::int64_t row = elements_of_shape(std::span(e.shape).subspan(1));
    part.read = [read = e.read, row, width = size_of(e.dtype), row_at = place.row_at](
                    std::int64_t begin, std::int64_t end, std::byte* out) {
      each_row_run(begin, end, row, row_at, [&](std::int64_t at, std::int64_t from, std::int64_t n) {
        read(from, from + n, out + static_cast<std::size_t>(at - begin) * width);
      });
    };
    out_.push_back(std::move(part));
  }
  void split_qkv(const weight_tensor& e, const std::string& prefix, const std::string& ending) {
    for (const int which : {0, 1, 2})
      add_rows(e, prefix + "qkv"[which] + "_proj" + ending, (which == 0 ? c_.heads : c_.kv_heads) * c_.head_dim,
               place_in_qkv(c_, e.name, which));
  }
  void split_gate_up(const weight_tensor& e, const std::string& prefix, const std::string& ending) {
    for (const int which : {0, 1})
      add_rows(e, prefix + (which == 0 ? "gate_proj" : "up_proj") + ending, c_.ffn,
               place_in_gate_up(c_, e.name, which));
  }
  void halves_from_pairs(const weight_tensor& e, std::string name, std::int64_t heads) {
    add_rows(e, std::move(name), heads * c_.head_dim, place_in_pairs(c_, e.name, heads));
  }
  [[noreturn]] void unknown(const weight_tensor& e, const char* tool) const {
    fail({source_, ": tensor '", e.name, "' is not one that ", tool, " has for a Llama"});
  }

  /// Adds a tensor that consists of the elements of `parts`, one after another; all parts have equally many.
  void join(std::vector<weight_tensor> parts, std::string name) {
    const weight_tensor& first = parts.front();
    weight_tensor all{std::move(name), first.dtype, first.shape, {}};
    all.shape.insert(all.shape.begin(), static_cast<std::int64_t>(parts.size()));
    for (const weight_tensor& p : parts)
      if (p.shape != first.shape || p.dtype != first.dtype)
        fail({source_, ": tensor '", p.name, "' has the shape ", shape_text(p.shape), " in ", name_of(p.dtype),
              ", and '", first.name, "' ", shape_text(first.shape), " in ", name_of(first.dtype),
              "; legal are equal ones"});
    const std::int64_t size = std::max<std::int64_t>(first.size(), 1);
    all.read = [parts = std::move(parts), size](std::int64_t begin, std::int64_t end, std::byte* out) {
      while (begin < end) {
        const std::int64_t i = begin / size, stop = std::min(end, (i + 1) * size);
        const weight_tensor& part = parts[static_cast<std::size_t>(i)];
        part.read(begin - i * size, stop - i * size, out);
        out += static_cast<std::size_t>(stop - begin) * size_of(part.dtype);
        begin = stop;
      }
    };
    out_.push_back(std::move(all));
  }
  weight_tensor& last() { return out_.back(); }
  const llama_config& config() const { return c_; }
  const std::string& source() const { return source_; }
  std::vector<weight_tensor> take() { return std::move(out_); }

 private:
  const llama_config& c_;
  std::string source_;
  std::vector<weight_tensor> out_;
};

}  // namespace detail

/// Converts weights with the names of Megatron-LM (core), from one tensor- and pipeline-parallel rank. They have q, k
/// and v in one tensor, and gate and up in one. Throws `error`, which begins with `source`, if a tensor is unknown or
/// does not have the configuration's size.
inline std::vector<weight_tensor> weights_from_megatron(std::span<const weight_tensor> entries,
                                                        const llama_config& config, const std::string& source) {
  detail::weight_converter to(config, source);
  for (const weight_tensor& e : entries) {
    const auto [layer, rest] = detail::layer_and_rest(e.name, "decoder.layers.");
    const std::string block = "model.layers." + layer;
    const std::string ending(e.name.substr(e.name.rfind('.') + 1));
    const auto whole = detail::renamed(detail::megatron_top, e.name, true);
    if (e.shape.size() == 2 && !whole.empty() && e.shape[0] > config.vocab)
      fail({source, ": tensor '", e.name, "' has ", e.shape[0], " rows, and config.json a vocab_size of ", config.vocab,
            "; Megatron pads the vocabulary, and with the vocab_size ", e.shape[0], " its last tokens never occur"});
    if (!whole.empty())
      to.keep(e, std::string(whole));
    else if (const auto part = detail::renamed(detail::megatron_inner, rest, true); !part.empty())
      to.keep(e, block + std::string(part));
    else if (rest == "self_attention.linear_qkv.weight" || rest == "self_attention.linear_qkv.bias")
      to.split_qkv(e, block + "self_attn.", "." + ending);
    else if (rest == "mlp.linear_fc1.weight" || rest == "mlp.linear_fc1.bias")
      to.split_gate_up(e, block + "mlp.", "." + ending);
    else
      to.unknown(e, "Megatron");
  }
  return to.take();
}

/// Converts weights with the names of Meta's own files, from one model-parallel rank, whose q and k are for rotary
/// pairs. The table of rotary frequencies is left out. Throws like `weights_from_megatron`.
inline std::vector<weight_tensor> weights_from_meta(std::span<const weight_tensor> entries, const llama_config& config,
                                                    const std::string& source) {
  detail::weight_converter to(config, source);
  for (const weight_tensor& e : entries) {
    if (e.name == "rope.freqs") continue;
    const auto [layer, rest] = detail::layer_and_rest(e.name, "layers.");
    const std::string block = "model.layers." + layer;
    if (const auto whole = detail::renamed(detail::meta_top, e.name, true); !whole.empty())
      to.keep(e, std::string(whole));
    else if (const auto part = detail::renamed(detail::meta_inner, rest, true); !part.empty())
      to.keep(e, block + std::string(part));
    else if (rest == "attention.wq.weight")
      to.halves_from_pairs(e, block + "self_attn.q_proj.weight", config.heads);
    else if (rest == "attention.wk.weight")
      to.halves_from_pairs(e, block + "self_attn.k_proj.weight", config.kv_heads);
    else
      to.unknown(e, "Meta");
  }
  return to.take();
}

namespace detail {

/// Splits transformers' stack of gates above ups, [experts, 2 width, hidden].
inline void split_stacked_gate_up(weight_converter& to, const weight_tensor& e, const std::string& prefix) {
  const llama_config& c = to.config();
  const std::vector<std::int64_t> shape{c.mixture.experts, 2 * c.ffn, c.hidden};
  if (e.shape != shape)
    fail({to.source(), ": tensor '", e.name, "' has the shape ", shape_text(e.shape), ", and the model needs ",
          shape_text(shape)});
  weight_tensor rows = e;
  rows.shape = {c.mixture.experts * 2 * c.ffn, c.hidden};
  for (const int which : {0, 1}) {
    const auto row_at = [f = c.ffn, which](std::int64_t i) { return i / f * 2 * f + which * f + i % f; };
    to.add_rows(rows, prefix + (which == 0 ? "gate_proj.weight" : "up_proj.weight"), c.mixture.experts * c.ffn,
                {e.name, rows.shape[0], row_at});
    to.last().shape = {c.mixture.experts, c.ffn, c.hidden};
  }
}

}  // namespace detail

/// Converts weights of a mixture from a Hugging Face directory to the names of a `mixture_llama`. They have one tensor
/// per expert, or stacks of all experts of a layer, with gate above up. Throws `error`, which begins with `source`, if
/// experts are missing or do not fit.
inline std::vector<weight_tensor> weights_of_experts(std::span<const weight_tensor> entries, const llama_config& config,
                                                     const std::string& source) {
  detail::weight_converter to(config, source);
  std::map<std::string, std::map<std::int64_t, weight_tensor>> stacks;
  for (const weight_tensor& e : entries) {
    const auto [layer, rest] = detail::layer_and_rest(e.name, "model.layers.");
    const std::string block = "model.layers." + layer + "mlp.";
    const bool mixtral = rest.starts_with("block_sparse_moe.");
    if (!mixtral && !rest.starts_with("mlp.")) {
      to.keep(e, e.name);
      continue;
    }
    const std::string_view inside = rest.substr(rest.find('.') + 1);
    const auto [number, matrix] = detail::layer_and_rest(inside, "experts.");
    if (!number.empty()) {
      const std::string here = mixtral ? detail::renamed_of_expert(matrix, true) : std::string(matrix);
      if (here.empty()) to.unknown(e, "Mixtral");
      std::int64_t expert = -1;
      if (number.size() < 8) std::from_chars(number.data(), number.data() + number.size(), expert);
      if (cat({expert, "."}) != number) to.unknown(e, "Hugging Face");
      const std::string name = cat({block, "experts.", here});
      if (!stacks[name].emplace(expert, e).second)
        fail({source, ": tensor '", e.name, "' is one of two for expert ", expert, " of '", name, "'"});
    } else if (inside == "experts.gate_up_proj") {
      detail::split_stacked_gate_up(to, e, block + "experts.");
    } else if (inside.starts_with("shared_experts.")) {
      to.keep(e, block + "shared_expert" + std::string(inside.substr(inside.find('.'))));
    } else {
      to.keep(e, inside == "experts.down_proj" ? block + "experts.down_proj.weight" : block + std::string(inside));
    }
  }
  for (auto& [name, experts] : stacks) {
    std::vector<weight_tensor> parts;
    for (std::int64_t i = 0; i < config.mixture.experts; ++i) {
      const auto found = experts.find(i);
      if (found == experts.end())
        fail({source, ": expert ", i, " of '", name, "' is missing; the model has ", config.mixture.experts,
              " experts"});
      parts.push_back(std::move(found->second));
    }
    if (experts.size() > parts.size())
      fail({source, ": '", name, "' has expert ", experts.rbegin()->first, ", and the model has ",
            config.mixture.experts, " experts"});
    to.join(std::move(parts), name);
  }
  return to.take();
}

/// Returns the tool whose names most tensors have, according to embeddings and layers.
inline weights_order order_of_names(std::span<const weight_tensor> entries) {
  const auto any = [&](auto&& is) { return std::any_of(entries.begin(), entries.end(), is); };
  if (any([](const weight_tensor& e) { return e.name.starts_with("model.") || e.name == "embed_tokens.weight"; }))
    return weights_order::hugging_face;
  if (any([](const weight_tensor& e) {
        return e.name.starts_with("decoder.layers.") || e.name == "embedding.word_embeddings.weight";
      }))
    return weights_order::megatron;
  if (any([](const weight_tensor& e) {
        return e.name == "tok_embeddings.weight" ||
               (e.name.starts_with("layers.") && e.name.find(".attention.w") != e.name.npos);
      }))
    return weights_order::meta;
  return weights_order::hugging_face;
}

/// Returns the tensors under the names and in the orders of Hugging Face. `field` names the setting of `order`. Throws
/// `error`, which begins with `source`, if the names belong to another tool than `order`. Throws also like
/// `weights_from_megatron` and `weights_from_meta`.
inline std::vector<weight_tensor> weights_in_order(std::vector<weight_tensor> entries, weights_order order,
                                                   const llama_config& config, const std::string& source,
                                                   std::string_view field = "order") {
  const weights_order there = order_of_names(entries);
  if (there != order && entries.empty()) fail({source, ": it has no tensors"});
  if (there != order)
    fail({source, ": its tensors, such as '", entries.front().name, "', have the names of ", name_of(there), ", and ",
          field, " is ", name_of(order), "; legal is ", field, " ", name_of(there)});
  if (order == weights_order::megatron) return weights_from_megatron(entries, config, source);
  if (order == weights_order::meta) return weights_from_meta(entries, config, source);
  return entries;
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
