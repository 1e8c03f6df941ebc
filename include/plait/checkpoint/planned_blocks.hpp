// Puts what is wanted of the boxes of a saved step in the order of its files, and joins neighbours into blocks that are
// read in one go. Which boxes there are: checkpoint/stored_boxes.hpp.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "plait/checkpoint/boxes.hpp"
#include "plait/checkpoint/manifest.hpp"
#include "plait/checkpoint/stored_boxes.hpp"
#include "plait/core/dtype.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/io/read_ahead.hpp"

namespace plait {

/// A box of a saved tensor and where its elements go, row-major.
struct wanted_box {
  const stored_tensor* tensor = nullptr;
  box wanted;
  std::byte* out = nullptr;
  std::optional<dtype> type{};  ///< of the elements there; none: that of the saved ones, whatever it is
  std::size_t owner = 0;        ///< a number that the caller knows it by; those of a list do not fall
};

namespace detail {

/// The part that a wanted box and a stored one have in common, on its way to memory.
struct common_box {
  common_box(const wanted_box& w, std::uint32_t stored_box_index, const box& stored_whole, const box& both)
      : for_whom(w), index(stored_box_index), whole(stored_whole), common(both) {
    std::tie(run, outer) = common_run(common, whole, for_whom.wanted);
    runs = common.local_size() / run;
    left = static_cast<std::uint64_t>(common.local_size()) * width();
  }
  const stored_tensor& tensor() const { return *for_whom.tensor; }
  const stored_box& stored() const { return tensor().boxes[index]; }
  std::size_t width() const { return size_of(tensor().dtype); }
  bool converts() const { return for_whom.type && safetensors_dtype_of(*for_whom.type) != tensor().dtype; }
  bool is_whole() const { return common.local_size() == whole.local_size(); }
  /// Returns where the i-th run begins in the stored and in the wanted box, in elements.
  std::pair<std::int64_t, std::int64_t> places(std::int64_t i) const {
    per_dim at = common.offset;
    for (int d = outer - 1; d >= 0; --d) {
      at[d] += i % common.local[d];
      i /= common.local[d];
    }
    return {place_in(whole, at), place_in(for_whom.wanted, at)};
  }
  /// Returns the place of its first byte in the file.
  std::uint64_t position(std::int64_t i) const {
    return stored().stored.position + static_cast<std::uint64_t>(places(i).first) * width();
  }

  wanted_box for_whom;
  std::uint32_t index;  ///< in `tensor().boxes`
  box whole, common;
  std::int64_t run = 0, runs = 0;  ///< elements that follow each other in both, and how often
  int outer = 0;                   ///< the dims before those of a run
  std::uint32_t sum = 0;           ///< of the bytes that have been read, as in `partly_read`
  std::uint64_t left = 0;          ///< bytes that have not
};

/// Runs of a common box that are read together, or a part of one.
struct piece_of_box {
  std::shared_ptr<common_box> from;
  std::uint64_t begin = 0, end = 0;  ///< in the file
  std::int64_t first = 0, runs = 0;  ///< which runs; a part of a run is of one
  std::uint32_t sum = 0;
  std::uint64_t bytes = 0;  ///< what is wanted of it

  std::uint32_t file() const { return from->stored().stored.file; }
};

/// Gives blocks one after the other. Boxes are planned some at a time, so that the plan of any state is small.
class planned_blocks {
 public:
  struct block : file_block {
    std::uint32_t which_file = 0;
    std::vector<piece_of_box> pieces;
  };
  /// Blocks smaller than this are read as they are; larger ones from page to page, which goes past the system's cache.
  static constexpr std::uint64_t large = std::uint64_t{256} << 10, page = 4096;
  /// Boxes of at least this size are read directly into their destination, where both have the same page offset.
  static constexpr std::uint64_t straight = std::uint64_t{1} << 20;

  planned_blocks(const manifest& saved, stored_boxes& boxes, std::vector<wanted_box> wanted, std::size_t block_bytes)
      : saved_(saved), boxes_(boxes), wanted_(std::move(wanted)), block_bytes_(block_bytes) {
    if (!wanted_.empty()) unread_.resize(wanted_.back().owner + 1);
  }

  /// Returns the next block, whose file is not open yet; nothing after the last one.
  std::optional<block> next() {
    while (next_ == pieces_.size()) {
      if (planned_ == wanted_.size()) return std::nullopt;
      plan();
    }
    block out;
    out.which_file = pieces_[next_].file();
    out.into = goes_straight(pieces_[next_]);
    const bool alone = out.into != nullptr;
    const std::uint64_t align = block_bytes_ >= large ? page : 1;
    const std::uint64_t limit = (pieces_[next_].begin + block_bytes_) / align * align;
    std::uint64_t end = 0, bytes = 0;
    while (next_ < pieces_.size() && (out.pieces.empty() || !alone)) {
      piece_of_box& p = pieces_[next_];
      if (p.file() != out.which_file || p.begin >= limit) break;
      if (!out.pieces.empty() && p.begin < out.pieces.front().begin) break;  // it overlaps one that was cut
      if (!out.pieces.empty() && (p.begin > end + bytes / most_gap || goes_straight(p) != nullptr)) break;
      std::uint64_t to = p.end;
      if (to > limit) {  // at the end of an element
        const std::size_t width = p.from->width();
        to = p.runs > 1 ? p.begin : p.begin + (limit - p.begin) / width * width;
        if (to == p.begin) break;
      }
      piece_of_box& taken = out.pieces.emplace_back(p);
      taken.end = p.begin = to;
      if (p.runs == 1) taken.bytes = to - taken.begin;
      end = std::max(end, to);
      bytes += taken.bytes;
      if (p.begin < p.end) break;  // the rest is of the next one
      ++next_;
    }
    out.position = out.pieces.front().begin;
    if (!alone && end - out.position > large) {
      out.position = out.position / page * page;
      end = std::max(end, std::min((end + page - 1) / page * page, saved_.files[out.which_file].bytes));
    }
    out.bytes = end - out.position;
    return out;
  }
  /// Says that all of a common box has been read.
  void has_read(const common_box& one) { --unread_[one.for_whom.owner]; }
  /// Returns whether all that an owner wants has been read.
  bool has_all(std::size_t owner) const {
    const bool is_planned = planned_ == wanted_.size() || wanted_[planned_].owner > owner;
    return is_planned && (owner >= unread_.size() || unread_[owner] == 0);
  }

 private:
  /// A gap between two boxes is read with them where it is at most so small a part of what is wanted before it.
  static constexpr std::uint64_t most_gap = 16;

  /// Returns where a piece can be read to straight away, or nothing.
  static std::byte* goes_straight(const piece_of_box& p) {
    const common_box& b = *p.from;
    if (p.runs > 1 || b.converts() || static_cast<std::uint64_t>(b.run) * b.width() < straight) return nullptr;
    const auto [from, to] = b.places(p.first);
    const std::uint64_t before = b.stored().stored.position + static_cast<std::uint64_t>(from) * b.width();
    std::byte* const out = b.for_whom.out + static_cast<std::size_t>(to) * b.width() + (p.begin - before);
    return (reinterpret_cast<std::uintptr_t>(out) - p.begin) % page == 0 ? out : nullptr;
  }

  /// Plans the next boxes: about as many as make some blocks, so that those of one file can be joined.
  void plan() {
    constexpr std::uint64_t blocks = 16;
    pieces_.clear();
    next_ = 0;
    for (std::uint64_t bytes = 0; planned_ < wanted_.size() && bytes < blocks * block_bytes_; ++planned_) {
      const wanted_box& w = wanted_[planned_];
      for (const std::uint32_t i : boxes_.overlapping(*w.tensor, w.wanted)) {
        const box whole = w.tensor->box_of(w.tensor->boxes[i]);
        const std::optional<box> common = intersection(whole, w.wanted);
        if (!common) continue;
        const auto both = std::make_shared<common_box>(w, i, whole, *common);
        bytes += both->left;
        ++unread_[w.owner];
        add(both);
      }
    }
    std::stable_sort(pieces_.begin(), pieces_.end(), [](const piece_of_box& a, const piece_of_box& b) {
      return std::make_tuple(a.file(), a.begin) < std::make_tuple(b.file(), b.begin);
    });
  }
  void add(const std::shared_ptr<common_box>& both) {
    const auto run = static_cast<std::uint64_t>(both->run) * both->width();
    const bool apart = run >= std::min<std::uint64_t>(stored_boxes::long_run, block_bytes_ / 4);
    const std::uint64_t most = block_bytes_ - std::min<std::uint64_t>(block_bytes_ / 2, page);
    for (std::int64_t i = 0; i < both->runs; ++i) {
      const std::uint64_t begin = both->position(i);
      if (i > 0 && !apart && begin + run - pieces_.back().begin <= most) {
        pieces_.back().end = begin + run;
        pieces_.back().bytes += run;
        ++pieces_.back().runs;
      } else {
        pieces_.push_back({both, begin, begin + run, i, 1, 0, run});
      }
    }
  }

  const manifest& saved_;
  stored_boxes& boxes_;
  std::vector<wanted_box> wanted_;
  std::size_t block_bytes_;
  std::size_t planned_ = 0;  ///< how many of `wanted_`
  std::vector<piece_of_box> pieces_;
  std::size_t next_ = 0;             ///< of `pieces_`
  std::vector<std::size_t> unread_;  ///< by owner: common boxes that are planned and have not been read
};

}  // namespace detail

}  // namespace plait

#include "plait/core/macros_on.hpp"
