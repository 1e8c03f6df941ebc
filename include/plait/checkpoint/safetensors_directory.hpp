// Opens all tensors of a folder as Hugging Face lays it out: one model.safetensors, or shards and an index that says
// which tensor is where.
#pragma once

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "plait/checkpoint/weight_tensor.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/io/mapped_file.hpp"

namespace plait {

inline constexpr const char* safetensors_file_name = "model.safetensors";
inline constexpr const char* safetensors_index_name = "model.safetensors.index.json";

/// Returns the file of each tensor, as the text of a model.safetensors.index.json says. Throws `error`, its text
/// starting with `source`, where it has no weight_map, or one that names something else than .safetensors files of the
/// same folder.
std::map<std::string, std::string> parse_safetensors_index(std::string_view text, const std::string& source);

/// The files of a folder that have tensors, open. No element is read before somebody asks for it.
class safetensors_directory {
 public:
  /// Throws `error`, its text starting with `field` and `path`: where the folder has no weights, or a file of one is
  /// named instead; where a shard is missing or is malformed; where two tensors have one name; and where a shard and
  /// the index do not say the same. Names in the index must be those of files in the folder itself.
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
  /// Returns the beginning of messages about the tensors.
  std::string source() const { return cat({field_, ": '", path_, "'"}); }
  /// All tensors, file by file, in the order of their data.
  const std::vector<weight_tensor>& entries() const { return entries_; }
  /// The name of the file that has the tensor `name`; `error` if none has.
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
    bad(cat(
        {"has neither ", safetensors_file_name, " nor ", safetensors_index_name,
         shards.empty() ? "" : cat({"; it has ", detail::quoted(shards), ", and no index that says what is in them"}),
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
      const auto said = index.find(tensor);
      if (said == index.end())
        bad(cat({"has the tensor '", tensor, "' in ", file, ", and ", safetensors_index_name, " does not name it"}));
      if (said->second != file)
        bad(cat({"has the tensor '", tensor, "' in ", file, ", and ", safetensors_index_name, " says that it is in ",
                 said->second}));
    }
    for (const auto& [tensor, file] : index)
      if (!file_of_.contains(tensor))
        bad(cat({"has no tensor '", tensor, "' in ", file, ", where ", safetensors_index_name, " says that it is"}));
  }

  std::map<std::string, std::string> read_index() const {
    const std::string path = within(safetensors_index_name);
    return parse_safetensors_index(read_file(path, field_), cat({field_, ": '", path, "'"}));
  }

  std::string path_, field_;
  std::vector<weight_tensor> entries_;
  std::map<std::string, std::string> file_of_;
};

}  // namespace plait

#ifndef PLAIT_COMPILED
#include "plait/checkpoint/safetensors_directory.ipp"  // IWYU pragma: keep
#endif

#include "plait/core/macros_on.hpp"
