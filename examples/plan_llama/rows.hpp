#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "plan_llama/planner/step_time.hpp"

/// A job on a machine, as options or the cells of a row give it.
struct request {
  plait::planner::hardware machine;
  std::int64_t accelerators = 0;  ///< 0: as many as the layout has ranks
  plait::planner::training_job job;
  plait::planner::training_layout layout;
};

/// One property of a request by the name of a column or option: of the model (model, vocab, hidden, ...), the machine
/// (cluster), the batch (seq, batch, batch_tokens), the program (program, precision, attention, ...) or the layout (tp,
/// cp, ...).
struct property {
  std::string name, value, flag;
};

/// The request of some properties, in whatever order they are given: a program is set before its facts, a model before
/// its sizes, and the length of a sequence before a batch in tokens. Throws `plait::error` naming the flag.
request request_of(std::vector<property> all);

/// Prices the rows of a CSV file of layouts, and returns them as CSV, with the columns of the price behind those of the
/// file. What a row does not say is as in `common`. The column `note` is passed on unread.
std::string price_rows(const std::string& path, const std::vector<property>& common);
