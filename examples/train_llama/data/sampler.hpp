// Cuts token streams into samples in a shuffled order, which any rank can compute at any place.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "plait/core/error.hpp"
#include "plait/version.hpp"
#include "train_llama/data/tokens.hpp"

namespace plait {

/// A pseudo-random permutation of [0, size) that can be evaluated at any place in constant time and memory: a balanced
/// Feistel network on the smallest even number of bits that holds `size`, walked until the image falls into range
/// (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). The domain is at most four times `size`, so
/// the expected walk is at most four steps.
///
/// A shuffled array would have to be stored, and made again by every rank and after every restart. A permutation
/// depends only on (key, index).
class permutation {
 public:
  /// `size` >= 1. Different pairs (`seed`, `stream`) give unrelated permutations.
  constexpr permutation(std::int64_t size, std::uint64_t seed, std::uint64_t stream)
      : size_(static_cast<std::uint64_t>(size)), key_(mix(mix(seed) ^ (stream + golden))) {
    const int bits = size_ <= 1 ? 0 : static_cast<int>(std::bit_width(size_ - 1));
    half_bits_ = bits == 0 ? 1 : (bits + 1) / 2;
    mask_ = (std::uint64_t{1} << half_bits_) - 1;
  }

  constexpr std::int64_t size() const { return static_cast<std::int64_t>(size_); }

  /// Returns the image of `index`, for 0 <= index < size().
  constexpr std::int64_t operator()(std::int64_t index) const {
    auto value = static_cast<std::uint64_t>(index);
    do {
      value = encrypt(value);
    } while (value >= size_);
    return static_cast<std::int64_t>(value);
  }

 private:
  static constexpr std::uint64_t golden = 0x9e3779b97f4a7c15u;  // 2^64 / golden ratio
  static constexpr int rounds = 8;

  /// The output function of SplitMix64 (Steele, Lea and Flood, 2014): a bijection with full avalanche.
  static constexpr std::uint64_t mix(std::uint64_t x) {
    x += golden;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  }
  constexpr std::uint64_t encrypt(std::uint64_t value) const {
    std::uint64_t left = value >> half_bits_;
    std::uint64_t right = value & mask_;
    for (std::uint64_t round = 0; round < rounds; ++round) {
      const std::uint64_t next = left ^ (mix(key_ ^ mix(right + (round << 56))) & mask_);
      left = right;
      right = next;
    }
    return (left << half_bits_) | right;
  }

  std::uint64_t size_;
  std::uint64_t key_;
  std::uint64_t mask_ = 0;
  int half_bits_ = 1;
};

/// The source of each of a run's samples, by global index, in proportion to weights. [0, 2^32) is divided into parts
/// whose lengths are proportional to the weights. Sample i has the phase i * 2654435769 mod 2^32: the fractional part
/// of i times the golden ratio, in whole numbers. It comes from the source whose part has this phase. So the first n
/// samples have n * w of a source, with an error of about log n for every n (Kronecker's sequence; Niederreiter 1992,
/// section
/// 3.1). The index within the source is a sum of floors, computed in logarithmic time.
class blend {
 public:
  struct pick {
    std::size_t source;
    std::int64_t index;  ///< of the source's own samples, from 0
  };

  /// Weights need not add up to 1. Throws `error` if there are none, or if one is not finite, not above 0, or less than
  /// 2^-32 of their sum.
  explicit blend(const std::vector<double>& weights) {
    double sum = 0, before = 0;
    if (weights.empty()) fail({"--data-weights: no weight given"});
    for (const double w : weights) {
      if (!(w > 0 && std::isfinite(w))) fail({"--data-weights: ", w, " is no weight; legal are numbers above 0"});
      sum += w;
    }
    if (!std::isfinite(sum)) fail({"--data-weights: the weights add up to more than a double holds"});
    ends_.push_back(0);
    for (std::size_t i = 0; i < weights.size(); ++i) {
      before += weights[i];
      ends_.push_back(i + 1 == weights.size() ? period
                                              : static_cast<std::uint64_t>(std::llround(std::ldexp(before / sum, 32))));
      if (ends_[i + 1] <= ends_[i])
        fail({"--data-weights: ", weights[i], " is less than one sample in 2^32 of ", sum, "; leave the source out"});
    }
  }

  std::size_t sources() const { return ends_.size() - 1; }

  /// Returns the source of the run's sample `index` >= 0, and the index within the source.
  pick at(std::int64_t index) const {
    const auto i = static_cast<std::uint64_t>(index);
    const std::uint64_t phase = i * step % period, rest = i % period, rounds = i / period;
    std::size_t source = 0;
    while (ends_[source + 1] <= phase) ++source;
    const std::uint64_t low = ends_[source], high = ends_[source + 1];
    return {source, static_cast<std::int64_t>(rounds * (high - low) + below(rest, high) - below(rest, low))};
  }

 private:
  static constexpr std::uint64_t period = std::uint64_t{1} << 32, step = 2654435769;  // 2^32 / golden ratio, and odd

  /// Returns how many of the first n < 2^32 samples have a phase below x <= 2^32: each adds
  /// floor(y / 2^32) - floor((y - x) / 2^32) for y = j * step.
  static std::uint64_t below(std::uint64_t n, std::uint64_t x) {
    return n + sum_of_floors(n, 0) - sum_of_floors(n, period - x);
  }
  /// Returns the sum of floor((step * j + b) / 2^32) over j in [0, n), modulo 2^64, by Euclid's algorithm (Knuth 1998,
  /// section 3.3.3, on Dedekind sums).
  static std::uint64_t sum_of_floors(std::uint64_t n, std::uint64_t b) {
    std::uint64_t a = step, m = period, sum = 0;
    while (n > 0) {
      sum += (n % 2 == 0 ? n / 2 * (n - 1) : (n - 1) / 2 * n) * (a / m) + n * (b / m);
      a %= m;
      b %= m;
      const std::uint64_t most = a * n + b;  // below 2^64: a and b are below m, and n m falls
      if (most < m) break;
      n = most / m;
      b = most % m;
      const std::uint64_t old = m;
      m = a;
      a = old;
    }
    return sum;
  }

  std::vector<std::uint64_t> ends_;  ///< ends of the sources' parts, from 0 to 2^32
};

struct sampler_config {
  std::int64_t seq = 0;       ///< positions per sample
  std::uint64_t seed = 0;     ///< seed of the order of the samples
  double held_out = 0;        ///< fraction of each source's windows kept for evaluation, in [0, 1); the last ones
  bool all_held_out = false;  ///< keeps all windows for evaluation, and none for training
  bool shuffle = true;        ///< false: windows in the order of the data, in every epoch
  /// Whether documents are separate: a target in another document than its input is `no_target`. The model keeps
  /// attention within documents; `sampler::starts` returns their beginnings.
  bool documents = false;
  std::int64_t no_target = -100;  ///< the loss's `ignore_index`
};

/// Samples of one or several token sources. Window w of a source is its tokens [w seq, w seq + seq]. Position p has the
/// input w seq + p, and the target is the next token. In an epoch each token is a target once, except the first token,
/// held-out ones, and the rest after the last whole window. The order is a permutation of the windows, keyed by (seed,
/// epoch) and evaluated at each place. If there are several sources, `blend` chooses the source of a sample, and each
/// has its own epochs.
///
/// A *cursor* counts samples since the start of training: `step * global_batch + i`. All ranks that compute one cursor
/// read the same sample, on every mesh. Nothing is stored, so a cursor is enough to resume a run.
class sampler {
 public:
  /// Throws `error` if `seq` or `held_out` is out of range, if a source has no window to train on, or if documents are
  /// to be separate and a source does not know them.
  sampler(token_source source, sampler_config config)
      : sampler(std::vector<token_source>{std::move(source)}, {1.0}, std::move(config)) {}
  /// Mixes several sources, one weight each; weights need not add up to 1. Each source is read again, in another order,
  /// as often as its share requires.
  sampler(std::vector<token_source> sources, const std::vector<double>& weights, sampler_config config)
      : config_(std::move(config)), blend_(weights) {
    if (config_.seq < 1) fail({"--seq: ", config_.seq, " positions per sample; at least 1 is legal"});
    if (!(config_.held_out >= 0 && config_.held_out < 1)) {
      fail({"--held-out: ", config_.held_out, " is no fraction; legal is 0 up to, not including, 1"});
    }
    if (weights.size() != sources.size())
      fail({"--data-weights: ", weights.size(), " weights for ", sources.size(), " sources; give one for each"});
    for (token_source& source : sources) add(std::move(source));
  }

  std::int64_t seq() const { return config_.seq; }
  std::size_t sources() const { return parts_.size(); }
  /// Returns the number of samples in one epoch of training on a source.
  std::int64_t epoch_samples(std::size_t source = 0) const { return parts_[source].train; }
  /// Returns the number of samples kept for evaluation in all sources. An evaluation takes this number.
  std::int64_t held_out_samples() const {
    std::int64_t all = 0;
    for (const part& p : parts_) all += p.held_out;
    return all;
  }
  const token_source& source(std::size_t source = 0) const { return parts_[source].tokens; }

  /// A window of a source.
  struct place {
    std::size_t source;
    std::int64_t window;
  };
  /// Returns where training sample `cursor` >= 0 is.
  place training(std::int64_t cursor) const {
    const blend::pick which = picked(cursor);
    const std::int64_t train = parts_[which.source].train, at = which.index % train;
    if (!config_.shuffle) return {which.source, at};
    // Sources of equal size have different orders.
    const std::uint64_t stream = static_cast<std::uint64_t>(which.source) << 48;
    return {which.source,
            permutation(train, config_.seed, stream + static_cast<std::uint64_t>(which.index / train))(at)};
  }
  /// Returns where evaluation sample `index` is, 0 <= index < held_out_samples(). Samples come from the sources in
  /// proportion to their weights, as in training. So their mean loss is the one that training minimizes, for sources of
  /// any size. Within a source they are in the order of the data; a source that is too short for its share begins
  /// again.
  place evaluation(std::int64_t index) const {
    if (index < 0 || index >= held_out_samples())
      fail({"sampler: evaluation sample ", index, " asked for, and --held-out keeps ", held_out_samples()});
    const blend::pick which = picked(index);
    const part& p = parts_[which.source];
    return {which.source, p.train + which.index % p.held_out};
  }

  /// Writes positions [first, first + count) of a sample to `inputs[count]` and `targets[count]`. A rank with a part of
  /// the sequence calls it for its part. Throws `error` for positions outside [0, seq()] and for bad tokens.
  void fill(const place& at, std::int64_t first, std::int64_t count, std::int64_t* inputs,
            std::int64_t* targets) const {
    require_positions(first, count);
    if (count == 0) return;
    const token_source& tokens = source(at.source);
    const std::int64_t start = at.window * config_.seq + first;
    tokens.read(start, count, inputs);
    std::copy(inputs + 1, inputs + count, targets);
    tokens.read(start + count, 1, targets + count - 1);
    if (!config_.documents) return;
    std::vector<std::int64_t> begin(static_cast<std::size_t>(count));
    tokens.document_starts(start, start + 1, count, begin.data());  // of the targets, seen from the first input
    for (std::int64_t i = 0; i < count; ++i)
      if (begin[static_cast<std::size_t>(i)] == start + i + 1) targets[i] = config_.no_target;
  }
  /// Writes for each of these positions where its document begins, as a position in the sample; 0 if it begins before.
  /// The numbers are for `microbatch::document_starts`. Throws `error` as `fill`, and if the sample's source knows no
  /// documents.
  void starts(const place& at, std::int64_t first, std::int64_t count, std::int32_t* out) const {
    require_positions(first, count);
    if (count == 0) return;
    const std::int64_t start = at.window * config_.seq;
    std::vector<std::int64_t> begin(static_cast<std::size_t>(count));
    source(at.source).document_starts(start, start + first, count, begin.data());
    for (std::int64_t i = 0; i < count; ++i)
      out[i] = static_cast<std::int32_t>(begin[static_cast<std::size_t>(i)] - start);
  }

 private:
  struct part {
    token_source tokens;
    std::int64_t train, held_out;  ///< windows
  };

  void add(token_source source) {
    const std::string& flag = source.config().flag;
    const std::int64_t windows = (source.size() - 1) / config_.seq;
    if (windows < 1) {
      fail({flag, " and --seq: '", source.config().paths.front(), "'",
            source.config().paths.size() > 1 ? " and the other files hold " : " holds ", source.size(),
            " tokens, and one sample at --seq ", config_.seq, " takes ", config_.seq + 1,
            "; use more data or a smaller --seq"});
    }
    if (config_.documents && !source.knows_documents())
      fail({"--documents: '", source.config().paths.front(), "' is read as ", name_of(source.format()),
            ", which does not say where documents end; name the token by --end-of-document"});
    std::int64_t held_out = 0;
    if (config_.held_out > 0) {
      held_out = std::max<std::int64_t>(1, std::llround(config_.held_out * static_cast<double>(windows)));
    }
    if (config_.all_held_out) {
      held_out = windows;
    } else if (held_out >= windows) {
      fail({"--held-out: ", config_.held_out, " of ", windows, " windows (--seq ", config_.seq, ", ", source.size(),
            " tokens) leaves none to train on; use more data, a smaller fraction or a smaller --seq"});
    }
    parts_.push_back({std::move(source), windows - held_out, held_out});
  }

  blend::pick picked(std::int64_t cursor) const {
    if (cursor < 0) fail({"sampler: the cursor is ", cursor, "; it counts samples from 0"});
    return parts_.size() == 1 ? blend::pick{0, cursor} : blend_.at(cursor);
  }
  void require_positions(std::int64_t first, std::int64_t count) const {
    if (first < 0 || count < 0 || first > config_.seq - count) {
      fail({"sampler: positions [", first, ", ", first, " + ", count, ") asked for, and --seq is ", config_.seq});
    }
  }
  sampler_config config_;
  blend blend_;
  std::vector<part> parts_;
};

}  // namespace plait
