// Reads the data files of a saved step: boxes of tensors in the background in large blocks, or tensors from start to
// end. Every checksum is verified.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "plait/checkpoint/boxes.hpp"
#include "plait/checkpoint/manifest.hpp"
#include "plait/checkpoint/safetensors.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/tensor_names.hpp"
#include "plait/core/types.hpp"
#include "plait/io/byte_buffer.hpp"
#include "plait/io/crc32c.hpp"
#include "plait/io/file_system.hpp"

namespace plait {

/// Bytes of a file that are read at once.
struct file_block {
  std::shared_ptr<const open_file> file;
  std::uint64_t position = 0;
  std::size_t bytes = 0;
  std::byte* into = nullptr;  ///< destination; null: memory of the thread that reads them
};

/// Reads the blocks of a `Source`, in its order, with threads that have memory for one block each. A source has
///   a type `block`, which derives from `file_block`;
///   std::optional<block> next(): the next block, or nothing after the last;
///   void use(block&, std::span<const std::byte>), which several threads may call at once;
///   void used(block&), which is called after `use`, and may complete what the caller waits for.
/// One thread at a time calls `next` or `used`. After an exception from these or from a read, no more blocks are
/// requested. The caller gets the exception of the first block that failed.
template <class Source>
class read_ahead {
 public:
  /// Starts the threads; the source must outlive this object. A block without a destination (`into`) may have at most
  /// `block_bytes`. Throws `error` if the system cannot start more threads.
  read_ahead(Source& source, int threads, std::size_t block_bytes)
      : source_(source), block_bytes_((block_bytes + page - 1) / page * page) {
    arena_.grow(block_bytes_ * static_cast<std::size_t>(threads));
    try {
      for (int i = 0; i < threads; ++i) {
        threads_.emplace_back([this, i] { run(arena_.data() + block_bytes_ * static_cast<std::size_t>(i)); });
      }
    } catch (const std::system_error& e) {
      stop();
      fail({"cannot start thread ", static_cast<std::int64_t>(threads_.size()) + 1, " of ", threads,
            " that read ahead: ", e.what()});
    }
  }
  /// Requests no more blocks, and waits for the blocks that are being read.
  ~read_ahead() { stop(); }
  read_ahead(const read_ahead&) = delete;
  read_ahead& operator=(const read_ahead&) = delete;

  /// Waits until `ready()`, or all blocks are used, or an error has occurred and no thread uses a block. One thread at
  /// a time calls `ready`. Returns whether no error has occurred.
  template <class Ready>
  bool wait(Ready&& ready) {
    std::unique_lock lock(mutex_);
    ++waiting_;
    changed_.wait(lock, [&] { return at_work_ == 0 && (failure_ || ended_) ? true : !failure_ && ready(); });
    --waiting_;
    return !failure_;
  }
  /// Waits until all blocks are used. Throws the first error.
  void finish() {
    if (!wait([] { return false; })) std::rethrow_exception(failure_);
  }
  /// Requests no more blocks.
  void cancel() {
    const std::lock_guard lock(mutex_);
    ended_ = true;
  }
  /// Bytes of memory for blocks without a destination.
  std::size_t memory() const { return arena_.size(); }

 private:
  static constexpr std::size_t page = 4096;

  void run(std::byte* memory) {
    std::unique_lock lock(mutex_);
    while (!failure_ && !ended_) {
      const std::size_t number = next_number_;
      ++at_work_;
      bool locked = true;
      try {
        std::optional<typename Source::block> block = source_.next();
        if (block) {
          ++next_number_;
          lock.unlock();
          locked = false;
          const std::span<std::byte> bytes(block->into != nullptr ? block->into : memory, block->bytes);
          block->file->read(block->position, bytes);
          source_.use(*block, bytes);
          lock.lock();
          locked = true;
          source_.used(*block);
        } else {
          ended_ = true;
        }
      } catch (...) {
        if (!locked) lock.lock();
        if (!failure_ || number < failed_number_) {
          failure_ = std::current_exception();
          failed_number_ = number;
        }
      }
      --at_work_;
      if (waiting_ > 0) changed_.notify_all();
    }
  }
  void stop() {
    cancel();
    for (std::thread& t : threads_) t.join();
  }

  Source& source_;
  std::size_t block_bytes_;
  byte_buffer arena_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t next_number_ = 0, failed_number_ = 0;
  int at_work_ = 0, waiting_ = 0;
  bool ended_ = false;
  std::exception_ptr failure_;
  std::vector<std::thread> threads_;
};

/// Indexes of the boxes of tensors, each made on first use. One thread at a time may use it.
class stored_boxes {
 public:
  /// Bytes from which runs are read one by one. Shorter runs are read together with the gaps between them.
  static constexpr std::int64_t long_run = 16 << 10;

  /// Returns the indices, ascending, of the boxes of `tensor` that overlap `wanted`. The tensor must not move in
  /// memory.
  std::vector<std::uint32_t> overlapping(const stored_tensor& tensor, const box& wanted) {
    const auto [found, is_new] = indices_.try_emplace(&tensor);
    if (is_new) {
      std::vector<box> boxes;
      for (const stored_box& b : tensor.boxes) boxes.push_back(tensor.box_of(b));
      found->second = box_index(boxes);
    }
    return found->second.overlapping(wanted);
  }
  /// Returns whether `wanted` consists, in some box of the tensor, of short runs with gaps that would be read too.
  bool has_short_runs(const stored_tensor& tensor, const box& wanted) {
    for (const std::uint32_t i : overlapping(tensor, wanted)) {
      const box whole = tensor.box_of(tensor.boxes[i]);
      const std::optional<box> common = intersect(whole, wanted);
      if (!common) continue;
      const std::int64_t elements = common->local_size(), run = detail::common_run(*common, whole, whole).first;
      if (run < elements && run * static_cast<std::int64_t>(size_of(tensor.dtype)) < long_run) return true;
    }
    return false;
  }
  /// Returns the position in its file of the first element of `wanted`, a box of the tensor; 0 if it is empty.
  std::uint64_t place_of(const stored_tensor& tensor, const box& wanted) {
    for (const std::uint32_t i : overlapping(tensor, wanted)) {
      const box whole = tensor.box_of(tensor.boxes[i]);
      const std::optional<box> common = intersect(whole, wanted);
      if (!common || common->offset != wanted.offset) continue;
      const auto at = static_cast<std::uint64_t>(kernels::offset_of(whole, common->offset));
      return tensor.boxes[i].stored.position + at * size_of(tensor.dtype);
    }
    return 0;
  }

 private:
  std::map<const stored_tensor*, box_index> indices_;
};

/// The bytes and checksum of the part of a box that was read. Once readers have read each of its elements once, the
/// exclusive or of their sums is the box's checksum.
struct partly_read {
  const stored_tensor* tensor = nullptr;
  std::uint32_t box = 0;    ///< index in `tensor->boxes`
  std::uint32_t sum = 0;    ///< computed as if unread bytes were zeros that leave the checksum unchanged
  std::uint64_t bytes = 0;  ///< number of bytes read
};

/// Returns the checksum of a range of a file, continued from `sum`, the checksum of earlier bytes. It reads in blocks.
/// Throws `error` if the file ends before.
inline std::uint32_t crc32c_of(const open_file& file, std::uint64_t position, std::uint64_t bytes, byte_buffer& scratch,
                               std::uint32_t sum = 0) {
  constexpr std::uint64_t block = std::uint64_t{4} << 20, page = 4096;
  scratch.grow(static_cast<std::size_t>(std::min(bytes, block) + page));
  // With the page offset of the file, reads bypass the cache.
  std::byte* const to = scratch.data() + position % page;
  for (std::uint64_t at = 0; at < bytes; at += block) {
    const std::span<std::byte> some(to, static_cast<std::size_t>(std::min(block, bytes - at)));
    file.read(position + at, some);
    sum = crc32c(some, sum);
  }
  return sum;
}

namespace detail {

inline std::string name_of_box(const stored_tensor& tensor, const stored_box& b) {
  return cat({"tensor '", tensor.name, "' box ", text_of_box(tensor, b)});
}
inline std::string name_of_blob(const stored_blob& blob) { return cat({"blob '", blob.name, "'"}); }

}  // namespace detail

/// The data of a saved step. One thread at a time may use it.
class step_data {
 public:
  /// `path` is the step's directory, and `saved` its manifest, which must outlive this object.
  step_data(file_system& files, std::string path, const manifest& saved)
      : path_(std::move(path)), saved_(saved), open_(files, paths_of(path_, saved)) {}

  /// Returns the index that finds overlapping boxes.
  stored_boxes& boxes() { return boxes_; }
  /// Reads a range only for its checksum, and returns whether that is right. Throws as `open_file::read` and
  /// `file_system::open`.
  bool is_whole(const stored_bytes& stored) {
    const std::uint32_t sum = crc32c_of(open_.at(stored.file), stored.position, stored.bytes, scratch_);
    bytes_ += stored.bytes;
    return sum == stored.crc32c;
  }
  /// Returns the error text for a range called `name` with a wrong checksum.
  std::string damage(const stored_bytes& where, const std::string& name) const {
    return cat({"'", path_, "/", saved_.files[where.file].path, "' is damaged: ", name, ", ", where.bytes,
                " bytes from ", where.position, " on, has another checksum than when it was written"});
  }
  /// Throws the `error` for a box with a wrong checksum: it names the tensor, box, file and position.
  [[noreturn]] void damaged(const stored_tensor& tensor, const stored_box& b) const {
    fail(damage(b.stored, detail::name_of_box(tensor, b)));
  }
  /// Reads a blob. Throws `error` as for tensors.
  std::string read(const stored_blob& blob) {
    std::string text(blob.stored.bytes, '\0');
    const auto bytes = std::as_writable_bytes(std::span(text));
    open_.at(blob.stored.file).read(blob.stored.position, bytes);
    bytes_ += bytes.size();
    if (crc32c(bytes) != blob.stored.crc32c) fail(damage(blob.stored, detail::name_of_blob(blob)));
    return text;
  }
  /// Bytes read so far.
  std::uint64_t bytes() const { return bytes_; }
  /// Returns an open data file for a reader, which reports the bytes it reads with `add_bytes`.
  std::shared_ptr<const open_file> hold(std::uint32_t file) { return open_.hold(file); }
  void add_bytes(std::uint64_t bytes) { bytes_ += bytes; }

 private:
  static std::vector<std::string> paths_of(const std::string& path, const manifest& saved) {
    std::vector<std::string> all;
    for (const stored_file& f : saved.files) all.push_back(path + "/" + f.path);
    return all;
  }

  std::string path_;
  const manifest& saved_;
  open_files open_;
  stored_boxes boxes_;
  byte_buffer scratch_;
  std::uint64_t bytes_ = 0;
};

/// A box of a saved tensor, and the row-major destination of its elements.
struct wanted_box {
  const stored_tensor* tensor = nullptr;
  box wanted;
  std::byte* out = nullptr;
  std::optional<dtype> type{};  ///< of the destination's elements; none: the saved type
  std::size_t owner = 0;        ///< the caller's number for it; must not decrease in a list
};

namespace detail {

/// The intersection of a wanted box and a stored one, which is being read.
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
  /// Returns the index of the i-th run's first element in the stored and in the wanted box.
  std::pair<std::int64_t, std::int64_t> places(std::int64_t i) const {
    per_dim at = common.offset;
    for (int d = outer - 1; d >= 0; --d) {
      at[d] += i % common.local[d];
      i /= common.local[d];
    }
    return {kernels::offset_of(whole, at), kernels::offset_of(for_whom.wanted, at)};
  }
  /// Returns the position of the i-th run's first byte in the file.
  std::uint64_t position(std::int64_t i) const {
    return stored().stored.position + static_cast<std::uint64_t>(places(i).first) * width();
  }

  wanted_box for_whom;
  std::uint32_t index;  ///< in `tensor().boxes`
  box whole, common;
  std::int64_t run = 0, runs = 0;  ///< elements of a run (contiguous in both boxes), and number of runs
  int outer = 0;                   ///< number of dims outside a run
  std::uint32_t sum = 0;           ///< of the bytes read so far, as in `partly_read`
  std::uint64_t left = 0;          ///< bytes not read yet
};

/// Several runs of a common box that are read together, or a part of one run.
struct piece_of_box {
  std::shared_ptr<common_box> from;
  std::uint64_t begin = 0, end = 0;  ///< in the file
  std::int64_t first = 0, runs = 0;  ///< the range of runs; a part of a run has `runs` 1
  std::uint32_t sum = 0;
  std::uint64_t bytes = 0;  ///< wanted bytes, without gaps

  std::uint32_t file() const { return from->stored().stored.file; }
};

/// Produces blocks one after the other. It plans some boxes at a time, so that the plan stays small for every state.
class planned_blocks {
 public:
  struct block : file_block {
    std::uint32_t which_file = 0;
    std::vector<piece_of_box> pieces;
  };
  /// Larger blocks are read in whole pages, which bypasses the system's cache.
  static constexpr std::uint64_t large = std::uint64_t{256} << 10, page = 4096;
  /// Boxes of at least this size are read directly into their destination, if file and destination have one page
  /// offset.
  static constexpr std::uint64_t direct_read_bytes = std::uint64_t{1} << 20;

  planned_blocks(const manifest& saved, stored_boxes& boxes, std::vector<wanted_box> wanted, std::size_t block_bytes)
      : saved_(saved), boxes_(boxes), wanted_(std::move(wanted)), block_bytes_(block_bytes) {
    if (!wanted_.empty()) unread_.resize(wanted_.back().owner + 1);
  }

  /// Returns the next block, without an open file; nothing after the last one.
  std::optional<block> next() {
    while (next_ == pieces_.size()) {
      if (planned_ == wanted_.size()) return std::nullopt;
      plan();
    }
    block out;
    out.which_file = pieces_[next_].file();
    out.into = direct_destination(pieces_[next_]);
    const bool alone = out.into != nullptr;
    const std::uint64_t align = block_bytes_ >= large ? page : 1;
    const std::uint64_t limit = (pieces_[next_].begin + block_bytes_) / align * align;
    std::uint64_t end = 0, bytes = 0;
    while (next_ < pieces_.size() && (out.pieces.empty() || !alone)) {
      piece_of_box& p = pieces_[next_];
      if (p.file() != out.which_file || p.begin >= limit) break;
      if (!out.pieces.empty() && p.begin < out.pieces.front().begin) break;  // it overlaps a piece that was split
      if (!out.pieces.empty() && (p.begin > end + bytes / most_gap || direct_destination(p) != nullptr)) break;
      std::uint64_t to = p.end;
      if (to > limit) {  // split at the end of an element
        const std::size_t width = p.from->width();
        to = p.runs > 1 ? p.begin : p.begin + (limit - p.begin) / width * width;
        if (to == p.begin) break;
      }
      piece_of_box& taken = out.pieces.emplace_back(p);
      taken.end = p.begin = to;
      if (p.runs == 1) taken.bytes = to - taken.begin;
      end = std::max(end, to);
      bytes += taken.bytes;
      if (p.begin < p.end) break;  // the rest is for the next block
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
  /// Notes that a common box has been read completely.
  void has_read(const common_box& one) { --unread_[one.for_whom.owner]; }
  /// Returns whether all boxes of an owner have been read.
  bool has_all(std::size_t owner) const {
    const bool is_planned = planned_ == wanted_.size() || wanted_[planned_].owner > owner;
    return is_planned && (owner >= unread_.size() || unread_[owner] == 0);
  }

 private:
  /// A gap between two boxes is read with them if it is at most the wanted bytes before it divided by this.
  static constexpr std::uint64_t most_gap = 16;

  /// Returns the destination of a piece that can be read directly, or null.
  static std::byte* direct_destination(const piece_of_box& p) {
    const common_box& b = *p.from;
    if (p.runs > 1 || b.converts() || static_cast<std::uint64_t>(b.run) * b.width() < direct_read_bytes) return nullptr;
    const auto [from, to] = b.places(p.first);
    const std::uint64_t before = b.stored().stored.position + static_cast<std::uint64_t>(from) * b.width();
    std::byte* const out = b.for_whom.out + static_cast<std::size_t>(to) * b.width() + (p.begin - before);
    return (reinterpret_cast<std::uintptr_t>(out) - p.begin) % page == 0 ? out : nullptr;
  }

  /// Plans the next boxes, enough for about 16 blocks, so that boxes of one file can be joined.
  void plan() {
    constexpr std::uint64_t blocks = 16;
    pieces_.clear();
    next_ = 0;
    for (std::uint64_t bytes = 0; planned_ < wanted_.size() && bytes < blocks * block_bytes_; ++planned_) {
      const wanted_box& w = wanted_[planned_];
      for (const std::uint32_t i : boxes_.overlapping(*w.tensor, w.wanted)) {
        const box whole = w.tensor->box_of(w.tensor->boxes[i]);
        const std::optional<box> common = intersect(whole, w.wanted);
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
    const bool is_long = run >= std::min<std::uint64_t>(stored_boxes::long_run, block_bytes_ / 4);
    const std::uint64_t most = block_bytes_ - std::min<std::uint64_t>(block_bytes_ / 2, page);
    for (std::int64_t i = 0; i < both->runs; ++i) {
      const std::uint64_t begin = both->position(i);
      if (i > 0 && !is_long && begin + run - pieces_.back().begin <= most) {
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
  std::size_t planned_ = 0;  ///< number of planned boxes of `wanted_`
  std::vector<piece_of_box> pieces_;
  std::size_t next_ = 0;             ///< index of the next of `pieces_`
  std::vector<std::size_t> unread_;  ///< by owner: common boxes that are planned but not read
};

}  // namespace detail

/// How much is read in advance: `threads` blocks of `bytes` each at once, with as much memory.
struct read_sizes {
  int threads = 2;
  std::size_t bytes = std::size_t{4} << 20;
};

/// Returns what is wrong with the sizes, or an empty text. `threads` and `bytes` are the names that the text uses.
inline std::string fault_of(const read_sizes& s, const std::string& threads, const std::string& bytes) {
  if (s.threads < 1 || s.threads > 64) return cat({threads, " is ", s.threads, "; legal are 1 to 64"});
  constexpr std::size_t least = 64, most = std::size_t{1} << 30;
  if (s.bytes < least || s.bytes > most) return cat({bytes, " is ", s.bytes, "; legal are ", least, " to ", most});
  return {};
}

/// Reads boxes in advance, in the background. The caller waits for one owner's boxes after the other.
class reads_ahead {
 public:
  /// Begins to read. `data` belongs to the step of `saved`. The caller must not use it until `finish` has returned, or
  /// this object is destroyed. This thread opens no file. The sizes must be valid.
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

  /// Waits until all boxes of `owner` are read, and the checksums of its whole boxes are verified. Returns whether no
  /// error has occurred. After an error no thread writes any more.
  bool wait(std::size_t owner) {
    return !ahead_ || ahead_->wait([&] { return source_->blocks.has_all(owner); });
  }
  /// Waits for all boxes. Throws `error` that names the tensor, box, file and position of a wrong checksum. It also
  /// throws as `open_file::read` and `file_system::open`.
  void finish() {
    if (ahead_) ahead_->finish();
  }
  /// Returns the parts that were read of boxes that were not read whole, each with its owner. Call it after `finish`.
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

  /// Copies or converts elements to their place in the wanted box, unless they were read directly into it.
  static void put(const detail::common_box& from, std::int64_t at, std::span<const std::byte> bytes) {
    const wanted_box& w = from.for_whom;
    const std::size_t width = from.converts() ? size_of(*w.type) : from.width();
    std::byte* const out = w.out + static_cast<std::size_t>(at) * width;
    if (from.converts())
      convert_elements(from.tensor().dtype, *w.type, bytes.data(), out,
                       static_cast<std::int64_t>(bytes.size() / from.width()), from.tensor().name);
    else if (out != bytes.data())
      copy_past_cache(out, bytes.data(), bytes.size());
  }
  /// Sums and copies some bytes at a time, while they are in the cache.
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
    p.sum = sum_in_box(from, in_box + bytes.size(), sum);
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
      const std::uint64_t step = begin + run - end;  // runs at equal distances share a power
      if (step != last_step) power = detail::crc32c_power(last_step = step);
      sum = detail::crc32c_multiply(power, sum) ^ crc32c(some);
      end = begin + run;
      put(from, wanted, some);
    }
    p.sum = sum_in_box(from, end, sum);
  }
  /// Returns the term of some bytes in the checksum of their box. The bytes end at byte `end` of the box, and have the
  /// checksum `sum`.
  static std::uint32_t sum_in_box(const detail::common_box& from, std::uint64_t end, std::uint32_t sum) {
    return detail::crc32c_multiply(detail::crc32c_power(from.stored().stored.bytes - end), sum);
  }

  std::optional<source> source_;
  std::optional<read_ahead<source>> ahead_;
};

/// Returns the number of elements of a tensor whose manifest was checked.
inline std::int64_t elements_of(const stored_tensor& tensor) { return elements_of_shape(tensor.shape); }

/// Returns how many elements to read at once: as many as fit in `bytes`, at least one. They are whole rows or planes if
/// these fit, so that a chunk is one box.
inline std::int64_t chunk_elements(const stored_tensor& tensor, std::uint64_t bytes) {
  const auto most = static_cast<std::int64_t>(std::max<std::uint64_t>(bytes / size_of(tensor.dtype), 1));
  std::int64_t row = 1;
  for (std::size_t d = tensor.shape.size(); d-- > 0;) {
    if (tensor.shape[d] == 0 || row > most / tensor.shape[d]) break;
    row *= tensor.shape[d];
  }
  return most - most % row;
}

/// Calls f(begin, end, bytes) for each chunk of a tensor in order: elements [begin, end), which have about
/// `chunk_bytes` bytes.
template <class F>
void each_chunk(const stored_tensor& tensor, std::uint64_t chunk_bytes, F&& f) {
  const std::int64_t size = elements_of(tensor), chunk = chunk_elements(tensor, chunk_bytes);
  for (std::int64_t begin = 0; begin < size; begin += std::min(size - begin, chunk)) {
    const std::int64_t end = begin + std::min(size - begin, chunk);
    f(begin, end, static_cast<std::uint64_t>(end - begin) * size_of(tensor.dtype));
  }
}

/// Reads a step's tensors one after the other, each from its first element to its last. Only one thread may use it.
class flat_reader {
 public:
  /// `path` is the step's directory, and `saved` its manifest, which must outlive this object.
  flat_reader(file_system& files, std::string path, const manifest& saved)
      : saved_(saved), data_(files, std::move(path), saved) {}

  /// Reads elements [begin, end) of a tensor into `out`; they must be the next ones. With the last of them, the
  /// checksums of all its boxes have been verified. Throws `error` that names the tensor, box, file and position of a
  /// wrong checksum. It also throws if the elements are not the next ones, and as `reads_ahead::finish` does.
  void read(const stored_tensor& tensor, std::int64_t begin, std::int64_t end, std::byte* out) {
    if (begin == 0) begin_tensor(tensor);
    if (tensor_ != &tensor || begin != next_) fail({"the elements of '", tensor.name, "' are read out of order"});
    stored_box all;
    std::copy(tensor.shape.begin(), tensor.shape.end(), all.extent.begin());
    std::vector<wanted_box> wanted;
    for (const box& part : boxes_of_flat_range(tensor.box_of(all), begin, end)) {
      wanted.push_back({&tensor, part, out});
      out += static_cast<std::uint64_t>(part.local_size()) * size_of(tensor.dtype);
    }
    reads_ahead ahead(saved_, data_, std::move(wanted), {});
    ahead.finish();
    for (const auto& [owner, part] : ahead.take_partly_read()) {
      const auto found = sums_.try_emplace(part.box, 0u).first;
      found->second ^= part.sum;
    }
    next_ = end;
    if (end == elements_of(tensor)) end_tensor();
  }
  /// Reads a blob whole. Throws `error` as for tensors.
  std::string read(const stored_blob& blob) { return data_.read(blob); }

 private:
  void begin_tensor(const stored_tensor& tensor) {
    tensor_ = &tensor;
    next_ = 0;
    sums_.clear();
  }
  /// Verifies the boxes that were read in several chunks. Others were verified when they were read.
  void end_tensor() {
    for (const auto& [box, sum] : sums_) {
      const stored_box& stored = tensor_->boxes[box];
      if (sum != stored.stored.crc32c) data_.damaged(*tensor_, stored);
    }
    tensor_ = nullptr;
  }

  const manifest& saved_;
  step_data data_;
  const stored_tensor* tensor_ = nullptr;  ///< the tensor that is being read
  std::int64_t next_ = 0;
  std::map<std::uint32_t, std::uint32_t> sums_;  ///< checksums, by box, of boxes that are read in parts
};

namespace detail {

/// Returns in words how the tensors of a step differ from a model's tensors; an empty text if they do not.
inline std::string mismatch_text(const std::vector<std::string>& missing, const std::vector<std::string>& unexpected,
                                 const std::string& wrong) {
  std::string problem;
  if (!missing.empty()) problem = cat({"the model needs ", quoted(missing), ", which it has not"});
  if (!unexpected.empty())
    append(problem, {problem.empty() ? "" : "; ", "nothing in the model is ", quoted(unexpected)});
  if (!wrong.empty()) append(problem, {problem.empty() ? "" : "; ", wrong});
  return problem;
}

}  // namespace detail

/// Returns the `wanted` tensors of a step, in that order, without comparing types. Throws `error`, whose text starts
/// with `source`, with the names of all tensors that are missing, not wanted or of another shape. With `weights_only`,
/// unwanted tensors that are not weights are allowed.
inline std::vector<const stored_tensor*> tensors_of_step(const manifest& saved,
                                                         const std::vector<safetensors_declaration>& wanted,
                                                         const std::string& source, bool weights_only) {
  std::map<std::string_view, const stored_tensor*> there;
  for (const stored_tensor& t : saved.tensors)
    if (!weights_only || !is_of_optimizer(t.name)) there.emplace(t.name, &t);
  std::vector<const stored_tensor*> found;
  std::vector<std::string> missing, unexpected;
  std::string wrong;
  for (const safetensors_declaration& w : wanted) {
    const auto at = there.find(w.name);
    if (at == there.end()) {
      if (!is_last_load(w.name)) missing.push_back(w.name);
      continue;
    }
    if (at->second->shape != w.shape)
      append(wrong, {wrong.empty() ? "" : "; ", "'", w.name, "' has the shape ", detail::shape_text(at->second->shape),
                     ", and the model needs ", detail::shape_text(w.shape)});
    found.push_back(at->second);
    there.erase(at);
  }
  for (const auto& [name, tensor] : there)
    if (!is_last_load(name)) unexpected.emplace_back(name);
  const std::string problem = detail::mismatch_text(missing, unexpected, wrong);
  if (!problem.empty()) fail({source, ": ", problem});
  return found;
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
