#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/comm/world.hpp"
#include "plait/device/device.hpp"
#include "plait/layout/layout.hpp"

namespace plait {

/// Weight gradients that a backward pass has put off, in order. Pipeline schedules run them in the bubble.
class weight_work {
 public:
  weight_work() = default;
  template <class F>
  void add(F&& work) {
    tasks_.push_back(std::make_unique<holder<std::decay_t<F>>>(std::forward<F>(work)));
  }
  std::size_t size() const { return tasks_.size(); }
  /// Runs and forgets them.
  void run() {
    for (std::unique_ptr<task>& t : tasks_) t->run();
    tasks_.clear();
  }

 private:
  struct task {
    virtual ~task() = default;
    virtual void run() = 0;
  };
  template <class F>
  struct holder final : task {
    explicit holder(F f) : work(std::move(f)) {}
    void run() override { work(); }
    F work;
  };
  std::vector<std::unique_ptr<task>> tasks_;
};

/// The table of global sizes that a context holds: `sizes_of<batch, seq, hidden>(8, 1024, 512)`.
template <dim_like... Dims, class... Sizes>
  requires(sizeof...(Dims) == sizeof...(Sizes) && (std::is_convertible_v<Sizes, std::int64_t> && ...))
constexpr dim_sizes sizes_of(Sizes... sizes) {
  dim_sizes table;
  (table.set(dim_of<Dims>, static_cast<std::int64_t>(sizes)), ...);
  return table;
}

/// What a layer runs in: one rank's device and mesh, the global size of every dim, and the seed of its random numbers.
template <compute_device Device>
struct context {
  Device& device;
  world& ranks;
  dim_sizes sizes;
  std::uint64_t seed = 0;
  /// Global index of the first sample of the current microbatch, over all steps: with it, dropout differs from sample
  /// to sample, but not from mesh to mesh.
  std::int64_t first_sample = 0;
  /// For sequences packed from documents: the position of the first token of each token's document, in the device's
  /// memory, one for each of this rank's tokens of the current microbatch; null: none. Must not decrease along the
  /// text.
  const std::int32_t* document_starts = nullptr;
  /// Where `backward` puts weight gradients; null: it computes them at once.
  weight_work* deferred = nullptr;

  /// Runs `task` now, or puts it off.
  template <class F>
  void on_weights(F&& task) {
    if (deferred)
      deferred->add(std::forward<F>(task));
    else
      task();
  }
};

}  // namespace plait
