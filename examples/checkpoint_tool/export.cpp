#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "../number_text.hpp"
#include "commands.hpp"
#include "plait/checkpoint/safetensors.hpp"
#include "plait/checkpoint/step_data.hpp"
#include "plait/io/posix_file_system.hpp"
#include "steps.hpp"
#include "table.hpp"

namespace {

/// A new file that gets its name when it is whole, and only if no other file has the name. If it is destroyed before,
/// no file remains.
class new_file {
 public:
  explicit new_file(const std::string& path) : path_(path) {
    if (path.empty()) plait::fail("OUT: the name of the file to write is empty");
    about("OUT", [&] {
      if (plait::machine_files().kind_of(path)) refuse_existing();
      int count = 0;  // a killed process with the same number may have left a file
      do temporary_ = fmt::format("{}.tmp-{}-{}", path, ::getpid(), count++);
      while (plait::machine_files().kind_of(temporary_));
    });
  }
  ~new_file() {
    if (made_) ::unlink(temporary_.c_str());
  }
  new_file(const new_file&) = delete;
  new_file& operator=(const new_file&) = delete;

  const std::string& directory() const { return directory_; }
  plait::safetensors_stream create(plait::safetensors_plan plan) {
    made_ = true;  // from here on, the destructor removes the file
    return plait::safetensors_stream(plait::machine_files(), temporary_, std::move(plan));
  }
  /// Gives the file its name. A rename would replace a file that another program has made since.
  void commit() {
    if (::link(temporary_.c_str(), path_.c_str()) != 0) {
      if (errno == EEXIST) refuse_existing();
      plait::fail_file("give the finished file the name", path_, errno);
    }
    plait::machine_files().remove_file(temporary_);
    made_ = false;
    plait::machine_files().sync_directory(directory_);
  }

 private:
  [[noreturn]] void refuse_existing() const {
    plait::fail({"there is '", path_, "' already, and no file is overwritten; give the name of a new one"});
  }

  std::string path_, temporary_;
  std::string directory_ =
      std::filesystem::path(path_).has_parent_path() ? std::filesystem::path(path_).parent_path().string() : ".";
  bool made_ = false;
};

}  // namespace

void export_safetensors(const export_options& opt) {
  const opened_step from = open_step("STEP", opt.step);
  std::vector<const plait::stored_tensor*> tensors;
  for (const plait::stored_tensor& tensor : from.saved.tensors)
    if (!opt.weights_only || kind_of_tensor(tensor.name) == "weights") tensors.push_back(&tensor);
  if (tensors.empty())
    plait::fail({"STEP: '", opt.step, "' has no ", opt.weights_only ? "weights" : "tensors", " to export"});
  // Wide elements first, so that each tensor starts on a multiple of its element size.
  std::stable_sort(tensors.begin(), tensors.end(),
                   [](const auto* a, const auto* b) { return size_of(a->dtype) > size_of(b->dtype); });
  std::vector<plait::safetensors_declaration> declared;
  for (const plait::stored_tensor* t : tensors) declared.push_back({t->name, t->dtype, t->shape});
  plait::safetensors_plan plan = plait::plan_safetensors(declared, {{"format", "pt"}}, "STEP: '" + opt.step + "'");

  new_file out(opt.out);
  if (lies_in(out.directory(), from.path))
    plait::fail({"OUT: '", opt.out, "' lies in the step itself, which is not changed; name a file elsewhere"});
  plait::safetensors_stream stream = about("OUT", [&] { return out.create(std::move(plan)); });
  plait::flat_reader reader(plait::machine_files(), from.path, from.saved);
  std::vector<std::byte> buffer;
  for (const plait::stored_tensor* t : tensors) {
    plait::each_chunk(*t, chunk_bytes, [&](std::int64_t begin, std::int64_t end, std::uint64_t bytes) {
      buffer.resize(bytes);
      about("STEP", [&] { reader.read(*t, begin, end, buffer.data()); });
      about("OUT", [&] { stream.append(buffer); });
    });
  }
  about("OUT", [&] {
    stream.finish();
    out.commit();
  });
  fmt::print("{}: {}, {}\n", printable(opt.out), counted(tensors.size(), "tensor"),
             size_text(static_cast<double>(std::filesystem::file_size(opt.out))));
  fmt::print("not in it: {}, {}, {}\n",
             counted(from.saved.tensors.size() - tensors.size(), "tensor") + " of an optimizer",
             counted(from.saved.scalars.size(), "scalar"), counted(from.saved.blobs.size(), "blob"));
}
