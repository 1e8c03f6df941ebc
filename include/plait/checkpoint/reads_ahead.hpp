// Reads many boxes of the tensors of a saved step in the background, in large blocks of its files, compares checksums
// and puts the elements where they belong, of whatever type. Tensors from end to end: checkpoint/read_flat.hpp.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "plait/checkpoint/convert.hpp"
#include "plait/checkpoint/planned_blocks.hpp"
#include "plait/checkpoint/step_data.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/io/copy_past_cache.hpp"
#include "plait/io/crc32c.hpp"
#include "plait/io/read_ahead.hpp"

namespace plait {

/// How much is read ahead: `threads` blocks of `bytes` at once, and as much memory.
struct read_sizes {
  int threads = 2;
  std::size_t bytes = std::size_t{4} << 20;
};

/// Returns nothing, or what is wrong with the sizes, which are called `threads` and `bytes`.
inline std::string fault_of(const read_sizes& s, const std::string& threads, const std::string& bytes) {
  if (s.threads < 1 || s.threads > 64) return cat({threads, " is ", s.threads, "; legal are 1 to 64"});
  constexpr std::size_t least = 64, most = std::size_t{1} << 30;
  if (s.bytes < least || s.bytes > most) return cat({bytes, " is ", s.bytes, "; legal are ", least, " to ", most});
  return {};
}

/// Boxes on their way to memory. The caller waits for those of one owner after the other.
class reads_ahead {
 public:
  /// Begins to read. `data` is of the step whose manifest is `saved`; it is not used by others until `finish` has
  /// returned, or this is destroyed. No file is opened by this thread. The sizes are legal.
  reads_ahead(const manifest& saved, step_data& data, std::vector<wanted_box> wanted, read_sizes sizes) {
    std::uint64_t all = 0;
    for (const wanted_box& w : wanted)
      all += static_cast<std::uint64_t>(w.wanted.local_size()) * size_of(w.tensor->dtype);
    if (all == 0) return;
    sizes.bytes = static_cast<std::size_t>(std::min<std::uint64_t>(sizes.bytes, std::max<std::uint64_t>(all, 64)));
    const std::uint64_t blocks = (all + sizes.bytes - 1) / sizes.bytes;
    sizes.threads = static_cast<int>(std::min<std::uint64_t>(static_cast<std::uint64_t>(sizes.threads), blocks));
    source_.emplace(saved, data, std::move(wanted), sizes.bytes);
    ahead_.emplace(*source_, sizes.threads, sizes.bytes + 2 * detail::planned_blocks::page);
  }

  /// Waits until all that `owner` wants is there and the checksums of the boxes that it wanted whole are right. Returns
  /// whether nothing has failed so far; where something has, no thread writes anywhere any more.
  bool wait(std::size_t owner) {
    return !ahead_ || ahead_->wait([&] { return source_->blocks.has_all(owner); });
  }
  /// Waits for all. Throws the `error` that names the tensor, box, file and position of a box whose checksum is
  /// another, and as `open_file::read` and `file_system::open`.
  void finish() {
    if (ahead_) ahead_->finish();
  }
  /// Returns what was read of boxes that were not wanted whole, each with its owner; after `finish`.
  std::vector<std::pair<std::size_t, partly_read>> take_partly_read() {
    return source_ ? std::exchange(source_->partly, {}) : std::vector<std::pair<std::size_t, partly_read>>{};
  }

 private:
  struct source {
    using block = detail::planned_blocks::block;

    source(const manifest& saved, step_data& d, std::vector<wanted_box> wanted, std::size_t bytes)
        : data(d), blocks(saved, d.boxes(), std::move(wanted), bytes) {}

    std::optional<block> next() {
      std::optional<block> one = blocks.next();
      if (one) one->file = data.hold(one->which_file);
      return one;
    }
    void use(block& one, std::span<const std::byte> bytes) const {
      for (detail::piece_of_box& p : one.pieces) {
        const auto mine =
            bytes.subspan(static_cast<std::size_t>(p.begin - one.position), static_cast<std::size_t>(p.end - p.begin));
        p.runs == 1 ? use_part_of_run(p, mine) : use_runs(p, mine);
      }
    }
    void used(block& one) {
      data.add_bytes(one.bytes);
      for (const detail::piece_of_box& p : one.pieces) {
        detail::common_box& from = *p.from;
        from.sum ^= p.sum;
        from.left -= p.bytes;
        if (from.left > 0) continue;
        if (!from.is_whole()) {
          const auto bytes = static_cast<std::uint64_t>(from.common.local_size()) * from.width();
          partly.emplace_back(from.for_whom.owner, partly_read{&from.tensor(), from.index, from.sum, bytes});
        } else if (from.sum != from.stored().stored.crc32c) {
          data.damaged(from.tensor(), from.stored());
        }
        blocks.has_read(from);
      }
    }

    step_data& data;
    detail::planned_blocks blocks;
    std::vector<std::pair<std::size_t, partly_read>> partly;
  };

  /// Copies or converts elements to their place in the wanted box, unless they were read to it.
  static void put(const detail::common_box& from, std::int64_t at, std::span<const std::byte> bytes) {
    const wanted_box& w = from.for_whom;
    const std::size_t width = from.converts() ? size_of(*w.type) : from.width();
    std::byte* const out = w.out + static_cast<std::size_t>(at) * width;
    if (from.converts())
      convert_saved(from.tensor().dtype, *w.type, bytes.data(), out,
                    static_cast<std::int64_t>(bytes.size() / from.width()), from.tensor().name);
    else if (out != bytes.data())
      copy_past_cache(out, bytes.data(), bytes.size());
  }
  /// Bytes are summed up and copied some at a time, so that the cache has them still.
  static void use_part_of_run(detail::piece_of_box& p, std::span<const std::byte> bytes) {
    constexpr std::size_t at_once = std::size_t{128} << 10;
    const detail::common_box& from = *p.from;
    const auto [stored, wanted] = from.places(p.first);
    const std::uint64_t in_box = p.begin - from.stored().stored.position;
    const auto into_run = static_cast<std::int64_t>(in_box / from.width()) - stored;
    std::uint32_t sum = 0;
    for (std::size_t at = 0; at < bytes.size(); at += at_once) {
      const auto some = bytes.subspan(at, std::min(at_once, bytes.size() - at));
      sum = crc32c(some, sum);
      put(from, wanted + into_run + static_cast<std::int64_t>(at / from.width()), some);
    }
    p.sum = behind(from, in_box + bytes.size(), sum);
  }
  static void use_runs(detail::piece_of_box& p, std::span<const std::byte> bytes) {
    const detail::common_box& from = *p.from;
    const std::size_t run = static_cast<std::size_t>(from.run) * from.width();
    std::uint64_t last_step = 0, end = p.begin - from.stored().stored.position;
    std::uint32_t sum = 0, power = detail::crc32c_power(0);
    for (std::int64_t i = p.first; i < p.first + p.runs; ++i) {
      const auto [stored, wanted] = from.places(i);
      const std::uint64_t begin = static_cast<std::uint64_t>(stored) * from.width();
      const auto some = bytes.subspan(static_cast<std::size_t>(begin + from.stored().stored.position - p.begin), run);
      const std::uint64_t step = begin + run - end;  // runs that follow each other in equal steps share a power
      if (step != last_step) power = detail::crc32c_power(last_step = step);
      sum = detail::crc32c_multiply(power, sum) ^ crc32c(some);
      end = begin + run;
      put(from, wanted, some);
    }
    p.sum = behind(from, end, sum);
  }
  /// Returns what bytes of a box that end at byte `end` of it, whose sum is `sum`, have in the sum of the box.
  static std::uint32_t behind(const detail::common_box& from, std::uint64_t end, std::uint32_t sum) {
    return detail::crc32c_multiply(detail::crc32c_power(from.stored().stored.bytes - end), sum);
  }

  std::optional<source> source_;
  std::optional<read_ahead<source>> ahead_;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
