// Weights of a Llama as Megatron and as Meta keep them, under the names and in the orders of Hugging Face: fused
// projections are split, and rotary pairs become halves. Where what lies: models/weights_order.hpp.
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
#include "plait/core/macros_off.hpp"
#include "plait/models/llama_config.hpp"
#include "plait/models/weights_order.hpp"

namespace plait {

namespace detail {

/// Converts the tensors of one source, whose errors begin with `source`.
class weight_converter {
 public:
  weight_converter(const llama_config& c, std::string source) : c_(c), source_(std::move(source)) {}

  /// Keeps the tensor, under another name.
  void keep(const weight_tensor& e, std::string name) {
    out_.push_back(e);
    out_.back().name = std::move(name);
  }
  /// Adds a tensor of some rows of another, as `place` says.
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
    fail({source_, ": tensor '", e.name, "' is none that ", tool, " has for a Llama"});
  }

  const llama_config& config() const { return c_; }
  std::vector<weight_tensor> take() { return std::move(out_); }

 private:
  const llama_config& c_;
  std::string source_;
  std::vector<weight_tensor> out_;
};

}  // namespace detail

/// Weights with the names of Megatron-LM (core), of one tensor- and pipeline-parallel rank: q, k and v in one tensor,
/// gate and up in one. Throws `error`, its text starting with `source`, for a tensor that it does not know or that
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

/// Weights with the names of Meta's own files, of one model-parallel rank, whose q and k are for rotary pairs. The
/// table of rotary frequencies is left out. Errors as `weights_from_megatron`.
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
/// `source`, where the names are those of another tool than `order` says, which `field` has set, and as
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
