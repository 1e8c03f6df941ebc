#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "commands.hpp"
#include "plait/checkpoint/step_data.hpp"
#include "plait/io/posix_file_system.hpp"
#include "steps.hpp"
#include "table.hpp"
#include "tensor_difference.hpp"

namespace {

using enum table::align;

/// Tensors or scalars in two steps, matched by their names.
template <class T>
struct matched {
  std::vector<const T*> only_a, only_b;
  std::vector<std::pair<const T*, const T*>> both;
};

const std::string& name_of(const plait::stored_tensor& t) { return t.name; }
const std::string& name_of(const plait::stored_blob& b) { return b.name; }
const std::string& name_of(const plait::saved_scalars::value_type& s) { return s.first; }

template <class T>
matched<T> match(const std::vector<T>& a, const std::vector<T>& b) {
  std::unordered_map<std::string_view, const T*> left;
  for (const T& t : b) left.emplace(name_of(t), &t);
  matched<T> out;
  for (const T& t : a) {
    const auto found = left.find(name_of(t));
    if (found == left.end()) {
      out.only_a.push_back(&t);
    } else {
      out.both.emplace_back(&t, found->second);
      left.erase(found);
    }
  }
  for (const T& t : b)
    if (left.contains(name_of(t))) out.only_b.push_back(&t);
  return out;
}

/// Prints the names that only one step has. Returns their number.
template <class T>
std::size_t print_unmatched(const matched<T>& m, const char* what) {
  for (const auto& [names, of] : {std::pair(&m.only_a, 'A'), std::pair(&m.only_b, 'B')})
    for (const T* t : *names) fmt::print("only in {}: {} {}\n", of, what, printable(name_of(*t)));
  return m.only_a.size() + m.only_b.size();
}

bool alike(const plait::stored_scalar& a, const plait::stored_scalar& b, double tolerance) {
  const double *x = std::get_if<double>(&a), *y = std::get_if<double>(&b);
  if (x == nullptr || y == nullptr) return a == b;
  if (std::bit_cast<std::uint64_t>(*x) == std::bit_cast<std::uint64_t>(*y)) return true;
  return tolerance > 0 && std::abs(*x - *y) <= tolerance * std::max(std::abs(*x), std::abs(*y));
}

class step_diff {
 public:
  explicit step_diff(const diff_options& opt)
      : opt_(opt),
        a_(open_step("A", opt.a)),
        b_(open_step("B", opt.b)),
        from_a_(plait::machine_files(), a_.path, a_.saved),
        from_b_(plait::machine_files(), b_.path, b_.saved) {}

  bool run() {
    for (const auto& [name, s] : {std::pair('A', &a_), std::pair('B', &b_)})
      fmt::print("{}: {}, step {}, {}\n", name, printable(s->path), s->saved.step, printable(s->saved.layout));
    const std::string tensors = compare_tensors();
    const std::string scalars = compare_scalars();
    const std::string blobs = compare_blobs();
    fmt::print("tensors: {}\nscalars: {}\nblobs: {}\n", tensors, scalars, blobs);
    fmt::print("{}\n", differences_ > 0 ? "different" : near_ > 0 ? "equal, within the tolerance" : "equal");
    return differences_ == 0;
  }

 private:
  std::string compare_tensors() {
    const auto names = match(a_.saved.tensors, b_.saved.tensors);
    const std::size_t unmatched = print_unmatched(names, "tensor");
    table unlike({{"tensor"}, {"A"}, {"B"}});
    table differing({{"tensor"},
                     {"dtype"},
                     {"differing", right},
                     {"of", right},
                     {"max |a-b|", right},
                     {"relative", right},
                     {"of largest", right},
                     {""}});
    std::size_t identical = 0, near = 0, apart = 0;
    for (const auto& [a, b] : names.both) {
      if (a->shape != b->shape || a->dtype != b->dtype) {
        const auto form = [](const plait::stored_tensor& t) {
          return fmt::format("{} {}", plait::name_of(t.dtype), shape_text(t.shape));
        };
        unlike.add({a->name, form(*a), form(*b)});
        ++apart;
        continue;
      }
      const plait::tensor_difference d = difference(*a, *b);
      const bool within = d.within(opt_.tolerance) && opt_.tolerance > 0;
      ++(d.identical() ? identical : within ? near : apart);
      if (d.identical()) continue;
      differing.add({a->name, std::string(plait::name_of(a->dtype)), std::to_string(d.differing),
                     std::to_string(d.elements), fmt::format("{:.3g}", d.absolute), fmt::format("{:.3g}", d.relative),
                     fmt::format("{:.3g}", d.absolute == 0 ? 0 : d.absolute / d.largest), within ? "within" : ""});
    }
    if (!unlike.empty()) fmt::print("\n{}\n", unlike.text());
    if (!differing.empty()) {
      fmt::print("\n{}", differing.text());
      fmt::print("(relative: to the larger of the two elements; of largest: to the largest element of the tensor)\n\n");
    }
    return findings_text(unmatched, identical, near, apart, "bit-identical");
  }

  plait::tensor_difference difference(const plait::stored_tensor& a, const plait::stored_tensor& b) {
    return plait::compare_tensors(from_a_, a, from_b_, b, chunk_bytes);
  }

  std::string compare_scalars() {
    const auto names = match(a_.saved.scalars, b_.saved.scalars);
    const std::size_t unmatched = print_unmatched(names, "scalar");
    table differing({{"scalar"}, {"A"}, {"B"}});
    std::size_t same = 0, near = 0, apart = 0;
    for (const auto& [a, b] : names.both) {
      const bool identical = alike(a->second, b->second, 0);
      ++(identical ? same : alike(a->second, b->second, opt_.tolerance) ? near : apart);
      if (!identical) differing.add({a->first, scalar_text(a->second), scalar_text(b->second)});
    }
    if (!differing.empty()) fmt::print("\n{}\n", differing.text());
    return findings_text(unmatched, same, near, apart, "equal");
  }

  std::string compare_blobs() {
    const auto names = match(a_.saved.blobs, b_.saved.blobs);
    const std::size_t unmatched = print_unmatched(names, "blob");
    std::size_t same = 0, apart = 0;
    for (const auto& [a, b] : names.both) {
      const bool equal = a->stored.bytes == b->stored.bytes && from_a_.read(*a) == from_b_.read(*b);
      ++(equal ? same : apart);
      if (!equal) fmt::print("blob {} differs\n", printable(a->name));
    }
    return findings_text(unmatched, same, 0, apart, "equal");
  }

  /// Returns the numbers of findings as text.
  std::string findings_text(std::size_t unmatched, std::size_t same, std::size_t near, std::size_t apart,
                            const char* equal) {
    differences_ += unmatched + apart;
    near_ += near;
    std::string out = fmt::format("{} {}", same, equal);
    if (opt_.tolerance > 0) out += fmt::format(", {} within {:g}", near, opt_.tolerance);
    return out + fmt::format(", {} different, {} in one step only", apart, unmatched);
  }

  const diff_options& opt_;
  const opened_step a_, b_;
  plait::flat_reader from_a_, from_b_;
  std::size_t differences_ = 0, near_ = 0;
};

}  // namespace

bool diff(const diff_options& opt) {
  if (!(opt.tolerance >= 0 && std::isfinite(opt.tolerance)))
    plait::fail(fmt::format("--tolerance is {}; legal are numbers from 0 on", opt.tolerance));
  return step_diff(opt).run();
}
