#include "rows.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <string_view>

#include "plait/io/mapped_file.hpp"
#include "plait/models/llama_config_json.hpp"
#include "plan_llama/planner/hardware_json.hpp"
#include "plan_llama/planner/llama_shape.hpp"
#include "plan_llama/planner/parse_layout.hpp"
#include "plan_llama/planner/software_table.hpp"

namespace {

namespace pp = plait::planner;

double real(const std::string& text, const std::string& flag) {
  const auto value = number_of<double>(text);
  if (!value || !(*value >= 0 && *value < 1e30)) plait::fail({flag, ": '", text, "' is not a number from 0 on"});
  return *value;
}

bool switch_value(const std::string& text, const std::string& flag) {
  if (text != "0" && text != "1") plait::fail({flag, ": '", text, "' is neither 0 nor 1"});
  return text == "1";
}

/// Returns the cells of a line. A cell in quotes may have commas.
std::vector<std::string> cells_of(std::string_view line, const std::string& where) {
  std::vector<std::string> cells(1);
  bool quoted = false;
  for (std::size_t i = 0; i < line.size(); ++i) {
    if (line[i] == '"' && quoted && i + 1 < line.size() && line[i + 1] == '"') {
      cells.back() += line[++i];
    } else if (line[i] == '"') {
      quoted = !quoted;
    } else if (line[i] == ',' && !quoted) {
      cells.emplace_back();
    } else if (line[i] != '\r') {
      cells.back() += line[i];
    }
  }
  if (quoted) plait::fail({where, ": a cell's quotes are not closed"});
  return cells;
}

/// A size of a model: the column that sets it, and its least value.
struct size_column {
  std::int64_t* value;
  std::int64_t least;
};
std::map<std::string, size_column> size_columns(pp::transformer_shape& m) {
  return {{"vocab", {&m.vocab, 1}},
          {"hidden", {&m.hidden, 1}},
          {"layers", {&m.layers, 1}},
          {"heads", {&m.heads, 1}},
          {"kv_heads", {&m.kv_heads, 1}},
          {"head_dim", {&m.head_dim, 1}},
          {"ffn", {&m.ffn, 1}},
          {"experts", {&m.experts, 0}},
          {"chosen", {&m.chosen, 0}},
          {"shared_ffn", {&m.shared_ffn, 0}},
          {"dense_layers", {&m.dense_layers, 0}},
          {"first_ffn", {&m.first_ffn, 0}},
          {"positions", {&m.positions, 0}},
          {"window", {&m.window, 0}}};
}
std::map<std::string, bool*> kind_columns(pp::transformer_shape& m) {
  return {{"gated", &m.gated},     {"tied", &m.tied},       {"biases", &m.biases},          {"limited", &m.limited},
          {"dropout", &m.dropout}, {"qk_norm", &m.qk_norm}, {"shared_gate", &m.shared_gate}};
}
/// Returns the numeric facts about a program, by the columns that set them.
std::map<std::string, double*> number_columns(pp::software& s) {
  return {{"weight_bytes", &s.weight_bytes},       {"gradient_bytes", &s.gradient_bytes},
          {"optimizer_bytes", &s.optimizer_bytes}, {"reduced_bytes", &s.reduced_bytes},
          {"loss_bytes", &s.loss_bytes},           {"logit_bytes", &s.logit_bytes},
          {"host_seconds", &s.host_seconds}};
}
std::map<std::string, bool*> fact_columns(pp::software& s) {
  return {{"fused", &s.fused},
          {"packs", &s.packs},
          {"async_tensor", &s.async_tensor},
          {"delayed_norm", &s.delayed_norm},
          {"bare_ends", &s.bare_ends},
          {"keeps_fp8", &s.keeps_fp8},
          {"sends_tokens_once", &s.sends_tokens_once},
          {"gathers_masters", &s.gathers_masters},
          {"fused_norms", &s.fused_norms},
          {"fixed_order_attention", &s.fixed_order_attention},
          {"gathers_again", &s.gathers_again},
          {"gathers_late", &s.gathers_late},
          {"packs_gradients", &s.packs_gradients},
          {"reduces_whole", &s.reduces_whole},
          {"broadcasts_slices", &s.broadcasts_slices},
          {"selective_drops_scores_only", &s.selective_drops_scores_only},
          {"reduces_each_microbatch", &s.reduces_each_microbatch},
          {"overlaps_tensor", &s.overlaps_tensor},
          {"overlaps_data", &s.overlaps_data},
          {"overlaps_pipeline", &s.overlaps_pipeline}};
}
template <class Value>
std::string names_of(const std::map<std::string, Value>& columns) {
  std::string text;
  for (const auto& column : columns) text += (text.empty() ? "" : ", ") + column.first;
  return text;
}

/// Sets the size that a column names; returns false if the column names none.
bool set_size(pp::transformer_shape& m, const std::string& name, const std::string& value, const std::string& flag) {
  const auto sizes = size_columns(m);
  const auto kinds = kind_columns(m);
  if (const auto size = sizes.find(name); size != sizes.end())
    *size->second.value = pp::parse_count(value, flag, size->second.least);
  else if (const auto kind = kinds.find(name); kind != kinds.end())
    *kind->second = switch_value(value, flag);
  else
    return false;
  return true;
}

/// Sets a fact about the program; returns false if the column names none.
bool set_fact(pp::software& s, const std::string& name, const std::string& value, const std::string& flag) {
  const auto numbers = number_columns(s);
  const auto flags = fact_columns(s);
  if (const auto number = numbers.find(name); number != numbers.end()) {
    *number->second = real(value, flag);
  } else if (const auto one = flags.find(name); one != flags.end()) {
    *one->second = switch_value(value, flag);
  } else if (name == "precision") {
    const auto kind = pp::value_called<pp::number_kind>(value, pp::number_kinds);
    if (!kind) plait::fail({flag, ": unknown precision '", value, "'; legal are f32, bf16 and fp8"});
    pp::set_products(s, *kind);
  } else if (name == "attention") {
    constexpr std::array<std::string_view, 4> names{"unfused", "flash1", "flash2", "flash3"};
    const auto at = std::find(names.begin(), names.end(), value);
    if (at == names.end())
      plait::fail({flag, ": unknown attention '", value, "'; legal are unfused, flash1, flash2 and flash3"});
    s.attention = static_cast<pp::attention_kernel>(at - names.begin());
  } else {
    return false;
  }
  return true;
}

/// Returns the place of a property in the order in which properties are set. A model or program is set before its
/// parts, and the length of a sequence before a batch of tokens.
int turn(const std::string& name) {
  if (name == "model" || name == "program" || name == "cluster") return 0;
  return name == "precision" ? 1 : name == "batch_tokens" ? 3 : 2;
}

constexpr std::string_view price_columns =
    "ranks,step_seconds,tokens_per_second,mfu,mfu_causal,products,attention,memory_bound,recompute,tensor,context,"
    "experts_seconds,bubble,data,optimizer,offload_seconds,straggling,turns,memory_bytes,weights_bytes,gradients_bytes,"
    "optimizer_bytes_held,activations_bytes,logits_bytes,working_bytes,buffers_bytes,host_bytes,fits,refused";

std::string price_cells(const request& r) {
  pp::training_layout l = r.layout;
  l.folds_experts = r.job.program.folds_experts;
  std::string why = pp::why_illegal(l, r.job);
  if (why.empty() && r.accelerators != 0 && l.ranks() != r.accelerators)
    why = plait::cat({"the layout has ", l.ranks(), " ranks and the cluster ", r.accelerators});
  if (why.empty()) why = pp::why_no_host_link(r.machine, l);
  if (!why.empty()) {
    std::string cells = std::to_string(l.ranks());
    cells.append(static_cast<std::size_t>(std::count(price_columns.begin(), price_columns.end(), ',')), ',');
    return cells + '"' + why + '"';
  }
  const pp::layout_price p = pp::price(r.machine, r.job, l);
  const pp::step_split& s = p.seconds;
  const pp::memory_split& m = p.memory;
  std::string cells = fmt::format("{},{:.6g},{:.6g},{:.4f},{:.4f},", l.ranks(), p.step(), r.job.tokens() / p.step(),
                                  pp::utilisation(r.machine, r.job, l, p.step()),
                                  pp::utilisation(r.machine, r.job, l, p.step(), r.job.model.visible(r.job.seq)));
  for (const double part :
       {s.products,  s.attention,   s.memory,  s.recompute,  s.tensor,  s.context, s.experts, s.bubble,
        s.data,      s.optimizer,   s.offload, s.straggling, s.turns,   m.total(), m.weights, m.gradients,
        m.optimizer, m.activations, m.logits,  m.working,    m.buffers, m.host})
    cells += fmt::format("{:.6g},", part);
  return cells + (p.fits ? "1," : "0,");
}

using known_clusters = std::map<std::string, pp::cluster>;  // a file of them is read once

void set_property(request& r, const property& given, known_clusters& clusters) {
  const auto& [name, value, flag] = given;
  if (name == "model") {
    if (const pp::transformer_shape* large = plait::find_large_llama(value); large != nullptr) {
      r.job.model = *large;
    } else if (plait::find_llama_preset(value) != nullptr || value.find('/') != value.npos ||
               value.ends_with(".json")) {
      r.job.model = plait::plan_shape(plait::load_llama_config(value, flag));
    } else {
      std::string names = plait::llama_preset_names();
      for (const plait::named_shape& one : plait::large_llamas) names += ", " + std::string(one.name);
      plait::fail({flag, ": unknown model '", value, "'; presets are ", names, "; or give the path of a config.json"});
    }
  } else if (name == "cluster") {
    auto known = clusters.find(value);
    if (known == clusters.end()) known = clusters.emplace(value, pp::load_cluster(value, flag)).first;
    r.machine = known->second.machine, r.accelerators = known->second.accelerators;
    if (r.accelerators == 0)
      plait::fail({flag, ": '", value, "' names no number of accelerators, as in h100:16384 or my.json:64"});
  } else if (name == "program") {
    r.job.program = pp::software_called(value, flag);
  } else if (name == "seq") {
    r.job.seq = pp::parse_count(value, flag, 1, true);
  } else if (name == "batch") {
    if (value.find_last_not_of("0123456789") + 1 == value.size() && value.size() > 1)
      plait::fail({flag, ": '", value, "' is not a whole number of sequences; a number of tokens, as in 16M, is for ",
                   flag.starts_with("--batch") ? "--batch-tokens" : "batch_tokens"});
    r.job.global_batch = pp::parse_count(value, flag);
  } else if (name == "batch_tokens") {
    const std::int64_t tokens = pp::parse_count(value, flag, 1, true);
    if (r.job.seq < 1) plait::fail({flag, ": a batch of tokens needs seq, the tokens of a sequence, before it"});
    if (tokens % r.job.seq != 0)
      plait::fail({flag, ": ", tokens, " tokens are not a whole number of sequences of ", r.job.seq,
                   "; the nearest are ", std::max(tokens / r.job.seq, std::int64_t{1}) * r.job.seq, " and ",
                   (tokens / r.job.seq + 1) * r.job.seq});
    r.job.global_batch = tokens / r.job.seq;
  } else if (!set_size(r.job.model, name, value, flag) && !set_fact(r.job.program, name, value, flag)) {
    // A string such as ", tp, cp and order, " has separators on both sides of each key.
    std::string keys = plait::cat({", ", pp::layout_keys, ", "});
    keys.replace(keys.find(" and "), 5, ", ");
    if (keys.find(plait::cat({", ", name, ", "})) == keys.npos)
      plait::fail({flag, ": unknown column; legal are note, model and its sizes (", names_of(size_columns(r.job.model)),
                   ", ", names_of(kind_columns(r.job.model)),
                   "), cluster, seq, batch, batch_tokens, program and its facts (precision, attention, ",
                   names_of(number_columns(r.job.program)), ", ", names_of(fact_columns(r.job.program)), "), ",
                   pp::layout_keys});
    pp::set_layout_key(r.layout, name, value, flag);
  }
}

request request_of(std::vector<property> all, known_clusters& clusters) {
  std::stable_sort(all.begin(), all.end(),
                   [](const property& a, const property& b) { return turn(a.name) < turn(b.name); });
  request r;
  for (const property& one : all) set_property(r, one, clusters);
  return r;
}

/// Whether two properties set the same thing: a batch has one size, in sequences or in tokens.
bool is_same(const std::string& a, const std::string& b) {
  return a == b || (a.starts_with("batch") && b.starts_with("batch"));
}

}  // namespace

request request_of(std::vector<property> all) {
  known_clusters clusters;
  return request_of(std::move(all), clusters);
}

std::string price_rows(const std::string& path, const std::vector<property>& common) {
  const std::string text = plait::read_file(path, "--layouts");
  std::string out;
  std::vector<std::string> columns;
  known_clusters clusters;
  std::int64_t number = 0;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find('\n', at), text.size());
    const std::string_view line = std::string_view(text).substr(at, end - at);
    at = end + 1;
    ++number;
    if (line.empty() || line == "\r") continue;
    const std::string where = plait::cat({"--layouts: '", path, "' line ", number});
    std::vector<std::string> cells = cells_of(line, where);
    if (columns.empty()) {
      columns = std::move(cells);
      for (std::string& column : columns) {
        column.erase(0, column.find_first_not_of(' '));
        column.erase(column.find_last_not_of(' ') + 1);
      }
      for (std::size_t i = 0; i < columns.size(); ++i)
        for (std::size_t k = 0; k < i; ++k)
          if (columns[i] == columns[k] && columns[i] != "note")
            plait::fail({where, ": the column ", columns[i], " is there twice; leave one out"});
      out = fmt::format("{},{}\n", line.substr(0, line.find('\r')), price_columns);
      continue;
    }
    if (cells.size() != columns.size())
      plait::fail({where, " has ", cells.size(), " cells and the first line ", columns.size()});
    std::vector<property> all = common;
    for (std::size_t i = 0; i < columns.size(); ++i) {
      if (cells[i].empty() || columns[i] == "note") continue;
      std::erase_if(all, [&](const property& p) { return is_same(p.name, columns[i]); });
      all.push_back({columns[i], cells[i], where + ": " + columns[i]});
    }
    const request r = request_of(std::move(all), clusters);
    if (r.machine.levels.empty()) plait::fail({where, ": no machine; give --cluster or a column cluster"});
    pp::validate(r.job.model, where);
    if (r.machine.peak_of(r.job.program.products) == 0)
      plait::fail({where, ": ", r.machine.name, " has no products in ", pp::name_of(r.job.program.products)});
    out += fmt::format("{},{}\n", line.substr(0, line.find('\r')), price_cells(r));
  }
  if (columns.empty()) plait::fail({"--layouts: '", path, "' is empty; its first line names columns"});
  return out;
}
