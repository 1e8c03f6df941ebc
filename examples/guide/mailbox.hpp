// A communicator whose ranks are threads. Every operation sends letters from rank to rank.
#pragma once

#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "plait/comm/communicator.hpp"
#include "plait/comm/reduce.hpp"

namespace mail {

namespace pl = plait;

/// Named boxes for letters: the transport below this communicator, as MPI or NCCL is below others. Any thread puts
/// letters into a box, and any thread takes them out, the oldest first.
class post_office {
 public:
  using letter = std::vector<std::byte>;

  void put(const std::string& box, const void* data, std::size_t bytes) {
    const auto* from = static_cast<const std::byte*>(data);
    const std::lock_guard lock(mutex_);
    boxes_[box].emplace_back(from, from + bytes);
    changed_.notify_all();
  }
  letter take(const std::string& box) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !closed_.empty() || !boxes_[box].empty(); });
    if (!closed_.empty()) pl::fail({"the post office is closed: ", closed_});
    letter out = std::move(boxes_[box].front());
    boxes_[box].pop_front();
    return out;
  }
  bool has(const std::string& box) {
    const std::lock_guard lock(mutex_);
    return !closed_.empty() || !boxes_[box].empty();
  }
  /// Returns the next number of a name: 1, 2, 3, ...
  int next(const std::string& name) {
    const std::lock_guard lock(mutex_);
    return ++counts_[name];
  }
  /// Closes all boxes. Every waiting rank gets an error with the first reason.
  void close(const std::string& why) {
    const std::lock_guard lock(mutex_);
    if (closed_.empty()) closed_ = why;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::deque<letter>> boxes_;
  std::map<std::string, int> counts_;
  std::string closed_;
};

/// A receive that has begun: the bytes of the next letter in a box will go to `to`.
struct awaited_letter {
  std::shared_ptr<post_office> office;
  std::string box;
  void* to;

  void wait() const {
    const post_office::letter got = office->take(box);
    if (!got.empty()) std::memcpy(to, got.data(), got.size());
  }
  bool done() const { return office->has(box); }
  void drop() const noexcept {
    try {
      wait();
    } catch (const pl::error&) {  // the office is closed: the next operation throws
    }
  }
};

class mailbox : public pl::verbs<mailbox> {
 public:
  mailbox() = default;
  mailbox(std::shared_ptr<post_office> office, std::string id, std::string label, int rank, int size)
      : office_(std::move(office)), id_(std::move(id)), label_(std::move(label)), rank_(rank), size_(size) {}
  explicit operator bool() const { return office_ != nullptr; }

  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::string& label() const { return label_; }

  pl::request start(const pl::call& c) {
    if (!office_) pl::fail("a communicator without a group was used (its rank has a negative color in the split)");
    check(c, rank_, size_);  // throws for calls that every backend refuses
    const std::size_t size = size_of(c.type), bytes = c.count * size;
    const auto* const in = static_cast<const std::byte*>(c.in);
    auto* const out = static_cast<std::byte*>(c.out);
    if (c.kind == pl::collective::receive)
      return pl::request(std::make_shared<awaited_letter>(awaited_letter{office_, box(c.peer, rank_, c.tag), out}));
    if (c.kind == pl::collective::send) return office_->put(box(rank_, c.peer, c.tag), in, bytes), pl::request();

    const bool in_pieces = c.kind == pl::collective::reduce_scatter || c.kind == pl::collective::all_to_all;
    const auto sends = [&](int rank) { return c.kind != pl::collective::broadcast || rank == c.peer; };
    std::vector<post_office::letter> got(static_cast<std::size_t>(size_));
    for (std::size_t k = 0; sends(rank_) && k < got.size(); ++k) {
      const std::size_t at = c.ragged ? c.send_offsets[k] * size : in_pieces ? k * bytes : 0;
      office_->put(box(rank_, static_cast<int>(k)), in + at, c.ragged ? c.send_counts[k] * size : bytes);
    }
    for (int k = 0; k < size_; ++k)
      if (sends(k)) got[static_cast<std::size_t>(k)] = office_->take(box(k, rank_));
    if (c.kind == pl::collective::all_reduce || c.kind == pl::collective::reduce_scatter) {
      std::vector<const void*> terms;
      for (const post_office::letter& l : got) terms.push_back(l.data());
      pl::reduce_arrays(terms, out, c.count, c.type, c.op);
      return {};
    }
    for (std::size_t k = 0; k < got.size(); ++k) {
      const bool one = c.kind == pl::collective::broadcast;
      const std::size_t at = c.ragged ? c.receive_offsets[k] * size : one ? 0 : k * bytes;
      if (!got[k].empty()) std::memcpy(out + at, got[k].data(), got[k].size());
    }
    return {};
  }

  mailbox split(int color, int key, std::string_view label = {}) {
    std::vector<std::pair<int, int>> all(static_cast<std::size_t>(size_));
    const std::pair<int, int> mine(color, key);
    all_gather(&mine, all.data(), 2, pl::dtype::i32);
    const std::string id = pl::cat({id_, ".", office_->next(pl::cat({id_, "/", rank_})), ".", color});
    int rank = 0, size = 0;
    for (int k = 0; k < size_; ++k) {
      const auto [its_color, its_key] = all[static_cast<std::size_t>(k)];
      size += its_color == color;
      rank += its_color == color && std::pair(its_key, k) < std::pair(key, rank_);
    }
    return color < 0 ? mailbox() : mailbox(office_, id, label.empty() ? id : std::string(label), rank, size);
  }
  void abort(const std::string& why) noexcept { office_->close(why); }

 private:
  std::string box(int from, int to, int tag = -1) const { return pl::cat({id_, "/", from, "/", to, "/", tag}); }

  std::shared_ptr<post_office> office_;
  std::string id_, label_;
  int rank_ = 0, size_ = 0;
};

/// Runs body(communicator) on `ranks` threads. The first error of a rank ends the others, and is thrown.
template <class F>
void run(int ranks, const F& body) {
  const auto office = std::make_shared<post_office>();
  std::exception_ptr first;
  std::mutex once;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&, rank] {
      try {
        body(mailbox(office, "world", "world", rank, ranks));
      } catch (const std::exception& e) {
        {
          const std::lock_guard lock(once);
          if (!first) first = std::current_exception();
        }
        office->close(e.what());
      }
    });
  for (std::thread& t : threads) t.join();
  if (first) std::rethrow_exception(first);
}

}  // namespace mail
