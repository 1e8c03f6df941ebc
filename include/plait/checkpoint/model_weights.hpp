// Fills a model's parameters from whole tensors of safetensors files, and writes them to such files, on any mesh. Each
// rank reads and writes its own parts. Tests: tests/unit/models/hugging_face_ranks.cpp.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "plait/checkpoint/agree.hpp"
#include "plait/checkpoint/boxes.hpp"
#include "plait/checkpoint/manifest.hpp"
#include "plait/checkpoint/safetensors.hpp"
#include "plait/checkpoint/weight_files.hpp"
#include "plait/comm/host_values.hpp"
#include "plait/core/box.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/tensor_names.hpp"
#include "plait/core/text.hpp"
#include "plait/core/types.hpp"
#include "plait/io/atomic_file.hpp"
#include "plait/io/byte_buffer.hpp"
#include "plait/layout/layout.hpp"
#include "plait/nn/parameter.hpp"
#include "plait/nn/parameter/array.hpp"

namespace plait {

namespace detail {

/// Calls f(global index, local index, count) for each run of `part` that is contiguous in the global row-major tensor.
template <class F>
void each_run(const box& part, F&& f) {
  box whole = part;
  whole.offset = {};
  whole.local = part.global;
  each_common_run(part, whole, part, std::forward<F>(f));
}

/// As `each_run`, for the elements of the part that are in `piece` and have a global index below `logical`. At that
/// index the padding of the leading dim begins.
template <class F>
void each_run_of(const box& part, const storage_slice& piece, std::int64_t logical, F&& f) {
  each_run(part, [&](std::int64_t from, std::int64_t to, std::int64_t count) {
    const std::int64_t begin = std::max(to, piece.begin);
    const std::int64_t end = std::min({to + count, piece.end, to + logical - from});
    if (begin < end) f(from + begin - to, begin, end - begin);
  });
}

}  // namespace detail

/// Other names of a parameter in a checkpoint, such as for a tied output projection: {"lm_head.weight",
/// "model.embed_tokens.weight"}.
using parameter_aliases = std::vector<std::pair<std::string, std::string>>;

namespace detail {

/// Returns the tensors of a file by name. Throws if two tensors have one name.
inline std::unordered_map<std::string_view, const weight_tensor*> entries_by_name(
    std::span<const weight_tensor> entries, const std::string& source) {
  std::unordered_map<std::string_view, const weight_tensor*> by_name;
  for (const weight_tensor& e : entries)
    if (!by_name.emplace(e.name, &e).second) fail({source, ": two tensors are called '", e.name, "'"});
  return by_name;
}

/// The tensors of a file that the parameters of some stages need.
struct wanted_tensors {
  std::set<std::uint64_t> names;  ///< hashes of the names of all parameters
  std::vector<std::string> missing, misfits;

  /// Adds the names and errors of the other stages. Collective along the pipeline.
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
          const std::string text = theirs.substr(at, end - at);  // a tied parameter is on two stages, with one text
          if (std::find(list->begin(), list->end(), text) == list->end()) list->push_back(text);
        }
    }
  }
};

/// Reads runs of a tensor, in its order, as `T`. Short runs are read together with the gaps between them, because a
/// call costs more than reading some KB.
template <class T>
class run_reader {
 public:
  run_reader(const weight_tensor& from, T* out) : from_(from), out_(out), width_(size_of(from.dtype)) {}

  /// Requests elements [from, from + count) for the place `to`. They are read now, or together with later elements.
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

/// Fills this rank's part of parameter `p` from `full`, a whole tensor without padding, converted to the master type.
/// Rows of padding become zero. Throws `error` that starts with `source` and names the tensor. Causes are another
/// shape, elements that are not floating-point numbers, and a file that cannot be read.
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
    detail::each_run_of(p.part(), p.slice(), full.size(),
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

/// Fills every parameter of `model` from the whole tensors of a checkpoint, on any mesh: each rank reads its own part.
/// For a `pipeline` this is collective along it, and `entries` are the tensors of the whole model. Before it changes
/// anything, it throws `error` with all names, whose text starts with `source`. Causes are a parameter of any stage
/// without a tensor of its shape, and a tensor without a parameter. A tensor under the first name of an alias may be
/// absent. If it is present, it must equal the tensor under the second name. A file that cannot be read to its end is
/// also an error, but then some parameters are filled. Parameters whose names `keeps` accepts, such as `is_of_adapter`,
/// stay as they are and have no tensors.
template <compute_device Device, class Model>
void load_weights(const context<Device>& ctx, Model& model, std::span<const weight_tensor> entries,
                  const std::string& source, const parameter_aliases& aliases = {},
                  bool (*keeps)(std::string_view name) = nullptr) {
  const auto stays = [&](const std::string& name) { return is_last_load(name) || (keeps != nullptr && keeps(name)); };
  const auto by_name = detail::entries_by_name(entries, source);
  const auto find = [&](const std::string& name) {
    const auto found = by_name.find(name);
    return found == by_name.end() ? nullptr : found->second;
  };
  detail::wanted_tensors wanted;
  model.visit([&](auto& p) {
    if (stays(p.name())) return;
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
  model.visit([&](auto& p) {
    if (!stays(p.name())) load_parameter(ctx, p, *find(p.name()), source);
  });
}

template <compute_device Device, class Model>
void load_weights(const context<Device>& ctx, Model& model, std::span<const safetensors_entry> entries,
                  const std::string& source, const parameter_aliases& aliases = {}) {
  load_weights(ctx, model, std::span<const weight_tensor>(weights_in_memory(entries)), source, aliases);
}

namespace detail {

/// Whether this rank writes its piece of `p`. Of the ranks that hold equal elements, the one with coordinate 0 writes.
template <class Precision, compute_device Device>
bool writes(const context<Device>& ctx, const parameter<Precision, Device>& p) {
  const mesh_shape& mesh = ctx.ranks.shape();
  for (axis_id axis : mesh.axes) {
    const bool cut = p.stored().sharded_by(axis) || (p.storage() && p.storage()->axes().contains(axis));
    if (!cut && ctx.ranks.coordinate(axis) != 0) return false;
  }
  return p.counts();
}

/// Calls f(begin in the whole tensor, values, count) for each run of master values that this rank writes. The values
/// are a copy, which f may change.
template <class Precision, compute_device Device, class F>
void each_written_run(const context<Device>& ctx, const parameter<Precision, Device>& p, F&& f) {
  const storage_slice own = p.slice();
  if (own.size() == 0 || !writes(ctx, p)) return;
  std::vector<master_of<Precision>> values(static_cast<std::size_t>(own.size()));
  ctx.device.download(values.data(), p.value(), values.size() * sizeof(values[0]), ctx.device.main_stream());
  each_run_of(p.part(), own, elements_of_shape(p.info().shape),
              [&](std::int64_t to, std::int64_t from, std::int64_t count) {
                f(to, values.data() + (from - own.begin), count);
              });
}

/// The matrices of a low-rank adapter, A [rank, in] and B [out, rank], both whole. For stacked weights [matrices, out,
/// in], the adapters' matrices are stacked in the same way.
template <class Master>
struct whole_adapter {
  std::vector<Master> a, b;
  std::int64_t rank = 0;
  double scale = 0;
  std::int64_t matrices = 1;

  /// Adds scale * B A to `count` elements of the weight [out, in], from element `begin` on. As in peft's
  /// merge_and_unload, the product is rounded to the weight's type before it is added.
  void add_to(std::int64_t begin, Master* values, std::int64_t count) const {
    using number = arithmetic<Master>;
    const std::int64_t ranks = rank * matrices, columns = static_cast<std::int64_t>(a.size()) / ranks;
    const std::int64_t rows = static_cast<std::int64_t>(b.size()) / ranks;
    std::vector<number> product;
    for (std::int64_t at = begin, n = 0; at < begin + count; at += n, values += n) {
      const std::int64_t row = at / columns, column = at % columns;
      n = std::min(begin + count - at, columns - column);
      product.assign(static_cast<std::size_t>(n), 0);
      for (std::int64_t r = 0; r < rank; ++r) {
        const number factor = widened(b[static_cast<std::size_t>(row * rank + r)]);
        const Master* const from = a.data() + (row / rows * rank + r) * columns + column;
        for (std::int64_t i = 0; i < n; ++i) product[static_cast<std::size_t>(i)] += factor * widened(from[i]);
      }
      for (std::int64_t i = 0; i < n; ++i) {
        const auto added = converted<Master>(product[static_cast<std::size_t>(i)] * static_cast<number>(scale));
        values[i] = converted<Master>(widened(values[i]) + widened(added));
      }
    }
  }
};

/// Adapters by the names of the weights that they adapt.
template <class Precision>
using whole_adapters = std::map<std::string, whole_adapter<master_of<Precision>>>;

/// Returns the whole adapters of this rank's stages. Collective over the context's mesh.
template <compute_device Device, class Model>
whole_adapters<typename Model::precision_type> gather_adapters(const context<Device>& ctx, Model& model) {
  whole_adapters<typename Model::precision_type> all;
  model.visit([&](const auto& p) {
    if (!is_of_adapter(p.name())) return;
    auto& of = all[p.name().substr(0, p.name().find(".lora_")) + ".weight"];
    const bool second = p.name().ends_with(".lora_B.weight");
    auto& whole = second ? of.b : of.a;
    if (second) {
      of.scale = p.info().adapter_scale, of.matrices = p.info().adapter_matrices;
      of.rank = p.info().shape.back();
    }
    whole.resize(static_cast<std::size_t>(elements_of_shape(p.info().shape)));
    each_written_run(ctx, p, [&](std::int64_t to, const auto* values, std::int64_t count) {
      std::copy_n(values, count, whole.data() + to);
    });
    all_reduce_values(ctx.device, ctx.ranks.group(ctx.ranks.shape().axes), whole.data(), whole.size(), reduce_op::sum);
  });
  return all;
}

/// Writes tensors into the files that `create_files` has made in a directory.
class weight_writer {
 public:
  weight_writer(const safetensors_shards& shards, std::string folder, std::string field)
      : shards_(shards), folder_(std::move(folder)), field_(std::move(field)) {}

  /// Writes the elements from `begin` on of a tensor of this shape, to the place that `place` gives. An element has
  /// `width` bytes.
  void write(const weight_place& place, const std::vector<std::int64_t>& shape, std::int64_t begin,
             std::span<const std::byte> bytes, std::size_t width) {
    const std::int64_t all = elements_of_shape(shape), end = begin + static_cast<std::int64_t>(bytes.size() / width);
    const auto put = [&](const std::string& tensor, std::int64_t at, std::int64_t to, std::int64_t n) {
      const safetensors_shards::place& where = shards_.of(tensor);
      file(where.file)
          .write(where.offset + static_cast<std::uint64_t>(to) * width,
                 bytes.data() + static_cast<std::size_t>(at - begin) * width, static_cast<std::size_t>(n) * width);
    };
    if (!place.parts.empty()) {
      const std::int64_t part = std::max<std::int64_t>(all / static_cast<std::int64_t>(place.parts.size()), 1);
      for (std::int64_t at = begin; at < end;) {
        const std::int64_t i = at / part, n = std::min(end, (i + 1) * part) - at;
        put(place.parts[static_cast<std::size_t>(i)], at, at % part, n);
        at += n;
      }
    } else if (place.row_at) {
      const std::int64_t row = shape.empty() ? 1 : all / std::max<std::int64_t>(shape[0], 1);
      each_row_run(begin, end, row, place.row_at,
                   [&](std::int64_t at, std::int64_t to, std::int64_t n) { put(place.tensor, at, to, n); });
    } else {
      put(place.tensor, begin, begin, end - begin);
    }
  }
  void close() {
    for (auto& [index, file] : files_) file.close();
  }

 private:
  file_of_parts& file(std::size_t index) {
    if (!files_.contains(index))
      files_.emplace(
          index, file_of_parts::open((std::filesystem::path(folder_) / shards_.files()[index].name).string(), field_));
    return files_.at(index);
  }

  const safetensors_shards& shards_;
  std::string folder_, field_;
  std::map<std::size_t, file_of_parts> files_;
};

}  // namespace detail

/// Returns the names and logical shapes of all parameters, sorted by name and equal on every rank. For a `pipeline` the
/// list has all stages' parameters, and the call is collective along it.
template <compute_device Device, class Model>
std::vector<safetensors_declaration> shapes_of(const context<Device>& ctx, Model& model, safetensors_dtype dtype) {
  manifest own;
  model.visit([&](auto& p) {
    if (p.counts()) own.tensors.push_back({p.name(), dtype, p.info().shape, {}});
  });
  std::vector<std::string> stages{detail::unchecked_text(own)};
  if constexpr (requires { model.executor().along(); })
    stages = gather_texts(ctx.device, model.executor().along(), stages.front());
  std::vector<safetensors_declaration> all;
  for (const std::string& text : stages)
    for (stored_tensor& t : detail::manifest_from(text, "a stage's parameters").tensors)
      all.push_back({std::move(t.name), t.dtype, std::move(t.shape)});
  std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  return all;
}

/// Makes the files in `folder`, with their headers and full sizes. One rank calls it.
inline void create_files(const safetensors_shards& shards, const std::string& folder, const std::string& field) {
  for (const auto& f : shards.files()) {
    file_of_parts file = file_of_parts::create((std::filesystem::path(folder) / f.name).string(), f.bytes, field);
    file.write(0, f.header.data(), f.header.size());
    file.close();
  }
}

/// Writes this rank's share of the master values, converted to `dtype`, into files that `create_files` has made. This
/// rank must see these files. `adapters` are merged into the values, and `place` names the place of a parameter's rows.
/// Each element is written by one rank. Not collective. Throws `error` starting with `field`.
template <compute_device Device, class Model>
void write_weights(const context<Device>& ctx, Model& model, const safetensors_shards& shards, safetensors_dtype dtype,
                   const std::string& folder, const std::string& field,
                   const std::function<weight_place(const std::string&)>& place,
                   const detail::whole_adapters<typename Model::precision_type>& adapters) {
  const auto written = weight_dtype_of(dtype);
  if (!written) fail({"weights are written as F64, F32 or BF16, not as ", name_of(dtype)});
  detail::weight_writer writer(shards, folder, field);
  std::vector<std::byte> converted_run;
  model.visit([&](auto& p) {
    if (is_of_adapter(p.name()) || is_last_load(p.name())) return;
    using master = typename std::remove_cvref_t<decltype(p)>::master_type;
    const auto adapter = adapters.find(p.name());
    const weight_place there = place(p.name());
    detail::each_written_run(ctx, p, [&](std::int64_t to, master* values, std::int64_t count) {
      if (adapter != adapters.end()) adapter->second.add_to(to, values, count);
      converted_run.resize(static_cast<std::size_t>(count) * size_of(dtype));
      convert_elements(safetensors_dtype_of(dtype_of<master>), *written, reinterpret_cast<const std::byte*>(values),
                       converted_run.data(), count, p.name());
      writer.write(there, p.info().shape, to, converted_run, size_of(dtype));
    });
  });
  writer.close();
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
