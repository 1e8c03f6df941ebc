// The handle of a started operation, and the table of functions by which a backend serves it. It starts nothing; that
// is `start` of comm/communicator.hpp.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

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
};

/// Is told when a request has been waited for (how the ledger and the recorder see asynchronous operations).
class request_observer {
 public:
  virtual void waiting(std::uint64_t token) noexcept = 0;
  virtual void completed(std::uint64_t token) noexcept = 0;

 protected:
  ~request_observer() = default;
};

/// Handle of an asynchronous operation. The buffers belong to the operation until `wait` returns. A request that is
/// destroyed waits first, so buffers that outlive it are safe; an error met there is reported by the next operation.
class [[nodiscard]] request {
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
    if (observer_) observer_->waiting(token_);
    ops_->drop(owner_.get(), object_);
    if (observer_) observer_->completed(token_);
  }

  /// Blocks until the operation is complete. A request without an operation, or already waited for, returns at once.
  void wait() {
    if (ops_ == nullptr) return;
    const request_ops* ops = std::exchange(ops_, nullptr);
    const auto observer = std::move(observer_);
    if (observer) observer->waiting(token_);
    ops->wait(owner_.get(), object_);
    owner_.reset();
    if (observer) observer->completed(token_);
  }

  /// True if `wait` would not block. Gives up the processor when not, because ranks may outnumber cores.
  bool done() const { return ops_ == nullptr || ops_->done(owner_.get(), object_); }

  /// True while there is an operation that was not waited for.
  explicit operator bool() const noexcept { return ops_ != nullptr; }

  void observe(std::shared_ptr<request_observer> observer, std::uint64_t token) {
    observer_ = std::move(observer);
    token_ = token;
  }

  void swap(request& other) noexcept {
    std::swap(ops_, other.ops_);
    owner_.swap(other.owner_);
    std::swap(object_, other.object_);
    observer_.swap(other.observer_);
    std::swap(token_, other.token_);
  }

 private:
  const request_ops* ops_ = nullptr;
  std::shared_ptr<void> owner_;
  void* object_ = nullptr;
  std::shared_ptr<request_observer> observer_;
  std::uint64_t token_ = 0;
};

}  // namespace plait
