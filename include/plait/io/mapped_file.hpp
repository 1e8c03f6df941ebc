// Reads whole files, mapped or as a string, and recognises the formats of other programs' files.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/io/posix_file_system.hpp"
#include "plait/version.hpp"

namespace plait {

/// A whole file, mapped read-only. Ranks that are threads share its pages, and processes share them through the page
/// cache. So a data set of any size needs memory once per machine.
///
/// The file must not shrink while it is mapped.
class mapped_file {
 public:
  /// Maps `path`. `field` is the setting that names this file; every error text starts with it. Throws `error` if the
  /// path cannot be opened or is not a regular file. An empty file gives an empty mapping.
  mapped_file(std::string path, const std::string& field) : path_(std::move(path)) {
    naming_field(field, [&] { map(); });
  }
  ~mapped_file() {
    if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
  }
  mapped_file(const mapped_file&) = delete;
  mapped_file& operator=(const mapped_file&) = delete;

  const std::string& path() const { return path_; }
  std::span<const std::byte> bytes() const { return {data_, size_}; }

 private:
  void map() {
    const detail::posix_descriptor file(path_, O_RDONLY | O_NONBLOCK, "open");
    struct stat status {};
    if (::fstat(file.value(), &status) != 0) fail_file("examine", path_, errno);
    if (S_ISDIR(status.st_mode)) fail({"'", path_, "' is a folder; name a file"});
    if (!S_ISREG(status.st_mode)) fail({"'", path_, "' is not a regular file; pipes and devices cannot be mapped"});
    size_ = static_cast<std::size_t>(status.st_size);
    if (size_ == 0) return;
    void* const start = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file.value(), 0);
    if (start == MAP_FAILED) fail_file("map", path_, errno);
    data_ = static_cast<const std::byte*>(start);
  }

  std::string path_;
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

/// The default limit on the bytes of a text that is read whole.
inline constexpr std::size_t max_text_bytes = std::size_t{64} << 20;

/// Returns the bytes of a whole file as text. Throws `error` as `mapped_file`, and for a file of more than `most`
/// bytes.
inline std::string read_file(const std::string& path, const std::string& field, std::size_t most = max_text_bytes) {
  const mapped_file file(path, field);
  if (file.bytes().size() > most)
    fail({field, ": '", path, "' has ", file.bytes().size(),
          " bytes, too many for a text of this kind; legal are up to ", most});
  return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()};
}

/// Returns the kind of a file that begins with `start`, in words that follow "this is". It recognises formats that
/// users confuse with text, tokens, JSON or weights, and returns nothing for others.
inline std::string_view other_format(std::string_view start) {
  struct kind {
    std::string_view magic, what;
  };
  constexpr kind kinds[] = {
      {"version https://git-lfs.github.com/spec", "a pointer of Git LFS; fetch the file itself with `git lfs pull`"},
      {"\x93NUMPY", "an array of NumPy's (.npy), which has a header"},
      {"\x1f\x8b\x08", "compressed by gzip; unpack it first"},
      {"\x28\xb5\x2f\xfd", "compressed by zstd; unpack it first"},
      {{"\xfd\x37zXZ\0", 6}, "compressed by xz; unpack it first"},
      {"PK\x03\x04", "a zip archive, as PyTorch and NumPy (.npz) write them, too"},
      {"PAR1", "a table of Parquet's"},
      {"ARROW1", "a table of Arrow's"},
  };
  for (const kind& k : kinds)
    if (start.starts_with(k.magic)) return k.what;
  return {};
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
