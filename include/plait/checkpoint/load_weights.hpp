// Fills a model's parameters from whole tensors, on any mesh. Only weights are loaded, not the optimizer's state.
// Files are read by checkpoint/safetensors_reader.hpp. Both together: tests/unit/models/llama_golden.cpp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plait/checkpoint/safetensors_format.hpp"
#include "plait/core/error.hpp"
#include "plait/nn/parameter.hpp"

namespace plait {

/// Another name under which a checkpoint may hold a parameter, such as the output projection of a model that ties it to
/// the embedding: {"lm_head.weight", "model.embed_tokens.weight"}.
using parameter_aliases = std::vector<std::pair<std::string, std::string>>;

namespace detail {

inline std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text;
  for (std::int64_t n : shape) append(text, {(text.empty() ? "" : ", "), n});
  return cat({"[", text, "]"});
}

inline const safetensors_entry* find_entry(std::span<const safetensors_entry> entries, std::string_view name) {
  const auto found = std::find_if(entries.begin(), entries.end(), [&](const auto& e) { return e.name == name; });
  return found == entries.end() ? nullptr : &*found;
}

constexpr bool floating(safetensors_dtype type) {
  return type == safetensors_dtype::f64 || type == safetensors_dtype::f32 || type == safetensors_dtype::f16 ||
         type == safetensors_dtype::bf16;
}

/// Calls f(global index, local index, count) for each run of `part` that is contiguous in the global row-major tensor.
template <class F>
void each_run(const box& part, F&& f) {
  std::int64_t run = 1, rows = 1, stride = 1;
  int outer = part.dims;  // dims from here on are one run
  while (outer > 0) {
    const auto d = static_cast<std::size_t>(--outer);
    run *= part.local[d];
    if (part.local[d] != part.global[d]) break;
  }
  for (int d = 0; d < outer; ++d) rows *= part.local[static_cast<std::size_t>(d)];
  for (std::int64_t row = 0; row < rows; ++row) {
    std::int64_t rest = row, at = 0;
    stride = 1;
    for (std::size_t d = static_cast<std::size_t>(part.dims); d-- > 0;) {
      std::int64_t index = part.offset[d];
      if (static_cast<int>(d) < outer) index += rest % part.local[d], rest /= part.local[d];
      at += index * stride;
      stride *= part.global[d];
    }
    f(at, row * run, run);
  }
}

}  // namespace detail

/// Fills parameter `p` with what this rank stores of `full`, a whole tensor without padding, converted to its master
/// type; rows of padding become zero. Throws `error` that starts with `source` and names the
/// tensor if its shape is not the parameter's or its elements are no floating-point numbers.
template <class Precision, compute_device Device>
void load_parameter(const context<Device>& ctx, parameter<Precision, Device>& p, const safetensors_entry& full,
                    const std::string& source) {
  using T = master_of<Precision>;
  if (full.shape != p.info().shape)
    fail({source, ": tensor '", full.name, "' has the shape ", detail::shape_text(full.shape), ", and the model needs ",
          detail::shape_text(p.info().shape), " for ", p.name()});
  const auto width = static_cast<std::size_t>(size_of(full.dtype));
  std::vector<T> values(static_cast<std::size_t>(p.size()));
  try {
    detail::each_run(p.part(), [&](std::int64_t from, std::int64_t to, std::int64_t count) {
      const std::int64_t there = std::clamp<std::int64_t>(full.size() - from, 0, count);
      safetensors_entry piece{full.name, full.dtype, {there}, {}};
      if (there > 0)
        piece.bytes =
            full.bytes.subspan(static_cast<std::size_t>(from) * width, static_cast<std::size_t>(there) * width);
      copy_elements(piece, values.data() + to);
      std::fill(values.data() + to + there, values.data() + to + count, T{});
    });
  } catch (const error& e) {
    fail({source, ": ", e.what()});
  }
  p.fill_values(ctx, [&](T* part) {
    ctx.device.upload(part, values.data(), values.size() * sizeof(T), ctx.device.main_stream());
  });
}

/// Fills every parameter that `model.visit` yields from the whole tensors of a checkpoint, on whatever mesh the model
/// lies: each rank reads its own part. Strict: throws `error`, its text starting with `source`, before anything is
/// changed if a parameter has no tensor or one of another shape, or a tensor belongs to no parameter. A tensor under
/// the first name of an alias may be absent; where it is present it must hold the same as the second.
template <compute_device Device, class Model>
void load_weights(const context<Device>& ctx, Model& model, std::span<const safetensors_entry> entries,
                  const std::string& source, const parameter_aliases& aliases = {}) {
  std::vector<std::string> names;
  std::string missing;
  model.visit([&](auto& p) {
    names.push_back(p.name());
    const safetensors_entry* const entry = detail::find_entry(entries, p.name());
    if (!entry)
      missing += (missing.empty() ? "'" : "', '") + p.name();
    else if (entry->shape != p.info().shape)
      fail({source, ": tensor '", entry->name, "' has the shape ", detail::shape_text(entry->shape),
            ", and the model needs ", detail::shape_text(p.info().shape)});
    else if (!detail::floating(entry->dtype))
      fail({source, ": tensor '", entry->name, "' holds ", name_of(entry->dtype),
            " elements; weights are F64, F32, F16 or BF16"});
  });
  if (!missing.empty()) fail({source, ": the model needs tensors that are missing: ", missing, "'"});
  for (const safetensors_entry& e : entries) {
    if (std::find(names.begin(), names.end(), e.name) != names.end()) continue;
    const auto alias = std::find_if(aliases.begin(), aliases.end(), [&](const auto& a) { return a.first == e.name; });
    if (alias == aliases.end()) fail({source, ": tensor '", e.name, "' belongs to no parameter of the model"});
    const safetensors_entry* const same = detail::find_entry(entries, alias->second);
    if (!same || same->dtype != e.dtype || same->shape != e.shape ||
        !std::equal(e.bytes.begin(), e.bytes.end(), same->bytes.begin(), same->bytes.end()))
      fail({source, ": tensor '", e.name, "' differs from '", alias->second, "', to which the model ties it"});
  }
  model.visit([&](auto& p) { load_parameter(ctx, p, *detail::find_entry(entries, p.name()), source); });
}

/// Names that a Llama's checkpoint may hold beside its parameters.
template <class Config>
parameter_aliases tied_names(const Config& config) {
  if (!config.tie_embeddings) return {};
  return {{"lm_head.weight", "model.embed_tokens.weight"}};
}

}  // namespace plait
