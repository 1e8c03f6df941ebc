// The executor of a kernel's blocks, and the arithmetic of tensor cores on the bits of registers: see block.hpp.
#include "block.hpp"

#include <bit>
#include <cstdint>
#include <cstring>

#include "fiber.hpp"

namespace stand_in {

executor& executor::instance() {  // called with the runtime's lock, so two threads cannot both create it
  static executor* one = nullptr;
  if (one == nullptr) one = new executor;
  return *one;
}

void executor::run(const launch& what, const std::function<void()>& body) {
  launch_ = what;
  body_ = &body;
  gridDim = what.grid;
  blockDim = what.block;
  const auto blocks = std::uint64_t{what.grid.x} * what.grid.y * what.grid.z;
  threads_.assign(what.block.x * what.block.y * what.block.z, {});
  for (std::size_t t = 0; t < threads_.size(); ++t) {
    const auto i = static_cast<unsigned>(t);
    threads_[t].index = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
  }
  warps_.assign((threads_.size() + 31) / 32, {});
  shared_.reset(new (std::align_val_t{1024}) std::byte[what.shared_bytes]);
  host_->adopt();

  std::vector<std::uint32_t> shuffled;
  if (order_ == run_order::shuffle) {
    shuffled.resize(blocks);
    for (std::uint64_t i = 0; i < blocks; ++i) shuffled[i] = static_cast<std::uint32_t>(i);
    shuffle(shuffled);
  }
  for (std::uint64_t i = 0; i < blocks; ++i) {
    const std::uint64_t b = order_ == run_order::forward   ? i
                            : order_ == run_order::reverse ? blocks - 1 - i
                                                           : shuffled[i];
    blockIdx = {static_cast<unsigned>(b % what.grid.x), static_cast<unsigned>(b / what.grid.x % what.grid.y),
                static_cast<unsigned>(b / what.grid.x / what.grid.y)};
    run_block();
    block_ended_[blocks_ % 2].after();
  }
  body_ = nullptr;
  shared_.reset();
}

void executor::barrier() {
  device_thread& self = threads_[current_];
  moment& met = barrier_met_[barriers_ % 2];
  met.happened();
  self.state = state::at_barrier;
  if (++arrived_ == threads_.size()) {
    arrived_ = 0;
    ++barriers_;
    for (device_thread& t : threads_) t.state = state::ready;
  }
  suspend();
  met.after();
}

std::uint64_t executor::collective(warp_op op, unsigned mask, std::uint64_t value, unsigned source) {
  const unsigned lane = current_ % 32;
  warp& w = warps_[current_ / 32];
  if (!(mask >> lane & 1))
    die(where() + " takes part in a warp collective with mask " + hex(mask) + ", which lacks it");
  device_thread& self = threads_[current_];
  self.state = state::in_warp;
  self.op = op;
  self.mask = mask;
  self.value = value;
  self.source = source;
  w.waiting |= 1u << lane;
  moment& met = w.met[w.syncs % 2];
  if (op == warp_op::sync) met.happened();
  if ((w.waiting & mask) == mask) complete(w, self);
  suspend();
  if (op == warp_op::sync) met.after();
  return threads_[current_].result;
}

const executor::offer* executor::gather(const offer& mine) {
  threads_[current_].offered = mine;
  collective(warp_op::gather, 0xffffffffu, 0, 0);
  return warps_[current_ / 32].gathered;
}

void executor::copy_later(void* to, const void* from, std::size_t bytes) {
  const unseen own;
  threads_[current_].copies.push_back({to, from, bytes, threads_[current_].groups});
}
void executor::commit_copies() { ++threads_[current_].groups; }
void executor::wait_for_copies(unsigned pending) {
  device_thread& self = threads_[current_];
  std::erase_if(self.copies, [&](const copy& c) {
    if (c.group + pending >= self.groups) return false;
    if (c.from) std::memcpy(c.to, c.from, c.bytes);
    if (!c.from) std::memset(c.to, 0, c.bytes);
    return true;
  });
}

std::string executor::where() const {
  return "thread " + text(threadIdx) + " of block " + text(blockIdx) + " of kernel " + std::string(launch_.kernel);
}

executor::executor() : host_(std::make_unique<fiber>()) {
  random_.seed(seed_from_environment());
  set_order(order_from_environment());
}

void executor::set_order(run_order order) {
  order_ = order;
  lane_orders_.assign(order == run_order::shuffle ? 61 : 1, {});
  for (lane_order& lanes : lane_orders_) {
    for (std::size_t i = 0; i < 32; ++i) lanes[i] = static_cast<std::uint8_t>(order == run_order::reverse ? 31 - i : i);
    if (order == run_order::shuffle) shuffle(lanes);
  }
}

std::string executor::text(uint3 v) {
  return "(" + std::to_string(v.x) + ", " + std::to_string(v.y) + ", " + std::to_string(v.z) + ")";
}

std::string executor::hex(unsigned v) {
  char buffer[16];
  std::snprintf(buffer, sizeof buffer, "0x%08x", v);
  return buffer;
}

template <class Values>
void executor::shuffle(Values& values) {
  for (std::size_t i = values.size(); i > 1; --i) std::swap(values[i - 1], values[random_() % i]);
}

void executor::run_block() {
  if (launch_.shared_bytes) std::memset(shared_.get(), 0xff, launch_.shared_bytes);
  block_ended_[blocks_++ % 2].happened();
  for (device_thread& t : threads_) {
    t.on = nullptr;
    t.state = state::fresh;
    t.groups = 0;
    t.copies.clear();
  }
  for (warp& w : warps_) w.waiting = w.syncs = 0;
  arrived_ = done_ = 0;
  warp_at_ = lane_at_ = 0;
  ran_in_pass_ = ran_in_round_ = false;
  new_round();
  new_pass();
  continue_with(next(), *host_);
  if (done_ != threads_.size()) stuck();
}

void executor::new_round() {
  warp_order_.resize(warps_.size());
  for (std::size_t i = 0; i < warps_.size(); ++i) {
    warp_order_[i] = static_cast<unsigned>(order_ == run_order::reverse ? warps_.size() - 1 - i : i);
  }
  if (order_ == run_order::shuffle) shuffle(warp_order_);
}

void executor::new_pass() {
  first_lane_ = std::size_t{warp_order_[warp_at_]} * 32;
  lanes_ = &lane_orders_[lane_orders_.size() == 1 ? 0 : random_() % lane_orders_.size()];
}

std::size_t executor::next() {
  const unseen own;
  while (true) {
    while (lane_at_ < 32) {
      const std::size_t t = first_lane_ + (*lanes_)[lane_at_++];
      if (t < threads_.size() && runnable(threads_[t])) {
        ran_in_pass_ = ran_in_round_ = true;
        return t;
      }
    }
    lane_at_ = 0;
    if (!ran_in_pass_ && ++warp_at_ == warps_.size()) {
      warp_at_ = 0;
      if (!ran_in_round_) return nobody;
      ran_in_round_ = false;
      new_round();
    }
    ran_in_pass_ = false;
    new_pass();
  }
}

void executor::set_current(std::size_t t) {
  current_ = t;
  threadIdx = threads_[t].index;
}

void executor::continue_with(std::size_t t, fiber& from) {
  if (t == nobody) {
    from.switch_to(*host_);
    return;
  }
  device_thread& thread = threads_[t];
  if (!thread.on) {
    const unseen own;
    if (idle_.empty()) {
      fibers_.push_back(std::make_unique<fiber>(&executor::fiber_main));
      idle_.push_back(fibers_.back().get());
    }
    thread.on = idle_.back();
    idle_.pop_back();
  }
  thread.state = state::ready;
  set_current(t);
  from.switch_to(*thread.on);
}

void executor::suspend() {
  const std::size_t self = current_;
  const std::size_t t = next();
  if (t != self) continue_with(t, *threads_[self].on);
}

void executor::fiber_main() {
  executor& self = instance();
  while (true) {
    self.block_ended_[(self.blocks_ + 1) % 2].after();
    (*self.body_)();
    self.block_ended_[self.blocks_ % 2].happened();
    self.finish();
  }
}

void executor::finish() {
  device_thread& self = threads_[current_];
  fiber* on = self.on;
  self.on = nullptr;
  self.state = state::done;
  ++done_;
  const std::size_t t = next();
  if (t != nobody && !threads_[t].on) {  // a new thread starts here, without a switch
    threads_[t].on = on;
    threads_[t].state = state::ready;
    set_current(t);
    return;
  }
  {
    const unseen own;
    idle_.push_back(on);
  }
  continue_with(t, *on);
}

void executor::complete(warp& w, const device_thread& last) {
  const std::size_t first = current_ / 32 * 32;
  unsigned bits = 0;
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (!(last.mask >> lane & 1)) continue;
    const device_thread& t = threads_[first + lane];
    if (t.op != last.op || t.mask != last.mask) {
      die(where() + ": the lanes of its warp meet in different collectives or with different masks");
    }
    bits |= (t.value != 0 ? 1u : 0u) << lane;
  }
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (!(last.mask >> lane & 1)) continue;
    device_thread& t = threads_[first + lane];
    if (t.op == warp_op::gather) {
      w.gathered[lane] = t.offered;
    } else if (t.op == warp_op::shuffle) {
      if (!(t.mask >> t.source & 1))
        die(where() + ": a shuffle reads lane " + std::to_string(t.source) + ", outside its mask");
      t.result = threads_[first + t.source].value;
    } else {
      t.result = bits;
    }
    t.state = state::ready;
  }
  w.waiting &= ~last.mask;
  if (last.op == warp_op::sync) ++w.syncs;
}

void executor::stuck() {
  std::size_t barriers = 0, warps = 0, done = 0;
  for (const device_thread& t : threads_) {
    barriers += t.state == state::at_barrier;
    warps += t.state == state::in_warp;
    done += t.state == state::done;
  }
  die("block " + text(blockIdx) + " of kernel " + std::string(launch_.kernel) + " cannot go on: of " +
      std::to_string(threads_.size()) + " threads " + std::to_string(barriers) + " wait at a barrier, " +
      std::to_string(warps) + " in a collective of their warp, " + std::to_string(done) + " have returned");
}

namespace {

/// The sum of `sum` and the products of the four bf16 in each word, added in order.
float dot4(std::uint64_t a, std::uint64_t b, float sum) {
  for (int i = 0; i < 4; ++i) {
    const auto x = std::bit_cast<float>(static_cast<std::uint32_t>(a >> (16 * i)) << 16);
    const auto y = std::bit_cast<float>(static_cast<std::uint32_t>(b >> (16 * i)) << 16);
    sum += x * y;
  }
  return sum;
}

}  // namespace

void multiply_fragments(const executor::offer* warp, int lane, float (&c)[4]) {
  const int group = lane / 4, pair = lane % 4;
  for (int k = 0; k < 4; ++k) {
    const std::uint64_t row0 = warp[4 * group + k].words[0], row8 = warp[4 * group + k].words[1];
    const std::uint64_t column0 = warp[8 * pair + k].words[2], column1 = warp[8 * pair + 4 + k].words[2];
    c[0] = dot4(row0, column0, c[0]);
    c[1] = dot4(row0, column1, c[1]);
    c[2] = dot4(row8, column0, c[2]);
    c[3] = dot4(row8, column1, c[3]);
  }
}

}  // namespace stand_in
