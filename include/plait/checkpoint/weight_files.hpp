// Whole tensors of a model's weights, which are read in parts from safetensors files, from memory or as rows of another
// tensor (models/weights_order.hpp). A folder may hold several files. Files are not mapped, so that a truncated file is
// an error.
#pragma once

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "plait/checkpoint/safetensors.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/io/file_system.hpp"
#include "plait/io/json.hpp"
#include "plait/io/mapped_file.hpp"
#include "plait/io/posix_file_system.hpp"

namespace plait {

/// A tensor with a name, whose elements are read on request.
struct weight_tensor {
  std::string name;
  safetensors_dtype dtype = safetensors_dtype::f32;
  std::vector<std::int64_t> shape;
  /// Reads elements [begin, end), counted row-major, into `out`. Several threads may call it at once.
  std::function<void(std::int64_t begin, std::int64_t end, std::byte* out)> read;

  /// Number of elements.
  std::int64_t size() const { return elements_of_shape(shape); }
};

/// Returns a tensor of elements in memory, which must outlive the result. Throws `error` that names it if its bytes do
/// not fit its shape.
inline weight_tensor weight_in_memory(const safetensors_entry& entry) {
  if (safetensors_bytes(entry.shape, entry.dtype) != entry.bytes.size())
    fail({"tensor '", entry.name, "' has ", entry.bytes.size(), " bytes, which are not those of its shape ",
          detail::shape_text(entry.shape), " in ", name_of(entry.dtype)});
  return {entry.name, entry.dtype, entry.shape,
          [bytes = entry.bytes, width = size_of(entry.dtype)](std::int64_t begin, std::int64_t end, std::byte* out) {
            if (begin == end) return;
            std::memcpy(out, bytes.data() + static_cast<std::size_t>(begin) * width,
                        static_cast<std::size_t>(end - begin) * width);
          }};
}
inline std::vector<weight_tensor> weights_in_memory(std::span<const safetensors_entry> entries) {
  std::vector<weight_tensor> all;
  for (const safetensors_entry& e : entries) all.push_back(weight_in_memory(e));
  return all;
}

/// Opens a safetensors file, reads its header, and returns its tensors, in the order of their data. The tensors keep
/// the file open, and read elements on request. Throws `error` that starts with `field` and names the path if the file
/// cannot be opened or read, and as `parse_safetensors_header`. `weight_tensor::read` throws `error` that names the
/// path of a file that has become shorter since.
inline std::vector<weight_tensor> weights_of_file(const std::string& path, const std::string& field,
                                                  file_system& files = machine_files()) {
  const std::string source = cat({field, ": '", path, "'"});
  const std::shared_ptr<const open_file> file = naming_field(field, [&] { return files.open(path); });
  std::vector<std::byte> start(8);
  const std::uint64_t size = naming_field(field, [&] {
    const std::uint64_t bytes = file->size();
    file->read(0, std::span(start).first(static_cast<std::size_t>(std::min<std::uint64_t>(bytes, 8))));
    return bytes;
  });
  start.resize(safetensors_header_end(start, size, source));
  naming_field(field, [&] { file->read(0, start); });
  std::vector<weight_tensor> all;
  for (safetensors_position& t : parse_safetensors_header(start, size, source).tensors)
    all.push_back(
        {std::move(t.name), t.dtype, std::move(t.shape),
         [file, position = t.position, width = size_of(t.dtype)](std::int64_t begin, std::int64_t end, std::byte* out) {
           file->read(position + static_cast<std::uint64_t>(begin) * width,
                      {out, static_cast<std::size_t>(end - begin) * width});
         }});
  return all;
}

/// The place of a tensor's rows in a tensor of another tool, which may contain other rows too.
struct weight_place {
  std::string tensor;                                  ///< the other tensor's name
  std::int64_t rows = 0;                               ///< the other tensor's number of rows
  std::function<std::int64_t(std::int64_t)> row_at{};  ///< index there of row i; empty: i
  /// If not empty, replaces `tensor`: tensors that hold the rows one after the other, with equal numbers of rows.
  std::vector<std::string> parts{};
};

/// Calls f(first element, its place, elements) for runs of the elements [begin, end) of a tensor whose rows have `row`
/// elements. Row i is row `row_at(i)` of another tensor, and a run is contiguous there too.
template <class RowAt, class F>
void each_row_run(std::int64_t begin, std::int64_t end, std::int64_t row, RowAt&& row_at, F&& f) {
  while (begin < end) {
    const std::int64_t first = begin / row, there = row_at(first);
    std::int64_t last = first + 1;
    while (last * row < end && row_at(last) == there + (last - first)) ++last;
    const std::int64_t n = std::min(end, last * row) - begin;
    f(begin, there * row + begin % row, n);
    begin += n;
  }
}

/// Calls f(begin, end) for blocks of some MB of `n` elements of `type`.
template <class F>
void each_block(std::int64_t n, safetensors_dtype type, F&& f) {
  const auto most = static_cast<std::int64_t>((std::size_t{4} << 20) / size_of(type));
  for (std::int64_t begin = 0; begin < n; begin += most) f(begin, std::min(n, begin + most));
}

/// Returns whether two tensors have equal types, shapes and elements. It reads them in blocks.
inline bool same_elements(const weight_tensor& a, const weight_tensor& b) {
  if (a.dtype != b.dtype || a.shape != b.shape) return false;
  bool same = true;
  std::vector<std::byte> here, there;
  each_block(a.size(), a.dtype, [&](std::int64_t begin, std::int64_t end) {
    if (!same) return;
    here.resize(static_cast<std::size_t>(end - begin) * size_of(a.dtype));
    there.resize(here.size());
    a.read(begin, end, here.data());
    b.read(begin, end, there.data());
    same = here == there;
  });
  return same;
}

/// Returns all bytes of a tensor.
inline std::vector<std::byte> bytes_of(const weight_tensor& tensor) {
  std::vector<std::byte> all(static_cast<std::size_t>(tensor.size()) * size_of(tensor.dtype));
  tensor.read(0, tensor.size(), all.data());
  return all;
}

/// The tensors of the safetensors files in a folder. The files are open, and elements are read on request.
class safetensors_directory {
 public:
  /// Throws `error`, whose text starts with `field` and `path`, in these cases. The folder has no weights, or the path
  /// is a file. A shard is missing or malformed. Two tensors have one name. A shard and the index differ. The index
  /// names a file outside of the folder.
  explicit safetensors_directory(const std::string& path, const std::string& field = "path")
      : path_(path), field_(field) {
    require_folder();
    const bool file = exists(safetensors_file_name), index = exists(safetensors_index_name);
    if (file && index)
      bad(cat({"has both ", safetensors_file_name, " and ", safetensors_index_name,
               ", which may hold different weights; take one out"}));
    if (file)
      open(safetensors_file_name);
    else if (index)
      open_shards();
    else
      no_weights();
  }

  const std::string& path() const { return path_; }
  /// Returns the beginning of error texts about the tensors.
  std::string source() const { return cat({field_, ": '", path_, "'"}); }
  /// All tensors, file by file, in the order of their data.
  const std::vector<weight_tensor>& entries() const { return entries_; }
  /// Returns the name of the file that has the tensor `name`. Throws `error` if none has it.
  const std::string& file_of(const std::string& name) const {
    if (const auto found = file_of_.find(name); found != file_of_.end()) return found->second;
    bad(cat({"has no tensor '", name, "' among its ", entries_.size()}));
  }

 private:
  [[noreturn]] void bad(const std::string& what) const { fail({source(), " ", what}); }
  std::string within(const std::string& name) const { return (std::filesystem::path(path_) / name).string(); }
  bool exists(const std::string& name) const {
    std::error_code why;
    const bool found = std::filesystem::exists(within(name), why);
    if (why) fail({field_, ": cannot look for '", within(name), "': ", why.message()});
    return found;
  }

  void require_folder() const {
    struct stat status {};
    if (::stat(path_.c_str(), &status) != 0)
      fail({field_, ": cannot open '", path_, "': ", std::strerror(errno),
            "; it is a folder on this machine, to which a model of Hugging Face's hub is downloaded first"});
    if (S_ISDIR(status.st_mode)) return;
    const std::filesystem::path folder = std::filesystem::path(path_).parent_path();
    bad(cat({"is a file; name the folder that has the model's config.json and weights",
             path_.ends_with(".safetensors") || path_.ends_with(".json")
                 ? cat({", '", folder.empty() ? "." : folder.string(), "'"})
                 : std::string()}));
  }
  [[noreturn]] void no_weights() const {
    std::vector<std::string> shards;
    bool pickled = false;
    std::error_code ignored;
    for (const auto& entry : std::filesystem::directory_iterator(path_, ignored)) {
      const std::string name = entry.path().filename().string();
      if (name.ends_with(".safetensors")) shards.push_back(name);
      pickled = pickled || (name.starts_with("pytorch_model") && name.ends_with(".bin"));
    }
    std::sort(shards.begin(), shards.end());
    bad(cat({"has neither ", safetensors_file_name, " nor ", safetensors_index_name,
             shards.empty() ? "" : cat({"; it has ", detail::quoted(shards), ", and no index of their tensors"}),
             pickled ? "; its pytorch_model.bin can run any code when it is read: save the model again with "
                       "transformers, which writes safetensors"
                     : ""}));
  }

  void open(const std::string& name) {
    for (weight_tensor& entry : weights_of_file(within(name), field_)) {
      const auto [other, is_new] = file_of_.emplace(entry.name, name);
      if (!is_new) bad(cat({"has the tensor '", entry.name, "' twice, in ", other->second, " and in ", name}));
      entries_.push_back(std::move(entry));
    }
  }

  void open_shards() {
    const std::map<std::string, std::string> index = read_index();
    std::set<std::string> names;
    for (const auto& [tensor, file] : index) names.insert(file);
    std::string missing;
    for (const std::string& name : names)
      if (!exists(name)) missing += (missing.empty() ? "'" : "', '") + name;
    if (!missing.empty()) bad(cat({"lacks files that ", safetensors_index_name, " names: ", missing, "'"}));
    for (const std::string& name : names) open(name);
    for (const auto& [tensor, file] : file_of_) {
      const auto listed = index.find(tensor);
      if (listed == index.end())
        bad(cat({"has the tensor '", tensor, "' in ", file, ", and ", safetensors_index_name, " does not name it"}));
      if (listed->second != file)
        bad(cat({"has the tensor '", tensor, "' in ", file, ", and ", safetensors_index_name, " says that it is in ",
                 listed->second}));
    }
    for (const auto& [tensor, file] : index)
      if (!file_of_.contains(tensor))
        bad(cat({"has no tensor '", tensor, "' in ", file, ", although ", safetensors_index_name, " lists it there"}));
  }

  std::map<std::string, std::string> read_index() const {
    const std::string path = within(safetensors_index_name);
    return parse_safetensors_index(read_file(path, field_), cat({field_, ": '", path, "'"}));
  }

  std::string path_, field_;
  std::vector<weight_tensor> entries_;
  std::map<std::string, std::string> file_of_;
};

/// The division of tensors into files, in the given order.
class safetensors_shards {
 public:
  struct file {
    std::string name;
    std::string header;       ///< the first bytes of the file
    std::uint64_t bytes = 0;  ///< of the whole file
  };
  struct place {
    std::size_t file = 0;
    std::uint64_t offset = 0;  ///< of the first element, in its file
  };

  /// Each file has at most `most` bytes of tensors, or one tensor. A single file is called model.safetensors, several
  /// model-00001-of-00003.safetensors and so on. Throws as `plan_safetensors` does, with `source`.
  safetensors_shards(const std::vector<safetensors_declaration>& tensors, std::uint64_t most,
                     const std::string& source) {
    std::vector<std::vector<safetensors_declaration>> parts(1);
    std::uint64_t bytes = 0;
    for (const safetensors_declaration& t : tensors) {
      const std::uint64_t own = safetensors_bytes(t.shape, t.dtype).value_or(0);
      if (!parts.back().empty() && bytes + own > most) parts.emplace_back(), bytes = 0;
      parts.back().push_back(t);
      bytes += own;
      total_ += own;
    }
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const std::string name = parts.size() == 1
                                   ? safetensors_file_name
                                   : cat({"model-", five(i + 1), "-of-", five(parts.size()), ".safetensors"});
      // transformers refuses files without this metadata.
      safetensors_plan plan = plan_safetensors(parts[i], {{"format", "pt"}}, source);
      for (std::size_t k = 0; k < parts[i].size(); ++k)
        if (!places_.emplace(parts[i][k].name, place{i, plan.positions[k]}).second)
          fail({source, ": the name '", parts[i][k].name, "' is used twice"});
      files_.push_back({name, std::move(plan.header), plan.file_bytes});
    }
  }

  const std::vector<file>& files() const { return files_; }
  const place& of(const std::string& tensor) const { return places_.at(tensor); }
  /// Returns the text of model.safetensors.index.json, which a model in several files needs.
  std::string index() const {
    json_object map;
    for (const auto& [name, where] : places_) map.add(name, files_[where.file].name);
    return json_object().add("metadata", json_object().add("total_size", total_)).add("weight_map", map).lines();
  }

 private:
  static std::string five(std::size_t n) {
    const std::string digits = std::to_string(n);
    return std::string(digits.size() < 5 ? 5 - digits.size() : 0, '0') + digits;
  }

  std::vector<file> files_;
  std::map<std::string, place> places_;
  std::uint64_t total_ = 0;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
