// The handle of a started operation, and the table of functions by which a backend serves it.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "plait/comm/clock.hpp"
#include "plait/version.hpp"

namespace plait {

/// The functions that a backend supplies behind a request: a constant table and no virtual object, so that a backend
/// that reuses its operations allocates nothing to start one. `owner` keeps alive whatever `object` points to.
struct request_ops {
  /// Blocks until the operation is complete; throws plait::error if it never will be.
  void (*wait)(void* owner, void* object);
  /// True once complete (the operation must still be waited for); throws if it never will be.
  bool (*done)(void* owner, void* object);
  /// Waits without throwing, because the buffers are about to go; used by the destructor.
  void (*drop)(void* owner, void* object) noexcept;
  /// When the operation was complete, in seconds of `comm_clock`; 0: it is not, or it is unknown. Null: it is unknown.
  double (*completed)(void* owner, void* object) noexcept = nullptr;
};

/// When a started operation was under way, in seconds of `comm_clock`.
struct request_times {
  double started = 0;  ///< when `start` returned
  /// When it was complete, as the backend knows it, or else when `done` first said so; 0 where neither was before
  /// `wait`, which then found it so when it returned. An operation that is never asked about seems to last until it is
  /// waited for.
  double completed = 0;
  double waited_from = 0, waited_to = 0;  ///< when the rank stood in `wait`
};

/// Is told when a request has been waited for (how the ledger and the recorder see asynchronous operations).
class request_observer {
 public:
  virtual void waited(std::uint64_t token, const request_times& times) noexcept = 0;

 protected:
  ~request_observer() = default;
};

/// Handle of an asynchronous operation. The buffers belong to the operation until `wait` returns. A request that is
/// destroyed waits first, so buffers that outlive it are safe; an error met there is reported by the next operation.
/// Functions that return one are `[[nodiscard]]`; the class is not, because nvcc 13 would warn of every assignment.
class request {
 public:
  request() = default;
  request(const request_ops& ops, std::shared_ptr<void> owner, void* object)
      : ops_(&ops), owner_(std::move(owner)), object_(object) {}
  request(request&& other) noexcept { swap(other); }
  request& operator=(request&& other) noexcept {
    request(std::move(other)).swap(*this);
    return *this;
  }
  request(const request&) = delete;
  request& operator=(const request&) = delete;
  ~request() {
    if (ops_ == nullptr) return;
    if (observer_) begin_wait();
    ops_->drop(owner_.get(), object_);
    if (observer_) end_wait();
  }

  /// Blocks until the operation is complete. A request without an operation, or already waited for, returns at once.
  void wait() {
    if (ops_ == nullptr) return;
    if (observer_) begin_wait();
    const request_ops* ops = std::exchange(ops_, nullptr);
    ops->wait(owner_.get(), object_);
    owner_.reset();
    if (observer_) end_wait();
    observer_.reset();
  }

  /// True if `wait` would not block. Gives up the processor when not, because ranks may outnumber cores.
  bool done() const {
    if (ops_ == nullptr) return true;
    if (!ops_->done(owner_.get(), object_)) return false;
    if (observer_ && times_.completed == 0) {
      times_.completed = completed_at();
      if (times_.completed == 0) times_.completed = comm_clock();
    }
    return true;
  }
  /// When the operation was complete, in seconds of `comm_clock`; 0: it is not, or the backend does not know.
  double completed_at() const {
    return ops_ != nullptr && ops_->completed ? ops_->completed(owner_.get(), object_) : 0;
  }

  /// True while there is an operation that was not waited for.
  explicit operator bool() const noexcept { return ops_ != nullptr; }

  /// `started` is when the operation was, in seconds of `comm_clock`.
  void observe(std::shared_ptr<request_observer> observer, std::uint64_t token, double started) {
    observer_ = std::move(observer);
    token_ = token;
    times_ = {.started = started};
  }

  void swap(request& other) noexcept {
    std::swap(ops_, other.ops_);
    owner_.swap(other.owner_);
    std::swap(object_, other.object_);
    observer_.swap(other.observer_);
    std::swap(token_, other.token_);
    std::swap(times_, other.times_);
  }

 private:
  void begin_wait() {
    if (times_.completed == 0) times_.completed = completed_at();
    times_.waited_from = comm_clock();
  }
  void end_wait() {
    times_.waited_to = comm_clock();
    observer_->waited(token_, times_);
  }

  const request_ops* ops_ = nullptr;
  std::shared_ptr<void> owner_;
  void* object_ = nullptr;
  std::shared_ptr<request_observer> observer_;
  std::uint64_t token_ = 0;
  mutable request_times times_;  ///< where an observer is set
};

}  // namespace plait
