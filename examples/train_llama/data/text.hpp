// Text as tokens, one for each byte: encoding, safe printing, and entropies to compare a loss with. It has no subword
// tokenizer: such tokens come from files (token_file.hpp). Messages are put together in core/text.hpp.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "plait/core/text.hpp"
#include "plait/io/json.hpp"
#include "train_llama/data/token_source.hpp"

namespace plait {

/// Entropy in nats of a distribution given by counts, or by shares that need not add up to 1: -sum p log p. The loss of
/// the best model that ignores context.
inline double entropy(std::span<const double> counts) {
  double total = 0;
  for (double n : counts) total += n;
  double sum = 0;
  for (double n : counts) {
    if (n > 0) sum += n * std::log(total / n);
  }
  return total > 0 ? sum / total : 0;
}

/// Entropy in nats of the single bytes of `text`; log 256 = 5.545 at most.
inline double unigram_entropy(std::string_view text) {
  std::vector<double> counts(256);
  for (char c : text) ++counts[static_cast<unsigned char>(c)];
  return entropy(counts);
}

/// Returns how often each token of the vocabulary is in a whole source; reads all of it. Throws `error` as
/// `token_source::read`.
inline std::vector<double> token_counts(const token_source& source) {
  std::vector<double> counts(static_cast<std::size_t>(source.vocab()));
  std::vector<std::int64_t> chunk(1 << 14);
  for (std::int64_t first = 0; first < source.size();) {
    const std::int64_t n = std::min<std::int64_t>(source.size() - first, static_cast<std::int64_t>(chunk.size()));
    source.read(first, n, chunk.data());
    for (std::int64_t i = 0; i < n; ++i) ++counts[static_cast<std::size_t>(chunk[static_cast<std::size_t>(i)])];
    first += n;
  }
  return counts;
}

/// Entropy in nats of the single tokens of a whole source; reads all of it. Throws `error` as `token_source::read`.
inline double unigram_entropy(const token_source& source) { return entropy(token_counts(source)); }

/// The tokens of a text by bytes.
inline std::vector<std::int64_t> encode_bytes(std::string_view text) {
  std::vector<std::int64_t> tokens;
  tokens.reserve(text.size());
  for (char c : text) tokens.push_back(static_cast<unsigned char>(c));
  return tokens;
}

/// `text` made safe for a terminal: line feeds, tabs, printable ASCII and well-formed UTF-8 stay; control characters
/// (also U+0080 to U+009F, which some terminals obey) and stray bytes become `\xHH`.
inline std::string printable(std::string_view text) {
  constexpr char digits[] = "0123456789abcdef";
  std::string out;
  const auto escape = [&](char c) {
    const auto value = static_cast<unsigned char>(c);
    out += {'\\', 'x', digits[value >> 4], digits[value & 15]};
  };
  while (!text.empty()) {
    const std::size_t length = utf8_length(text);
    const auto lead = static_cast<unsigned char>(text[0]);
    const bool control = (lead < 0x20 && lead != '\n' && lead != '\t') || lead == 0x7f;
    const bool upper_control = length == 2 && lead == 0xc2 && static_cast<unsigned char>(text[1]) < 0xa0;
    const std::size_t taken = std::max<std::size_t>(length, 1);
    if (length == 0 || control || upper_control) {
      for (char c : text.substr(0, taken)) escape(c);
    } else {
      out += text.substr(0, taken);
    }
    text.remove_prefix(taken);
  }
  return out;
}

/// Tokens by bytes as printable text; a token that is no byte becomes `<token>`.
inline std::string decode_bytes(std::span<const std::int64_t> tokens) {
  std::string out, run;
  for (std::int64_t token : tokens) {
    if (token >= 0 && token < 256) {
      run += static_cast<char>(static_cast<unsigned char>(token));
      continue;
    }
    append(out, {printable(run), "<", token, ">"});
    run.clear();
  }
  return out + printable(run);
}

}  // namespace plait
