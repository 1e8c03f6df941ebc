#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "plan_llama/planner/step_time.hpp"

/// A job on a machine, from options or from the cells of a row.
struct request {
  plait::planner::hardware machine;
  std::int64_t accelerators = 0;  ///< 0: one for each rank of the layout
  plait::planner::training_job job;
  plait::planner::training_layout layout;
};

/// One property of a request by the name of a column or option: of the model (model, vocab, hidden, ...), the machine
/// (cluster), the batch (seq, batch, batch_tokens), the program (program, precision, attention, ...) or the layout (tp,
/// cp, ...).
struct property {
  std::string name, value, flag;
};

/// Makes a request from properties in any order. It sets a program before its facts, a model before its sizes, and the
/// length of a sequence before a batch in tokens. Throws `plait::error` with the flag.
request request_of(std::vector<property> all);

/// Prices the rows of a CSV file of layouts. Returns them as CSV, with the columns of the price after those of the
/// file.
/// `common` has the properties that rows do not set. The column `note` is copied unread.
std::string price_rows(const std::string& path, const std::vector<property>& common);
