// Machines, jobs and layouts of the planner's tests, by short names.
#pragma once

#include <doctest/doctest.h>

#include <cstdint>
#include <string>

#include "plait/models/llama_config.hpp"
#include "plait/plan/hardware.hpp"
#include "plan_llama/planner/llama_shape.hpp"
#include "plan_llama/planner/parse_layout.hpp"
#include "plan_llama/planner/software_table.hpp"
#include "plan_llama/planner/step_time.hpp"

namespace pp = plait::planner;

inline const pp::hardware h100 = pp::hardware_called("h100", "x");

inline pp::transformer_shape llama_shape(const char* name) {
  const pp::transformer_shape* large = plait::find_large_llama(name);
  return large != nullptr ? *large : plait::plan_shape(plait::llama_preset_config(name));
}

/// The training of a Llama on `batch` sequences a step.
inline pp::training_job llama_job(const char* name, std::int64_t batch, std::int64_t seq = 8192,
                                  const char* program = "plait") {
  return {llama_shape(name), seq, batch, pp::software_called(program, "x")};
}

inline pp::training_layout layout_of(const std::string& text) { return pp::parse_layout(text, "x"); }
/// A layout for a job's program.
inline pp::training_layout layout_of(const pp::training_job& job, const std::string& text) {
  pp::training_layout l = layout_of(text);
  l.folds_experts = job.program.folds_experts;
  return l;
}

/// The price of a layout that can train the job.
inline pp::layout_price priced(const pp::hardware& h, const pp::training_job& job, const std::string& text) {
  const pp::training_layout l = layout_of(job, text);
  CAPTURE(text);
  REQUIRE(pp::why_illegal(l, job) == "");
  return pp::price(h, job, l);
}
