// Cuts a token stream into samples and gives them in shuffled order. A sampler knows no mesh: each rank asks for the
// samples and positions that it holds, such as those of nn/sequence_order.hpp. Next: data/token_source.hpp.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "plait/core/error.hpp"
#include "plait/data/permutation.hpp"
#include "plait/data/token_source.hpp"

namespace plait {

struct sampler_config {
  std::int64_t seq = 0;    ///< positions per sample
  std::uint64_t seed = 0;  ///< of the order of the samples
  double held_out = 0;     ///< fraction of the windows kept for evaluation, in [0, 1); the last ones of the data
  bool shuffle = true;     ///< false: windows in the order of the data, in every epoch
  std::string seq_knob = "--seq";
  std::string held_out_knob = "--held-out";
};

/// Samples of a token stream. Window w is tokens [w seq, w seq + seq]: position p has the input w seq + p and the
/// target one further, so in an epoch no token is the target twice, and each is once but the first, those that are held
/// out, and the rest after the last whole window. The order is a permutation of the windows keyed by
/// (seed, epoch) and evaluated at the place asked for; nothing is stored, and a cursor alone resumes a run. A *cursor*
/// counts samples since the start of training, `step * global_batch + i`; every rank that computes the same cursor
/// reads the same sample, whatever the mesh.
class sampler {
 public:
  /// Throws `error` when `seq` or `held_out` is out of range, and when the data holds not even one window to train on.
  sampler(token_source source, sampler_config config) : source_(std::move(source)), config_(std::move(config)) {
    const std::string& seq_knob = config_.seq_knob;
    if (config_.seq < 1) fail({seq_knob, ": ", config_.seq, " positions per sample; at least 1 is legal"});
    if (!(config_.held_out >= 0 && config_.held_out < 1)) {
      fail({config_.held_out_knob, ": ", config_.held_out, " is no fraction; legal is 0 up to, not including, 1"});
    }
    const std::int64_t windows = (source_.size() - 1) / config_.seq;
    if (windows < 1) {
      fail({source_.config().knob, " and ", seq_knob, ": '", source_.config().paths.front(), "'",
            source_.config().paths.size() > 1 ? " and the other files hold " : " holds ", source_.size(),
            " tokens, and one sample at ", seq_knob, " ", config_.seq, " takes ", config_.seq + 1,
            "; use more data or a smaller ", seq_knob});
    }
    if (config_.held_out > 0) {
      held_out_ = std::max<std::int64_t>(1, std::llround(config_.held_out * static_cast<double>(windows)));
    }
    if (held_out_ >= windows) {
      fail({config_.held_out_knob, ": ", config_.held_out, " of ", windows, " windows (", seq_knob, " ", config_.seq,
            ", ", source_.size(), " tokens) leaves none to train on; use more data, a smaller fraction or a smaller ",
            seq_knob});
    }
    train_ = windows - held_out_;
  }

  std::int64_t seq() const { return config_.seq; }
  /// Samples in one epoch of training.
  std::int64_t epoch_samples() const { return train_; }
  /// Samples kept for evaluation.
  std::int64_t held_out_samples() const { return held_out_; }
  const token_source& source() const { return source_; }

  /// The window that training sample `cursor` >= 0 is; in [0, epoch_samples()).
  std::int64_t window(std::int64_t cursor) const {
    if (cursor < 0) fail({"sampler: the cursor is ", cursor, "; it counts samples from 0"});
    const std::int64_t place = cursor % train_;
    if (!config_.shuffle) return place;
    return permutation(train_, config_.seed, static_cast<std::uint64_t>(cursor / train_))(place);
  }

  /// Positions [first, first + count) of training sample `cursor`: `inputs[count]` and `targets[count]`. A rank that
  /// holds a slice of the sequence asks for its slice only. Throws `error` for positions outside [0, seq()] and bad
  /// tokens.
  void fill(std::int64_t cursor, std::int64_t first, std::int64_t count, std::int64_t* inputs,
            std::int64_t* targets) const {
    fill_window(window(cursor), first, count, inputs, targets);
  }
  /// All positions of training sample `cursor`.
  void fill(std::int64_t cursor, std::int64_t* inputs, std::int64_t* targets) const {
    fill(cursor, 0, config_.seq, inputs, targets);
  }
  /// Positions of evaluation sample `index`, 0 <= index < held_out_samples(); in the order of the data.
  void fill_held_out(std::int64_t index, std::int64_t first, std::int64_t count, std::int64_t* inputs,
                     std::int64_t* targets) const {
    if (index < 0 || index >= held_out_) {
      fail({"sampler: evaluation sample ", index, " asked for, and ", config_.held_out_knob, " keeps ", held_out_});
    }
    fill_window(train_ + index, first, count, inputs, targets);
  }

 private:
  void fill_window(std::int64_t window, std::int64_t first, std::int64_t count, std::int64_t* inputs,
                   std::int64_t* targets) const {
    if (first < 0 || count < 0 || first > config_.seq - count) {
      fail({"sampler: positions [", first, ", ", first, " + ", count, ") asked for, and ", config_.seq_knob, " is ",
            config_.seq});
    }
    if (count == 0) return;
    const std::int64_t start = window * config_.seq + first;
    source_.read(start, count, inputs);
    std::copy(inputs + 1, inputs + count, targets);
    source_.read(start + count, 1, targets + count - 1);
  }

  token_source source_;
  sampler_config config_;
  std::int64_t held_out_ = 0;
  std::int64_t train_ = 0;
};

}  // namespace plait
