// Threads that read blocks of files and use them, while the caller does something else: one block is read while another
// is used.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/io/byte_buffer.hpp"
#include "plait/io/file_system.hpp"

namespace plait {

/// Bytes of a file that are read in one go.
struct file_block {
  std::shared_ptr<const open_file> file;
  std::uint64_t position = 0;
  std::size_t bytes = 0;
  std::byte* into = nullptr;  ///< where they go; nothing: to memory of the thread that reads them
};

/// Reads the blocks that `Source` names, in its order, by threads that have memory for one block each. A source has
///   a type `block`, which derives from `file_block`;
///   std::optional<block> next(): the next one, or nothing after the last;
///   void use(block&, std::span<const std::byte>), which several threads may call at once;
///   void used(block&), after which what the caller waits for may be true.
/// One thread at a time calls `next` or `used`. Where one of these or a read throws, no more blocks are asked for. The
/// caller gets the exception of the first block that failed.
template <class Source>
class read_ahead {
 public:
  /// The source must outlive this object, and its threads begin at once. A block that has no place of its own (`into`)
  /// may have at most `block_bytes`. Throws `error` where the system starts no more threads.
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
  /// Gives up, and waits for the blocks that are being read.
  ~read_ahead() { stop(); }
  read_ahead(const read_ahead&) = delete;
  read_ahead& operator=(const read_ahead&) = delete;

  /// Waits until `ready()`, or until all blocks are used, or until something has failed and no thread uses a block. One
  /// thread at a time calls `ready`. Returns whether nothing has failed.
  template <class Ready>
  bool wait(Ready&& ready) {
    std::unique_lock lock(mutex_);
    ++waiting_;
    changed_.wait(lock, [&] { return at_work_ == 0 && (failure_ || ended_) ? true : !failure_ && ready(); });
    --waiting_;
    return !failure_;
  }
  /// Waits until all blocks are used. Throws what has failed.
  void finish() {
    if (!wait([] { return false; })) std::rethrow_exception(failure_);
  }
  /// Asks for no more blocks.
  void give_up() {
    const std::lock_guard lock(mutex_);
    ended_ = true;
  }
  /// Bytes of memory that blocks are read to.
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
    give_up();
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

}  // namespace plait

#include "plait/core/macros_on.hpp"
