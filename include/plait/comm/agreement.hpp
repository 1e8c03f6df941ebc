// A check that all ranks of a run were given equal options, before a difference costs a wrong result or a hang. A
// difference throws on every rank; the check changes no value. Test: tests/unit/comm/agreement.cpp.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/comm/any_communicator.hpp"
#ifndef PLAIT_COMPILED
#include "plait/comm/deadline.hpp"
#endif
#include "plait/comm/host_values.hpp"
#include "plait/core/compiled.hpp"
#include "plait/core/error.hpp"
#include "plait/core/function_ref.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/text.hpp"
#include "plait/device/device.hpp"

namespace plait {

/// A value that must be equal on all ranks of a run: an option, a size of the model, a digest of a file.
struct setting {
  std::string name;
  std::string value;  ///< short, as an error shows it; empty for a switch that is set
  bool operator==(const setting&) const = default;
};

/// A number as a setting's value: two numbers have equal texts only if they are equal.
inline std::string exact_text(double number) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", number);
  if (std::strtod(text, nullptr) != number) std::snprintf(text, sizeof text, "%.17g", number);
  return text;
}

/// The error that `require_agreement` throws.
class disagreement : public error_of_all {
 public:
  using error_of_all::error_of_all;
};

namespace detail {

/// The words of the error text, as in "rank 1 was started with clip 1, rank 0 with clip 2; every rank needs the same
/// options".
struct agreement_words {
  const char* one = " was started";
  const char* several = " were started";
  const char* end = "; every rank needs the same options";
};

/// Compares settings by two collectives. `greatest(values, n)` replaces each of n int64 by the maximum over the ranks,
/// and `gather(in, out, bytes)` gathers the bytes of all ranks.
void require_agreement(int ranks, std::span<const setting> settings,
                       function_ref<void(std::int64_t*, std::size_t)> greatest,
                       function_ref<void(const char*, char*, std::size_t)> gather, std::string_view who = {},
                       const agreement_words& words = {});

/// Compares the settings of ranks that communicate through host memory. It allocates no device memory.
void require_agreement_on_host(any_communicator& ranks, std::span<const setting> settings, std::string_view who = {},
                               const agreement_words& words = {});

template <compute_device Device>
void require_agreement_on(Device& device, any_communicator& ranks, std::span<const setting> settings,
                          std::string_view who, const agreement_words& words) {
  if (ranks.size() == 1) return;
  if constexpr (std::is_base_of_v<cpu, Device>)
    require_agreement_on_host(ranks, settings, who, words);
  else
    require_agreement(
        ranks.size(), settings,
        [&](std::int64_t* v, std::size_t n) { all_reduce_values(device, ranks, v, n, reduce_op::max); },
        [&](const char* in, char* out, std::size_t bytes) { gather_values(device, ranks, in, bytes, out); }, who,
        words);
}

/// Throws `disagreement` unless all ranks have equal values. `who` is the start of the error text.
template <compute_device Device>
void require_equal_values(Device& device, any_communicator& ranks, std::string_view who,
                          std::span<const setting> values) {
  require_agreement_on(device, ranks, values, cat({who, ": "}),
                       {" runs", " run", "; every rank needs the same values"});
}

}  // namespace detail

/// Throws `disagreement` on every rank unless all were given equal settings, in any order. The text names the ranks,
/// the settings and the values. If all agree, it costs one reduction of two numbers. Collective over `ranks`, which
/// communicate through host memory: threads and MPI.
inline void require_agreement(any_communicator& ranks, std::span<const setting> settings) {
  detail::require_agreement_on_host(ranks, settings);
}
/// This overload serves ranks that communicate through device memory, as with NCCL. It waits for the main stream.
template <compute_device Device>
void require_agreement(Device& device, any_communicator& ranks, std::span<const setting> settings) {
  detail::require_agreement_on(device, ranks, settings, {}, {});
}

}  // namespace plait

#ifndef PLAIT_COMPILED
namespace plait {

namespace detail {

/// Sorts settings by name, and joins the values of a repeated name, so that lists of equal settings become equal.
inline std::vector<setting> sorted_settings(std::span<const setting> settings) {
  std::vector<setting> sorted;
  for (const setting& k : settings) {
    const auto at = std::find_if(sorted.begin(), sorted.end(), [&](const setting& s) { return s.name >= k.name; });
    if (at != sorted.end() && at->name == k.name)
      at->value += ", " + k.value;
    else
      sorted.insert(at, k);
  }
  return sorted;
}

/// Writes settings as zero-terminated words. No word contains a zero byte, so different lists have different bytes.
inline std::string packed_settings(std::span<const setting> settings) {
  std::string bytes;
  for (const setting& k : sorted_settings(settings))
    for (const std::string* word : {&k.name, &k.value}) bytes.append(*word).push_back('\0');
  return bytes;
}

/// Reads settings up to the end, or to an empty name.
inline std::vector<setting> unpacked_settings(std::string_view bytes) {
  std::vector<setting> settings;
  const auto word = [&] {
    std::string text(bytes.substr(0, bytes.find('\0')));
    bytes.remove_prefix(text.size() + 1);
    return text;
  };
  while (!bytes.empty() && bytes[0] != '\0') {
    setting& k = settings.emplace_back();
    k.name = word();
    k.value = word();
  }
  return settings;
}

/// Returns which ranks have which value of the setting `name`, the most frequent value last. Returns an empty text if
/// all are equal.
inline std::string difference_text(const std::vector<std::vector<setting>>& of_ranks, const std::string& name,
                                   const agreement_words& words) {
  struct party {
    const setting* has;  // null: these ranks lack the setting
    std::vector<std::size_t> ranks;
  };
  std::vector<party> parties;
  for (std::size_t r = of_ranks.size(); r-- > 0;) {  // of equally frequent values, rank 0's comes last
    const auto& all = of_ranks[r];
    const auto at = std::find_if(all.begin(), all.end(), [&](const setting& k) { return k.name == name; });
    const setting* const has = at == all.end() ? nullptr : &*at;
    const auto same = std::find_if(parties.begin(), parties.end(), [&](const party& p) {
      return p.has == nullptr || has == nullptr ? p.has == has : p.has->value == has->value;
    });
    party& joined = same == parties.end() ? parties.emplace_back(party{has, {}}) : *same;
    joined.ranks.insert(joined.ranks.begin(), r);
  }
  if (parties.size() < 2) return {};
  std::sort(parties.begin(), parties.end(), [](const party& a, const party& b) {
    return a.ranks.size() != b.ranks.size() ? a.ranks.size() < b.ranks.size() : a.ranks.back() > b.ranks.back();
  });
  constexpr std::size_t most = 4;
  if (parties.size() > most) {  // three of them, and the most frequent value
    std::swap(parties[most - 1], parties.back());
  }
  std::string text;
  for (std::size_t i = 0; i < parties.size() && i < most; ++i) {
    const party& p = parties[i];
    text += (i == 0 ? "" : ", ") + ranks_text(p.ranks);
    if (i == 0) text += p.ranks.size() == 1 ? words.one : words.several;
    text += (p.has ? " with " : " without ") + name;
    if (!p.has || p.has->value.empty()) continue;
    const bool plain = p.has->value.find_first_of(" \t\n") == std::string::npos;
    text += plain ? " " + p.has->value : cat({" '", p.has->value, "'"});
  }
  if (parties.size() > most) append(text, {", and there are ", parties.size() - most, " other values"});
  return text;
}

/// Lists the settings that differ between ranks: up to three in full, eleven by name.
inline std::string disagreement_text(const std::vector<std::vector<setting>>& of_ranks, const agreement_words& words) {
  std::vector<std::string> names;
  for (const auto& all : of_ranks)
    for (const setting& k : all)
      if (std::find(names.begin(), names.end(), k.name) == names.end()) names.push_back(k.name);
  std::string text, others;
  std::size_t found = 0;
  for (const std::string& name : names) {
    const std::string difference = difference_text(of_ranks, name, words);
    if (difference.empty()) continue;
    if (found++ < 3)
      text += (text.empty() ? "" : "; ") + difference;
    else if (found <= 11)
      others += (others.empty() ? "; they differ in " : ", ") + name;
  }
  if (found > 11) append(others, {" and ", found - 11, " more"});
  return cat({text, others, (others.empty() ? "" : ", too"), words.end});
}

PLAIT_INLINE void require_agreement(int ranks, std::span<const setting> settings,
                                    function_ref<void(std::int64_t*, std::size_t)> greatest,
                                    function_ref<void(const char*, char*, std::size_t)> gather, std::string_view who,
                                    const agreement_words& words) {
  std::string mine = packed_settings(settings);
  const auto hash = static_cast<std::int64_t>(fnv1a(mine));
  std::int64_t most[] = {hash, ~hash};  // the maximum of the complements is the complement of the minimum
  greatest(most, 2);
  if (most[0] == ~most[1]) return;

  auto size = static_cast<std::int64_t>(mine.size());
  greatest(&size, 1);
  const auto bytes = static_cast<std::size_t>(size);
  mine.resize(bytes);
  std::string all(bytes * static_cast<std::size_t>(ranks), '\0');
  gather(mine.data(), all.data(), bytes);
  std::vector<std::vector<setting>> of_ranks;
  for (std::size_t r = 0; r < static_cast<std::size_t>(ranks); ++r)
    of_ranks.push_back(unpacked_settings(std::string_view(all).substr(r * bytes, bytes)));
  throw disagreement(std::string(who) + disagreement_text(of_ranks, words));
}

PLAIT_INLINE void require_agreement_on_host(any_communicator& ranks, std::span<const setting> settings,
                                            std::string_view who, const agreement_words& words) {
  if (ranks.size() == 1) return;
  require_agreement(
      ranks.size(), settings,
      [&](std::int64_t* values, std::size_t n) { ranks.all_reduce(values, values, n, dtype::i64, reduce_op::max); },
      [&](const char* in, char* out, std::size_t bytes) { ranks.all_gather(in, out, bytes, dtype::u8); }, who, words);
}

}  // namespace detail
}  // namespace plait
#endif

#include "plait/core/macros_on.hpp"
