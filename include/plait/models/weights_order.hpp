// Where the tensors and rows of a Llama lie as Hugging Face, Megatron and Meta keep them: names, fused projections,
// rotary pairs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plait/checkpoint/safetensors_writer.hpp"
#include "plait/checkpoint/weight_tensor.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/models/llama_config.hpp"

namespace plait {

/// Whose names and orders the tensors of a Llama have.
enum class weights_order : std::uint8_t { hugging_face, megatron, meta };

inline constexpr std::string_view weights_order_names[] = {"hugging-face", "megatron", "meta"};
constexpr std::string_view name_of(weights_order order) { return weights_order_names[static_cast<int>(order)]; }
/// Throws `error`, which begins with `field`, for a name that is none.
inline weights_order weights_order_from(std::string_view name, std::string_view field = "order") {
  for (const weights_order order : {weights_order::hugging_face, weights_order::megatron, weights_order::meta})
    if (name == name_of(order)) return order;
  fail({field, " '", name, "' is unknown; legal are hugging-face, megatron, meta"});
}

namespace detail {

/// A tensor's name at another tool, and Hugging Face's; those behind the layer's number are without what is before it.
struct renamed_tensor {
  std::string_view there, here;
};

// Where two are there for one here, the first is written, and either is read.
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

/// Megatron's fused q, k and v (`which` is 0, 1, 2): for each kv head, the queries that share it, its key, its value.
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
/// Gate above up (`which` is 0, 1).
inline weight_place place_in_gate_up(const llama_config& c, std::string tensor, int which) {
  return {std::move(tensor), 2 * c.ffn, [first = which * c.ffn](std::int64_t i) { return first + i; }};
}
/// Rotary positions turn neighbours (2i, 2i + 1) of a head at Meta, and i with i + head_dim / 2 at Hugging Face.
inline weight_place place_in_pairs(const llama_config& c, std::string tensor, std::int64_t heads) {
  const std::int64_t d = c.head_dim, half = d / 2;
  return {std::move(tensor), heads * d, [=](std::int64_t i) { return i / d * d + 2 * (i % d % half) + i % d / half; }};
}

/// "7.rest" after `prefix`: the layer, with its dot, and the rest; empty where `name` does not begin so.
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

/// Throws `error`, its text starting with `source`, where an order has no tensors for a model: Meta's has none for
/// biases and for norms of q and k.
inline void require_order(weights_order order, const llama_config& c, const std::string& source) {
  if (order != weights_order::meta) return;
  const char* const what = c.attention_bias || c.qkv_bias || c.mlp_bias ? "biases"
                           : c.qk_norm                                  ? "norms of q and k"
                                                                        : nullptr;
  if (what != nullptr)
    fail({source, ": the order meta has no tensors for ", what, ", which this model has; legal are hugging-face and ",
          "megatron"});
}

/// Returns where a tensor of Hugging Face's lies in another order. Throws `error`, its text starting with `source`,
/// where that order has no such tensor.
inline weight_place place_in_order(const std::string& name, weights_order order, const llama_config& config,
                                   const std::string& source) {
  if (order == weights_order::hugging_face) return {name};
  weight_place place =
      order == weights_order::megatron ? detail::place_in_megatron(name, config) : detail::place_in_meta(name, config);
  if (place.tensor.empty()) fail({source, ": the order ", name_of(order), " has no tensor for '", name, "'"});
  return place;
}

/// Returns the tensors of a model, given as Hugging Face's, as they are declared in another order: fused ones where the
/// first of their parts is. Throws as `require_order` and `place_in_order`.
inline std::vector<safetensors_declaration> declared_in_order(const std::vector<safetensors_declaration>& tensors,
                                                              weights_order order, const llama_config& config,
                                                              const std::string& source) {
  require_order(order, config, source);
  std::vector<safetensors_declaration> out;
  std::map<std::string, std::size_t> known;
  for (const safetensors_declaration& t : tensors) {
    const weight_place place = place_in_order(t.name, order, config, source);
    if (!known.emplace(place.tensor, out.size()).second) continue;
    out.push_back({place.tensor, t.dtype, t.shape});
    if (place.row_at) out.back().shape.at(0) = place.rows;
  }
  return out;
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
