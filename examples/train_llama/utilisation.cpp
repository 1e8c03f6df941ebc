#include "utilisation.hpp"

#include <fmt/format.h>

#include <utility>

#include "../median.hpp"
#include "plait/device/cpu.hpp"
#include "train_llama/flops.hpp"

namespace {

plait::product_kind kind_of(const options& opt) {
  return in_bf16(opt) ? plait::product_kind::bf16 : opt.tf32 ? plait::product_kind::tf32 : plait::product_kind::f32;
}

}  // namespace

utilisation::utilisation(const setup& s, std::string device)
    : s_(s), device_(std::move(device)), flops_(plait::flops_per_token(s.config, s.opt.seq)) {
  peak_ = s.opt.peak_tflops > 0 ? s.opt.peak_tflops : plait::known_peak_tflops(device_, kind_of(s.opt));
}

std::string utilisation::operations() const {
  if (s_.opt.device == "cpu" && peak_ == 0) return {};
  return fmt::format("operations: {:.4g} GFLOP a token, {:.4g} with the causal half of attention alone\n",
                     flops_.total() / 1e9, flops_.causal() / 1e9);
}

std::string utilisation::heading() const {
  std::string text;
  if (s_.opt.device == "cuda")
    text = fmt::format("on {}{}, attention: {}, {}\n", s_.devices > 1 ? fmt::format("{} x ", s_.devices) : "", device_,
                       !s_.cudnn && in_bf16(s_.opt) && s_.opt.attention_kernel == "auto"
                           ? "plait's (this program was built without cuDNN, whose attention is faster)"
                       : !s_.cudnn                          ? "plait's"
                       : s_.opt.attention_kernel == "cudnn" ? "cuDNN's"
                                                            : "cuDNN's where it can be",
                       s_.as_graph ? "each step replayed as a graph" : "no graph");
  else if (in_bf16(s_.opt) && !plait::cpu::supports_bf16())
    text =
        "this processor has no instructions for bf16 (avx512_bf16): its products are of floats, and float is faster\n";
  text += operations();
  if (peak_ > 0)
    text += fmt::format(
        "peak: {:g} TFLOP/s, {}\n", peak_,
        s_.opt.peak_tflops > 0 ? "as --peak-tflops says" : fmt::format("dense {}", plait::name_of(kind_of(s_.opt))));
  else if (s_.opt.device == "cuda")
    text += fmt::format("peak: not known for {} of '{}'; give --peak-tflops to see the utilisation (MFU)\n",
                        plait::name_of(kind_of(s_.opt)), device_);
  return text;
}

double utilisation::of_step(double tokens_per_second) {
  const double mfu =
      plait::model_flops_utilisation(tokens_per_second, flops_.total(), peak_, static_cast<double>(s_.devices));
  if (mfu > 0) steps_.push_back(mfu);
  return mfu;
}

double utilisation::median() const { return plait::median(steps_); }

std::string utilisation::ending() const {
  if (steps_.empty()) return {};
  return fmt::format("MFU of the median step: {:.1f}% ({:.1f}% with the causal half of attention)\n", 100 * median(),
                     100 * median() * causal());
}

void utilisation::add_to(plait::json_object& summary) const {
  if (peak_ == 0) return;
  summary.add("peak_tflops", peak_).add("devices", s_.devices).add("flops_per_token", flops_.total());
  if (!steps_.empty()) summary.add("mfu", median()).add("mfu_causal", median() * causal());
}
