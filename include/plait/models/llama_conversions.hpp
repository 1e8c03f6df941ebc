// Weights of a Llama as Megatron and as Meta keep them, under the names and in the orders of Hugging Face: fused
// projections are split, and rotary pairs become halves. Nothing is copied, rows are read from where they lie. It opens
// no files: models/hugging_face_directory.hpp does.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plait/checkpoint/weight_tensor.hpp"
#include "plait/core/error.hpp"
#include "plait/models/llama_config.hpp"

namespace plait {

/// Whose names and orders the tensors of a Llama have.
enum class weights_order : std::uint8_t { hugging_face, megatron, meta };

inline constexpr std::string_view weights_order_names[] = {"hugging-face", "megatron", "meta"};
constexpr std::string_view name_of(weights_order order) { return weights_order_names[static_cast<int>(order)]; }
/// Throws `error`, which begins with `knob`, for a name that is none.
inline weights_order weights_order_from(std::string_view name, std::string_view knob = "--weights-order") {
  for (const weights_order order : {weights_order::hugging_face, weights_order::megatron, weights_order::meta})
    if (name == name_of(order)) return order;
  fail({knob, " '", name, "' is unknown; legal are hugging-face, megatron, meta"});
}

namespace detail {

/// One place where a tensor of another tool goes.
struct renamed_tensor {
  std::string_view from, to;
};

/// Converts the tensors of one source, whose errors begin with `source`.
class weight_converter {
 public:
  weight_converter(const llama_config& c, std::string source) : c_(c), source_(std::move(source)) {}

  /// Keeps the tensor, under another name.
  void keep(const weight_tensor& e, std::string name) {
    out_.push_back(e);
    out_.back().name = std::move(name);
  }
  /// Adds a tensor of some rows of another, which must have `all` of them: its row i is row `row_at(i)`.
  template <class RowAt>
  void add_rows(const weight_tensor& e, std::string name, std::int64_t all, std::int64_t rows, RowAt&& row_at) {
    if (e.shape.empty() || e.shape[0] != all)
      fail({source_, ": tensor '", e.name, "' has ", e.shape.empty() ? 0 : e.shape[0], " rows, and the model needs ",
            all});
    weight_tensor part{std::move(name), e.dtype, e.shape, {}};
    part.shape[0] = rows;
    std::int64_t row = 1;
    for (std::size_t d = 1; d < e.shape.size(); ++d) row *= e.shape[d];
    part.read = [read = e.read, row, width = size_of(e.dtype), row_at](std::int64_t begin, std::int64_t end,
                                                                       std::byte* out) {
      while (begin < end) {  // rows that follow each other there too are read together
        const std::int64_t first = begin / row, skipped = begin % row;
        std::int64_t last = first + 1;
        while (last * row < end && row_at(last) == row_at(first) + (last - first)) ++last;
        const std::int64_t n = std::min(end, last * row) - begin, from = row_at(first) * row + skipped;
        read(from, from + n, out);
        out += static_cast<std::size_t>(n) * width;
        begin += n;
      }
    };
    out_.push_back(std::move(part));
  }
  /// Megatron's fused q, k and v: for each kv head, the queries that share it, its key, its value.
  void split_qkv(const weight_tensor& e, const std::string& prefix, const std::string& ending) {
    const std::int64_t d = c_.head_dim, group = c_.heads / c_.kv_heads, fused = group + 2,
                       all = c_.kv_heads * fused * d;
    add_rows(e, prefix + "q_proj" + ending, all, c_.heads * d, [=](std::int64_t i) {
      const std::int64_t head = i / d;
      return (head / group * fused + head % group) * d + i % d;
    });
    for (const std::int64_t which : {0, 1})
      add_rows(e, prefix + (which == 0 ? "k_proj" : "v_proj") + ending, all, c_.kv_heads * d,
               [=](std::int64_t i) { return (i / d * fused + group + which) * d + i % d; });
  }
  /// Gate above up.
  void split_gate_up(const weight_tensor& e, const std::string& prefix, const std::string& ending) {
    for (const std::int64_t which : {0, 1})
      add_rows(e, prefix + (which == 0 ? "gate_proj" : "up_proj") + ending, 2 * c_.ffn, c_.ffn,
               [first = which * c_.ffn](std::int64_t i) { return first + i; });
  }
  /// Rotary positions turn neighbours (2i, 2i + 1) of a head at Meta, and i with i + head_dim / 2 at Hugging Face.
  void halves_from_pairs(const weight_tensor& e, std::string name, std::int64_t heads) {
    const std::int64_t d = c_.head_dim, half = d / 2;
    add_rows(e, std::move(name), heads * d, heads * d,
             [=](std::int64_t i) { return i / d * d + 2 * (i % d % half) + i % d / half; });
  }
  [[noreturn]] void unknown(const weight_tensor& e, const char* tool) const {
    fail({source_, ": tensor '", e.name, "' is none that ", tool, " has for a Llama"});
  }

  const llama_config& config() const { return c_; }
  std::vector<weight_tensor> take() { return std::move(out_); }

 private:
  const llama_config& c_;
  std::string source_;
  std::vector<weight_tensor> out_;
};

/// "7.rest" after `prefix`: the layer, with its dot, and the rest; empty where `name` does not begin so.
inline std::pair<std::string, std::string_view> layer_and_rest(std::string_view name, std::string_view prefix) {
  if (!name.starts_with(prefix)) return {};
  name.remove_prefix(prefix.size());
  const std::size_t dot = name.find_first_not_of("0123456789");
  if (dot == 0 || dot == name.npos || name[dot] != '.') return {};
  return {std::string(name.substr(0, dot + 1)), name.substr(dot + 1)};
}

inline const renamed_tensor* find_renamed(std::span<const renamed_tensor> all, std::string_view name) {
  const auto found = std::find_if(all.begin(), all.end(), [&](const auto& r) { return r.from == name; });
  return found == all.end() ? nullptr : &*found;
}

}  // namespace detail

/// Weights with the names of Megatron-LM (core), of one tensor- and pipeline-parallel rank: q, k and v in one tensor,
/// gate and up in one. Throws `error`, its text starting with `source`, for a tensor that it does not know or that
/// does not have the configuration's size.
inline std::vector<weight_tensor> weights_from_megatron(std::span<const weight_tensor> entries,
                                                        const llama_config& config, const std::string& source) {
  static constexpr detail::renamed_tensor top[] = {{"embedding.word_embeddings.weight", "model.embed_tokens.weight"},
                                                   {"decoder.final_layernorm.weight", "model.norm.weight"},
                                                   {"output_layer.weight", "lm_head.weight"}};
  static constexpr detail::renamed_tensor inner[] = {
      {"self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"},
      {"self_attention.linear_proj.weight", "self_attn.o_proj.weight"},
      {"self_attention.linear_proj.bias", "self_attn.o_proj.bias"},
      {"self_attention.q_layernorm.weight", "self_attn.q_norm.weight"},
      {"self_attention.k_layernorm.weight", "self_attn.k_norm.weight"},
      {"input_layernorm.weight", "input_layernorm.weight"},
      {"pre_mlp_layernorm.weight", "post_attention_layernorm.weight"},
      {"mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight"},
      {"mlp.linear_fc2.weight", "mlp.down_proj.weight"},
      {"mlp.linear_fc2.bias", "mlp.down_proj.bias"}};
  detail::weight_converter to(config, source);
  for (const weight_tensor& e : entries) {
    const auto [layer, rest] = detail::layer_and_rest(e.name, "decoder.layers.");
    const std::string block = "model.layers." + layer;
    const std::string ending(e.name.substr(e.name.rfind('.') + 1));
    if (const auto* whole = detail::find_renamed(top, e.name))
      to.keep(e, std::string(whole->to));
    else if (const auto* part = detail::find_renamed(inner, rest))
      to.keep(e, block + std::string(part->to));
    else if (rest == "self_attention.linear_qkv.weight" || rest == "self_attention.linear_qkv.bias")
      to.split_qkv(e, block + "self_attn.", "." + ending);
    else if (rest == "mlp.linear_fc1.weight" || rest == "mlp.linear_fc1.bias")
      to.split_gate_up(e, block + "mlp.", "." + ending);
    else
      to.unknown(e, "Megatron");
  }
  return to.take();
}

/// Weights with the names of Meta's own files, of one model-parallel rank, whose q and k are for rotary pairs. The
/// table of rotary frequencies is left out. Errors as `weights_from_megatron`.
inline std::vector<weight_tensor> weights_from_meta(std::span<const weight_tensor> entries, const llama_config& config,
                                                    const std::string& source) {
  static constexpr detail::renamed_tensor top[] = {{"tok_embeddings.weight", "model.embed_tokens.weight"},
                                                   {"norm.weight", "model.norm.weight"},
                                                   {"output.weight", "lm_head.weight"}};
  static constexpr detail::renamed_tensor inner[] = {
      {"attention.wv.weight", "self_attn.v_proj.weight"},  {"attention.wo.weight", "self_attn.o_proj.weight"},
      {"attention_norm.weight", "input_layernorm.weight"}, {"ffn_norm.weight", "post_attention_layernorm.weight"},
      {"feed_forward.w1.weight", "mlp.gate_proj.weight"},  {"feed_forward.w2.weight", "mlp.down_proj.weight"},
      {"feed_forward.w3.weight", "mlp.up_proj.weight"}};
  detail::weight_converter to(config, source);
  for (const weight_tensor& e : entries) {
    if (e.name == "rope.freqs") continue;
    const auto [layer, rest] = detail::layer_and_rest(e.name, "layers.");
    const std::string block = "model.layers." + layer;
    if (const auto* whole = detail::find_renamed(top, e.name))
      to.keep(e, std::string(whole->to));
    else if (const auto* part = detail::find_renamed(inner, rest))
      to.keep(e, block + std::string(part->to));
    else if (rest == "attention.wq.weight")
      to.halves_from_pairs(e, block + "self_attn.q_proj.weight", config.heads);
    else if (rest == "attention.wk.weight")
      to.halves_from_pairs(e, block + "self_attn.k_proj.weight", config.kv_heads);
    else
      to.unknown(e, "Meta");
  }
  return to.take();
}

/// Returns whose names most of the tensors have, by those of embeddings and layers.
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

/// Returns the tensors under the names and in the orders of Hugging Face. Throws `error`, its text starting with
/// `source`, where the names are those of another tool than `order` says, which `knob` has set, and as
/// `weights_from_megatron` and `weights_from_meta`.
inline std::vector<weight_tensor> weights_in_order(std::vector<weight_tensor> entries, weights_order order,
                                                   const llama_config& config, const std::string& source,
                                                   std::string_view knob = "--weights-order") {
  if (const weights_order there = order_of_names(entries); there != order)
    fail({source, ": its tensors, such as '", entries.front().name, "', have the names of ", name_of(there), ", and ",
          knob, " is ", name_of(order), "; legal is ", knob, " ", name_of(there)});
  if (order == weights_order::megatron) return weights_from_megatron(entries, config, source);
  if (order == weights_order::meta) return weights_from_meta(entries, config, source);
  return entries;
}

}  // namespace plait
