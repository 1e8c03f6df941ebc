#pragma once

#include <optional>
#include <string>
#include <vector>

#include "plan_llama/planner/explain.hpp"
#include "rows.hpp"

/// The amount of training and its price, if the user gives them.
struct purpose {
  double tokens = 0;      ///< tokens to train on; 0: not given
  double hour_price = 0;  ///< price of an accelerator for an hour
};

/// The fastest layout with products in another precision.
struct in_precision {
  plait::planner::number_kind kind;
  plait::planner::ranked_layout best;
};

/// The results for a job: of a search, or of one given layout.
struct findings {
  request asked;
  purpose why;
  bool searched = false;
  plait::planner::search_result found{};                ///< of a search
  std::vector<plait::planner::ranked_layout> ranked{};  ///< the best of a search, or the given layout
  std::optional<plait::planner::ranked_layout> fuller;  ///< the best layout without a margin of memory
  double memory_share = 1;                              ///< largest share of a device's memory that the search fills
  std::optional<plait::planner::ranked_layout> thumb;   ///< the rule of thumb
  std::vector<in_precision> precisions{};               ///< other precisions of the machine in which a layout fits
  std::vector<plait::planner::alternative> neighbours;  ///< alternatives to the best layout
  std::string too_large{};                              ///< why the given layout does not fit; empty: it fits
  std::optional<double> simulated;                      ///< seconds of the best layout with its schedule simulated
  std::optional<plait::planner::pipeline_balance> balance;  ///< of the best layout's pipeline
  std::optional<double> on_links;   ///< seconds of the best layout if messages and collectives share links
  std::optional<double> disturbed;  ///< factor by which jitter and slow ranks lengthen its pipelines
};

/// Returns a table of layouts, and what limits the best, as text.
std::string text_report(const findings& f);
/// Returns the same as one JSON object.
std::string json_report(const findings& f);
/// Returns the same as an HTML page that needs no other file, with a timeline of the pipeline and curves of scaling.
/// `options` are those of the search.
std::string html_report(const findings& f, const plait::planner::search_options& options);

/// Returns the simulated timeline of a layout's pipeline as SVG. Throws if there is no pipeline, or if it is too large
/// to draw.
std::string timeline_svg(const request& asked, const plait::planner::training_layout& layout);
/// Returns as SVG the tokens per second of the best layouts, from a small part of the cluster up to four times its
/// size: at a constant batch, and at a batch in proportion to the ranks.
std::string scaling_svg(const request& asked, const plait::planner::search_options& options);
