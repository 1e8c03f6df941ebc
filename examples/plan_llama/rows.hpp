#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "plait/plan/step_time.hpp"

/// A job on a machine, as options or the cells of a row give it.
struct request {
  plait::planner::hardware machine;
  std::int64_t accelerators = 0;  ///< 0: as many as the layout has ranks
  plait::planner::training_job job;
  plait::planner::training_layout layout;
};

/// Sets one property of a request by the name of a column or option: of the model (model, vocab, hidden, ...), the
/// machine (cluster), the batch (seq, batch, batch_tokens), the program (program, precision, attention, ...) or the
/// layout (tp, cp, ...). Throws `plait::error` naming `knob`. A program is set before its facts, and a model before its
/// sizes.
void set_property(request& r, const std::string& name, const std::string& value, const std::string& knob);

/// The text of --cluster, "h100:16384" or "my.json:64", as a machine and the number of its accelerators.
std::pair<plait::planner::hardware, std::int64_t> parse_cluster(const std::string& text, const std::string& knob);

/// Prices the rows of a CSV file of layouts, each a request on top of `common`, and returns them as CSV, with the
/// columns of the price behind those of the file. The column `note` is passed on unread.
std::string price_rows(const std::string& path, const request& common);
