#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../number_text.hpp"
#include "commands.hpp"
#include "plait/checkpoint/model_weights.hpp"
#include "plait/checkpoint/share.hpp"
#include "plait/checkpoint/step_data.hpp"
#include "plait/checkpoint/step_directory.hpp"
#include "plait/device/counting.hpp"
#include "plait/io/posix_file_system.hpp"
#include "plait/models/export_hugging_face.hpp"
#include "plait/models/hugging_face_directory.hpp"
#include "plait/models/mixture_llama.hpp"
#include "plait/nn/strategy.hpp"
#include "steps.hpp"
#include "table.hpp"

namespace {

template <class Model, class Strategy>
std::vector<plait::safetensors_declaration> tensors_of_model(const plait::llama_config& config,
                                                             const typename Strategy::mesh& one_rank) {
  plait::world ranks = plait::world::counting(one_rank.shape());
  plait::counting_device device;
  const plait::context<plait::counting_device> ctx{device, ranks,
                                                   plait::llama_sizes<Strategy>(config, ranks.shape(), 1, 1), 0};
  Model model(ctx, config);
  return shapes_of(ctx, model, plait::safetensors_dtype::f32);
}

/// Returns the names and shapes of a model's tensors. The model is built on a device that only counts.
std::vector<plait::safetensors_declaration> tensors_of(const plait::llama_config& config) {
  using dense = plait::megatron_sp;
  using experts = plait::megatron_experts;
  if (config.mixture.experts == 0)
    return tensors_of_model<plait::llama<float, dense, plait::counting_device>, dense>(config, dense::mesh(1, 1, 1, 1));
  return tensors_of_model<plait::mixture_llama<float, experts, plait::counting_device>, experts>(
      config, experts::mesh(1, 1, 1, 1, 1));
}

/// Refuses a directory unless it has exactly the model's tensors.
void require_model(const plait::model_directory& from) {
  plait::manifest there;
  for (const plait::weight_tensor& t : from.entries)
    if (!is_floating(t.dtype))
      plait::fail({from.source(), ": tensor '", t.name, "' holds ", name_of(t.dtype),
                   " elements, which are not weights; legal are F64, F32, F16 and BF16"});
  for (const plait::weight_tensor& t : from.entries) there.tensors.push_back({t.name, t.dtype, t.shape, {}});
  static_cast<void>(tensors_of_step(there, tensors_of(from.config), from.source(), true));
}

plait::staged_share::staged_box whole_box(const plait::weight_tensor& t, plait::safetensors_dtype type) {
  plait::box all;
  all.dims = static_cast<int>(t.shape.size());
  std::copy(t.shape.begin(), t.shape.end(), all.global.begin());
  all.local = all.global;
  return {t.name, type, all};
}

/// Returns the type that --dtype names; nothing if the option is not given.
std::optional<plait::safetensors_dtype> dtype_from(const std::string& name) {
  if (name.empty()) return {};
  const auto dtype = plait::find_safetensors_dtype(name);
  if (!dtype || !plait::weight_dtype_of(*dtype)) plait::fail({"--dtype is ", name, "; legal are F64, F32 and BF16"});
  return dtype;
}

}  // namespace

void export_hf(const export_hf_options& opt) {
  const opened_step from = open_step("STEP", opt.step);
  plait::export_options how;
  how.field = "DIR";
  how.shard_bytes = opt.shard_bytes;
  how.order = plait::weights_order_from(opt.weights_order, "--weights-order");
  how.dtype = dtype_from(opt.dtype);
  how.like = opt.config;
  for (const plait::stored_tensor& t : from.saved.tensors)
    if (plait::is_of_adapter(t.name))
      plait::fail({"STEP: '", opt.step, "' has low-rank adapters, such as '", t.name,
                   "', and the trainer merges those: train_llama --init-from ", opt.step,
                   " --lora RANK --steps 0 --export-hf ", opt.out});
  std::string config = opt.config;
  if (std::filesystem::is_directory(config)) config = (std::filesystem::path(config) / "config.json").string();
  if (lies_in(opt.out, from.path))
    plait::fail({"DIR: '", opt.out, "' lies in the step itself, which is not changed; name a folder elsewhere"});
  const plait::llama_config shape = plait::read_llama_config(config, "--config");
  plait::export_step(from.saved, from.path, shape, tensors_of(shape), opt.out, how);
  std::uint64_t files = 0, bytes = 0;
  for (const auto& entry : std::filesystem::directory_iterator(opt.out))
    if (entry.path().extension() == ".safetensors") ++files, bytes += entry.file_size();
  fmt::print("{}: {} of weights in {}, config.json of '{}'\n", printable(opt.out),
             size_text(static_cast<double>(bytes)), counted(files, "file"), printable(config));
}

void import_hf(const import_hf_options& opt) {
  const auto dtype = dtype_from(opt.dtype);
  plait::model_directory from = plait::open_model_directory(
      opt.model, "DIR", plait::weights_order_from(opt.weights_order, "--weights-order"), "--weights-order");
  require_model(from);
  const auto type_of = [&](const plait::weight_tensor& t) { return dtype.value_or(t.dtype); };
  // Wide elements first, so that each tensor starts on a multiple of its element size.
  std::stable_sort(from.entries.begin(), from.entries.end(),
                   [&](const auto& a, const auto& b) { return size_of(type_of(a)) > size_of(type_of(b)); });
  std::vector<plait::staged_share::staged_box> boxes;
  for (const plait::weight_tensor& t : from.entries) boxes.push_back(whole_box(t, type_of(t)));

  if (lies_in(opt.folder, opt.model))
    plait::fail({"FOLDER: '", opt.folder, "' lies in the model directory, which is not changed; name another folder"});
  const auto into = [](auto&& work) { return about("FOLDER", work); };
  plait::file_system& files = plait::machine_files();
  std::optional<plait::step_root> root;
  std::optional<plait::step_in_progress> step;
  std::optional<plait::share_writer> writer;
  into([&] {
    root.emplace(files, opt.folder);
    step.emplace(root->begin(0));
    writer.emplace(files, step->path(), 0, boxes, std::vector<std::pair<std::string, std::uint64_t>>{});
  });
  std::vector<std::byte> in, out;
  for (const plait::weight_tensor& t : from.entries)
    plait::each_block(t.size(), t.dtype, [&](std::int64_t begin, std::int64_t end) {
      in.resize(static_cast<std::size_t>(end - begin) * size_of(t.dtype));
      about("DIR", [&] { t.read(begin, end, in.data()); });
      if (dtype) {
        out.resize(static_cast<std::size_t>(end - begin) * size_of(*dtype));
        convert_elements(t.dtype, *plait::weight_dtype_of(*dtype), in.data(), out.data(), end - begin, t.name);
      }
      into([&] { writer->append(dtype ? out : in); });
    });
  plait::manifest saved;
  saved.layout = plait::cat({"the model directory '", opt.model, "'"});
  const std::string warning = into([&] {
    std::map<std::string, std::size_t> known;
    plait::add_share(saved, known, writer->finish());
    return step->commit(saved);
  });
  if (!warning.empty()) fmt::print(stderr, "checkpoint_tool: {}\n", printable(warning));
  if (from.untied)
    fmt::print(
        "its lm_head.weight is another than its embedding, so that the step has both: for it, set "
        "tie_word_embeddings to false in config.json\n");
  fmt::print("{}/{}: {}, {}; weights alone, for --init-from\n", printable(root->path()), plait::step_name(0),
             counted(saved.tensors.size(), "tensor"), size_text(static_cast<double>(bytes_of(saved))));
}
