#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <exception>
#include <initializer_list>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../reading_error.hpp"
#include "../standard_descriptors.hpp"
#include "measure.hpp"
#include "plait/core/error.hpp"
#include "plait/io/atomic_file.hpp"
#include "plan_llama/planner/hardware_json.hpp"
#include "plan_llama/planner/parse_layout.hpp"
#include "plan_llama/planner/ranking.hpp"
#include "plan_llama/planner/software_table.hpp"
#include "plan_llama/planner/step_on_links.hpp"
#include "report.hpp"
#include "rows.hpp"

namespace {

namespace pp = plait::planner;

struct options {
  std::map<std::string, std::string> properties;
  std::string layout, layouts, print_hardware, timeline, scaling, html, train_tokens;
  pp::search_options search{};  ///< the options that are numbers
  std::vector<std::string> schedules, recompute, zero, replicate, context, offload;
  std::string calibrate, backend = "threads";
  std::int64_t ranks = 0;
  double hour_price = 0, jitter = 0, slow_rank = 1;
  bool json = false;
};

/// Properties that are both options and columns, in the order in which they are set: the option, the column, the help.
struct shared_property {
  const char *option, *name, *help;
};
constexpr shared_property properties[] = {
    {"--model", "model", "a preset, llama-3-70b or llama-3-405b, or a Hugging Face config.json"},
    {"--cluster", "cluster", "hardware and its number, as in h100:16384; a description is a path that ends in .json"},
    {"--program", "program", "whose facts are priced: plait, megatron, nemo, fsdp and others (default plait)"},
    {"--precision", "precision", "of the products: f32, bf16 or fp8 (default bf16)"},
    {"--seq", "seq", "tokens of a sequence, as in 8192 or 8k (k is 2^10)"},
    {"--batch", "batch", "sequences of a step"},
    {"--batch-tokens", "batch_tokens",
     "tokens of a step, as in 16M, in place of --batch (k, M and G are 2^10, 2^20 and 2^30)"}};

void declare(CLI::App& app, options& opt) {
  for (const shared_property& p : properties) app.add_option(p.option, opt.properties[p.name], p.help);
  app.add_option("--layout", opt.layout, "prices one layout, as in tp=8,pp=16,dp=128,schedule=interleaved:2");
  app.add_option("--layouts", opt.layouts, "prices the rows of a CSV file; its columns may replace all options");
  app.add_option("--tp", opt.search.tp, "the extents to search, as in 4,8")->delimiter(',');
  app.add_option("--cp", opt.search.cp, "the same of cp")->delimiter(',');
  app.add_option("--pp", opt.search.pp, "the same of pp")->delimiter(',');
  app.add_option("--ep", opt.search.ep, "extents of ep to search: ranks of dp that shard experts")->delimiter(',');
  app.add_option("--microbatch", opt.search.microbatch, "the microbatches to search, in sequences")->delimiter(',');
  app.add_option("--schedule", opt.schedules,
                 "the schedules to search: gpipe, 1f1b, interleaved (or interleaved:V), zb_h1, zb_h2, zb_v, automatic")
      ->delimiter(',');
  app.add_option("--recompute", opt.recompute, "the policies to search: none, selective, full")->delimiter(',');
  app.add_option("--zero", opt.zero, "the levels to search: 0, 1, 2, 3")->delimiter(',');
  app.add_option(
         "--replicate", opt.replicate,
         "the hybrids to search, sharded within and replicated over an axis: none, dp (and each part of it), cp")
      ->delimiter(',');
  app.add_option("--context", opt.context, "of attention over cp: ring, all_gather_kv, ulysses")->delimiter(',');
  app.add_option(
         "--offload", opt.offload,
         "what may be in the host's memory, to search: none, optimizer, activations, both (default: all of them "
         "where the hardware has a host_bandwidth)")
      ->delimiter(',');
  app.add_option("--loss-chunks", opt.search.loss_chunks,
                 "chunks of a rank's tokens for which head and loss run one after the other, in all layouts")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 20));
  app.add_option("--top", opt.search.most, "how many layouts to show")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  app.add_option("--memory-share", opt.search.memory_share, "the share of a device's memory that layouts fill at most")
      ->check(CLI::Range(0.01, 1.0))
      ->capture_default_str();
  app.add_option("--train-tokens", opt.train_tokens,
                 "tokens to train on, as in 15T, for days and cost (B and T are 10^9 and 10^12)");
  app.add_option("--hour-price", opt.hour_price, "of one accelerator, in any currency");
  app.add_option("--jitter", opt.jitter, "simulates every pipeline with passes that vary by up to this share")
      ->check(CLI::Range(0.0, 0.5));
  app.add_option("--slow-rank", opt.slow_rank, "... and one rank that is so many times slower than the others")
      ->check(CLI::Range(1.0, 10.0));
  app.add_flag("--json", opt.json, "for programs: one JSON object, in bytes and seconds");
  app.add_option("--timeline", opt.timeline, "writes the best layout's simulated pipeline as SVG");
  app.add_option("--scaling", opt.scaling, "writes curves over the number of accelerators as SVG");
  app.add_option("--html", opt.html, "writes a page with all of it");
  app.add_option("--calibrate", opt.calibrate,
                 "measures this machine for under a minute and writes its description, which --cluster reads");
  app.add_option("--ranks", opt.ranks, "of --calibrate: as many as training will have");
  app.add_option("--backend", opt.backend, "of --calibrate: threads of this process, or mpi, under mpirun")
      ->check(CLI::IsMember({"threads", "mpi"}))
      ->capture_default_str();
  app.add_option("--print-hardware", opt.print_hardware, "prints a machine's description, to start a file from");
}

/// Refuses options that have no effect together with `option`, if that is given.
void alone(const CLI::App& app, const char* option, const char* what, std::initializer_list<std::string_view> beside) {
  if (app.count(option) == 0) return;
  for (const CLI::Option* o : app.get_options())
    if (o->count() > 0 && o->get_name() != option &&
        std::find(beside.begin(), beside.end(), o->get_name()) == beside.end())
      plait::fail({option, " ", what, ", and ", o->get_name(), " would say nothing; leave one of them out"});
}

/// Refuses options without a value, and options without an effect.
void check_given(const CLI::App& app, const options& opt) {
  for (const CLI::Option* o : app.get_options())
    for (const std::string& value : o->results())
      if (value.empty()) plait::fail({o->get_name(), " is empty; give it a value, or leave it out"});
  alone(app, "--print-hardware", "prints a description and ends", {});
  alone(app, "--calibrate", "measures a machine and ends", {"--ranks", "--backend"});
  alone(app, "--layouts", "prices the rows of a file",
        {"--model", "--cluster", "--program", "--precision", "--seq", "--batch", "--batch-tokens"});
  if (app.count("--layout") > 0)
    for (const char* searched : {"--tp", "--cp", "--pp", "--ep", "--microbatch", "--schedule", "--recompute", "--zero",
                                 "--replicate", "--context", "--offload", "--loss-chunks", "--memory-share", "--top"})
      if (app.count(searched) > 0)
        plait::fail({"--layout prices one layout, and ", searched, " is for a search; leave one of them out"});
  if (app.count("--ranks") + app.count("--backend") > 0 && opt.calibrate.empty())
    plait::fail("--ranks and --backend are for --calibrate, which names the file of a description to write");
  if (!(opt.hour_price >= 0 && opt.hour_price < 1e30))
    plait::fail(fmt::format("--hour-price is {}; legal is 0 or more", opt.hour_price));
  if (app.count("--hour-price") > 0 && opt.train_tokens.empty())
    plait::fail("--hour-price needs --train-tokens, as in 15T: a cost is that of a whole training");
}

double token_count(const std::string& text) {
  if (text.empty()) return 0;
  const bool tera = text.back() == 'T', giga = text.back() == 'B';
  const std::string digits = tera || giga ? text.substr(0, text.size() - 1) : text;
  char* rest = nullptr;
  const double tokens = std::strtod(digits.c_str(), &rest) * (tera ? 1e12 : giga ? 1e9 : 1);
  const bool plain = !digits.empty() && digits.find_first_not_of("0123456789.") == std::string::npos && *rest == '\0';
  if (!plain || !(tokens >= 1 && tokens < 1e18))
    plait::fail(
        {"--train-tokens: '", text, "' is not a number of tokens from 1 on, which B or T may follow, as in 1.5T"});
  return tokens;
}

pp::search_options search_of(const options& opt) {
  pp::search_options out = opt.search;
  const std::pair<const char*, const std::vector<std::int64_t>*> extents[] = {
      {"--tp", &out.tp}, {"--cp", &out.cp}, {"--pp", &out.pp}, {"--ep", &out.ep}, {"--microbatch", &out.microbatch}};
  for (const auto& [flag, values] : extents)
    for (const std::int64_t extent : *values)
      if (extent < 1) plait::fail({flag, " is ", extent, "; legal is 1 or more"});
  pp::training_layout l;
  bool any_chunks = false;
  for (const std::string& name : opt.schedules) {
    pp::set_layout_key(l, "schedule", name == "interleaved" ? "interleaved:2" : name, "--schedule");
    if (std::find(out.schedules.begin(), out.schedules.end(), l.schedule) == out.schedules.end())
      out.schedules.push_back(l.schedule);
    if (name == "interleaved") any_chunks = true;
    if (l.schedule == pp::schedule_kind::interleaved) out.chunks.push_back(l.chunks);
  }
  if (any_chunks) out.chunks.clear();
  const auto each = [&](const std::vector<std::string>& values, const char* key, auto&& add) {
    for (const std::string& value : values) {
      pp::set_layout_key(l, key, value, plait::cat({"--", key}));
      add();
    }
  };
  each(opt.recompute, "recompute", [&] {
    if (l.recompute_every > 1) plait::fail("--recompute: every:K is priced with --layout, and not searched");
    out.recompute.push_back(l.recompute);
  });
  each(opt.zero, "zero", [&] { out.zero.push_back(l.zero); });
  each(opt.replicate, "replicate", [&] {
    if (l.replicate == pp::replication::over_part_of_dp)
      plait::fail("--replicate: dp:R is priced with --layout, and not searched; dp searches all of dp and its parts");
    out.replicate.push_back(l.replicate);
    if (l.replicate == pp::replication::over_dp) out.replicate.push_back(pp::replication::over_part_of_dp);
  });
  each(opt.context, "context", [&] { out.context.push_back(l.context); });
  each(opt.offload, "offload", [&] { out.offload.push_back({l.offload_activations, l.offload_optimizer}); });
  return out;
}

/// Returns the fastest layouts in all other precisions.
std::vector<in_precision> in_other_precisions(const request& asked, pp::search_options search) {
  std::vector<in_precision> out;
  search.most = 1;
  for (int i = 0; i < pp::number_kinds; ++i) {
    const auto kind = static_cast<pp::number_kind>(i);
    if (kind == asked.job.program.products || asked.machine.peak_of(kind) == 0) continue;
    pp::training_job job = asked.job;
    job.program = pp::software_called(job.program.name, "--program");
    pp::set_products(job.program, kind);
    const pp::ranked_search found = pp::search_ranked(asked.machine, job, asked.accelerators, search);
    if (!found.ranked.empty()) out.push_back({kind, found.ranked.front()});
  }
  return out;
}

/// Returns the given layout with its price, or the best layouts.
findings find(const options& opt, const request& asked) {
  findings f;
  f.asked = asked;
  f.why = {token_count(opt.train_tokens), opt.hour_price};
  if (!opt.layout.empty()) {
    pp::training_layout l = pp::parse_layout(opt.layout, "--layout");
    l.folds_experts = asked.job.program.folds_experts;
    if (const std::string why = pp::why_illegal(l, asked.job); !why.empty()) plait::fail("--layout: " + why);
    if (l.ranks() != asked.accelerators)
      plait::fail({"--layout has ", l.ranks(), " ranks and --cluster ", asked.accelerators,
                   " accelerators; they must be equal"});
    if (const std::string why = pp::why_no_host_link(asked.machine, l); !why.empty()) plait::fail("--layout: " + why);
    const pp::layout_price given = pp::price(asked.machine, asked.job, l);
    f.ranked = pp::rank_on_links(asked.machine, asked.job, {{given, given.step()}}, 1);
    if (!given.fits) f.too_large = pp::why_too_large(asked.machine, asked.job, given);
  } else {
    f.searched = true;
    const pp::search_options search = search_of(opt);
    if (const std::string why = pp::why_lacking(asked.job.program, search.schedules); !why.empty())
      plait::fail("--schedule: " + why);
    pp::ranked_search ranking = pp::search_ranked(asked.machine, asked.job, asked.accelerators, search);
    f.found = std::move(ranking.found), f.ranked = std::move(ranking.ranked), f.fuller = std::move(ranking.fuller);
    f.memory_share = search.memory_share;
    if (f.ranked.empty()) plait::fail(pp::why_nothing(asked.machine, asked.job, asked.accelerators, f.found, search));
    f.precisions = in_other_precisions(asked, search);
    if (const auto thumb = pp::rule_of_thumb(asked.machine, asked.job, asked.accelerators); thumb)
      f.thumb = pp::rank_on_links(asked.machine, asked.job, {{*thumb, thumb->step()}}, 1).front();
    f.neighbours = pp::alternatives(asked.machine, asked.job, f.ranked.front().price, search.memory_share);
  }
  const pp::layout_price& best = f.ranked.front().price;
  if (best.layout.pp > 1) {
    f.simulated = pp::simulated_seconds(asked.machine, asked.job, best);
    f.balance = pp::balance_of(asked.machine, asked.job, best.layout);
  }
  if (pp::shares_links(best.layout)) f.on_links = pp::step_on_links(asked.machine, asked.job, best);
  if (opt.jitter > 0 || opt.slow_rank > 1) {
    const pp::disturbance how{.jitter = opt.jitter, .slow_rank = opt.slow_rank, .slow_at = best.layout.pp / 2};
    const auto with = [&](const pp::disturbance& d) {
      return pp::step_on_links(asked.machine, asked.job, best, d, best.layout.dp);
    };
    f.disturbed = with(how) / with({}) - 1;
  }
  return f;
}

int run(int argc, char** argv) {
  CLI::App app{"Finds and prices layouts of a training step by calculation.", "plan_llama"};
  options opt;
  declare(app, opt);
  try {
    app.parse(argc, argv);
    check_whole_numbers(app);
  } catch (const CLI::Success& e) {  // --help
    return app.exit(e);
  } catch (const CLI::ParseError& e) {
    plait::fail(reading_error(app, e, {argv + 1, argv + argc}) + " (--help lists the options)");
  }
  check_given(app, opt);
  if (!opt.calibrate.empty()) {
    calibrate_to(opt.calibrate, opt.ranks, opt.backend, argc, argv);
    return 0;
  }
  if (!opt.print_hardware.empty()) {
    fmt::print("{}", pp::hardware_text(pp::load_hardware(opt.print_hardware, "--print-hardware")));
    return 0;
  }
  std::vector<property> given;
  if (!opt.properties["batch"].empty() && !opt.properties["batch_tokens"].empty())
    plait::fail("--batch and --batch-tokens are both given; one says the other");
  for (const shared_property& p : properties)
    if (!opt.properties[p.name].empty()) given.push_back({p.name, opt.properties[p.name], p.option});
  if (!opt.layouts.empty()) {
    fmt::print("{}", price_rows(opt.layouts, given));
    return 0;
  }
  const request common = request_of(given);
  if (opt.properties["model"].empty()) plait::fail("--model is missing");
  if (opt.properties["cluster"].empty()) plait::fail("--cluster is missing, as in h100:16384");
  if (common.job.seq == 0) plait::fail("--seq is missing");
  if (common.job.global_batch == 0) plait::fail("--batch or --batch-tokens is missing");
  pp::validate(common.job.model, "--model");
  if (common.machine.peak_of(common.job.program.products) == 0)
    plait::fail(
        {"--precision: ", common.machine.name, " has no products in ", pp::name_of(common.job.program.products)});
  const findings f = find(opt, common);
  const pp::training_layout& best = f.ranked.front().price.layout;
  if (!opt.timeline.empty()) plait::write_file_atomically(opt.timeline, timeline_svg(common, best), "--timeline");
  if (!opt.scaling.empty()) plait::write_file_atomically(opt.scaling, scaling_svg(common, search_of(opt)), "--scaling");
  if (!opt.html.empty()) plait::write_file_atomically(opt.html, html_report(f, search_of(opt)), "--html");
  fmt::print("{}", opt.json ? json_report(f) : text_report(f));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    plait::open_standard_descriptors();
    const int code = run(argc, argv);
    if (std::fflush(stdout) == 0) return code;
    fmt::print(stderr, "plan_llama: the output cannot be written\n");
  } catch (const std::exception& e) {
    std::fflush(stdout);
    fmt::print(stderr, "plan_llama: {}\n", e.what());
  }
  return 2;
}
