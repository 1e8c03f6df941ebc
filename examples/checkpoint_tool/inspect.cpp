#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <string>
#include <variant>
#include <vector>

#include "../number_text.hpp"
#include "commands.hpp"
#include "plait/checkpoint/step_directory.hpp"
#include "plait/io/json.hpp"
#include "plait/io/posix_file_system.hpp"
#include "steps.hpp"
#include "table.hpp"

namespace {

using enum table::align;

std::string bytes_text(std::uint64_t bytes) { return size_text(static_cast<double>(bytes)); }

/// A step of a folder, and whether it can be read.
struct listed_step {
  std::string path;
  plait::manifest saved;
  std::string fault;  ///< empty: it is whole
  bool read = false;
};

listed_step look_at(const std::string& path) {
  listed_step out{path, {}, {}, false};
  try {
    out.saved = plait::read_step(plait::machine_files(), path);
    out.read = true;
    out.fault = plait::missing_data(plait::machine_files(), path, out.saved);
  } catch (const plait::error& e) {
    out.fault = e.what();
  }
  return out;
}

plait::json_object json_of(const listed_step& s) {
  plait::json_object out;
  out.add("path", s.path);
  s.read ? out.add("step", s.saved.step) : out.add_null("step");
  out.add("whole", s.fault.empty());
  if (!s.fault.empty()) out.add("fault", s.fault);
  if (!s.read) return out;
  out.add("layout", s.saved.layout).add("bytes", bytes_of(s.saved));
  return out.add("tensors", s.saved.tensors.size()).add("files", s.saved.files.size());
}

void inspect_folder(const std::string& path, bool json) {
  const plait::step_list found = about("PATH", [&] { return plait::list_steps(plait::machine_files(), path); });
  std::vector<std::string> leftovers;
  for (const plait::directory_entry& entry : found.leftovers) leftovers.push_back(entry.name);
  if (found.committed.empty() && found.invalid.empty())
    plait::fail({"PATH: '", path, "' holds no steps, and ", std::to_string(leftovers.size()), " leftovers of writers"});
  std::vector<listed_step> steps;
  for (const plait::committed_step& step : found.committed) steps.push_back(look_at(step.path));
  for (const plait::invalid_step& step : found.invalid) steps.push_back({step.path, {}, step.reason, false});
  if (json) {
    std::vector<plait::json_object> list;
    for (const listed_step& s : steps) list.push_back(json_of(s));
    fmt::print("{}", plait::json_object().add("steps", list).add("leftovers", leftovers).lines());
    return;
  }
  table all({{"step", right}, {"bytes", right}, {"tensors", right}, {"files", right}, {"layout"}, {"whole by sizes"}});
  for (const listed_step& s : steps) {
    const std::string whole = s.fault.empty() ? "yes" : "no: " + s.fault;
    const std::string step = std::to_string(*plait::step_called(s.path.substr(s.path.find_last_of('/') + 1)));
    if (!s.read)
      all.add({step, "-", "-", "-", "-", whole});
    else
      all.add({step, bytes_text(bytes_of(s.saved)), std::to_string(s.saved.tensors.size()),
               std::to_string(s.saved.files.size()), s.saved.layout, whole});
  }
  fmt::print("{}", all.text());
  for (const std::string& leftover : leftovers) fmt::print("leftover of a writer: {}\n", printable(leftover));
}

/// The total of the tensors of one kind and one type of elements.
struct kind_total {
  std::string kind;
  plait::safetensors_dtype dtype{};
  std::uint64_t tensors = 0, boxes = 0, elements = 0, bytes = 0;
};

/// Returns the totals by kind and type, in the order in which a manifest has them.
std::vector<kind_total> totals_of(const plait::manifest& saved) {
  std::vector<kind_total> out;
  for (const plait::stored_tensor& tensor : saved.tensors) {
    const std::string_view kind = kind_of_tensor(tensor.name);
    auto at = std::find_if(out.begin(), out.end(),
                           [&](const kind_total& t) { return t.kind == kind && t.dtype == tensor.dtype; });
    if (at == out.end()) at = out.insert(out.end(), {std::string(kind), tensor.dtype});
    at->tensors += 1;
    at->boxes += tensor.boxes.size();
    at->bytes += bytes_of(tensor);
    at->elements += bytes_of(tensor) / size_of(tensor.dtype);
  }
  return out;
}

/// The total of one writer.
struct writer_total {
  std::uint64_t boxes = 0, blobs = 0;
  std::uint64_t data = 0;  ///< bytes after the header
};

/// Returns a total for each file of a manifest.
std::vector<writer_total> writers_of(const plait::manifest& saved) {
  std::vector<writer_total> out;
  for (const plait::stored_file& file : saved.files) out.push_back({0, 0, file.bytes - file.header_bytes});
  for (const plait::stored_tensor& tensor : saved.tensors)
    for (const plait::stored_box& part : tensor.boxes) ++out[part.stored.file].boxes;
  for (const plait::stored_blob& blob : saved.blobs) ++out[blob.stored.file].blobs;
  return out;
}

/// The largest of the writers' bytes over their mean.
double imbalance(const std::vector<writer_total>& writers) {
  std::uint64_t most = 0, sum = 0;
  for (const writer_total& w : writers) most = std::max(most, w.data), sum += w.data;
  return sum == 0 ? 1 : static_cast<double>(most) * static_cast<double>(writers.size()) / static_cast<double>(sum);
}

plait::json_object json_of(const plait::saved_scalars& scalars) {
  plait::json_object out;
  for (const auto& [name, value] : scalars) {
    const auto* number = std::get_if<double>(&value);
    if (number != nullptr && !std::isfinite(*number))
      out.add(name, scalar_text(value));  // JSON has no such number
    else
      std::visit([&](const auto& v) { out.add(name, v); }, value);
  }
  return out;
}

void print_json(const listed_step& s, const inspect_options& opt) {
  const plait::manifest& m = s.saved;
  plait::json_object out = json_of(s), blobs;
  for (const plait::stored_blob& blob : m.blobs) blobs.add(blob.name, blob.stored.bytes);
  std::vector<plait::json_object> totals, tensors, files;
  for (const kind_total& t : totals_of(m)) {
    totals.push_back(plait::json_object().add("kind", t.kind).add("dtype", name_of(t.dtype)).add("tensors", t.tensors));
    totals.back().add("boxes", t.boxes).add("elements", t.elements).add("bytes", t.bytes);
  }
  out.add("scalars", json_of(m.scalars)).add("blobs", blobs).add("totals", totals);
  if (opt.tensors) {
    for (const plait::stored_tensor& t : m.tensors) {
      plait::json_object& tensor = tensors.emplace_back();
      tensor.add("name", t.name).add("kind", kind_of_tensor(t.name)).add("dtype", name_of(t.dtype));
      tensor.add("shape", t.shape).add("boxes", t.boxes.size()).add("bytes", bytes_of(t));
    }
    out.add("tensor_list", tensors);
  }
  if (opt.files) {
    const std::vector<writer_total> writers = writers_of(m);
    for (std::size_t i = 0; i < m.files.size(); ++i) {
      plait::json_object& file = files.emplace_back();
      file.add("path", m.files[i].path).add("bytes", m.files[i].bytes).add("header", m.files[i].header_bytes);
      file.add("data", writers[i].data).add("boxes", writers[i].boxes).add("blobs", writers[i].blobs);
    }
    out.add("file_list", files).add("max_over_mean", imbalance(writers));
  }
  fmt::print("{}", out.lines());
}

void print_totals(const plait::manifest& m) {
  table totals({{"kind"}, {"dtype"}, {"tensors", right}, {"boxes", right}, {"elements", right}, {"bytes", right}});
  kind_total sum;
  const auto add = [&](const kind_total& t, std::string_view dtype) {
    totals.add({t.kind, std::string(dtype), std::to_string(t.tensors), std::to_string(t.boxes),
                std::to_string(t.elements), bytes_text(t.bytes)});
  };
  for (const kind_total& t : totals_of(m)) {
    add(t, name_of(t.dtype));
    sum.tensors += t.tensors, sum.boxes += t.boxes, sum.elements += t.elements, sum.bytes += t.bytes;
  }
  sum.kind = "all";
  add(sum, "");
  fmt::print("\n{}", totals.text());
}

void print_step(const listed_step& s, const inspect_options& opt) {
  const plait::manifest& m = s.saved;
  fmt::print("{}: step {}, {} in {}, {}\n", printable(s.path), m.step, bytes_text(bytes_of(m)),
             counted(m.files.size(), "file"),
             s.fault.empty() ? "whole by sizes, and verify reads the bytes" : "not whole: " + printable(s.fault));
  fmt::print("layout: {}\n", printable(m.layout));
  if (!m.scalars.empty()) {
    table scalars({{"scalar"}, {"value"}});
    for (const auto& [name, value] : m.scalars) scalars.add({name, scalar_text(value)});
    fmt::print("\n{}", scalars.text());
  }
  if (!m.blobs.empty()) {
    table blobs({{"blob"}, {"bytes", right}});
    for (const plait::stored_blob& blob : m.blobs) blobs.add({blob.name, bytes_text(blob.stored.bytes)});
    fmt::print("\n{}", blobs.text());
  }
  print_totals(m);
  if (opt.tensors) {
    table tensors({{"tensor"}, {"dtype"}, {"shape", right}, {"boxes", right}, {"bytes", right}});
    for (const plait::stored_tensor& t : m.tensors) {
      tensors.add({t.name, std::string(name_of(t.dtype)), shape_text(t.shape), std::to_string(t.boxes.size()),
                   bytes_text(bytes_of(t))});
    }
    fmt::print("\n{}", tensors.text());
  }
  if (opt.files) {
    const std::vector<writer_total> writers = writers_of(m);
    table files({{"file"}, {"bytes", right}, {"header", right}, {"data", right}, {"boxes", right}, {"blobs", right}});
    std::vector<std::size_t> order(m.files.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::sort(order.begin(), order.end(), [&](auto i, auto j) { return m.files[i].path < m.files[j].path; });
    for (const std::size_t i : order) {
      files.add({m.files[i].path, bytes_text(m.files[i].bytes), bytes_text(m.files[i].header_bytes),
                 bytes_text(writers[i].data), std::to_string(writers[i].boxes), std::to_string(writers[i].blobs)});
    }
    fmt::print("\n{}data of a writer: max/mean {:.3f}\n", files.text(), imbalance(writers));
  }
}

}  // namespace

void inspect(const inspect_options& opt) {
  const place at = find_place("PATH", opt.path);
  if (!at.is_step) {
    if (opt.tensors || opt.files)
      plait::fail({opt.tensors ? "--tensors" : "--files", " is for one step, and '", opt.path, "' is a folder"});
    return inspect_folder(at.path, opt.json);
  }
  const listed_step s = look_at(at.path);
  if (!s.read) plait::fail({"PATH: ", s.fault});
  opt.json ? print_json(s, opt) : print_step(s, opt);
}
