// Tests that faults in deterministic sums change the result. The weights of a small Llama have one hash on several
// layouts. The hash changes if two ranks' terms are added in another order or a sum travels in bf16. It also changes if
// each rank clips by its own norm, or samples are in other leaves. scripts/trainer_deterministic.sh tests many more
// layouts.
#include <doctest/doctest.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plait/comm/threads.hpp"
#include "plait/kernels/sums.hpp"
#include "plait/models/llama.hpp"
#include "plait/nn/strategy.hpp"
#include "plait/parallel/parameter_hashes.hpp"
#include "plait/parallel/train_step.hpp"

using namespace plait;

namespace {

/// Runs a call, and does something else instead or changes its result.
using fault = std::function<void(any_communicator&, const call&)>;

/// A communicator with a fault.
class faulty_communicator : public verbs<faulty_communicator> {
 public:
  faulty_communicator() = default;
  faulty_communicator(any_communicator inner, std::shared_ptr<fault> what)
      : inner_(std::move(inner)), what_(std::move(what)) {}

  explicit operator bool() const { return static_cast<bool>(inner_); }
  int rank() const { return inner_.rank(); }
  int size() const { return inner_.size(); }
  std::string label() const { return inner_.label(); }
  request start(const call& c) {
    if (c.kind == collective::send || c.kind == collective::receive) return inner_.start(c);
    (*what_)(inner_, c);
    return {};
  }
  faulty_communicator split(int color, int key, std::string_view label = {}) {
    return {inner_.split(color, key, label), what_};
  }
  void abort(const std::string& why) noexcept { inner_.abort(why); }

 private:
  any_communicator inner_;
  std::shared_ptr<fault> what_;
};
static_assert(communicator<faulty_communicator>);

bool exchanges_floats(const call& c) { return c.kind == collective::all_to_all && c.ragged && c.type == dtype::f32; }

void no_fault(any_communicator& comm, const call& c) { comm.run(c); }
/// Adds the terms of ranks 1 and 2 in exchanged order.
void swap_terms(any_communicator& comm, const call& c) {
  comm.run(c);
  if (!exchanges_floats(c) || comm.size() < 4 || c.receive_counts[1] != c.receive_counts[2]) return;
  auto* const out = static_cast<float*>(c.out);
  for (std::size_t i = 0; i < c.receive_counts[1]; ++i)
    std::swap(out[c.receive_offsets[1] + i], out[c.receive_offsets[2] + i]);
}
/// Rounds terms to bf16.
void round_terms(any_communicator& comm, const call& c) {
  comm.run(c);
  if (!exchanges_floats(c)) return;
  auto* const out = static_cast<float*>(c.out);
  for (std::size_t r = 0; r < c.receive_counts.size(); ++r)
    for (std::size_t i = 0; i < c.receive_counts[r]; ++i) {
      float& x = out[c.receive_offsets[r] + i];
      x = to_float(to_bf16(x));
    }
}
/// Does not add squares of gradients over ranks, so each rank clips by its own norm.
void own_norm(any_communicator& comm, const call& c) {
  const bool squares = c.kind == collective::all_reduce && c.type == dtype::i64 &&
                       c.count == static_cast<std::size_t>(kernels::exact_squares::words);
  std::vector<std::int64_t> own;
  if (squares) own.assign(static_cast<const std::int64_t*>(c.in), static_cast<const std::int64_t*>(c.in) + c.count);
  comm.run(c);
  if (squares) std::memcpy(c.out, own.data(), own.size() * sizeof own[0]);
}

using S = context_parallel<megatron_sp, chosen<cp>, zigzag>;

struct layout_of_run {
  std::int64_t dp = 1, cp = 1, tp = 1, microbatches = 1;
  zero_level level = zero_level::replicated;
  std::int64_t loss_chunks = 1;
};
constexpr layout_of_run alone{};

/// Three steps of a small Llama; `place(i)` is the sample at index i of a step.
template <class T>
std::uint64_t hash_of(
    const layout_of_run& l, fault what = no_fault, deterministic_leaves leaves = {4, 8, 4},
    std::function<std::int64_t(std::int64_t)> place = [](std::int64_t i) { return i; }) {
  const S::mesh mesh{l.dp, l.cp, l.tp, 1};
  llama_config config;
  config.vocab = 61, config.hidden = 32, config.ffn = 64, config.layers = 1, config.heads = 8, config.kv_heads = 4;
  config.head_dim = 4;
  std::uint64_t hash = 0;
  threads::run(static_cast<int>(mesh.size()), [&](threads::communicator ranks) {
    world w(mesh.shape(), any_communicator(faulty_communicator(ranks, std::make_shared<fault>(what))));
    const auto* const function = what.target<void (*)(any_communicator&, const call&)>();
    const bool plain = function && *function == no_fault;
    w.checks().set(plain ? value_check::always : value_check::off);  // they would report such faults
    cpu device({.deterministic = true});
    const deterministic_leaves order = leaves_under<S>(leaves, mesh.shape());
    const std::int64_t batch = 8 / l.microbatches;
    const context<cpu> ctx{device, w, llama_sizes<S>(config, mesh.shape(), batch, 32, order), 1, order};
    llama<T, S> model(ctx, config, {.loss_chunks = l.loss_chunks});
    model.visit([&](auto& p) { p.initialize(ctx); });
    adamw<T> optimizer;
    pipeline_options options;
    options.parallel.level = l.level;
    training_step step(ctx, model, optimizer, l.microbatches, /*clip=*/0.1, options);
    const sequence_order places = sequence_order_of<S>(mesh.shape(), ctx.sizes);
    for (std::int64_t i = 0; i < 3; ++i) {
      step.load(ctx, i * 8, [&](std::int64_t m, host_tokens& ids, host_tokens& labels) {
        const box& part = ids.stored_part();
        const std::int64_t first =
            first_sample_in_step(order, m, l.microbatches, part.global[0], part.offset[0], part.local[0]);
        for (std::int64_t row = 0; row < part.local[0]; ++row)
          for (std::int64_t column = 0; column < part.local[1]; ++column) {
            const std::int64_t sample = i * 8 + place(first + row), at = places.position(part.offset[1] + column);
            const auto token = [&](std::int64_t p) { return (sample * 7919 + p * p * 31 + p) % 61; };
            ids.data()[row * part.local[1] + column] = token(at);
            labels.data()[row * part.local[1] + column] = token(at + 1);
          }
      });
      optimizer.begin_step(ctx, 1e-2);
      step.run(ctx);
      CHECK(step.result(ctx).gradient_norm > 0.1);  // so the step clips
    }
    const std::uint64_t own = weights_hash(ctx, step.model());
    if (w.rank() == 0) hash = own;
  });
  return hash;
}

}  // namespace

TEST_CASE_TEMPLATE("one hash on all layouts", T, float, bf16) {
  const std::uint64_t one = hash_of<T>(alone);
  for (const layout_of_run& l : {layout_of_run{1, 1, 1, 4},
                                 {4, 1, 1, 1},
                                 {1, 2, 2, 2},
                                 {2, 1, 2, 2, zero_level::gradients},
                                 {2, 2, 1, 1, zero_level::parameters}})
    CHECK(hash_of<T>(l) == one);
}

TEST_CASE_TEMPLATE("one hash on ranks with unequally many leaves", T, float, bf16) {
  const std::uint64_t one = hash_of<T>(alone, no_fault, {4, 8, 8});
  for (const layout_of_run& l : {layout_of_run{3, 1, 1, 1},
                                 {5, 1, 1, 1, zero_level::optimizer},
                                 {7, 1, 1, 1, zero_level::parameters},
                                 {1, 3, 1, 2},
                                 {1, 1, 3, 4},
                                 {2, 1, 3, 1},
                                 {1, 2, 3, 1, zero_level::gradients},
                                 {3, 2, 1, 2}})
    CHECK(hash_of<T>(l, no_fault, {4, 8, 8}) == one);
  const std::uint64_t finer = hash_of<T>(alone, no_fault, {2, 8, 16});
  for (const layout_of_run& l : {layout_of_run{1, 5, 1, 1}, {1, 7, 1, 1}})
    CHECK(hash_of<T>(l, no_fault, {2, 8, 16}) == finer);
}

TEST_CASE_TEMPLATE("chunks of tokens of the loss change no bit", T, float, bf16) {
  const std::uint64_t one = hash_of<T>(alone, no_fault, {4, 8, 8});
  for (const layout_of_run& l : {layout_of_run{.loss_chunks = 8},
                                 {1, 1, 2, 2, zero_level::replicated, 4},
                                 {1, 2, 2, 1, zero_level::replicated, 2},
                                 {2, 2, 1, 2, zero_level::parameters, 4}})
    CHECK(hash_of<T>(l, no_fault, {4, 8, 8}) == one);
  CHECK_THROWS_WITH_AS(
      hash_of<T>({.tp = 2, .loss_chunks = 4}),
      doctest::Contains("language model: loss_chunks = 4 makes chunks of 4 positions on each rank, which are not whole "
                        "leaves of deterministic_leaves::sequence = 4; legal are multiples of 8 there"),
      error);
  CHECK_THROWS_WITH_AS(
      hash_of<T>({.cp = 3, .loss_chunks = 2}, no_fault, {4, 8, 8}),
      doctest::Contains("language model: loss_chunks = 2 needs ranks whose positions of a sequence differ by one at "
                        "most, and 3 ranks share out zseq = 32 in blocks of 4; legal is 1"),
      error);
  CHECK_THROWS_WITH_AS(hash_of<T>({.loss_chunks = 3}),
                       doctest::Contains("language model: loss_chunks = 3 does not divide the positions of a sequence "
                                         "that each rank has, as deterministic sums need it; legal is 1"),
                       error);
}

TEST_CASE("faults change the hash") {
  const std::uint64_t one = hash_of<float>(alone);
  CHECK(hash_of<float>({4, 1, 1, 1}, swap_terms) != one);
  CHECK(hash_of<float>({1, 1, 4, 1}, swap_terms) != one);
  CHECK(hash_of<float>({2, 1, 1, 1}, round_terms) != one);
  CHECK(hash_of<float>({1, 1, 2, 1}, round_terms) != one);
  CHECK(hash_of<float>({1, 2, 1, 1}, round_terms) != one);
  CHECK(hash_of<float>({2, 1, 1, 1, zero_level::optimizer}, own_norm) != one);
  CHECK(hash_of<float>({1, 1, 2, 1}, own_norm) != one);
}

TEST_CASE("other leaves, and samples in other leaves, give other sums") {
  const std::uint64_t one = hash_of<float>(alone);
  CHECK(hash_of<float>(alone, no_fault, {2, 8, 4}) != one);
  CHECK(hash_of<float>(alone, no_fault, {4, 4, 4}) != one);
  CHECK(hash_of<float>(alone, no_fault, {4, 8, 2}) != one);
  CHECK(hash_of<float>(alone, no_fault, {4, 8, 4}, [](std::int64_t i) { return i == 1 ? 2 : i == 2 ? 1 : i; }) != one);
}

TEST_CASE("leaves that the ranks cannot divide are refused") {
  CHECK_THROWS_WITH_AS(hash_of<float>({1, 1, 2, 1}, no_fault, {3, 8, 4}),
                       doctest::Contains("deterministic_leaves::features = 3"), error);
  CHECK_THROWS_WITH_AS(
      hash_of<float>({1, 1, 4, 1}, no_fault, {2, 8, 4}),
      doctest::Contains("deterministic_leaves::features = 2 leaves of the vocabulary, which 4 ranks of tp"), error);
  CHECK_THROWS_WITH_AS(hash_of<float>({1, 1, 3, 1}, no_fault, {2, 8, 4}),
                       doctest::Contains("which 3 ranks of tp, tp_rep cannot divide; legal are 3 or more"), error);
  CHECK_THROWS_WITH_AS(hash_of<float>({4, 1, 1, 1}, no_fault, {4, 6, 4}),
                       doctest::Contains("deterministic_leaves::samples = 6"), error);
  CHECK_THROWS_WITH_AS(hash_of<float>({1, 2, 1, 1}, no_fault, {4, 8, 2}),
                       doctest::Contains("deterministic_leaves::sequence = 2"), error);
}
