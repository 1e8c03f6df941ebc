// Shares out tensors to safetensors files of a limited size: names, headers, and where the elements of each tensor go.
// It writes nothing, so that every rank knows the same.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "plait/checkpoint/safetensors_directory.hpp"
#include "plait/checkpoint/safetensors_writer.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/io/json_writer.hpp"

namespace plait {

/// Files of tensors that are shared out in the given order.
class safetensors_shards {
 public:
  struct file {
    std::string name;
    std::string header;       ///< the first bytes of the file
    std::uint64_t bytes = 0;  ///< of the whole file
  };
  struct place {
    std::size_t file = 0;
    std::uint64_t offset = 0;  ///< of the first element, in that file
  };

  /// A file has at most `most` bytes of tensors, or one tensor. One file is called model.safetensors, several
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
      // Without this metadata transformers refuses the file.
      safetensors_plan plan = plan_safetensors(parts[i], {{"format", "pt"}}, source);
      for (std::size_t k = 0; k < parts[i].size(); ++k)
        if (!places_.emplace(parts[i][k].name, place{i, plan.positions[k]}).second)
          fail({source, ": the name '", parts[i][k].name, "' is used twice"});
      files_.push_back({name, std::move(plan.header), plan.file_bytes});
    }
  }

  const std::vector<file>& files() const { return files_; }
  const place& of(const std::string& tensor) const { return places_.at(tensor); }
  /// The text of model.safetensors.index.json, which several files need.
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
