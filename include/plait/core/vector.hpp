// A vector that compilers are done with in less than half the time of std::vector. Test: tests/unit/core/vector.cpp.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>

#include "plait/core/macros_off.hpp"
#include "plait/version.hpp"

namespace plait {

/// A vector for elements of the library's own types, with the members of std::vector that those need. Iterators are
/// pointers. Moves of elements must not throw.
template <class T>
class dynamic_vector {
 public:
  using value_type = T;

  dynamic_vector() = default;
  explicit dynamic_vector(std::size_t count) : dynamic_vector() { resize(count); }
  dynamic_vector(std::size_t count, const T& value) : dynamic_vector() {
    reserve(count);
    while (size_ < count) push_back(value);
  }
  dynamic_vector(std::initializer_list<T> items) : dynamic_vector(items.begin(), items.end()) {}
  dynamic_vector(const T* first, const T* last) : dynamic_vector() { append(first, last); }
  dynamic_vector(const dynamic_vector& from) : dynamic_vector(from.begin(), from.end()) {}
  dynamic_vector(dynamic_vector&& from) noexcept
      : data_(std::exchange(from.data_, nullptr)),
        size_(std::exchange(from.size_, 0)),
        capacity_(std::exchange(from.capacity_, 0)) {}
  dynamic_vector& operator=(const dynamic_vector& from) { return *this = dynamic_vector(from); }
  dynamic_vector& operator=(dynamic_vector&& from) noexcept {
    std::swap(data_, from.data_);
    std::swap(size_, from.size_);
    std::swap(capacity_, from.capacity_);
    return *this;
  }
  ~dynamic_vector() {
    clear();
    ::operator delete(data_, std::align_val_t{alignof(T)});
  }

  std::size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  T* data() { return data_; }
  const T* data() const { return data_; }
  T* begin() { return data_; }
  T* end() { return data_ + size_; }
  const T* begin() const { return data_; }
  const T* end() const { return data_ + size_; }
  T& operator[](std::size_t i) { return data_[i]; }
  const T& operator[](std::size_t i) const { return data_[i]; }
  T& front() { return data_[0]; }
  const T& front() const { return data_[0]; }
  T& back() { return data_[size_ - 1]; }
  const T& back() const { return data_[size_ - 1]; }

  void reserve(std::size_t count) {
    if (count > capacity_) grow(count);
  }
  void resize(std::size_t count) {
    while (size_ > count) pop_back();
    reserve(count);
    for (; size_ < count; ++size_) ::new (static_cast<void*>(data_ + size_)) T();
  }
  void clear() {
    while (size_ > 0) pop_back();
  }

  /// The element may be one of this vector.
  void push_back(T value) {
    make_room();
    ::new (static_cast<void*>(data_ + size_++)) T(std::move(value));
  }
  /// Arguments must not refer to elements of this vector. Those of an aggregate are its members.
  template <class... Args>
  T& emplace_back(Args&&... args) {
    make_room();
    if constexpr (std::is_aggregate_v<T>)
      ::new (static_cast<void*>(data_ + size_)) T{std::forward<Args>(args)...};
    else
      ::new (static_cast<void*>(data_ + size_)) T(std::forward<Args>(args)...);
    return data_[size_++];
  }
  void pop_back() { data_[--size_].~T(); }

  /// Adds copies of elements of another array at the end.
  void append(const T* first, const T* last) {
    const std::size_t count = size_ + static_cast<std::size_t>(last - first);
    if (count > capacity_) grow(count > 2 * capacity_ ? count : 2 * capacity_);
    for (; first != last; ++first, ++size_) ::new (static_cast<void*>(data_ + size_)) T(*first);
  }
  /// Brings an element to the place of `at`; those from there on move up by one.
  void insert(const T* at, T value) {
    const auto i = static_cast<std::size_t>(at - data_);
    push_back(std::move(value));
    for (std::size_t k = size_ - 1; k > i; --k) std::swap(data_[k], data_[k - 1]);
  }
  /// Removes elements; those behind them take their places.
  void erase(T* first, T* last) {
    for (; last != end(); ++first, ++last) *first = std::move(*last);
    while (end() != first) pop_back();
  }

  friend bool operator==(const dynamic_vector& a, const dynamic_vector& b) {
    if (a.size_ != b.size_) return false;
    for (std::size_t i = 0; i < a.size_; ++i)
      if (!(a.data_[i] == b.data_[i])) return false;
    return true;
  }

 private:
  void make_room() {
    if (size_ == capacity_) grow(capacity_ < 4 ? 4 : 2 * capacity_);
  }
  void grow(std::size_t capacity) {
    T* const to = static_cast<T*>(::operator new(capacity * sizeof(T), std::align_val_t{alignof(T)}));
    for (std::size_t i = 0; i < size_; ++i) {
      ::new (static_cast<void*>(to + i)) T(std::move(data_[i]));
      data_[i].~T();
    }
    ::operator delete(data_, std::align_val_t{alignof(T)});
    data_ = to;
    capacity_ = capacity;
  }

  T* data_ = nullptr;
  std::size_t size_ = 0, capacity_ = 0;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
