#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "../number_text.hpp"
#include "commands.hpp"
#include "plait/checkpoint/boxes.hpp"
#include "plait/checkpoint/share.hpp"
#include "plait/checkpoint/step_data.hpp"
#include "plait/checkpoint/step_directory.hpp"
#include "plait/io/posix_file_system.hpp"
#include "steps.hpp"
#include "table.hpp"

namespace {

constexpr std::int64_t most_writers = 1024;  // each is an open file

/// Returns the first element of a tensor that a writer has. Writers have equal parts, in order.
std::int64_t border(const plait::stored_tensor& tensor, std::int64_t writer, std::int64_t writers) {
  const std::int64_t n = plait::elements_of(tensor);
  return n / writers * writer + n % writers * writer / writers;
}

std::vector<plait::staged_share::staged_box> boxes_of(const std::vector<const plait::stored_tensor*>& tensors,
                                                      std::int64_t writer, std::int64_t writers) {
  std::vector<plait::staged_share::staged_box> boxes;
  for (const plait::stored_tensor* t : tensors) {
    plait::stored_box all;
    std::copy(t->shape.begin(), t->shape.end(), all.extent.begin());
    const std::int64_t begin = border(*t, writer, writers), end = border(*t, writer + 1, writers);
    for (const plait::box& part : plait::boxes_of_flat_range(t->box_of(all), begin, end))
      boxes.push_back({t->name, t->dtype, part});
  }
  return boxes;
}

}  // namespace

void reshard(const reshard_options& opt) {
  if (opt.writers < 1 || opt.writers > most_writers)
    plait::fail({"--writers is ", opt.writers, "; legal are 1 to ", most_writers});
  const opened_step from = open_step("STEP", opt.step);
  plait::file_system& files = plait::machine_files();
  std::vector<const plait::stored_tensor*> tensors;
  for (const plait::stored_tensor& tensor : from.saved.tensors) tensors.push_back(&tensor);
  // Wide elements first, so that each tensor starts on a multiple of its element size.
  std::stable_sort(tensors.begin(), tensors.end(),
                   [](const auto* a, const auto* b) { return size_of(a->dtype) > size_of(b->dtype); });
  std::vector<std::pair<std::string, std::uint64_t>> blobs;
  for (const plait::stored_blob& b : from.saved.blobs) blobs.emplace_back(b.name, b.stored.bytes);

  if (lies_in(opt.folder, from.path))
    plait::fail({"FOLDER: '", opt.folder, "' lies in the step itself, which is not changed; name another folder"});
  const auto into = [](auto&& work) { return about("FOLDER", work); };
  std::optional<plait::step_root> root;
  std::optional<plait::step_in_progress> step;
  std::deque<plait::share_writer> writers;
  into([&] {
    root.emplace(files, opt.folder);
    step.emplace(root->begin(from.saved.step));
    for (std::int64_t w = 0; w < opt.writers; ++w)
      writers.emplace_back(files, step->path(), static_cast<std::uint32_t>(w), boxes_of(tensors, w, opt.writers),
                           w == 0 ? blobs : decltype(blobs){});
  });
  plait::flat_reader reader(files, from.path, from.saved);
  std::vector<std::byte> buffer;
  for (const plait::stored_tensor* t : tensors) {
    std::int64_t writer = 0;
    const auto width = static_cast<std::int64_t>(size_of(t->dtype));
    plait::each_chunk(*t, chunk_bytes, [&](std::int64_t begin, std::int64_t end, std::uint64_t bytes) {
      buffer.resize(bytes);
      about("STEP", [&] { reader.read(*t, begin, end, buffer.data()); });
      for (std::int64_t at = begin; at < end;) {
        while (border(*t, writer + 1, opt.writers) <= at) ++writer;
        const std::int64_t until = std::min(end, border(*t, writer + 1, opt.writers));
        const auto some = std::span(buffer).subspan(static_cast<std::size_t>((at - begin) * width),
                                                    static_cast<std::size_t>((until - at) * width));
        into([&] { writers[static_cast<std::size_t>(writer)].append(some); });
        at = until;
      }
    });
  }
  for (const plait::stored_blob& b : from.saved.blobs) {
    const std::string text = about("STEP", [&] { return reader.read(b); });
    into([&] { writers[0].append(std::as_bytes(std::span(text))); });
  }
  plait::manifest saved;
  saved.step = from.saved.step;
  saved.layout = from.saved.layout;
  saved.scalars = from.saved.scalars;
  const std::string warning = into([&] {
    std::map<std::string, std::size_t> known;
    for (plait::share_writer& w : writers) plait::add_share(saved, known, w.finish());
    return step->commit(saved);
  });
  if (!warning.empty()) fmt::print(stderr, "checkpoint_tool: {}\n", printable(warning));
  fmt::print("{}/{}: {}, {} in {}\n", printable(root->path()), plait::step_name(saved.step),
             counted(saved.tensors.size(), "tensor"), size_text(static_cast<double>(bytes_of(saved))),
             counted(writers.size(), "file"));
}
