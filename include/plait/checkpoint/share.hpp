// One rank's part of a step: staged in host memory, then written as a data file and a note of its contents. Rank 0
// writes the manifest from the notes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "plait/checkpoint/manifest.hpp"
#include "plait/checkpoint/safetensors.hpp"
#include "plait/checkpoint/step_directory.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/io/file_system.hpp"

namespace plait {

/// One rank's boxes of a step. `bytes` has their data one after the other, in this order, and then the blobs' bytes.
struct staged_share {
  struct staged_box {
    std::string tensor;
    safetensors_dtype dtype = safetensors_dtype::f32;
    box where;
  };
  std::vector<staged_box> boxes;
  std::vector<std::pair<std::string, std::uint64_t>> blobs{};  ///< names and bytes
  std::span<const std::byte> bytes;
};

/// The result of a writer's work: its file, its boxes of each tensor, its blobs. `stored_bytes::file` is 0.
struct written_share {
  stored_file file;
  std::vector<stored_tensor> tensors;
  std::vector<stored_blob> blobs{};
  /// An older step whose file of this writer was re-read and verified.
  std::optional<std::uint64_t> read_again{};
};

namespace detail {

/// Returns a writer's name, such as "w00017", which the data file's name contains.
inline std::string writer_name(std::uint32_t writer) {
  const std::string file = data_file_name(writer);
  const std::size_t begin = file.find('/') + 1;
  return file.substr(begin, file.find('.') - begin);
}
/// Returns the number in a text that begins with a writer's name.
inline std::size_t writer_of(const std::string& name) { return std::stoul(name.substr(1)); }

}  // namespace detail

/// A writer's data file in the directory of a step in progress. Boxes are declared first. Their bytes follow in the
/// same order, and then the bytes of blobs. Throws `error` as `file_system` and `safetensors_stream`.
class share_writer {
 public:
  share_writer(file_system& files, const std::string& directory, std::uint32_t writer,
               const std::vector<staged_share::staged_box>& boxes,
               const std::vector<std::pair<std::string, std::uint64_t>>& blobs)
      : blobs_(blobs), name_(data_file_name(writer)) {
    std::map<std::string_view, std::size_t> known;
    std::vector<safetensors_declaration> entries;
    for (const staged_share::staged_box& b : boxes) {
      const auto dims = static_cast<std::size_t>(b.where.dims);
      const auto [place, is_new] = known.try_emplace(b.tensor, done_.tensors.size());
      if (is_new)
        done_.tensors.push_back({b.tensor, b.dtype, {b.where.global.begin(), b.where.global.begin() + dims}, {}});
      stored_tensor& tensor = done_.tensors[place->second];
      stored_box& part = tensor.boxes.emplace_back();
      std::copy_n(b.where.offset.begin(), dims, part.offset.begin());
      std::copy_n(b.where.local.begin(), dims, part.extent.begin());
      places_.emplace_back(place->second, tensor.boxes.size() - 1);
      entries.push_back(
          {entry_name(tensor, part), b.dtype, {b.where.local.begin(), b.where.local.begin() + b.where.dims}});
    }
    for (const auto& [name, bytes] : blobs_)
      entries.push_back({"blob." + name, safetensors_dtype::u8, {static_cast<std::int64_t>(bytes)}});
    const std::string path = directory + "/" + name_;
    out_.emplace(files, path, plan_safetensors(entries, {{"format", "plait checkpoint"}}, "'" + path + "'"));
  }

  void append(std::span<const std::byte> bytes) { out_->append(bytes); }
  /// Appends bytes that must not change until `finish` has returned or this is destroyed.
  void append_lasting(std::span<const std::byte> bytes) { out_->append_lasting(bytes); }
  /// Syncs and closes the file.
  written_share finish() {
    out_->finish();
    done_.file = {name_, out_->plan().file_bytes, out_->plan().header.size(), out_->header_crc32c()};
    const auto stored = [&](std::size_t i) {
      return stored_bytes{0, out_->crc32c_of_tensors()[i], out_->plan().positions[i], out_->plan().bytes[i]};
    };
    for (std::size_t i = 0; i < places_.size(); ++i)
      done_.tensors[places_[i].first].boxes[places_[i].second].stored = stored(i);
    for (std::size_t i = 0; i < blobs_.size(); ++i)
      done_.blobs.push_back({blobs_[i].first, stored(places_.size() + i)});
    return std::move(done_);
  }

 private:
  std::vector<std::pair<std::string, std::uint64_t>> blobs_;
  std::string name_;
  written_share done_;
  /// For each box: the index of its tensor, and of the box in the tensor.
  std::vector<std::pair<std::size_t, std::size_t>> places_;
  std::optional<safetensors_stream> out_;
};

/// Writes a rank's data file into the directory of a step in progress, and syncs it. Throws `error` as `share_writer`.
/// `each`, if given, is called after each block; an exception from it ends the write. The share's bytes must not change
/// until this returns or throws.
inline written_share write_share(file_system& files, const std::string& directory, std::uint32_t writer,
                                 const staged_share& share, const std::function<void()>& each = {}) {
  share_writer out(files, directory, writer, share.boxes, share.blobs);
  constexpr std::size_t block = std::size_t{8} << 20;
  for (std::size_t at = 0; at < share.bytes.size(); at += block) {
    out.append_lasting(share.bytes.subspan(at, std::min(block, share.bytes.size() - at)));
    if (each) each();
  }
  return out.finish();
}

/// Returns the text of a writer's note, in the format of a manifest. Only the job that wrote it reads it.
inline std::string note_text(const written_share& share) {
  manifest m;
  m.files = {share.file};
  m.tensors = share.tensors;
  m.blobs = share.blobs;
  if (share.read_again) m.scalars.emplace_back("read_again", *share.read_again);
  return detail::unchecked_text(m);
}
/// Reads the text of a note. Throws `error` if it is truncated or damaged.
inline written_share parse_note(std::string_view text) {
  const std::string source = "checkpoint: a writer's note";
  manifest m = detail::manifest_from(text, source);
  if (m.files.size() != 1) fail({source, " names ", m.files.size(), " files; legal is 1"});
  written_share share{std::move(m.files[0]), std::move(m.tensors), std::move(m.blobs)};
  for (const auto& [name, value] : m.scalars) {
    const auto* const small = std::get_if<std::int64_t>(&value);  // small numbers are read as this type
    const auto* const large = std::get_if<std::uint64_t>(&value);
    if (name != "read_again" || (small == nullptr && large == nullptr))
      fail({source, " has the scalar '", name, "'; legal is read_again, a step"});
    share.read_again = small != nullptr ? static_cast<std::uint64_t>(*small) : *large;
  }
  return share;
}

/// Adds a writer's share to the manifest of its step. `known` maps tensors to their indices in it.
inline void add_share(manifest& m, std::map<std::string, std::size_t>& known, const written_share& share) {
  const auto file = static_cast<std::uint32_t>(m.files.size());
  m.files.push_back(share.file);
  for (const stored_tensor& t : share.tensors) {
    const auto [place, is_new] = known.try_emplace(t.name, m.tensors.size());
    if (is_new) m.tensors.push_back({t.name, t.dtype, t.shape, {}});
    stored_tensor& all = m.tensors[place->second];
    if (all.dtype != t.dtype || all.shape != t.shape)
      fail({"checkpoint: '", t.name, "' is ", name_of(t.dtype), " on one rank and ", name_of(all.dtype),
            " on another, or has another shape there"});
    for (stored_box b : t.boxes) {
      b.stored.file = file;
      all.boxes.push_back(b);
    }
  }
  for (stored_blob b : share.blobs) {
    b.stored.file = file;
    m.blobs.push_back(std::move(b));
  }
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
