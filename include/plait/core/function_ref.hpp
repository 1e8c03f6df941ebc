// A reference to any function of one signature, as a parameter of functions that are compiled once for all callers.
#pragma once

#include <concepts>
#include <memory>
#include <type_traits>
#include <utility>

#include "plait/version.hpp"

namespace plait {

template <class Signature>
class function_ref;

/// Refers to a function or a lambda that the caller keeps until the call returns. A call costs one indirection. It
/// compiles much faster than std::function.
template <class Result, class... Arguments>
class function_ref<Result(Arguments...)> {
 public:
  template <class F>
    requires(!std::same_as<std::remove_cvref_t<F>, function_ref> && std::is_invocable_r_v<Result, F&, Arguments...>)
  function_ref(F&& f)  // NOLINT: conversion from a lambda is the purpose
      : f_(const_cast<void*>(static_cast<const void*>(std::addressof(f)))), call_([](void* g, Arguments... arguments) {
          return static_cast<Result>(
              (*static_cast<std::remove_reference_t<F>*>(g))(std::forward<Arguments>(arguments)...));
        }) {}
  Result operator()(Arguments... arguments) const { return call_(f_, std::forward<Arguments>(arguments)...); }

 private:
  void* f_;
  Result (*call_)(void*, Arguments...);
};

}  // namespace plait
