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

// ---- AdamW -------------------------------------------------------------------------------------------------------

namespace detail {

inline constexpr std::int64_t adamw_chunk = 8192;  ///< elements per block of threads; a multiple of every pack
inline constexpr int adamw_threads = 256;

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
  using masters = element_pack<M, width>;
  using gradients = element_pack<G, width>;
  using weights = element_pack<W, width>;
  const int chunk = static_cast<int>(blockIdx.x), entry = table.entry_of(chunk);
  const std::int64_t begin = (chunk - table.first_chunk[entry]) * adamw_chunk;
  const std::int64_t left = table.entries[entry].size - begin;
  const int size = static_cast<int>(left < adamw_chunk ? left : adamw_chunk);
  M* const master = table.entries[entry].master + begin;
  const G* const gradient = table.entries[entry].gradient + begin;
  M* const m = table.entries[entry].m + begin;
  M* const v = table.entries[entry].v + begin;
  W* const weight = table.entries[entry].weight == nullptr ? nullptr : table.entries[entry].weight + begin;

  __shared__ double shared_numbers[4];
  adamw_share_numbers(shared_numbers, *scalars, table.entries[entry].weight_decay);
  const adamw_numbers<M> numbers = adamw_numbers<M>::of(shared_numbers, settings);

  int done = 0;
  if (holds_packs<width>(master) && holds_packs<width>(gradient) && holds_packs<width>(m) && holds_packs<width>(v) &&
      holds_packs<width>(weight)) {
    done = size / width * width;
    for (int i = static_cast<int>(threadIdx.x) * width; i < done; i += adamw_threads * width) {
      masters p = *reinterpret_cast<masters*>(master + i);
      masters mean = *reinterpret_cast<masters*>(m + i), square = *reinterpret_cast<masters*>(v + i);
      const gradients g = *reinterpret_cast<const gradients*>(gradient + i);
      for (int j = 0; j < width; ++j) numbers.update(p.at[j], number<M>(g.at[j]), mean.at[j], square.at[j]);
      *reinterpret_cast<masters*>(master + i) = p;
      *reinterpret_cast<masters*>(m + i) = mean;
      *reinterpret_cast<masters*>(v + i) = square;
      if (weight != nullptr) {
        weights rounded;
        for (int j = 0; j < width; ++j) rounded.at[j] = number<W>(p.at[j]);
        *reinterpret_cast<weights*>(weight + i) = rounded;
      }
    }
  }
  for (int i = done + static_cast<int>(threadIdx.x); i < size; i += adamw_threads) {
    M p = master[i], mean = m[i], square = v[i];
    numbers.update(p, number<M>(gradient[i]), mean, square);
    master[i] = p;
    m[i] = mean;
    v[i] = square;
    if (weight != nullptr) weight[i] = number<W>(p);
  }
}

}  // namespace detail

template <class M, class G, class W>
void adamw_update(cuda& device, std::span<const adamw_tensor<M, G, W>> tensors, const adamw_settings& settings,
                  const adamw_scalars* scalars) {
  detail::for_each_table(tensors, detail::adamw_chunk, [&](const auto& table, int chunks) {
    plait::detail::launch(device, {static_cast<unsigned>(chunks), detail::adamw_threads}, detail::adamw_step<M, G, W>,
                          table, settings, scalars);
  });
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
  const std::int64_t first = (chunk - table.first_chunk[entry]) * (adamw_chunk / moment_block);
  const int lane = static_cast<int>(threadIdx.x) % warp_lanes, warp = static_cast<int>(threadIdx.x) / warp_lanes;

  __shared__ double shared_numbers[4];
  adamw_share_numbers(shared_numbers, *scalars, t.weight_decay);
  const adamw_numbers<A> numbers = adamw_numbers<A>::of(shared_numbers, settings);

  for (int i = warp; i < adamw_chunk / moment_block; i += adamw_threads / warp_lanes) {
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
  detail::for_each_table(std::span<const adamw_rounded_tensor<M, G, W, S>>(entries), detail::adamw_chunk,
                         [&](const auto& table, int chunks) {
                           plait::detail::launch(device, {static_cast<unsigned>(chunks), detail::adamw_threads},
                                                 detail::adamw_rounded_step<M, G, W, S>, table, settings, scalars);
                         });
}

// ---- Muon --------------------------------------------------------------------------------------------------------

namespace detail {

inline constexpr std::int64_t muon_chunk = 8192;  ///< elements per block of threads; a multiple of every pack
inline constexpr int muon_threads = 256;

/// The elements of a block of threads: one chunk of one entry.
struct chunk_of_entry {
  int entry;
  std::int64_t begin;
  int size;
  template <class Entry>
  __device__ explicit chunk_of_entry(const tensor_table<Entry>& table) {
    const int chunk = static_cast<int>(blockIdx.x);
    entry = table.entry_of(chunk);
    begin = (chunk - table.first_chunk[entry]) * muon_chunk;
    const std::int64_t left = table.entries[entry].size - begin;
    size = static_cast<int>(left < muon_chunk ? left : muon_chunk);
  }
};

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
  using pack = element_pack<M, width>;
  using gradients = element_pack<G, width>;
  const chunk_of_entry here(table);
  const G* const gradient = table.entries[here.entry].gradient + here.begin;
  M* const momentum = table.entries[here.entry].momentum + here.begin;
  M* const direction = table.entries[here.entry].direction + here.begin;
  const muon_momentum_arithmetic<M> arithmetic(settings, *scalars);
  int done = 0;
  if (holds_packs<width>(gradient) && holds_packs<width>(momentum) && holds_packs<width>(direction)) {
    done = here.size / width * width;
    for (int i = static_cast<int>(threadIdx.x) * width; i < done; i += muon_threads * width) {
      pack m = *reinterpret_cast<pack*>(momentum + i), d;
      const gradients g = *reinterpret_cast<const gradients*>(gradient + i);
      for (int j = 0; j < width; ++j) d.at[j] = arithmetic.next(m.at[j], number<M>(g.at[j]));
      *reinterpret_cast<pack*>(momentum + i) = m;
      *reinterpret_cast<pack*>(direction + i) = d;
    }
  }
  for (int i = done + static_cast<int>(threadIdx.x); i < here.size; i += muon_threads) {
    M m = momentum[i];
    direction[i] = arithmetic.next(m, number<M>(gradient[i]));
    momentum[i] = m;
  }
}

template <class M, class G>
__global__ static void muon_rounded_momentum_step(const tensor_table<muon_rounded_tensor<M, G>> table,
                                                  const muon_settings settings, const adamw_scalars* scalars) {
  constexpr int together = 4;  // elements that share one Philox block of random words
  const chunk_of_entry here(table);
  const muon_rounded_tensor<M, G>& entry = table.entries[here.entry];
  const muon_momentum_arithmetic<M> arithmetic(settings, *scalars);
  neighbours_words words(entry.elements, scalars->rounding);
  for (int i = static_cast<int>(threadIdx.x) * together; i < here.size; i += muon_threads * together) {
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
  using pack = element_pack<M, width>;
  using weights = element_pack<W, width>;
  const chunk_of_entry here(table);
  const muon_tensor<M, W>& entry = table.entries[here.entry];
  M* const master = entry.master + here.begin;
  const M* const direction = entry.direction + here.begin;
  W* const weight = entry.weight == nullptr ? nullptr : entry.weight + here.begin;
  const double learning_rate = scalars->learning_rate;
  const M decay = static_cast<M>(1.0 - learning_rate * entry.weight_decay);
  const M rate = static_cast<M>(learning_rate * entry.scale);
  int done = 0;
  if (holds_packs<width>(master) && holds_packs<width>(direction) && holds_packs<width>(weight)) {
    done = here.size / width * width;
    for (int i = static_cast<int>(threadIdx.x) * width; i < done; i += muon_threads * width) {
      pack p = *reinterpret_cast<pack*>(master + i);
      const pack d = *reinterpret_cast<const pack*>(direction + i);
      for (int j = 0; j < width; ++j) p.at[j] = p.at[j] * decay - d.at[j] * rate;
      *reinterpret_cast<pack*>(master + i) = p;
      if (weight != nullptr) {
        weights rounded;
        for (int j = 0; j < width; ++j) rounded.at[j] = number<W>(p.at[j]);
        *reinterpret_cast<weights*>(weight + i) = rounded;
      }
    }
  }
  for (int i = done + static_cast<int>(threadIdx.x); i < here.size; i += muon_threads) {
    const M p = master[i] * decay - direction[i] * rate;
    master[i] = p;
    if (weight != nullptr) weight[i] = number<W>(p);
  }
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
  detail::for_each_table(tensors, detail::muon_chunk, [&](const auto& table, int chunks) {
    plait::detail::launch(device, {static_cast<unsigned>(chunks), detail::muon_threads},
                          detail::muon_momentum_step<M, G>, table, settings, scalars);
  });
}

template <class M, class G>
void muon_momentum(cuda& device, std::span<const muon_rounded_tensor<M, G>> tensors, const muon_settings& settings,
                   const adamw_scalars* scalars) {
  detail::for_each_table(tensors, detail::muon_chunk, [&](const auto& table, int chunks) {
    plait::detail::launch(device, {static_cast<unsigned>(chunks), detail::muon_threads},
                          detail::muon_rounded_momentum_step<M, G>, table, settings, scalars);
  });
}

template <class M, class W>
void muon_update(cuda& device, std::span<const muon_tensor<M, W>> tensors, const adamw_scalars* scalars) {
  detail::for_each_table(tensors, detail::muon_chunk, [&](const auto& table, int chunks) {
    plait::detail::launch(device, {static_cast<unsigned>(chunks), detail::muon_threads}, detail::muon_update_step<M, W>,
                          table, scalars);
  });
}

template <class T>
void divide_by_norm(cuda& device, const T* x, T* y, std::int64_t n, const double* squares, double epsilon) {
  if (n <= 0) return;
  plait::detail::launch(device, {plait::detail::blocks_for(n, 256, 4096), 256}, detail::divide_by_norm_of<T>, x, y, n,
                        squares, epsilon);
}

}  // namespace plait::kernels
