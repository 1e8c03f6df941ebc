// Whether a manifest is consistent: every tensor covered exactly once, every byte of every file spoken for, no number
// that overflows, no path that leaves the directory.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_set>
#include <variant>
#include <vector>

#include "plait/checkpoint/manifest.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/io/utf8.hpp"

namespace plait {

namespace detail {

/// Checks that the boxes of one tensor, which lie in it, cover each element exactly once.
///
/// How many boxes an element is in is a function on the grid of elements; its differences along every dimension are a
/// sum of signed corners, 2^n for each box, and are zero where it is known to be that of the whole tensor. So the
/// corners of the boxes must cancel up to those of the tensor, which sorting shows. At the first corner, in row-major
/// order, that is left over, the function differs from 1 by just that corner's sum: it names an element.
class cover_check {
 public:
  cover_check(const stored_tensor& tensor, const std::string& where) : tensor_(tensor), where_(where) {}

  void run() {
    choose_dims();
    std::size_t corners = std::size_t{1} << dims_.size();
    for (std::vector<std::uint64_t>& side : sides_) side.reserve((tensor_.boxes.size() + 1) * ((corners + 1) / 2));
    stored_box whole;
    std::copy(tensor_.shape.begin(), tensor_.shape.end(), whole.extent.begin());
    add_corners(whole, 1);
    for (const stored_box& part : tensor_.boxes) add_corners(part, 0);
    for (std::vector<std::uint64_t>& side : sides_) std::sort(side.begin(), side.end());
    const auto [more, fewer] = std::mismatch(sides_[0].begin(), sides_[0].end(), sides_[1].begin(), sides_[1].end());
    if (more == sides_[0].end() && fewer == sides_[1].end()) return;
    const bool twice = fewer == sides_[1].end() || (more != sides_[0].end() && *more < *fewer);
    complain(twice ? *more : *fewer, twice);
  }

 private:
  /// Dimensions that no box divides say nothing. The corners of the others are counted in a grid that has one more
  /// point than elements along each.
  void choose_dims() {
    std::uint64_t points = 1;
    for (std::size_t d = tensor_.shape.size(); d-- > 0;) {
      const auto undivided = [&](const stored_box& b) { return b.extent[d] == tensor_.shape[d]; };
      if (std::all_of(tensor_.boxes.begin(), tensor_.boxes.end(), undivided) && !tensor_.boxes.empty()) continue;
      dims_.push_back({d, points});
      if (__builtin_mul_overflow(points, static_cast<std::uint64_t>(tensor_.shape[d]) + 1, &points))
        fail({where_, " is divided along too many dimensions for its size"});
    }
  }
  /// A corner's sign is negative for an odd number of upper ends; side 0 has what is positive for a box.
  void add_corners(const stored_box& part, std::size_t side) {
    for (std::size_t corner = 0; corner < std::size_t{1} << dims_.size(); ++corner) {
      std::uint64_t key = 0;
      std::size_t upper = 0;
      for (std::size_t i = 0; i < dims_.size(); ++i) {
        const auto [d, stride] = dims_[i];
        const std::size_t end = corner >> i & 1;
        upper += end;
        key += stride * static_cast<std::uint64_t>(part.offset[d] + (end != 0 ? part.extent[d] : 0));
      }
      sides_[(side + upper) % 2].push_back(key);
    }
  }
  [[noreturn]] void complain(std::uint64_t key, bool twice) const {
    std::vector<std::int64_t> element(tensor_.shape.size());
    for (std::size_t i = dims_.size(); i-- > 0;) {
      element[dims_[i].dim] = static_cast<std::int64_t>(key / dims_[i].stride);
      key %= dims_[i].stride;
    }
    std::string at, boxes;
    for (const std::int64_t index : element) append(at, {at.empty() ? "" : ", ", index});
    int named = 0;
    for (const stored_box& part : tensor_.boxes) {
      bool inside = true;
      for (std::size_t d = 0; d < element.size(); ++d) {
        inside = inside && part.offset[d] <= element[d] && element[d] < part.offset[d] + part.extent[d];
      }
      if (inside && named++ < 2) boxes += (named == 1 ? " " : " and ") + text_of_box(tensor_, part);
    }
    fail({where_, ": the element [", at, "] is in ", twice ? "more than one box:" : "no box", twice ? boxes : ""});
  }

  struct divided {
    std::size_t dim;
    std::uint64_t stride;
  };
  const stored_tensor& tensor_;
  const std::string& where_;
  std::vector<divided> dims_;  ///< from the last dimension to the first
  std::vector<std::uint64_t> sides_[2];
};

/// The state of `check_manifest`.
class manifest_check {
 public:
  manifest_check(const manifest& m, const std::string& source) : m_(m), source_(source) {}

  void run() {
    std::unordered_set<std::string_view> paths;
    for (const stored_file& file : m_.files) {
      check_path(file.path);
      if (!paths.insert(file.path).second) fail({source_, ": the file '", file.path, "' is listed twice"});
      if (file.header_bytes > file.bytes) {
        fail({source_, ": the file '", file.path, "' of ", file.bytes, " bytes has a header of ", file.header_bytes});
      }
    }
    if (!is_utf8(m_.layout)) fail({source_, ": the layout is not UTF-8"});
    std::unordered_set<std::string_view> scalars, blobs, tensors;
    for (const auto& [name, value] : m_.scalars) {
      claim(scalars, "scalar", name);
      const std::string* text = std::get_if<std::string>(&value);
      if (text != nullptr && !is_utf8(*text)) fail({source_, ": the scalar '", name, "' is not UTF-8"});
    }
    for (const stored_blob& blob : m_.blobs) {
      claim(blobs, "blob", blob.name);
      check_range(blob.stored, cat({source_, ": blob '", blob.name, "'"}));
    }
    for (const stored_tensor& tensor : m_.tensors) {
      claim(tensors, "tensor", tensor.name);
      check_tensor(tensor);
    }
    check_files();
  }

 private:
  void claim(std::unordered_set<std::string_view>& names, const char* kind, const std::string& name) const {
    if (name.empty()) fail({source_, ": a ", kind, " has no name"});
    if (!is_utf8(name)) fail({source_, ": the name of the ", kind, " '", name, "' is not UTF-8"});
    if (!names.insert(name).second) fail({source_, ": the ", kind, " '", name, "' appears twice"});
  }
  void check_path(const std::string& path) const {
    bool legal = path.starts_with("data/") && is_utf8(path);
    for (const char c : path) legal = legal && static_cast<unsigned char>(c) >= 0x20 && c != '\\';
    for (std::size_t begin = 0; legal && begin <= path.size();) {
      const std::size_t end = std::min(path.find('/', begin), path.size());
      const std::string_view part = std::string_view(path).substr(begin, end - begin);
      legal = !part.empty() && part != "." && part != "..";
      begin = end + 1;
    }
    if (!legal) fail({source_, ": the file '", path, "' is none in the step's directory data/"});
  }
  void check_range(const stored_bytes& stored, const std::string& where) const {
    if (stored.file >= m_.files.size())
      fail({where, " is in file ", stored.file, "; the files are 0 to ", m_.files.size(), ", exclusive"});
    const stored_file& file = m_.files[stored.file];
    if (stored.position > file.bytes || stored.bytes > file.bytes - stored.position) {
      fail({where, " has ", stored.bytes, " bytes from byte ", stored.position, " of '", file.path, "', which has ",
            file.bytes});
    }
  }
  void check_tensor(const stored_tensor& tensor) const {
    const std::string where = cat({source_, ": tensor '", tensor.name, "'"});
    if (tensor.shape.size() > static_cast<std::size_t>(max_dims))
      fail({where, " has ", tensor.shape.size(), " dimensions; legal are up to ", max_dims});
    const auto bytes = safetensors_bytes(tensor.shape, tensor.dtype);
    if (!bytes) fail({where, " has a negative extent, or takes more than 2^63 bytes"});
    for (const stored_box& part : tensor.boxes) check_box(tensor, part, where);
    if (*bytes == 0) return;  // and no box, since none fits
    cover_check(tensor, where).run();
  }
  void check_box(const stored_tensor& tensor, const stored_box& part, const std::string& where) const {
    std::uint64_t bytes = size_of(tensor.dtype);
    bool legal = true;
    for (std::size_t d = 0; d < max_dims; ++d) {
      const std::int64_t offset = part.offset[d], extent = part.extent[d];
      if (d < tensor.shape.size()) {
        legal = legal && offset >= 0 && extent >= 1 && extent <= tensor.shape[d] && offset <= tensor.shape[d] - extent;
        bytes *= static_cast<std::uint64_t>(extent);  // no more than the tensor's, if it is legal
      } else {
        legal = legal && offset == 0 && extent == 0;
      }
    }
    if (!legal) {
      std::string numbers;
      for (std::size_t d = 0; d < max_dims; ++d) append(numbers, {" ", part.offset[d], "+", part.extent[d]});
      fail({where, " has a box that is empty or not in it, as offset+extent:", numbers});
    }
    if (bytes != part.stored.bytes) {
      fail({where, ": its box ", text_of_box(tensor, part), " has ", part.stored.bytes, " bytes, and its extents take ",
            bytes});
    }
    if (part.stored.file < m_.files.size() && part.stored.bytes <= m_.files[part.stored.file].bytes &&
        part.stored.position <= m_.files[part.stored.file].bytes - part.stored.bytes)
      return;
    check_range(part.stored, cat({where, ": its box ", text_of_box(tensor, part)}));
  }

  /// The ranges of each file follow each other from the end of its header to its end.
  void check_files() const {
    struct range {
      std::uint32_t file;
      std::uint64_t position, bytes;
      const std::string* name;
      bool operator<(const range& other) const {
        return std::tie(file, position, bytes) < std::tie(other.file, other.position, other.bytes);
      }
    };
    std::vector<range> ranges;
    const auto add = [&](const stored_bytes& s, const std::string& name) {
      ranges.push_back({s.file, s.position, s.bytes, &name});
    };
    for (const stored_blob& blob : m_.blobs) add(blob.stored, blob.name);
    for (const stored_tensor& tensor : m_.tensors) {
      for (const stored_box& part : tensor.boxes) add(part.stored, tensor.name);
    }
    std::sort(ranges.begin(), ranges.end());
    std::size_t next = 0;
    for (std::uint32_t i = 0; i < m_.files.size(); ++i) {
      const stored_file& file = m_.files[i];
      std::uint64_t position = file.header_bytes;
      for (; next < ranges.size() && ranges[next].file == i; ++next) {
        if (ranges[next].position != position) {
          fail({source_, ": '", *ranges[next].name, "' begins at byte ", ranges[next].position, " of '", file.path,
                "', and what is before it ends at ", position, "; there are no holes or overlaps in a file"});
        }
        position += ranges[next].bytes;
      }
      if (position != file.bytes) {
        fail(
            {source_, ": the file '", file.path, "' has ", file.bytes, " bytes, and what is in it ends at ", position});
      }
    }
  }

  const manifest& m_;
  const std::string& source_;
};

}  // namespace detail

/// Throws `error`, its text starting with `source`, unless `m` is what a step can be loaded from: names not empty,
/// UTF-8 and used once; files at different paths below data/ without "." or ".."; boxes within their tensors, of as
/// many bytes as their extents say, covering each element exactly once; ranges of bytes that follow the header of their
/// file to its end without holes or overlaps. The text names the tensor and the first element that is missing or there
/// twice. Takes O(n log n) for n boxes.
inline void check_manifest(const manifest& m, const std::string& source) { detail::manifest_check(m, source).run(); }

}  // namespace plait

#include "plait/core/macros_on.hpp"
