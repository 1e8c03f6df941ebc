// program: stages
// Tests the offload of activations in every order in which two streams can run: all reads are right. If the executor
// leaves out one of its waits, some order shows it.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "plait/parallel/executor.hpp"
#include "plait/parallel/world.hpp"
#include "plait/schedule/parse.hpp"

using namespace plait;

namespace {

/// A device that records the work of its streams and runs nothing. Its memory consists of cells of one number each. A
/// released cell is reused at once, as by an allocator in the order of the main stream.
class noting_device {
 public:
  class event;
  class stream {
   public:
    stream() = default;
    stream(noting_device* device, int number) : device_(device), number_(number) {}
    void synchronize() const {}
    void wait(const event& e) const;
    bool operator==(const stream&) const = default;

   private:
    friend class event;
    noting_device* device_ = nullptr;
    int number_ = 0;
  };
  class event {
   public:
    void record(stream s) {
      stream_ = s.number_;
      count_ = s.device_->work[s.number_].size();
    }
    void synchronize() const {}
    bool done() const { return true; }

   private:
    friend class stream;
    int stream_ = 0;
    std::size_t count_ = 0;
  };

  /// A task of a stream: writes a number or a cell to a cell, reads a cell that must have a given number, or waits
  /// until the other stream has done `count` tasks.
  struct task {
    enum { write, copy, read, wait } what;
    int to = 0, from = 0, number = 0;
    std::size_t count = 0;
  };
  std::vector<task> work[2];
  int waits = 0, forgotten = -1;  ///< the wait with this index is left out

  stream main_stream() { return {this, 0}; }
  stream side_stream() { return {this, 1}; }
  stream copy_stream() const { return {const_cast<noting_device*>(this), 1}; }
  void* allocate(std::size_t bytes, stream) { return cell(bytes, free_); }
  void* allocate_on_host(std::size_t bytes) { return cell(bytes, free_on_host_); }
  void release(void* pointer, stream) {
    (on_host_.contains(number_of(pointer)) ? free_on_host_ : free_).push_back(number_of(pointer));
  }
  void copy(void* to, const void* from, std::size_t bytes, stream s) {
    if (bytes > 0) work[s == main_stream() ? 0 : 1].push_back({task::copy, number_of(to), number_of(from)});
  }
  void write(void* to, int number) { work[0].push_back({task::write, number_of(to), 0, number}); }
  void read(const void* from, int number) { work[0].push_back({task::read, 0, number_of(from), number}); }
  int cells() const { return used_; }

  void zero(void*, std::size_t, stream) {}
  void upload(void*, const void*, std::size_t, stream) {}
  void download(void*, const void*, std::size_t, stream) {}
  void synchronize() {}
  std::size_t bytes_in_use() const { return 0; }
  void gemm(bool, bool, std::int64_t, std::int64_t, std::int64_t, float, const float*, std::int64_t, const float*,
            std::int64_t, float, float*, std::int64_t) {}
  static constexpr bool supports_bf16() { return true; }

 private:
  int number_of(const void* pointer) const { return static_cast<int>(static_cast<const double*>(pointer) - memory_); }
  void* cell(std::size_t bytes, std::vector<int>& free) {
    REQUIRE(bytes == sizeof(double));
    int taken = used_;
    if (free.empty())
      ++used_;
    else
      taken = free.back(), free.pop_back();
    REQUIRE(used_ <= static_cast<int>(std::size(memory_)));
    if (&free == &free_on_host_) on_host_.insert(taken);
    return memory_ + taken;
  }

  double memory_[64]{};
  int used_ = 0;
  std::vector<int> free_, free_on_host_;
  std::set<int> on_host_;
};

void noting_device::stream::wait(const event& e) const {
  if (device_->waits++ == device_->forgotten) return;
  REQUIRE(e.stream_ != number_);
  device_->work[number_].push_back({task::wait, 0, 0, 0, e.count_});
}

using memory = buffer<noting_device>;

/// A stage of several units, each of which keeps one number for each microbatch.
struct stage_of_units {
  struct activation {
    using value_type = double;
    double* data() { return nullptr; }
    std::int64_t size() const { return 0; }
    explicit operator bool() const { return false; }
  };
  using gradient = activation;
  struct saved {
    std::vector<memory> units;
  };

  int units;
  unit_watcher* watcher = nullptr;

  activation input(const context<noting_device>&, int) { return {}; }
  gradient output_gradient(const context<noting_device>&, int) { return {}; }
  activation forward(const context<noting_device>& ctx, int, int microbatch, activation, saved* keep) {
    noting_device& device = ctx.device;
    keep->units.resize(static_cast<std::size_t>(units));
    for (int u = 0; u < units; ++u) {
      watcher->enter(u);
      use_scratch(device);
      if (u > 0) device.read(at(*keep, u - 1).data(), number(microbatch, u - 1));
      at(*keep, u) = memory(device, sizeof(double));
      device.write(at(*keep, u).data(), number(microbatch, u));
    }
    return {};
  }
  gradient backward(const context<noting_device>& ctx, int, int microbatch, saved& kept, gradient, weight_work*) {
    for (int u = units; u-- > 0;) {
      watcher->enter(u);
      use_scratch(ctx.device);
      ctx.device.read(at(kept, u).data(), number(microbatch, u));
      at(kept, u).reset();
    }
    return {};
  }
  void watch(unit_watcher* who) { watcher = who; }
  template <class F>
  void visit_kept(int, int unit, saved& kept, F&& f) {
    f(at(kept, unit));
  }

 private:
  static memory& at(saved& kept, int unit) { return kept.units[static_cast<std::size_t>(unit)]; }
  int number(int microbatch, int unit) const { return 1 + microbatch * units + unit; }
  static void use_scratch(noting_device& device) {
    memory scratch(device, sizeof(double));
    device.write(scratch.data(), -1);
  }
};

/// Runs the tasks of two streams in every order; orders that lead to equal memory are merged.
class every_order {
 public:
  explicit every_order(const noting_device& device) : device_(device) {
    run(0, 0, std::vector<int>(static_cast<std::size_t>(device.cells()), 0));
  }
  /// Whether, in any order, a read found another number than was written for it.
  bool wrong() const { return wrong_; }
  /// The number of orders.
  double orders() { return orders_from(0, 0); }

 private:
  bool can_run(int stream, std::size_t at, std::size_t other) const {
    const auto& work = device_.work[stream];
    return at < work.size() && (work[at].what != noting_device::task::wait || work[at].count <= other);
  }
  void run(std::size_t main, std::size_t copies, const std::vector<int>& cells) {
    if (!seen_.insert({{main, copies}, cells}).second) return;
    if (can_run(0, main, copies)) run(main + 1, copies, after(device_.work[0][main], cells));
    if (can_run(1, copies, main)) run(main, copies + 1, after(device_.work[1][copies], cells));
  }
  std::vector<int> after(const noting_device::task& t, std::vector<int> cells) {
    int& to = cells[static_cast<std::size_t>(t.to)];
    const int from = cells[static_cast<std::size_t>(t.from)];
    if (t.what == noting_device::task::write) to = t.number;
    if (t.what == noting_device::task::copy) to = from;
    if (t.what == noting_device::task::read) wrong_ = wrong_ || from != t.number;
    return cells;
  }
  double orders_from(std::size_t main, std::size_t copies) {
    const auto [known, is_new] = counts_.try_emplace({main, copies}, 0.0);
    if (!is_new) return known->second;
    const bool first = can_run(0, main, copies), second = can_run(1, copies, main);
    double count = first || second ? 0 : 1;
    if (first) count += orders_from(main + 1, copies);
    if (second) count += orders_from(main, copies + 1);
    return counts_[{main, copies}] = count;
  }

  using place = std::pair<std::size_t, std::size_t>;
  const noting_device& device_;
  std::set<std::pair<place, std::vector<int>>> seen_;
  std::map<place, double> counts_;
  bool wrong_ = false;
};

/// Records the tasks of a step, without the wait with this index.
void note_step(noting_device& device, const step_schedule& step, int forgotten) {
  device.forgotten = forgotten;
  world one = world::counting(mesh_shape(), 0);
  const context<noting_device> ctx{device, one, {}};
  step_executor<noting_device> executor(counting_communicator(0, 1, "pp"), step);
  stage_of_units stages{static_cast<int>(step.units.size())};
  executor.run(ctx, stages);
}

}  // namespace

TEST_CASE("offloaded activations are right in every order of two streams, but not without their waits") {
  struct size {
    int units, microbatches;
    double orders;
    int waits, covered;  ///< covered: by another wait, which comes before the memory is used
  };
  for (const auto& [units, microbatches, orders, waits, covered] :
       {size{4, 1, 6000, 8, 0}, size{6, 1, 6e7, 16, 0}, size{2, 3, 1.521e11, 24, 6}, size{3, 2, 2.535e11, 24, 6}}) {
    CAPTURE(units);
    CAPTURE(microbatches);
    const step_schedule step = with_offload(expand(
        parse_schedule("gpipe", 1, microbatches),
        std::vector<step_unit>(static_cast<std::size_t>(units), step_unit{.trainable = false}), {.clip = false}));
    noting_device right;
    note_step(right, step, -1);
    every_order all(right);
    CHECK(!all.wrong());
    CHECK(all.orders() == doctest::Approx(orders));
    CHECK(right.waits == waits);
    int harmless = 0;
    for (int forgotten = 0; forgotten < right.waits; ++forgotten) {
      noting_device wrong;
      note_step(wrong, step, forgotten);
      harmless += every_order(wrong).wrong() ? 0 : 1;
    }
    CHECK(harmless == covered);
  }
}
