// Runs the blocks of a kernel one after the other. A thread of a block runs until it ends or reaches a barrier or a
// collective of its warp; only then another one runs, on its own fiber if the first thread must continue later.
//
// PLAIT_STAND_IN_ORDER (forward, reverse or shuffle) sets the order in which blocks, warps and lanes run between
// barriers, so a kernel without a necessary barrier gives different results. PLAIT_STAND_IN_SEED seeds random choices.
// For thread sanitizer each thread of a block is a thread, ordered by __syncthreads and __syncwarp only (a shuffle does
// not order memory). It reports two accesses to one word, at least one of them a write, without a barrier between them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "die.hpp"
#include "keywords.hpp"

#ifdef STAND_IN_THREAD_SANITIZER
extern "C" {
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#endif

inline uint3 threadIdx{};
inline uint3 blockIdx{};
inline dim3 blockDim{};
inline dim3 gridDim{};

namespace stand_in {

enum class run_order { forward, reverse, shuffle };

class fiber;

inline run_order order_from_environment() {
  const char* text = std::getenv("PLAIT_STAND_IN_ORDER");
  const std::string_view order = text ? text : "forward";
  if (order == "forward" || order.empty()) return run_order::forward;
  if (order == "reverse") return run_order::reverse;
  if (order == "shuffle") return run_order::shuffle;
  die("PLAIT_STAND_IN_ORDER is '" + std::string(order) + "'; legal are forward, reverse and shuffle");
}

inline unsigned seed_from_environment() {
  const char* text = std::getenv("PLAIT_STAND_IN_SEED");
  return text ? static_cast<unsigned>(std::atoi(text)) : 1u;
}

// Orders memory accesses of a kernel's threads for thread sanitizer.

/// A point in time that some threads reach and others wait for.
struct moment {
  /// Orders this thread's accesses up to now before those of any thread `after` this.
  void happened() {
#ifdef STAND_IN_THREAD_SANITIZER
    __tsan_release(this);
#endif
  }
  void after() {
#ifdef STAND_IN_THREAD_SANITIZER
    __tsan_acquire(this);
#endif
  }
  char place = 0;  ///< its address identifies the moment
};

/// While it exists, thread sanitizer ignores this thread: the executor's code on a fiber is not part of the kernel.
class unseen {
 public:
#ifdef STAND_IN_THREAD_SANITIZER
  unseen() { AnnotateIgnoreWritesBegin(__FILE__, __LINE__), AnnotateIgnoreReadsBegin(__FILE__, __LINE__); }
  ~unseen() { AnnotateIgnoreWritesEnd(__FILE__, __LINE__), AnnotateIgnoreReadsEnd(__FILE__, __LINE__); }
#else
  unseen() {}
#endif
  unseen(const unseen&) = delete;
};

/// The collectives of a warp's lanes.
enum class warp_op { sync, shuffle, ballot, gather };

/// The running kernel and its current block. Requires the runtime's lock. Its functions are in block.cpp, which is
/// optimised and not instrumented: sanitizers check kernels only.
class executor {
 public:
  static executor& instance();

  struct launch {
    dim3 grid, block;
    std::size_t shared_bytes = 0;
    std::string_view kernel;  // for messages
  };

  void run(const launch& what, const std::function<void()>& body);

  bool running() const { return body_ != nullptr; }
  void* dynamic_shared() { return shared_.get(); }
  run_order order() const { return order_; }
  void set_order(run_order order);

  /// A barrier of the block.
  void barrier();

  /// A collective of the lanes in `mask`; each passes a value. shuffle: returns the value of lane `source`; ballot:
  /// returns one bit for each lane whose value is not 0.
  std::uint64_t collective(warp_op op, unsigned mask, std::uint64_t value, unsigned source);

  /// The values of a lane that all other lanes of its warp read.
  struct offer {
    std::uint64_t words[3];
  };
  /// A collective of all 32 lanes. Returns the offer of each lane, valid until this lane's next collective.
  const offer* gather(const offer& mine);

  /// Copies from global to shared memory that the thread has started, in groups. They run as late as possible, in
  /// `wait_for_copies`, which waits for all groups except the last `pending`. `from` null: zeros.
  void copy_later(void* to, const void* from, std::size_t bytes);
  void commit_copies();
  void wait_for_copies(unsigned pending);

  unsigned lane() const { return static_cast<unsigned>(current_ % 32); }

  std::string where() const;

 private:
  enum class state : std::uint8_t { fresh, ready, at_barrier, in_warp, done };
  struct copy {
    void* to;
    const void* from;
    std::size_t bytes;
    unsigned group;
  };
  struct device_thread {
    fiber* on = nullptr;
    enum state state = state::fresh;
    warp_op op = warp_op::sync;
    unsigned mask = 0, source = 0;
    std::uint64_t value = 0, result = 0;
    unsigned groups = 0;  // committed
    offer offered{};
    uint3 index{};
    std::vector<copy> copies;
  };
  struct warp {
    unsigned waiting = 0;
    offer gathered[32];  // no lane arrives at the next collective before all lanes have these
    // Even and odd __syncwarp: a lane that leaves one late must not see what others did before the next.
    moment met[2];
    unsigned syncs = 0;
  };
  struct free_aligned {
    void operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t{1024}); }
  };

  executor();

  static std::string text(uint3 v);
  static std::string hex(unsigned v);

  template <class Values>
  void shuffle(Values& values);

  void run_block();

  // The order: a warp runs in passes over its lanes until none can run; a round runs all warps.
  void new_round();
  void new_pass();
  static bool runnable(const device_thread& t) { return t.state == state::fresh || t.state == state::ready; }

  static constexpr std::size_t nobody = ~std::size_t{0};
  std::size_t next();
  void set_current(std::size_t t);
  void continue_with(std::size_t t, fiber& from);
  void suspend();
  static void fiber_main();
  void finish();
  void complete(warp& w, const device_thread& last);

  [[noreturn]] void stuck();

  run_order order_;
  std::minstd_rand random_;
  launch launch_;
  const std::function<void()>* body_ = nullptr;
  std::unique_ptr<std::byte[], free_aligned> shared_;

  std::unique_ptr<fiber> host_;
  std::vector<std::unique_ptr<fiber>> fibers_;
  std::vector<fiber*> idle_;

  std::vector<device_thread> threads_;
  std::vector<warp> warps_;
  // Each pass uses one of these orders of lanes, chosen at random: a new shuffle for each pass took a tenth of all
  // time.
  using lane_order = std::array<std::uint8_t, 32>;
  std::vector<lane_order> lane_orders_;
  const lane_order* lanes_ = nullptr;
  std::vector<unsigned> warp_order_;
  std::size_t warp_at_ = 0, first_lane_ = 0, lane_at_ = 0, current_ = 0, arrived_ = 0, done_ = 0;
  bool ran_in_pass_ = false, ran_in_round_ = false;
  // Blocks are ordered in time, because they share one shared memory. Two moments alternate, as for warps.
  moment block_ended_[2], barrier_met_[2];
  unsigned blocks_ = 0, barriers_ = 0;
};

/// Adds the product of a 16 x 16 and a 16 x 8 matrix of bf16, in the order of its terms, to `lane`'s part of the 16 x 8
/// matrix c, as a tensor core does. `warp` has a[0] and a[2], a[1] and a[3], b[0] and b[1] of each lane, as
/// plait/kernels/cuda/math.hpp arranges them.
void multiply_fragments(const executor::offer* warp, int lane, float (&c)[4]);

}  // namespace stand_in

/// The dynamic shared memory of the running block; aligned to 1024 bytes, filled with 0xff when the block starts.
inline void* __stand_in_dynamic_shared() { return stand_in::executor::instance().dynamic_shared(); }
