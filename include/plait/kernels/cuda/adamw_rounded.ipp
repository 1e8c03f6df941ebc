// The kernel and launches of kernels/cuda/adamw_rounded.hpp, which includes this where CUDA is compiled.
#pragma once

#include <type_traits>
#include <vector>

#include "plait/device/cuda_launch.hpp"
#include "plait/kernels/cuda/adamw.hpp"
#include "plait/kernels/cuda/math.hpp"
#include "plait/kernels/cuda/tensor_table.hpp"
#include "plait/kernels/cuda/unroll.hpp"
#include "plait/kernels/moments.hpp"
#include "plait/kernels/philox.hpp"

namespace plait::kernels {

namespace detail {

/// The random words of elements, for a thread that asks for neighbours one after the other: they share a Philox block.
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

/// Every warp takes whole blocks of moments, of which a lane has two stretches of four elements. An entry's size counts
/// from the beginning of its first block.
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
    const std::int64_t block = first + i, at = block * moment_block - t.begin;  // of the block, which may begin before
    if (block * moment_block >= t.size) break;                                  // the first element
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

}  // namespace plait::kernels
