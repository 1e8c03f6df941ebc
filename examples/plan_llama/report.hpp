#pragma once

#include <optional>
#include <string>
#include <vector>

#include "plan_llama/planner/explain.hpp"
#include "rows.hpp"

/// What training costs, where the user says how much is trained and for what price.
struct purpose {
  double tokens = 0;      ///< to train on; 0: not asked for
  double hour_price = 0;  ///< of an accelerator's hour
};

/// The fastest layout with products in another precision.
struct in_precision {
  plait::planner::number_kind kind;
  plait::planner::ranked_layout best;
};

/// Everything that is said of a job: of a search, or of one layout that was given.
struct findings {
  request asked;
  purpose why;
  bool searched = false;
  plait::planner::search_result found{};                    ///< of a search
  std::vector<plait::planner::ranked_layout> ranked{};      ///< the best of a search, or the given layout alone
  std::optional<plait::planner::ranked_layout> fuller;      ///< what would come first without a margin of memory
  double memory_share = 1;                                  ///< of a device's memory, which the search fills at most
  std::optional<plait::planner::ranked_layout> thumb;       ///< the rule of thumb
  std::vector<in_precision> precisions{};                   ///< all others that the machine has and in which one fits
  std::vector<plait::planner::alternative> neighbours;      ///< of the best
  std::string too_large{};                                  ///< why the given layout does not fit; empty: it fits
  std::optional<double> simulated;                          ///< seconds of the best with its schedule simulated
  std::optional<plait::planner::pipeline_balance> balance;  ///< of the best's pipeline
  std::optional<double> on_links;   ///< seconds of the best with messages and collectives sharing links
  std::optional<double> disturbed;  ///< how much longer its pipelines take with jitter and slow ranks
};

/// A table of layouts with what binds the best, for people.
std::string text_report(const findings& f);
/// The same as one JSON object.
std::string json_report(const findings& f);
/// The same as a page that needs no other file, with a timeline of the pipeline and curves of scaling, for the same
/// `options` of the search.
std::string html_report(const findings& f, const plait::planner::search_options& options);

/// The simulated timeline of a layout's pipeline as SVG; throws without a pipeline, or with more than can be drawn.
std::string timeline_svg(const request& asked, const plait::planner::training_layout& layout);
/// Tokens per second of the best layouts from a small part of the cluster up to four times its size, as SVG: at a
/// constant batch, and at a batch in proportion.
std::string scaling_svg(const request& asked, const plait::planner::search_options& options);
