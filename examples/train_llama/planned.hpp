#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "options.hpp"
#include "plait/io/json.hpp"
#include "plan_llama/planner/step_time.hpp"

/// What the planner says of a run's step on --cluster.
struct prediction {
  plait::planner::hardware machine;
  plait::planner::training_job job;
  std::optional<plait::planner::layout_price> price{};
  std::string unpriced{};  ///< why there is no price
};

/// The options with what --plan auto chooses put in, for as many ranks as --cluster or --mesh names (or as there are,
/// where `ranks` is positive), by predicted time, fastest first: whoever trains takes the first that is legal. What the
/// command line gives stays. Throws where nothing fits, or where what is given cannot be priced.
std::vector<options> planned_options(const options& opt, std::int64_t ranks);

/// The prediction for a run that is set up; null without --cluster.
std::shared_ptr<const prediction> predict(const setup& s);

/// Step time, bubble, communication that is waited for, and memory by part, as lines and with them as JSON.
std::string prediction_text(const prediction& p);

/// The prediction as an object, or with why there is none; where steps ran, with their median's seconds and the peak of
/// a rank's memory beside it.
plait::json_object prediction_json(const prediction& p, double step_seconds = 0, double peak_bytes = 0);

/// Predicted beside measured step time and memory, as a line.
std::string beside_measured(const prediction& p, double step_seconds, double peak_bytes);
