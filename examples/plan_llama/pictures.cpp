#include "train_llama/observe/pictures.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "plan_llama/planner/simulated_step.hpp"
#include "report.hpp"

namespace pp = plait::planner;

std::string timeline_svg(const request& asked, const pp::training_layout& layout) {
  if (layout.pp == 1) plait::fail("--timeline: the layout has pp = 1, and no pipeline to draw");
  if (layout.pp > 128) plait::fail({"--timeline: the layout has pp = ", layout.pp, "; at most 128 ranks are drawn"});
  return plait::pipeline_svg({pp::simulated_timeline(asked.machine, asked.job, layout)});
}

std::string scaling_svg(const request& asked, const pp::search_options& options) {
  plait::curve_chart chart;
  chart.title = "Best layouts by the number of accelerators";
  chart.x_label = "accelerators";
  chart.y_label = "tokens per second and accelerator";
  plait::curve_series constant{"constant batch", {}}, growing{"batch in proportion", {}};
  pp::search_options few = options;
  few.most = 1;
  const auto add = [&](plait::curve_series& to, std::int64_t accelerators, std::int64_t batch) {
    pp::training_job job = asked.job;
    job.global_batch = batch;
    const pp::search_result found = pp::search_layouts(asked.machine, job, accelerators, few);
    if (!found.best.empty())
      to.points.push_back({static_cast<double>(accelerators),
                           job.tokens() / found.best.front().step() / static_cast<double>(accelerators)});
  };
  std::int64_t least = asked.accelerators;
  for (int i = 0; i < 3 && least % 2 == 0; ++i) least /= 2;
  for (std::int64_t n = least; n <= 4 * asked.accelerators; n *= 2) {
    add(constant, n, asked.job.global_batch);
    const std::int64_t batch = asked.job.global_batch * n / asked.accelerators;
    if (batch > 0) add(growing, n, batch);
  }
  chart.series = {std::move(constant), std::move(growing)};
  return plait::curve_svg(chart);
}

std::string html_report(const findings& f, const pp::search_options& options) {
  const pp::training_layout& best = f.ranked.front().price.layout;
  std::string out =
      "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>plan_llama</title>\n"
      "<style>body{font-family:Helvetica,Arial,sans-serif;margin:2em;color:#222}pre{overflow-x:auto;background:#f5f5f5;"
      "padding:1em}svg{max-width:100%;height:auto}</style></head><body>\n<h1>Layouts of a training step</h1>\n";
  out += fmt::format("<pre>{}</pre>\n", plait::detail::xml_text(text_report(f)));
  if (best.pp > 1 && best.pp <= 128)
    out += fmt::format("<h2>The pipeline of the first layout, simulated</h2>\n{}", timeline_svg(f.asked, best));
  if (f.searched) out += fmt::format("<h2>Scaling</h2>\n{}", scaling_svg(f.asked, options));
  return out + "</body></html>\n";
}
