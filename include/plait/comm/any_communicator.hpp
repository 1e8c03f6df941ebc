#pragma once

#include <concepts>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "plait/comm/communicator.hpp"

namespace plait {

/// Holds any model of `communicator`, with the same interface; copies share it. Layers take this one, so that they are
/// not instantiated per backend. One virtual call per operation.
class any_communicator {
  using counts = std::span<const std::size_t>;

 public:
  any_communicator() = default;

  /// An empty communicator gives an empty any_communicator.
  template <class Comm>
    requires(!std::same_as<std::remove_cvref_t<Comm>, any_communicator> &&
             plait::communicator<std::remove_cvref_t<Comm>>)
  any_communicator(Comm&& comm) {  // NOLINT: conversion from any backend is the purpose
    if (comm) held_ = std::make_shared<holder<std::remove_cvref_t<Comm>>>(std::forward<Comm>(comm));
  }

  explicit operator bool() const { return held_ != nullptr; }
  int rank() const { return held().rank(); }
  int size() const { return held().size(); }
  std::string label() const { return held().label(); }

  void all_reduce(const void* in, void* out, std::size_t n, dtype t, reduce_op op) {
    held().all_reduce(in, out, n, t, op);
  }
  void all_gather(const void* in, void* out, std::size_t n, dtype t) { held().all_gather(in, out, n, t); }
  void reduce_scatter(const void* in, void* out, std::size_t n, dtype t, reduce_op op) {
    held().reduce_scatter(in, out, n, t, op);
  }
  void all_to_all(const void* in, void* out, std::size_t n, dtype t) { held().all_to_all(in, out, n, t); }
  void all_to_all_v(const void* in, counts sc, counts so, void* out, counts rc, counts ro, dtype t) {
    held().all_to_all_v(in, sc, so, out, rc, ro, t);
  }
  void broadcast(void* data, std::size_t n, dtype t, int root) { held().broadcast(data, n, t, root); }
  void send(const void* data, std::size_t n, dtype t, int peer, int tag = 0) { held().send(data, n, t, peer, tag); }
  void receive(void* data, std::size_t n, dtype t, int peer, int tag = 0) { held().receive(data, n, t, peer, tag); }
  void barrier() { held().barrier(); }

  request start_all_reduce(const void* in, void* out, std::size_t n, dtype t, reduce_op op) {
    return held().start_all_reduce(in, out, n, t, op);
  }
  request start_all_gather(const void* in, void* out, std::size_t n, dtype t) {
    return held().start_all_gather(in, out, n, t);
  }
  request start_reduce_scatter(const void* in, void* out, std::size_t n, dtype t, reduce_op op) {
    return held().start_reduce_scatter(in, out, n, t, op);
  }
  request start_all_to_all(const void* in, void* out, std::size_t n, dtype t) {
    return held().start_all_to_all(in, out, n, t);
  }
  request start_all_to_all_v(const void* in, counts sc, counts so, void* out, counts rc, counts ro, dtype t) {
    return held().start_all_to_all_v(in, sc, so, out, rc, ro, t);
  }
  request start_broadcast(void* data, std::size_t n, dtype t, int root) {
    return held().start_broadcast(data, n, t, root);
  }
  request start_send(const void* data, std::size_t n, dtype t, int peer, int tag = 0) {
    return held().start_send(data, n, t, peer, tag);
  }
  request start_receive(void* data, std::size_t n, dtype t, int peer, int tag = 0) {
    return held().start_receive(data, n, t, peer, tag);
  }

  any_communicator split(int color, int key, std::string_view label = {}) { return held().split(color, key, label); }
  void abort(const std::string& why) noexcept {
    if (held_) held_->abort(why);
  }
  void begin_group() { held().begin_group(); }
  void end_group() { held().end_group(); }

  /// The held communicator if it is a Comm, else nullptr.
  template <class Comm>
  Comm* get_if() const {
    auto* h = dynamic_cast<holder<Comm>*>(held_.get());
    return h ? &h->comm : nullptr;
  }

 private:
  struct base {
    virtual ~base() = default;
    virtual int rank() const = 0;
    virtual int size() const = 0;
    virtual std::string label() const = 0;
    virtual void all_reduce(const void*, void*, std::size_t, dtype, reduce_op) = 0;
    virtual void all_gather(const void*, void*, std::size_t, dtype) = 0;
    virtual void reduce_scatter(const void*, void*, std::size_t, dtype, reduce_op) = 0;
    virtual void all_to_all(const void*, void*, std::size_t, dtype) = 0;
    virtual void all_to_all_v(const void*, counts, counts, void*, counts, counts, dtype) = 0;
    virtual void broadcast(void*, std::size_t, dtype, int) = 0;
    virtual void send(const void*, std::size_t, dtype, int, int) = 0;
    virtual void receive(void*, std::size_t, dtype, int, int) = 0;
    virtual void barrier() = 0;
    virtual request start_all_reduce(const void*, void*, std::size_t, dtype, reduce_op) = 0;
    virtual request start_all_gather(const void*, void*, std::size_t, dtype) = 0;
    virtual request start_reduce_scatter(const void*, void*, std::size_t, dtype, reduce_op) = 0;
    virtual request start_all_to_all(const void*, void*, std::size_t, dtype) = 0;
    virtual request start_all_to_all_v(const void*, counts, counts, void*, counts, counts, dtype) = 0;
    virtual request start_broadcast(void*, std::size_t, dtype, int) = 0;
    virtual request start_send(const void*, std::size_t, dtype, int, int) = 0;
    virtual request start_receive(void*, std::size_t, dtype, int, int) = 0;
    virtual any_communicator split(int, int, std::string_view) = 0;
    virtual void abort(const std::string&) noexcept = 0;
    virtual void begin_group() = 0;
    virtual void end_group() = 0;
  };

  template <class Comm>
  struct holder final : base {
    Comm comm;

    template <class C>
    explicit holder(C&& c) : comm(std::forward<C>(c)) {}

    int rank() const override { return comm.rank(); }
    int size() const override { return comm.size(); }
    std::string label() const override { return std::string(comm.label()); }
    void all_reduce(const void* i, void* o, std::size_t n, dtype t, reduce_op op) override {
      comm.all_reduce(i, o, n, t, op);
    }
    void all_gather(const void* i, void* o, std::size_t n, dtype t) override { comm.all_gather(i, o, n, t); }
    void reduce_scatter(const void* i, void* o, std::size_t n, dtype t, reduce_op op) override {
      comm.reduce_scatter(i, o, n, t, op);
    }
    void all_to_all(const void* i, void* o, std::size_t n, dtype t) override { comm.all_to_all(i, o, n, t); }
    void all_to_all_v(const void* i, counts sc, counts so, void* o, counts rc, counts ro, dtype t) override {
      comm.all_to_all_v(i, sc, so, o, rc, ro, t);
    }
    void broadcast(void* d, std::size_t n, dtype t, int root) override { comm.broadcast(d, n, t, root); }
    void send(const void* d, std::size_t n, dtype t, int peer, int tag) override { comm.send(d, n, t, peer, tag); }
    void receive(void* d, std::size_t n, dtype t, int peer, int tag) override { comm.receive(d, n, t, peer, tag); }
    void barrier() override { comm.barrier(); }
    request start_all_reduce(const void* i, void* o, std::size_t n, dtype t, reduce_op op) override {
      return comm.start_all_reduce(i, o, n, t, op);
    }
    request start_all_gather(const void* i, void* o, std::size_t n, dtype t) override {
      return comm.start_all_gather(i, o, n, t);
    }
    request start_reduce_scatter(const void* i, void* o, std::size_t n, dtype t, reduce_op op) override {
      return comm.start_reduce_scatter(i, o, n, t, op);
    }
    request start_all_to_all(const void* i, void* o, std::size_t n, dtype t) override {
      return comm.start_all_to_all(i, o, n, t);
    }
    request start_all_to_all_v(const void* i, counts sc, counts so, void* o, counts rc, counts ro, dtype t) override {
      return comm.start_all_to_all_v(i, sc, so, o, rc, ro, t);
    }
    request start_broadcast(void* d, std::size_t n, dtype t, int root) override {
      return comm.start_broadcast(d, n, t, root);
    }
    request start_send(const void* d, std::size_t n, dtype t, int peer, int tag) override {
      return comm.start_send(d, n, t, peer, tag);
    }
    request start_receive(void* d, std::size_t n, dtype t, int peer, int tag) override {
      return comm.start_receive(d, n, t, peer, tag);
    }
    any_communicator split(int color, int key, std::string_view label) override {
      return any_communicator(comm.split(color, key, label));
    }
    void abort(const std::string& why) noexcept override { comm.abort(why); }
    void begin_group() override {
      if constexpr (requires { comm.begin_group(); }) comm.begin_group();
    }
    void end_group() override {
      if constexpr (requires { comm.end_group(); }) comm.end_group();
    }
  };

  base& held() const {
    if (!held_) fail("an empty communicator was used (its rank has a negative color in the split)");
    return *held_;
  }

  std::shared_ptr<base> held_;
};

static_assert(plait::communicator<any_communicator>);

}  // namespace plait
