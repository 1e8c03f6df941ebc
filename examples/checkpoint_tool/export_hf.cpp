#include <fmt/format.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>

#include "../number_text.hpp"
#include "commands.hpp"
#include "content.hpp"
#include "model_tensors.hpp"
#include "paths.hpp"
#include "plait/models/export_hugging_face.hpp"
#include "table.hpp"

void export_hf(const export_hf_options& opt) {
  const opened_step from = open_step("STEP", opt.step);
  plait::export_options how;
  how.field = "DIR";
  how.shard_bytes = opt.shard_bytes;
  how.order = plait::weights_order_from(opt.weights_order, "--weights-order");
  if (!opt.dtype.empty()) {
    how.dtype = plait::find_safetensors_dtype(opt.dtype);
    if (!how.dtype || !plait::weight_dtype_of(*how.dtype))
      plait::fail({"--dtype is ", opt.dtype, "; legal are F64, F32 and BF16"});
  }
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
