#pragma once

// A block of malloc'ed memory in which tensors lie one after the other, and their first values. plain.cpp and
// parallel.cpp share this file.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <vector>

struct tensor {
  float** at;
  long size;
  float mean = 0, deviation = 0;  // of the first values of a weight
};

inline long total(const std::vector<tensor>& tensors) {
  long size = 0;
  for (const tensor& t : tensors) size += t.size;
  return size;
}
/// Returns a block of zeros in which these tensors lie one after the other.
inline float* make_block(const std::vector<tensor>& tensors) {
  float* const block = static_cast<float*>(calloc(total(tensors), sizeof(float)));
  float* next = block;
  for (const tensor& t : tensors) *t.at = next, next += t.size;
  return block;
}

/// Sets tensors to normally distributed numbers (Box and Muller's), equal in every run.
inline void initialize(const std::vector<tensor>& tensors) {
  std::uint64_t state = 1;
  const auto uniform = [&] {  // in (0, 1), by the generator of Knuth's MMIX
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (static_cast<double>(state >> 40) + 0.5) / (1 << 24);
  };
  for (const tensor& t : tensors)
    for (long i = 0; i < t.size; ++i) {
      const double length = sqrt(-2 * log(uniform())), angle = 6.283185307179586 * uniform();
      (*t.at)[i] = t.mean + t.deviation * static_cast<float>(length * cos(angle));
    }
}
