// CUDA kernels of AdamW and of Muon over many tensors. Test: tests/cuda/kernels/kernel_optimizer.cpp.
#pragma once

#include <type_traits>
#include <vector>

#include "plait/device/cuda_launch.hpp"
#include "plait/kernels/cuda/arrays.hpp"
#include "plait/kernels/cuda/launchers.hpp"
#include "plait/kernels/cuda/math.hpp"
#include "plait/kernels/moments.hpp"
#include "plait/kernels/philox.hpp"

namespace plait::kernels {

namespace detail {

inline constexpr std::int64_t optimizer_chunk = 8192;  ///< elements of a block; a multiple of every pack
inline constexpr int optimizer_threads = 256;

/// The elements of a block of threads: one chunk of one entry.
struct chunk_of_entry {
  int entry;
  std::int64_t begin;
  int size;
  template <class Entry>
  __device__ explicit chunk_of_entry(const tensor_table<Entry>& table) {
    const int chunk = static_cast<int>(blockIdx.x);
    entry = table.entry_of(chunk);
    begin = (chunk - table.first_chunk[entry]) * optimizer_chunk;
    const std::int64_t left = table.entries[entry].size - begin;
    size = static_cast<int>(left < optimizer_chunk ? left : optimizer_chunk);
  }
};

template <int N, class T>
__device__ inline element_pack<T, N>& pack_at(T* p) {
  return *reinterpret_cast<element_pack<T, N>*>(p);
}
template <int N, class T>
__device__ inline const element_pack<T, N>& pack_at(const T* p) {
  return *reinterpret_cast<const element_pack<T, N>*>(p);
}
/// Writes masters to `weight`, rounded.
template <class W, class M, int N>
__device__ inline void store_weights(W* weight, const element_pack<M, N>& masters) {
  element_pack<W, N> rounded;
  for (int j = 0; j < N; ++j) rounded.at[j] = number<W>(masters.at[j]);
  pack_at<N>(weight) = rounded;
}
/// Calls f(i, n) for this thread's elements i to i + n - 1 of a chunk of `size`: packs of `Width` if `packs`, and
/// single elements for the rest. n is a `std::integral_constant`.
template <int Width, class F>
__device__ inline void each_pack(int size, bool packs, F f) {
  const int done = packs ? size / Width * Width : 0, thread = static_cast<int>(threadIdx.x);
  for (int i = thread * Width; i < done; i += optimizer_threads * Width) f(i, std::integral_constant<int, Width>{});
  for (int i = done + thread; i < size; i += optimizer_threads) f(i, std::integral_constant<int, 1>{});
}

/// Launches `kernel` for tables of `tensors`, with a block for each chunk.
template <class Entry, class... Arguments>
void launch_tables(cuda& device, std::span<const Entry> tensors, void (*kernel)(tensor_table<Entry>, Arguments...),
                   const std::type_identity_t<Arguments>&... arguments) {
  for_each_table(tensors, optimizer_chunk, [&](const auto& table, int chunks) {
    plait::detail::launch(device, {static_cast<unsigned>(chunks), optimizer_threads}, kernel, table, arguments...);
  });
}

}  // namespace detail

// ---- AdamW -------------------------------------------------------------------------------------------------------

namespace detail {

/// The numbers of a step in the type of the arithmetic.
template <class M>
struct adamw_numbers {
  M rate, root_scale, one_minus_b1, b2, one_minus_b2, epsilon, gradient_scale, decay;

  /// Reads the numbers that `adamw_share_numbers` has computed.
  __device__ static adamw_numbers of(const double* shared, const adamw_settings& settings) {
    return {static_cast<M>(shared[0]),      static_cast<M>(shared[1]),          static_cast<M>(1 - settings.beta1),
            static_cast<M>(settings.beta2), static_cast<M>(1 - settings.beta2), static_cast<M>(settings.epsilon),
            static_cast<M>(shared[2]),      static_cast<M>(shared[3])};
  }
  __device__ void update(M& p, M g, M& mean, M& square) const {
    g *= gradient_scale;
    mean += (g - mean) * one_minus_b1;
    square = square * b2 + g * g * one_minus_b2;
    p = p * decay - rate * mean / (sqrt(square) * root_scale + epsilon);
  }
};

/// Computes divisions and roots in double, once per block. All threads of the block must call it.
__device__ inline void adamw_share_numbers(double* shared, const adamw_scalars& scalars, double weight_decay) {
  if (threadIdx.x == 0) {
    const double learning_rate = scalars.learning_rate;
    shared[0] = learning_rate / scalars.correction1;
    shared[1] = 1.0 / sqrt(scalars.correction2);
    shared[2] = scalars.gradient_scale;
    shared[3] = 1.0 - learning_rate * weight_decay;
  }
  __syncthreads();
}

template <class M, class G, class W>
__global__ static void adamw_step(const tensor_table<adamw_tensor<M, G, W>> table, const adamw_settings settings,
                                  const adamw_scalars* scalars) {
  if (scalars->update == 0.0) return;
  constexpr int width = vector16<M>::size;
  const chunk_of_entry here(table);
  const adamw_tensor<M, G, W>& entry = table.entries[here.entry];
  M* const master = entry.master + here.begin;
  const G* const gradient = entry.gradient + here.begin;
  M* const m = entry.m + here.begin;
  M* const v = entry.v + here.begin;
  W* const weight = entry.weight == nullptr ? nullptr : entry.weight + here.begin;

  __shared__ double shared_numbers[4];
  adamw_share_numbers(shared_numbers, *scalars, entry.weight_decay);
  const adamw_numbers<M> numbers = adamw_numbers<M>::of(shared_numbers, settings);

  const bool packs = holds_packs<width>(master) && holds_packs<width>(gradient) && holds_packs<width>(m) &&
                     holds_packs<width>(v) && holds_packs<width>(weight);
  each_pack<width>(here.size, packs, [&](int i, auto n) {
    constexpr int N = decltype(n)::value;
    auto p = pack_at<N>(master + i), mean = pack_at<N>(m + i), square = pack_at<N>(v + i);
    const auto g = pack_at<N>(gradient + i);
    for (int j = 0; j < N; ++j) numbers.update(p.at[j], number<M>(g.at[j]), mean.at[j], square.at[j]);
    pack_at<N>(master + i) = p;
    pack_at<N>(m + i) = mean;
    pack_at<N>(v + i) = square;
    if (weight != nullptr) store_weights(weight + i, p);
  });
}

}  // namespace detail

template <class M, class G, class W>
void adamw_update(cuda& device, std::span<const adamw_tensor<M, G, W>> tensors, const adamw_settings& settings,
                  const adamw_scalars* scalars) {
  detail::launch_tables(device, tensors, detail::adamw_step<M, G, W>, settings, scalars);
}

// ---- AdamW with moments or values that are rounded for memory ----------------------------------------------------

namespace detail {

/// The random words of elements, for a thread that requests neighbours in order: they share a Philox block.
class neighbours_words {
 public:
  __device__ neighbours_words(const rounded_elements& elements, std::uint64_t seed)
      : elements_(&elements), seed_(seed) {}
  __device__ std::uint32_t of(std::int64_t element) {
    const std::int64_t global = elements_->map.global_of_element(elements_->first + element);
    if (global / 4 != block_) {
      block_ = global / 4;
      words_ = random_words(seed_, elements_->stream, static_cast<std::uint64_t>(block_));
    }
    const auto lane = static_cast<int>(global % 4);
    const std::uint32_t low = lane == 0 ? words_[0] : words_[1], high = lane == 2 ? words_[2] : words_[3];
    return lane < 2 ? low : high;
  }

 private:
  const rounded_elements* elements_;
  std::uint64_t seed_;
  std::int64_t block_ = -1;
  four_words words_{};
};

template <class S, class A>
__device__ inline A widened_moment(S kept, std::uint8_t scale, bool second) {
  if constexpr (std::is_same_v<S, std::uint8_t>) {
    return static_cast<A>(second ? second_moment(kept, scale) : first_moment(kept, scale));
  } else {
    return number<A>(kept);
  }
}
template <class S, class A>
__device__ inline S rounded_moment(A x, std::uint8_t scale, bool second, std::uint32_t word) {
  const std::uint32_t random = second ? word >> 16 : word;
  if constexpr (std::is_same_v<S, std::uint8_t>) {
    return second ? second_moment_code(static_cast<float>(x), scale, random)
                  : first_moment_code(static_cast<float>(x), scale, random);
  } else if constexpr (std::is_same_v<S, A>) {
    return x;
  } else {
    return to_bf16_stochastically(static_cast<float>(x), random);
  }
}

/// Every warp takes whole blocks of moments; each lane has two groups of four elements of a block. An entry's size
/// counts from the start of its first block.
template <class M, class G, class W, class S>
__global__ static void adamw_rounded_step(const __grid_constant__ tensor_table<adamw_rounded_tensor<M, G, W, S>> table,
                                          const adamw_settings settings, const adamw_scalars* scalars) {
  if (scalars->update == 0.0) return;
  using A = arithmetic<M>;
  constexpr bool codes = std::is_same_v<S, std::uint8_t>;
  constexpr int held = static_cast<int>(moment_block) / warp_lanes, stretch = 4;
  const int chunk = static_cast<int>(blockIdx.x), entry = table.entry_of(chunk);
  const adamw_rounded_tensor<M, G, W, S>& t = table.entries[entry];
  const std::int64_t first = (chunk - table.first_chunk[entry]) * (optimizer_chunk / moment_block);
  const int lane = static_cast<int>(threadIdx.x) % warp_lanes, warp = static_cast<int>(threadIdx.x) / warp_lanes;

  __shared__ double shared_numbers[4];
  adamw_share_numbers(shared_numbers, *scalars, t.weight_decay);
  const adamw_numbers<A> numbers = adamw_numbers<A>::of(shared_numbers, settings);

  for (int i = warp; i < optimizer_chunk / moment_block; i += optimizer_threads / warp_lanes) {
    // `at` is the start of the block, which may be before the entry's first element
    const std::int64_t block = first + i, at = block * moment_block - t.begin;
    if (block * moment_block >= t.size) break;
    const std::int64_t from = at < 0 ? 0 : at, to = t.size - t.begin;
    const auto place = [&](int j) { return at + j / stretch * (warp_lanes * stretch) + lane * stretch + j % stretch; };
    A m[held], v[held];
    float most_m = 0, most_v = 0;
    std::uint8_t m_scale = codes ? t.m_scales[block] : 0, v_scale = codes ? t.v_scales[block] : 0;
    neighbours_words values(t.elements, value_rounding(scalars->rounding)), moments(t.elements, scalars->rounding);
    PLAIT_UNROLL
    for (int j = 0; j < held; ++j) {
      const std::int64_t e = place(j);
      m[j] = v[j] = A(0);
      if (e < from || e >= to) continue;
      m[j] = widened_moment<S, A>(t.m[e], m_scale, false);
      v[j] = widened_moment<S, A>(t.v[e], v_scale, true);
      A p = number<A>(t.master[e]);
      numbers.update(p, number<A>(t.gradient[e]), m[j], v[j]);
      if constexpr (std::is_same_v<M, A>)
        t.master[e] = p;
      else
        t.master[e] = to_bf16_stochastically(p, values.of(e));
      if (t.weight != nullptr) t.weight[e] = number<W>(p);
      const float size = fabsf(static_cast<float>(m[j]));
      most_m = size > most_m ? size : most_m;
      most_v = static_cast<float>(v[j]) > most_v ? static_cast<float>(v[j]) : most_v;
    }
    if constexpr (codes) {
      m_scale = moment_scale(warp_max(most_m));
      v_scale = moment_scale(warp_max(most_v));
      if (lane == 0) t.m_scales[block] = m_scale, t.v_scales[block] = v_scale;
    }
    PLAIT_UNROLL
    for (int j = 0; j < held; ++j) {
      const std::int64_t e = place(j);
      if (e < from || e >= to) continue;
      const std::uint32_t word = std::is_same_v<S, A> ? 0u : moments.of(e);
      t.m[e] = rounded_moment<S>(m[j], m_scale, false, word);
      t.v[e] = rounded_moment<S>(v[j], v_scale, true, word);
    }
  }
}

}  // namespace detail

template <class M, class G, class W, class S>
void adamw_update(cuda& device, std::span<const adamw_rounded_tensor<M, G, W, S>> tensors,
                  const adamw_settings& settings, const adamw_scalars* scalars) {
  std::vector<adamw_rounded_tensor<M, G, W, S>> entries;
  entries.reserve(tensors.size());
  for (const adamw_rounded_tensor<M, G, W, S>& t : tensors) {
    if (t.size <= 0) continue;
    entries.push_back(t);
    entries.back().size += t.begin;
  }
  detail::launch_tables<adamw_rounded_tensor<M, G, W, S>>(device, entries, detail::adamw_rounded_step<M, G, W, S>,
                                                          settings, scalars);
}

// ---- Muon --------------------------------------------------------------------------------------------------------

namespace detail {

/// Computes one element's momentum and direction. A skipped step has direction 0, and does not change the momentum.
template <class M>
struct muon_momentum_arithmetic {
  bool skipped;
  M scale, rest, ahead;
  __device__ muon_momentum_arithmetic(const muon_settings& settings, const adamw_scalars& scalars)
      : skipped(scalars.update == 0.0),
        scale(static_cast<M>(scalars.gradient_scale)),
        rest(static_cast<M>(1.0 - settings.momentum)),
        ahead(static_cast<M>(settings.nesterov ? settings.momentum : 1.0)) {}
  /// Returns the direction.
  __device__ M next(M& m, M g) const {
    if (skipped) return M(0);
    g *= scale;
    m += (g - m) * rest;
    return g + (m - g) * ahead;
  }
};

template <class M, class G>
__global__ static void muon_momentum_step(const tensor_table<muon_momentum_tensor<M, G>> table,
                                          const muon_settings settings, const adamw_scalars* scalars) {
  constexpr int width = vector16<M>::size;
  const chunk_of_entry here(table);
  const G* const gradient = table.entries[here.entry].gradient + here.begin;
  M* const momentum = table.entries[here.entry].momentum + here.begin;
  M* const direction = table.entries[here.entry].direction + here.begin;
  const muon_momentum_arithmetic<M> arithmetic(settings, *scalars);
  const bool packs = holds_packs<width>(gradient) && holds_packs<width>(momentum) && holds_packs<width>(direction);
  each_pack<width>(here.size, packs, [&](int i, auto n) {
    constexpr int N = decltype(n)::value;
    element_pack<M, N> m = pack_at<N>(momentum + i), d;
    const auto g = pack_at<N>(gradient + i);
    for (int j = 0; j < N; ++j) d.at[j] = arithmetic.next(m.at[j], number<M>(g.at[j]));
    pack_at<N>(momentum + i) = m;
    pack_at<N>(direction + i) = d;
  });
}

template <class M, class G>
__global__ static void muon_rounded_momentum_step(const tensor_table<muon_rounded_tensor<M, G>> table,
                                                  const muon_settings settings, const adamw_scalars* scalars) {
  constexpr int together = 4;  // elements that share one Philox block of random words
  const chunk_of_entry here(table);
  const muon_rounded_tensor<M, G>& entry = table.entries[here.entry];
  const muon_momentum_arithmetic<M> arithmetic(settings, *scalars);
  neighbours_words words(entry.elements, scalars->rounding);
  for (int i = static_cast<int>(threadIdx.x) * together; i < here.size; i += optimizer_threads * together) {
    for (int j = i; j < i + together && j < here.size; ++j) {
      const std::int64_t at = here.begin + j;
      M m = number<M>(entry.momentum[at]);
      entry.direction[at] = arithmetic.next(m, number<M>(entry.gradient[at]));
      if (!arithmetic.skipped) entry.momentum[at] = to_bf16_stochastically(static_cast<float>(m), words.of(at));
    }
  }
}

template <class M, class W>
__global__ static void muon_update_step(const tensor_table<muon_tensor<M, W>> table, const adamw_scalars* scalars) {
  if (scalars->update == 0.0) return;
  constexpr int width = vector16<M>::size;
  const chunk_of_entry here(table);
  const muon_tensor<M, W>& entry = table.entries[here.entry];
  M* const master = entry.master + here.begin;
  const M* const direction = entry.direction + here.begin;
  W* const weight = entry.weight == nullptr ? nullptr : entry.weight + here.begin;
  const double learning_rate = scalars->learning_rate;
  const M decay = static_cast<M>(1.0 - learning_rate * entry.weight_decay);
  const M rate = static_cast<M>(learning_rate * entry.scale);
  const bool packs = holds_packs<width>(master) && holds_packs<width>(direction) && holds_packs<width>(weight);
  each_pack<width>(here.size, packs, [&](int i, auto n) {
    constexpr int N = decltype(n)::value;
    auto p = pack_at<N>(master + i);
    const auto d = pack_at<N>(direction + i);
    for (int j = 0; j < N; ++j) p.at[j] = p.at[j] * decay - d.at[j] * rate;
    pack_at<N>(master + i) = p;
    if (weight != nullptr) store_weights(weight + i, p);
  });
}

template <class T>
__global__ static void divide_by_norm_of(const T* x, T* y, std::int64_t n, const double* squares, double epsilon) {
  const T factor = static_cast<T>(1.0 / (sqrt(*squares) + epsilon));
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += step)
    y[i] = x[i] * factor;
}

}  // namespace detail

template <class M, class G>
void muon_momentum(cuda& device, std::span<const muon_momentum_tensor<M, G>> tensors, const muon_settings& settings,
                   const adamw_scalars* scalars) {
  detail::launch_tables(device, tensors, detail::muon_momentum_step<M, G>, settings, scalars);
}

template <class M, class G>
void muon_momentum(cuda& device, std::span<const muon_rounded_tensor<M, G>> tensors, const muon_settings& settings,
                   const adamw_scalars* scalars) {
  detail::launch_tables(device, tensors, detail::muon_rounded_momentum_step<M, G>, settings, scalars);
}

template <class M, class W>
void muon_update(cuda& device, std::span<const muon_tensor<M, W>> tensors, const adamw_scalars* scalars) {
  detail::launch_tables(device, tensors, detail::muon_update_step<M, W>, scalars);
}

template <class T>
void divide_by_norm(cuda& device, const T* x, T* y, std::int64_t n, const double* squares, double epsilon) {
  if (n <= 0) return;
  plait::detail::launch(device, {plait::detail::blocks_for(n, 256, 4096), 256}, detail::divide_by_norm_of<T>, x, y, n,
                        squares, epsilon);
}

}  // namespace plait::kernels
