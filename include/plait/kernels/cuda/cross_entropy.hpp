// Cross entropy of softmax on a GPU, over a vocabulary that may be split over ranks and padded: the steps of
// kernels/cpu/cross_entropy.hpp, of which those that read the logits do so in one pass. Statistics, losses and scales
// are `statistic_of<T>`. A target outside the vocabulary is reported by the next `synchronize`, and until then is
// ignored. Test: tests/cuda/kernel_losses.cpp.
#pragma once

#include <cstdint>

#include "plait/core/compiled.hpp"
#include "plait/core/precision.hpp"
#include "plait/device/cuda.hpp"
#include "plait/kernels/cross_entropy_settings.hpp"

namespace plait::kernels {

/// row_max[r] over the valid local columns; -infinity where there are none.
template <class T>
void cross_entropy_max(cuda& device, const T* logits, statistic_of<T>* row_max, std::int64_t rows,
                       const vocabulary_range& range);

/// Per row, over the valid local columns, given the maximum over the whole vocabulary: the sum of exp(x - max), the
/// logit of the target (0 if it is another rank's), and the sum of the logits (needed for label smoothing; may be
/// null).
template <class T, class Id>
void cross_entropy_statistics(cuda& device, const T* logits, const Id* targets, const statistic_of<T>* row_max,
                              statistic_of<T>* sum_exp, statistic_of<T>* target_logit, statistic_of<T>* sum_logits,
                              std::int64_t rows, const vocabulary_range& range, const cross_entropy_settings& settings);

/// `cross_entropy_max` and `cross_entropy_statistics` relative to the local maximum, in one pass over the logits. Where
/// the vocabulary is whole these are final.
template <class T, class Id>
void cross_entropy_local_statistics(cuda& device, const T* logits, const Id* targets, statistic_of<T>* row_max,
                                    statistic_of<T>* sum_exp, statistic_of<T>* target_logit,
                                    statistic_of<T>* sum_logits, std::int64_t rows, const vocabulary_range& range,
                                    const cross_entropy_settings& settings);

/// sum_exp[r] *= exp(local_max[r] - global_max[r]).
template <class S>
void cross_entropy_rescale(cuda& device, const S* local_max, const S* global_max, S* sum_exp, std::int64_t rows);

/// loss[r] = (1 - eps) (lse - x_target) + eps (lse - mean x) + z lse^2 from statistics over the whole vocabulary, with
/// lse = max + log(sum_exp); 0 for an ignored row. sum_logits may be null without label smoothing.
template <class S, class Id>
void cross_entropy_loss(cuda& device, const Id* targets, const S* row_max, const S* sum_exp, const S* target_logit,
                        const S* sum_logits, S* loss, std::int64_t rows, const vocabulary_range& range,
                        const cross_entropy_settings& s);

/// dlogits[r, c] = scale[r] ((1 + 2 z lse) softmax(c) - eps / vocab - (1 - eps) [c is the target]), where scale[r] is
/// the gradient of loss[r]; 0 in padding and ignored rows. dlogits may be logits.
template <class T, class Id>
void cross_entropy_backward(cuda& device, const T* logits, const Id* targets, const statistic_of<T>* row_max,
                            const statistic_of<T>* sum_exp, const statistic_of<T>* scale, T* dlogits, std::int64_t rows,
                            const vocabulary_range& range, const cross_entropy_settings& s);

}  // namespace plait::kernels

#ifdef PLAIT_CUDA_KERNELS
#include "plait/kernels/cuda/cross_entropy.ipp"
#endif
