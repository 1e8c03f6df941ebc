// Measured choices of the algorithm for each matrix product, and their text form.
#pragma once

#include <algorithm>
#include <array>
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

/// For each product, the number of its algorithm in the library's list of proposals (the library sorts them by its own
/// estimate). A product's name is a text with all that the algorithm depends on. The choices hold for one GPU model and
/// version of the library only.
///
/// The text form has a line for the machine and one for each product:
///
///     plait products 1: NVIDIA H100 80GB HBM3, cuBLASLt 130002
///     bf16 float 00 4096 11008 8192 8192 11008 11008 ...: 3, 812.5 us (the first: 901.3 us)
///     bf16 bf16 01 4096 128256 8192 8192 8192 128256 ...: not measured, no room for 1050673152 bytes
class product_choices {
 public:
  struct choice {
    int candidate = 0;
    double microseconds = 0, first = 0;  ///< times of this algorithm, and of the library's first proposal
  };

  product_choices() = default;
  explicit product_choices(std::string machine) : machine_(std::move(machine)) {}

  const std::string& machine() const { return machine_; }
  /// The number of products that have a choice.
  std::size_t size() const { return of_.size(); }
  /// Returns null for a product that has not been measured.
  const choice* find(const std::string& product) const {
    const auto at = of_.find(product);
    return at == of_.end() ? nullptr : &at->second;
  }
  void set(const std::string& product, const choice& c) {
    of_[product] = c;
    unmeasured_.erase(product);
  }

  /// Products that could not be measured; the library's first proposal computes them. Each has the bytes of scratch
  /// memory that were missing, or 0 if it first occurred during capture of a graph.
  const std::map<std::string, std::size_t>& unmeasured() const { return unmeasured_; }
  /// Adds a product to the unmeasured ones, unless it has a choice.
  void leave_out(const std::string& product, std::size_t missing) {
    if (find(product) == nullptr) unmeasured_.emplace(product, missing);
  }
  /// Returns a sentence for a log that names the first unmeasured products with their sizes. Empty if there are none.
  std::string unmeasured_text() const {
    constexpr std::size_t most = 8;
    if (unmeasured_.empty()) return "";
    std::string out =
        cat({"products: ", unmeasured_.size(), " could not be measured and use the library's first algorithm: "});
    std::size_t named = 0;
    for (const auto& [product, missing] : unmeasured_) {
      if (++named > most) break;
      append(out, {named == 1 ? "" : ", ", sizes_of(product), " (", why_of(missing), ")"});
    }
    if (named > most) append(out, {" and ", unmeasured_.size() - most, " more"});
    return out +
           "; to have them measured, leave more of the GPU's memory free while they are, as a smaller microbatch does";
  }

  /// Adds the other object's choices for products that have none here. Throws if they were measured on another kind of
  /// machine.
  void merge(const product_choices& other) {
    if (other.machine_ != machine_)
      fail({"products: measured on '", other.machine_, "', and this is '", machine_, "'; measure them here"});
    of_.insert(other.of_.begin(), other.of_.end());
    for (const auto& [product, missing] : other.unmeasured_) leave_out(product, missing);
    std::erase_if(unmeasured_, [&](const auto& u) { return find(u.first) != nullptr; });
  }

  std::string text() const {
    std::string out = cat({first_words, machine_, "\n"});
    for (const auto& [product, c] : of_)
      append(out,
             {product, ": ", c.candidate, ", ", tenths(c.microseconds), " us (the first: ", tenths(c.first), " us)\n"});
    for (const auto& [product, missing] : unmeasured_) append(out, {product, not_measured, why_of(missing), "\n"});
    return out;
  }
  /// Throws `plait::error` with the first invalid line; `where` is the name of the text.
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
      if (!out.take(words)) fail({where, ": line ", line, " is not a product with its choice: '", words, "'"});
    }
    if (out.machine_.empty()) fail({where, ": there is no first line, which begins with '", first_words, "'"});
    return out;
  }

 private:
  static constexpr std::string_view first_words = "plait products 1: ";
  static constexpr std::string_view not_measured = ": not measured, ";
  static constexpr std::string_view no_room = "no room for ", while_recorded = "met while a graph was recorded";

  static std::string why_of(std::size_t missing) {
    return missing == 0 ? std::string(while_recorded) : cat({no_room, missing, " bytes"});
  }
  /// Returns the types and sizes in a product's name. Its words are in, out, the transpositions of A and B, m, n, k and
  /// others.
  static std::string sizes_of(std::string_view product) {
    std::array<std::string_view, 6> words;
    for (std::string_view& word : words) {
      word = product.substr(0, product.find(' '));
      product.remove_prefix(std::min(word.size() + 1, product.size()));
    }
    return cat({"m=", words[3], " n=", words[4], " k=", words[5], " of ", words[0], " to ", words[1]});
  }

  static std::string tenths(double value) {
    const auto n = static_cast<long long>(value * 10 + 0.5);
    return cat({n / 10, ".", n % 10});
  }
  bool take(std::string_view words) {
    const std::size_t colon = words.find(": ");
    if (colon == std::string_view::npos) return false;
    if (words.substr(colon).starts_with(not_measured)) return take_unmeasured(words, colon);
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

  bool take_unmeasured(std::string_view words, std::size_t colon) {
    const std::string product(words.substr(0, colon));
    std::string_view why = words.substr(colon + not_measured.size());
    std::size_t missing = 0;
    if (why != while_recorded) {
      if (!why.starts_with(no_room)) return false;
      why.remove_prefix(no_room.size());
      const auto [stop, problem] = std::from_chars(why.data(), why.data() + why.size(), missing);
      if (problem != std::errc() || missing == 0 || std::string_view(stop, why.data() + why.size()) != " bytes")
        return false;
    }
    leave_out(product, missing);
    return true;
  }

  std::string machine_;
  std::map<std::string, choice> of_;
  std::map<std::string, std::size_t> unmeasured_;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
