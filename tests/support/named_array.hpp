#pragma once

#include <cstdint>
#include <optional>
#include <random>
#include <vector>

#include "plait/layout/layout.hpp"

/// Arrays of integers with named dims, for tests of the algebra. Elements are unsigned, so sums and products are exact
/// modulo 2^64.
namespace plait::test {

using element = std::uint64_t;

struct array {
  std::vector<dim_id> dims;
  std::vector<std::int64_t> sizes;
  std::vector<element> data;

  array() = default;
  array(std::vector<dim_id> names, std::vector<std::int64_t> extents)
      : dims(std::move(names)), sizes(std::move(extents)) {
    std::int64_t n = 1;
    for (std::int64_t s : sizes) n *= s;
    data.assign(static_cast<std::size_t>(n), 0);
  }

  int find(dim_id dim) const {
    for (std::size_t i = 0; i < dims.size(); ++i)
      if (dims[i] == dim) return static_cast<int>(i);
    return -1;
  }
  bool has(dim_id dim) const { return find(dim) >= 0; }
  std::int64_t size_of(dim_id dim) const {
    const int i = find(dim);
    return i < 0 ? 1 : sizes[static_cast<std::size_t>(i)];
  }
  /// Distance of neighbours along `dim`; 0 (broadcast) if the array does not have the dim.
  std::int64_t stride(dim_id dim) const {
    const int i = find(dim);
    if (i < 0) return 0;
    std::int64_t n = 1;
    for (std::size_t j = static_cast<std::size_t>(i) + 1; j < sizes.size(); ++j) n *= sizes[j];
    return n;
  }
  array like() const { return array(dims, sizes); }
  friend bool operator==(const array&, const array&) = default;
};

inline array& operator+=(array& a, const array& b) {
  for (std::size_t i = 0; i < a.data.size(); ++i) a.data[i] += b.data[i];
  return a;
}

/// A loop over the dims of several arrays together: `body(offsets)` gets the offset into each array.
class joint_loop {
 public:
  explicit joint_loop(std::vector<const array*> all) : count_(all.size()) {
    for (const array* a : all)
      for (dim_id dim : a->dims) add(dim, a->size_of(dim), all);
  }

  template <class Body>
  void run(Body&& body) const {
    std::vector<std::int64_t> index(sizes_.size(), 0), offset(count_, 0);
    for (std::int64_t s : sizes_)
      if (s == 0) return;
    for (;;) {
      body(offset);
      std::size_t d = sizes_.size();
      while (d > 0) {
        --d;
        for (std::size_t a = 0; a < count_; ++a) offset[a] += strides_[d][a];
        if (++index[d] < sizes_[d]) break;
        for (std::size_t a = 0; a < count_; ++a) offset[a] -= sizes_[d] * strides_[d][a];
        index[d] = 0;
        if (d == 0) return;
      }
      if (sizes_.empty()) return;
    }
  }

 private:
  void add(dim_id dim, std::int64_t size, const std::vector<const array*>& all) {
    for (dim_id known : dims_)
      if (known == dim) return;
    dims_.push_back(dim);
    sizes_.push_back(size);
    strides_.emplace_back();
    for (const array* a : all) strides_.back().push_back(a->stride(dim));
  }

  std::size_t count_;
  std::vector<dim_id> dims_;
  std::vector<std::int64_t> sizes_;
  std::vector<std::vector<std::int64_t>> strides_;
};

/// Small random integers, none of them zero.
inline array random_array(const std::vector<dim_id>& dims, const dim_sizes& sizes, std::mt19937_64& random) {
  std::vector<std::int64_t> extents;
  for (dim_id dim : dims) extents.push_back(sizes.of(dim));
  array a(dims, extents);
  for (element& x : a.data) x = static_cast<element>(static_cast<std::int64_t>(random() % 97) + 1);
  return a;
}

/// The elements of the global array `whole` in `part`.
inline array cut(const array& whole, const box& part) {
  array a(whole.dims, {part.local.begin(), part.local.begin() + part.dims});
  for (std::size_t i = 0; i < a.data.size(); ++i) {
    std::int64_t rest = static_cast<std::int64_t>(i), at = 0, stride = 1;
    for (std::size_t d = a.dims.size(); d-- > 0;) {
      at += (part.offset[d] + rest % part.local[d]) * stride;
      rest /= part.local[d];
      stride *= whole.sizes[d];
    }
    a.data[i] = whole.data[static_cast<std::size_t>(at)];
  }
  return a;
}
/// Adds `a` into its place in `whole`.
inline void paste(array& whole, const array& a, const box& part) {
  for (std::size_t i = 0; i < a.data.size(); ++i) {
    std::int64_t rest = static_cast<std::int64_t>(i), at = 0, stride = 1;
    for (std::size_t d = a.dims.size(); d-- > 0;) {
      at += (part.offset[d] + rest % part.local[d]) * stride;
      rest /= part.local[d];
      stride *= whole.sizes[d];
    }
    whole.data[static_cast<std::size_t>(at)] += a.data[i];
  }
}

}  // namespace plait::test
