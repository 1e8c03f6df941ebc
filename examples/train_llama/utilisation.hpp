#pragma once

#include <string>
#include <vector>

#include "options.hpp"
#include "plait/io/json.hpp"

/// What a run makes of its devices' peak. A token's operations are those of `plait::flops_per_token`: 6 for each weight
/// that multiplies, and the full square of attention; recomputation does not count. Says nothing, and adds nothing to
/// the log, on the CPU without --peak-tflops.
class utilisation {
 public:
  /// `device` is what the GPU is called.
  utilisation(const setup& s, std::string device);

  /// Lines for the beginning: the device, how it computes, a token's operations and the peak that they are measured by.
  std::string heading() const;
  /// A token's operations, a line.
  std::string operations() const;
  /// A line for the end.
  std::string ending() const;

  /// Of a step at this rate, 0 to 1; 0 where no peak is known.
  double of_step(double tokens_per_second);
  void add_to(plait::json_object& summary) const;

 private:
  double median() const;
  double causal() const { return flops_.causal() / flops_.total(); }

  const setup& s_;
  std::string device_;
  plait::llama_flops flops_;
  double peak_ = 0;  ///< TFLOP/s of one device; 0: not known
  std::vector<double> steps_;
};
