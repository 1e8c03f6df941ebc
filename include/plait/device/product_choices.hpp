// Which algorithm computes each matrix product, as it was measured, and the text that keeps it. It measures nothing:
// device/gemm_cublaslt.hpp does. Next: train/product_tuning.hpp, for all ranks of a run to use the same.
#pragma once

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <map>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"

namespace plait {

/// Of each product, by a text with all that an algorithm depends on, the number of the algorithm among those that the
/// library proposes, fastest first by its own judgement. It holds for one GPU model and version of the library only.
///
/// As a text, a line for the machine and one for each product:
///
///     plait products 1: NVIDIA H100 80GB HBM3, cuBLASLt 130002
///     bf16 float 00 4096 11008 8192 8192 11008 11008 ...: 3, 812.5 us (the first: 901.3 us)
class product_choices {
 public:
  struct choice {
    int candidate = 0;
    double microseconds = 0, first = 0;  ///< of it, and of the candidate that the library puts first
  };

  product_choices() = default;
  explicit product_choices(std::string machine) : machine_(std::move(machine)) {}

  const std::string& machine() const { return machine_; }
  std::size_t size() const { return of_.size(); }
  /// Null for a product that has not been measured.
  const choice* find(const std::string& product) const {
    const auto at = of_.find(product);
    return at == of_.end() ? nullptr : &at->second;
  }
  void set(const std::string& product, const choice& c) { of_[product] = c; }

  /// Takes over what is not here. Throws where the other ones were measured on another kind of machine.
  void merge(const product_choices& other) {
    if (other.machine_ != machine_)
      fail({"products: measured on '", other.machine_, "', and this is '", machine_, "'; measure them here"});
    of_.insert(other.of_.begin(), other.of_.end());
  }

  std::string text() const {
    std::string out = cat({first_words, machine_, "\n"});
    for (const auto& [product, c] : of_)
      append(out,
             {product, ": ", c.candidate, ", ", tenths(c.microseconds), " us (the first: ", tenths(c.first), " us)\n"});
    return out;
  }
  /// Throws `plait::error` with the line that is no such text; `where` is its name.
  static product_choices parse(std::string_view text, std::string_view where) {
    product_choices out;
    for (int line = 1; !text.empty(); ++line) {
      const std::size_t end = std::min(text.find('\n'), text.size());
      const std::string_view words = text.substr(0, end);
      text.remove_prefix(std::min(end + 1, text.size()));
      if (line == 1) {
        if (!words.starts_with(first_words)) fail({where, ": line 1 must begin with '", first_words, "'"});
        out.machine_ = words.substr(first_words.size());
        continue;
      }
      if (!out.take(words)) fail({where, ": line ", line, " is no product with its choice: '", words, "'"});
    }
    if (out.machine_.empty()) fail({where, ": there is no first line, which begins with '", first_words, "'"});
    return out;
  }

 private:
  static constexpr std::string_view first_words = "plait products 1: ";

  static std::string tenths(double value) {
    const auto n = static_cast<long long>(value * 10 + 0.5);
    return cat({n / 10, ".", n % 10});
  }
  bool take(std::string_view words) {
    const std::size_t colon = words.find(": ");
    if (colon == std::string_view::npos) return false;
    choice c;
    const auto number = [&](std::string_view before, auto& value) {
      const std::size_t at = words.find(before, colon);
      if (at == std::string_view::npos) return false;
      const char* const begin = words.data() + at + before.size();
      return std::from_chars(begin, words.data() + words.size(), value).ec == std::errc();
    };
    if (!number(": ", c.candidate) || !number(", ", c.microseconds) || !number("first: ", c.first)) return false;
    if (c.candidate < 0) return false;
    set(std::string(words.substr(0, colon)), c);
    return true;
  }

  std::string machine_;
  std::map<std::string, choice> of_;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
