// Fills a model's parameters from whole tensors, on any mesh. Only weights are loaded, not the optimizer's state.
// Files are opened by checkpoint/safetensors_directory.hpp. Both together: tests/unit/models/hugging_face_ranks.cpp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "plait/checkpoint/agree.hpp"
#include "plait/checkpoint/box_runs.hpp"
#include "plait/checkpoint/safetensors_format.hpp"
#include "plait/checkpoint/weight_tensor.hpp"
#include "plait/core/error.hpp"
#include "plait/core/hash.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/io/byte_buffer.hpp"
#include "plait/nn/parameter.hpp"

namespace plait {

/// Another name under which a checkpoint may hold a parameter, such as the output projection of a model that ties it to
/// the embedding: {"lm_head.weight", "model.embed_tokens.weight"}.
using parameter_aliases = std::vector<std::pair<std::string, std::string>>;

namespace detail {

/// The tensors of a file by their names. Throws where two have one.
inline std::unordered_map<std::string_view, const weight_tensor*> entries_by_name(
    std::span<const weight_tensor> entries, const std::string& source) {
  std::unordered_map<std::string_view, const weight_tensor*> by_name;
  for (const weight_tensor& e : entries)
    if (!by_name.emplace(e.name, &e).second) fail({source, ": two tensors are called '", e.name, "'"});
  return by_name;
}

/// The tensors that the parameters of some stages ask of a file.
struct wanted_tensors {
  std::set<std::uint64_t> names;  ///< hashed, of all parameters
  std::vector<std::string> missing, misfits;

  /// Adds those of the other stages. Collective along the pipeline.
  template <compute_device Device>
  void add_stages(Device& device, any_communicator& along) {
    for (const auto& theirs : gather_records(device, along, std::vector(names.begin(), names.end())))
      names.insert(theirs.begin(), theirs.end());
    for (std::vector<std::string>* list : {&missing, &misfits}) {
      std::string lines;
      for (const std::string& text : *list) append(lines, {text, "\n"});
      list->clear();
      for (const std::string& theirs : gather_texts(device, along, lines))
        for (std::size_t at = 0, end = 0; at < theirs.size(); at = end + 1) {
          end = theirs.find('\n', at);
          const std::string text = theirs.substr(at, end - at);  // a tied parameter is on two stages
          if (std::find(list->begin(), list->end(), text) == list->end()) list->push_back(text);
        }
    }
  }
};

}  // namespace detail

namespace detail {

/// Reads runs of a tensor, in its order, as `T`: long ones in blocks, short ones with what lies between them, since a
/// call costs more than some KB.
template <class T>
class run_reader {
 public:
  run_reader(const weight_tensor& from, T* out) : from_(from), out_(out), width_(size_of(from.dtype)) {}

  /// Elements [from, from + count) go to `to`, now or with those that follow.
  void add(std::int64_t from, std::int64_t to, std::int64_t count) {
    const auto bytes = [&](std::int64_t n) { return static_cast<std::size_t>(n) * width_; };
    if (!runs_.empty() && (bytes(count) >= long_run || bytes(from + count - runs_.front().from) > most_at_once))
      flush();
    const auto most = static_cast<std::int64_t>(most_at_once / width_);
    for (; count > most; from += most, to += most, count -= most) {
      runs_.push_back({from, to, most});
      flush();
    }
    runs_.push_back({from, to, count});
  }
  void flush() {
    if (runs_.empty()) return;
    const std::int64_t begin = runs_.front().from, end = runs_.back().from + runs_.back().count;
    bytes_.grow(static_cast<std::size_t>(end - begin) * width_);
    from_.read(begin, end, bytes_.data());
    for (const run& r : runs_) {
      const std::span<const std::byte> some(bytes_.data() + static_cast<std::size_t>(r.from - begin) * width_,
                                            static_cast<std::size_t>(r.count) * width_);
      copy_elements({from_.name, from_.dtype, {r.count}, some}, out_ + r.to);
    }
    runs_.clear();
  }

 private:
  static constexpr std::size_t long_run = 16 << 10, most_at_once = 4 << 20;
  struct run {
    std::int64_t from, to, count;
  };

  const weight_tensor& from_;
  T* out_;
  std::size_t width_;
  std::vector<run> runs_;
  byte_buffer bytes_;
};

}  // namespace detail

/// Fills parameter `p` with what this rank stores of `full`, a whole tensor without padding, converted to its master
/// type; rows of padding become zero. Throws `error` that starts with `source` and names the tensor if its shape is not
/// the parameter's or its elements are no floating-point numbers, and where it cannot be read.
template <class Precision, compute_device Device>
void load_parameter(const context<Device>& ctx, parameter<Precision, Device>& p, const weight_tensor& full,
                    const std::string& source) {
  using T = master_of<Precision>;
  if (full.shape != p.info().shape)
    fail({source, ": tensor '", full.name, "' has the shape ", detail::shape_text(full.shape), ", and the model needs ",
          detail::shape_text(p.info().shape), " for ", p.name()});
  std::vector<T> values(static_cast<std::size_t>(p.size()));
  try {
    detail::run_reader<T> in(full, values.data());
    detail::each_run_of(p.part(), p.piece(), full.size(),
                        [&](std::int64_t from, std::int64_t to, std::int64_t count) { in.add(from, to, count); });
    in.flush();
  } catch (const error& e) {
    fail({source, ": ", e.what()});
  }
  p.fill_values(ctx, [&](T* part) {
    ctx.device.upload(part, values.data(), values.size() * sizeof(T), ctx.device.main_stream());
  });
}
template <class Precision, compute_device Device>
void load_parameter(const context<Device>& ctx, parameter<Precision, Device>& p, const safetensors_entry& full,
                    const std::string& source) {
  load_parameter(ctx, p, weight_in_memory(full), source);
}

/// Fills every parameter of `model` from the whole tensors of a checkpoint, on whatever mesh it lies: each rank reads
/// its own part. For a `pipeline` this is collective along it, and `entries` are those of the whole model. Strict:
/// throws `error` with all names, its text starting with `source`, before anything is changed if a parameter of any
/// stage has no tensor or one of another shape, or a tensor belongs to no parameter of any. A tensor under the first
/// name of an alias may be absent; where it is present it must hold the same as the second. A file that cannot be read
/// to its end is an error too, and then some parameters are filled.
template <compute_device Device, class Model>
void load_weights(const context<Device>& ctx, Model& model, std::span<const weight_tensor> entries,
                  const std::string& source, const parameter_aliases& aliases = {}) {
  const auto by_name = detail::entries_by_name(entries, source);
  const auto find = [&](const std::string& name) {
    const auto found = by_name.find(name);
    return found == by_name.end() ? nullptr : found->second;
  };
  detail::wanted_tensors wanted;
  model.visit([&](auto& p) {
    wanted.names.insert(fnv1a(p.name()));
    const weight_tensor* const entry = find(p.name());
    if (!entry)
      wanted.missing.push_back(p.name());
    else if (entry->shape != p.info().shape)
      wanted.misfits.push_back(cat({"tensor '", entry->name, "' has the shape ", detail::shape_text(entry->shape),
                                    ", and the model needs ", detail::shape_text(p.info().shape)}));
    else if (!is_floating(entry->dtype))
      wanted.misfits.push_back(cat({"tensor '", entry->name, "' holds ", name_of(entry->dtype),
                                    " elements; weights are F64, F32, F16 or BF16"}));
  });
  if constexpr (requires { model.executor().along(); }) wanted.add_stages(ctx.device, model.executor().along());
  std::vector<std::string> unexpected;
  for (const weight_tensor& e : entries) {
    if (wanted.names.contains(fnv1a(e.name))) continue;
    const auto alias = std::find_if(aliases.begin(), aliases.end(), [&](const auto& a) { return a.first == e.name; });
    const weight_tensor* const same = alias == aliases.end() ? nullptr : find(alias->second);
    if (alias == aliases.end())
      unexpected.push_back(e.name);
    else if (!same || !same_elements(e, *same))
      wanted.misfits.push_back(
          cat({"tensor '", e.name, "' differs from '", alias->second, "', to which the model ties it"}));
  }
  std::string problems;
  const auto add = [&](const std::string& text) { append(problems, {problems.empty() ? ": " : "; ", text}); };
  if (!wanted.missing.empty()) add(cat({"the model needs tensors that are missing: ", detail::quoted(wanted.missing)}));
  if (!unexpected.empty()) add(cat({"tensors that belong to no parameter of the model: ", detail::quoted(unexpected)}));
  for (std::size_t i = 0; i < std::min<std::size_t>(wanted.misfits.size(), 20); ++i) add(wanted.misfits[i]);
  if (!problems.empty()) fail(source + problems);
  model.visit([&](auto& p) { load_parameter(ctx, p, *find(p.name()), source); });
}

template <compute_device Device, class Model>
void load_weights(const context<Device>& ctx, Model& model, std::span<const safetensors_entry> entries,
                  const std::string& source, const parameter_aliases& aliases = {}) {
  load_weights(ctx, model, std::span<const weight_tensor>(weights_in_memory(entries)), source, aliases);
}

/// Names that a Llama's checkpoint may hold beside its parameters.
template <class Config>
parameter_aliases tied_names(const Config& config) {
  if (!config.tie_embeddings) return {};
  return {{"lm_head.weight", "model.embed_tokens.weight"}};
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
