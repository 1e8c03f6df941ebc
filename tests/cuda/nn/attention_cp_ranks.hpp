#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda/device/device_array.hpp"
#include "plait/device/cuda.hpp"
#include "plait/kernels/cpu/attention.hpp"
#include "plait/nn/attention/chosen.hpp"

/// Attention with context-parallel policies on ranks with a GPU's memory. Inputs and outputs are in original order.
namespace plait::test {

/// Sizes of one attention; arrays are [seq, heads, head_dim], one sequence.
struct context_sizes {
  std::int64_t seq = 128, heads = 4, kv_heads = 2, head_dim = 16;
  kernels::attention_mask mask{};
  kernels::attention_score score{};
};

/// Output and gradients in original order.
struct context_arrays {
  std::vector<double> o, dq, dk, dv, dsinks{};
};

struct context_inputs {
  context_sizes sizes;
  values q, k, v, d_o;
  std::vector<std::int32_t> starts;  ///< of documents; empty: none
  values sinks{};                    ///< empty: none
};

inline kernels::attention_shape shape_of(const context_sizes& sizes) {
  kernels::attention_shape s;
  s.heads = sizes.heads, s.kv_heads = sizes.kv_heads, s.head_dim = sizes.head_dim, s.mask = sizes.mask;
  s.scale = 1 / std::sqrt(static_cast<double>(s.head_dim));
  s.score = sizes.score;
  return s;
}

/// The cpu's attention on one rank, in double.
inline context_arrays context_on_cpu(const context_inputs& in) {
  cpu device;
  const auto& [sizes, q, k, v, d_o, starts, sinks] = in;
  kernels::attention_shape s = shape_of(sizes);
  s.q_len = s.k_len = sizes.seq;
  std::vector<std::int32_t> ends(starts.size());
  if (!starts.empty()) {
    kernels::document_ends(device, starts.data(), sizes.seq, ends.data(), 1, 0, sizes.seq, sizes.seq);
    s.first_visible = starts.data(), s.end_visible = ends.data();
  }
  context_arrays made{values(q.size()), values(q.size()), values(k.size()), values(v.size()), values(sinks.size())};
  values lse(static_cast<std::size_t>(s.heads * s.q_len)), delta(lse);
  kernels::attention_forward(device, q.data(), k.data(), v.data(), made.o.data(), lse.data(), s);
  if (!sinks.empty()) {
    kernels::join_sinks(device, sinks.data(), made.o.data(), lse.data(), s);
    kernels::attention_delta(device, made.o.data(), d_o.data(), delta.data(), s);
    kernels::sink_gradients(device, sinks.data(), lse.data(), delta.data(), made.dsinks.data(), s);
  }
  kernels::attention_backward(device, q.data(), k.data(), v.data(), made.o.data(), lse.data(), d_o.data(),
                              made.dq.data(), made.dk.data(), made.dv.data(), s);
  return made;
}

/// The errors of the output, of the three gradients and, if there are sinks, of their gradients.
inline values errors_of(const context_arrays& got, const context_arrays& expected) {
  values all{difference(got.o, expected.o), difference(got.dq, expected.dq), difference(got.dk, expected.dk),
             difference(got.dv, expected.dv)};
  if (!got.dsinks.empty()) all.push_back(difference(got.dsinks, expected.dsinks));
  return all;
}
inline void check_below(const values& errors, double most) {
  for (std::size_t i = 0; i < errors.size(); ++i) {
    CAPTURE(i);
    CHECK(errors[i] < most);
  }
}
/// Compares the errors of the output and of its gradients on several ranks with those on one.
inline void check_no_worse(const values& many, const values& one, double factor) {
  for (std::size_t i = 0; i < 4; ++i) {
    CAPTURE(i);
    CAPTURE(one[i]);
    CHECK(many[i] <= factor * one[i]);
  }
}

template <class T>
context_inputs random_inputs(const context_sizes& s, bool documents) {
  context_inputs in{s,
                    random_values<T>(s.seq * s.heads * s.head_dim, 1),
                    random_values<T>(s.seq * s.kv_heads * s.head_dim, 2),
                    random_values<T>(s.seq * s.kv_heads * s.head_dim, 3),
                    random_values<T>(s.seq * s.heads * s.head_dim, 4),
                    {}};
  for (std::int64_t p = 0; documents && p < s.seq; ++p) {
    const std::int64_t last = s.seq * 3 / 4;  // the last rank's tokens, in original order, see no key
    in.starts.push_back(static_cast<std::int32_t>(p < 41 ? 0 : p < last ? 41 : s.seq));
  }
  return in;
}

/// This rank's rows of [seq, width], or the inverse.
inline values taken(const values& all, const std::vector<std::int64_t>& positions, std::int64_t width) {
  values mine;
  for (const std::int64_t p : positions)
    for (std::int64_t i = 0; i < width; ++i) mine.push_back(all[static_cast<std::size_t>(p * width + i)]);
  return mine;
}
inline void put(values& all, const values& mine, const std::vector<std::int64_t>& positions, std::int64_t width) {
  for (std::size_t row = 0; row < positions.size(); ++row)
    for (std::int64_t i = 0; i < width; ++i)
      all[static_cast<std::size_t>(positions[row] * width + i)] =
          mine[row * static_cast<std::size_t>(width) + static_cast<std::size_t>(i)];
}

/// `launch(ranks, body)` calls body(communicator, device) on `ranks` ranks. With `as_graph`, the results are those of a
/// recorded pass.
template <class T, class Policy, class Launch>
context_arrays attend_on(Launch&& launch, const context_inputs& in, int ranks, bool zigzag, bool as_graph = false) {
  const context_sizes& s = in.sizes;
  const std::int64_t q_width = s.heads * s.head_dim, k_width = s.kv_heads * s.head_dim, own = s.seq / ranks;
  const sequence_order order = zigzag ? sequence_order::zigzag(s.seq, ranks) : sequence_order::original(s.seq);
  std::vector<context_arrays> all(static_cast<std::size_t>(ranks));
  launch(ranks, [&](auto comm, cuda& device) {
    world w(mesh<axis<cp>>{ranks}.shape(), comm);
    context<cuda> ctx{device, w, {}};
    const bool documents = !in.starts.empty();
    context_attention<T, Policy, cuda> attention(ctx, shape_of(s), order, documents);
    const std::vector<std::int64_t>& positions = attention.positions();
    number_array<T> q(device, taken(in.q, positions, q_width)), k(device, taken(in.k, positions, k_width));
    number_array<T> v(device, taken(in.v, positions, k_width)), d_o(device, taken(in.d_o, positions, q_width));
    number_array<T> o(device, own * q_width), dq(device, own * q_width), dk(device, own * k_width),
        dv(device, own * k_width);
    std::vector<std::int32_t> starts;
    for (const std::int64_t p : positions)
      if (documents) starts.push_back(in.starts[static_cast<std::size_t>(p)]);
    device_array<std::int32_t> first_visible(device, starts);
    number_array<T> sinks(device, in.sinks);
    number_array<statistic_of<T>> dsinks(device, in.sinks);
    const bool with_sinks = !in.sinks.empty();
    const attention_inputs<T> args{q.view(), k.view(), v.view(), documents ? first_visible.data() : nullptr,
                                   with_sinks ? sinks.view() : nullptr};
    typename context_attention<T, Policy, cuda>::saved kept;
    const auto pass = [&] {
      attention.forward(ctx, args, o.data(), &kept);
      attention.backward(ctx, args, o.view(), d_o.view(), kept,
                         {dq.data(), dk.data(), dv.data(), with_sinks ? dsinks.data() : nullptr});
    };
    pass();
    if (as_graph) {
      pass();  // all memory is allocated now
      cuda_graph graph(device);
      graph.record(pass);
      for (number_array<T>* a : {&o, &dq})
        device.zero(a->data(), static_cast<std::size_t>(own * q_width) * sizeof(T), device.main_stream());
      for (number_array<T>* a : {&dk, &dv})
        device.zero(a->data(), static_cast<std::size_t>(own * k_width) * sizeof(T), device.main_stream());
      graph.launch();
      device.synchronize();
      w.root().barrier();
    }
    all[static_cast<std::size_t>(w.rank())] = {o.read(), dq.read(), dk.read(), dv.read(), dsinks.read()};
  });
  context_arrays text{values(in.q.size()), values(in.q.size()), values(in.k.size()), values(in.v.size()),
                      values(in.sinks.size())};
  for (int r = 0; r < ranks; ++r) {
    const std::vector<std::int64_t> positions = order.positions(r * own, own);
    const context_arrays& mine = all[static_cast<std::size_t>(r)];
    put(text.o, mine.o, positions, q_width);
    put(text.dq, mine.dq, positions, q_width);
    put(text.dk, mine.dk, positions, k_width);
    put(text.dv, mine.dv, positions, k_width);
    for (std::size_t h = 0; h < in.sinks.size(); ++h) text.dsinks[h] += mine.dsinks[h];
  }
  return text;
}

}  // namespace plait::test
