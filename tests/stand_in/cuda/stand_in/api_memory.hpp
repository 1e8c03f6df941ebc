// The runtime's functions on memory: device and pinned allocations, pools, copies and fills.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <vector>

#include "stream.hpp"

// ---- device memory -------------------------------------------------------------------------------------------------

namespace stand_in {

inline void* allocate(runtime& r, std::size_t bytes, cudaMemPool_t pool, const stream_ptr& stream = {}) {
  arena& memory = arena::instance();
  const int device = pool ? pool->device : current_device;
  const auto attempt = [&] {
    const std::uint64_t kept = pool ? std::min<std::uint64_t>(pool->kept, bytes) : 0;  // of the pool, used first
    memory.keep(-static_cast<std::int64_t>(kept));
    void* const found = memory.allocate(bytes, device, pool);
    if (found && pool) pool->kept -= kept;
    if (!found) memory.keep(static_cast<std::int64_t>(kept));
    return found;
  };
  void* p = attempt();
  // Releases may still be queued in streams. A pool completes those of the requesting stream, and waits for no other.
  if (!p && pool) {
    r.finish(stream);
    p = attempt();
  } else if (!p) {
    if (r.refuse_while_capturing(nullptr) != cudaSuccess) return nullptr;
    r.finish_all();
    p = attempt();
  }
  if (p && pool) pool->used += bytes;
  return p;
}
inline void release(void* p) {
  arena& memory = arena::instance();
  if (auto* pool = static_cast<cudaMemPool_t>(memory.find(p)->pool)) {
    const std::size_t bytes = memory.find(p)->bytes;
    pool->used -= bytes;
    if (!pool->destroyed && pool->kept + bytes <= pool->release_threshold) {
      pool->kept += bytes;
      memory.keep(static_cast<std::int64_t>(bytes));
    }
    if (pool->destroyed && pool->used == 0) runtime::instance().pools.erase(pool);
  }
  memory.release(p);
}
/// Frees memory of cudaMalloc at once. An operation in flight that uses it ends the process.
inline void release_now(void* p, const char* who) {
  runtime& r = runtime::instance();
  r.must_be_unused(static_cast<const char*>(p), arena::instance().find(p)->bytes, who);
  arena::instance().open();
  release(p);
  arena::instance().close();
}
inline cudaMemPool_t default_pool(runtime& r, int device) {
  cudaMemPool_t& pool = r.default_pools[device];
  if (!pool) {
    auto made = std::make_unique<CUmemPoolHandle_st>();
    made->device = device;
    pool = made.get();
    r.pools.emplace(pool, std::move(made));
  }
  return pool;
}

}  // namespace stand_in

inline cudaError_t cudaMalloc(void** p, std::size_t bytes) {
  return stand_in::call([&](stand_in::runtime& r) {
    if (!p) return cudaErrorInvalidValue;
    if (const auto error = r.refuse_unsafe()) return error;
    *p = nullptr;
    if (bytes == 0) return cudaSuccess;
    *p = stand_in::allocate(r, bytes, nullptr);
    if (!*p) return cudaErrorMemoryAllocation;
    stand_in::arena::instance().open();
    stand_in::arena::instance().make_usable(*p);
    stand_in::arena::instance().close();
    return cudaSuccess;
  });
}
inline cudaError_t cudaFree(void* p) {
  return stand_in::call([&](stand_in::runtime& r) {
    if (!p) return cudaSuccess;
    if (const auto error = r.refuse_unsafe()) return error;
    const auto* a = stand_in::arena::instance().find(p);
    if (!a || a->freeing) return cudaErrorInvalidValue;
    if (const auto error = r.refuse_while_capturing(nullptr)) return error;
    r.finish_all();
    stand_in::stream_ptr user;  // the stream of an operation that waits for other ranks
    while (r.user_of(static_cast<const char*>(p), a->bytes, &user)) r.settle(user);
    stand_in::release_now(p, "cudaFree");
    return cudaSuccess;
  });
}

inline cudaError_t cudaMallocFromPoolAsync(void** p, std::size_t bytes, cudaMemPool_t pool, cudaStream_t stream) {
  return stand_in::call([&](stand_in::runtime& r) {
    const auto s = r.find(stream);
    if (!p || !r.is_pool(pool)) return cudaErrorInvalidValue;
    if (!s) return cudaErrorInvalidResourceHandle;
    if (const auto error = r.refuse_while_capturing(s.get())) return error;  // graphs that own memory are not modelled
    *p = nullptr;
    if (bytes == 0) return cudaSuccess;
    void* memory = stand_in::allocate(r, bytes, pool, s);
    *p = memory;
    if (!memory) return cudaErrorMemoryAllocation;
    return r.enqueue(s, [memory] { stand_in::arena::instance().make_usable(memory); });
  });
}
inline cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
  return stand_in::call([&](stand_in::runtime& r) {
    if (device < 0 || device >= stand_in::device_count()) return cudaErrorInvalidDevice;
    *pool = stand_in::default_pool(r, device);
    return cudaSuccess;
  });
}
inline cudaError_t cudaMallocAsync(void** p, std::size_t bytes, cudaStream_t stream) {
  cudaMemPool_t pool = nullptr;
  if (const auto error = cudaDeviceGetDefaultMemPool(&pool, stand_in::current_device)) return error;
  return cudaMallocFromPoolAsync(p, bytes, pool, stream);
}
inline cudaError_t cudaFreeAsync(void* p, cudaStream_t stream) {
  return stand_in::call_on(stream, [&](stand_in::runtime& r, const stand_in::stream_ptr& s) {
    if (!p) return cudaSuccess;
    auto* a = stand_in::arena::instance().find(p);
    if (!a || a->freeing) return cudaErrorInvalidValue;
    if (const auto error = r.refuse_while_capturing(s.get())) return error;
    a->freeing = true;
    return r.enqueue(s, [p, &r, bytes = a->bytes] {
      r.must_be_unused(static_cast<const char*>(p), bytes, "cudaFreeAsync");
      stand_in::release(p);
    });
  });
}

inline cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps* props) {
  return stand_in::call([&](stand_in::runtime& r) {
    if (!pool || !props || props->allocType != cudaMemAllocationTypePinned) return cudaErrorInvalidValue;
    if (props->location.type != cudaMemLocationTypeDevice) return cudaErrorInvalidValue;
    if (props->location.id < 0 || props->location.id >= stand_in::device_count()) return cudaErrorInvalidDevice;
    auto made = std::make_unique<CUmemPoolHandle_st>();
    made->device = props->location.id;
    *pool = made.get();
    r.pools.emplace(made.get(), std::move(made));
    return cudaSuccess;
  });
}
/// Does not wait: a pool exists until its last allocation is released.
inline cudaError_t cudaDeviceCanAccessPeer(int* possible, int device, int peer) {
  const int count = stand_in::device_count();
  if (device < 0 || device >= count || peer < 0 || peer >= count) return stand_in::fail(cudaErrorInvalidDevice);
  *possible = device != peer;
  return cudaSuccess;
}
inline cudaError_t cudaMemPoolSetAccess(cudaMemPool_t pool, const cudaMemAccessDesc* list, std::size_t count) {
  return stand_in::call([&](stand_in::runtime& r) {
    if (!r.is_pool(pool)) return cudaErrorInvalidValue;
    for (const cudaMemAccessDesc* a = list; a != list + count; ++a) {
      if (a->location.type != cudaMemLocationTypeDevice || a->location.id >= stand_in::device_count())
        return cudaErrorInvalidValue;
      if (a->flags != cudaMemAccessFlagsProtReadWrite) return cudaErrorNotSupported;
      pool->peers.insert(a->location.id);
    }
    return cudaSuccess;
  });
}

namespace stand_in {

/// Whether a kernel of `device` may use memory at `p`.
inline bool usable_by(const void* p, int device) {
  runtime& r = runtime::instance();
  const std::lock_guard lock(r.mutex);
  const arena::allocation* const found = arena::instance().around(p);
  if (found == nullptr || found->device == device || found->pool == nullptr) return true;
  return static_cast<cudaMemPool_t>(found->pool)->peers.count(device) != 0;
}

}  // namespace stand_in

inline cudaError_t cudaMemPoolDestroy(cudaMemPool_t pool) {
  return stand_in::call([&](stand_in::runtime& r) {
    if (!r.is_pool(pool)) return cudaErrorInvalidValue;
    pool->destroyed = true;
    stand_in::arena::instance().keep(-static_cast<std::int64_t>(pool->kept));
    pool->kept = 0;
    if (pool->used == 0) r.pools.erase(pool);
    return cudaSuccess;
  });
}
/// Memory that a pool keeps unused is not available to other allocations.
inline cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, std::size_t keep) {
  return stand_in::call([&](stand_in::runtime& r) {
    if (!r.is_pool(pool)) return cudaErrorInvalidValue;
    if (pool->kept <= keep) return cudaSuccess;
    stand_in::arena::instance().keep(-static_cast<std::int64_t>(pool->kept - keep));
    pool->kept = keep;
    return cudaSuccess;
  });
}

inline cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, cudaMemPoolAttr which, void* value) {
  return stand_in::call([&](stand_in::runtime& r) {
    if (!r.is_pool(pool) || which != cudaMemPoolAttrReleaseThreshold) return cudaErrorInvalidValue;
    pool->release_threshold = *static_cast<std::uint64_t*>(value);
    return cudaSuccess;
  });
}

inline cudaError_t cudaMemGetInfo(std::size_t* free_bytes, std::size_t* total_bytes) {
  return stand_in::call([&](stand_in::runtime&) {
    *total_bytes = stand_in::arena::instance().capacity();
    *free_bytes = *total_bytes - stand_in::arena::instance().used();
    return cudaSuccess;
  });
}

// ---- host memory ---------------------------------------------------------------------------------------------------

inline cudaError_t cudaHostAlloc(void** p, std::size_t bytes, unsigned) {
  return stand_in::call([&](stand_in::runtime& r) {
    if (!p) return cudaErrorInvalidValue;
    if (const auto error = r.refuse_unsafe()) return error;
    *p = nullptr;
    if (bytes == 0) return cudaSuccess;
    if (bytes / static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)) >=
        static_cast<std::size_t>(::sysconf(_SC_PHYS_PAGES)))
      return cudaErrorMemoryAllocation;  // each of its pages is physical memory of the machine
    *p = ::operator new(bytes, std::align_val_t{256});
    std::memset(*p, 0xff, bytes);
    r.pinned.emplace(static_cast<const char*>(*p), bytes);
    return cudaSuccess;
  });
}
inline cudaError_t cudaMallocHost(void** p, std::size_t bytes, unsigned flags = cudaHostAllocDefault) {
  return cudaHostAlloc(p, bytes, flags);
}
/// Does not wait: an operation that still needs the memory ends the process.
inline cudaError_t cudaFreeHost(void* p) {
  return stand_in::call([&](stand_in::runtime& r) {
    if (!p) return cudaSuccess;
    if (const auto error = r.refuse_unsafe()) return error;
    const auto held = r.pinned.find(static_cast<const char*>(p));
    if (held == r.pinned.end()) return cudaErrorInvalidValue;
    r.must_be_unused(held->first, held->second, "cudaFreeHost");
    std::memset(p, 0xff, held->second);
    r.pinned.erase(held);
    ::operator delete(p, std::align_val_t{256});
    return cudaSuccess;
  });
}

inline cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* p) {
  return stand_in::call([&](stand_in::runtime& r) {
    *attributes = {cudaMemoryTypeUnregistered, -1};
    if (const auto* a = stand_in::arena::instance().around(p)) {
      *attributes = {cudaMemoryTypeDevice, a->device};
    } else if (r.is_pinned(p)) {
      *attributes = {cudaMemoryTypeHost, stand_in::current_device};
    }
    return cudaSuccess;
  });
}

// ---- copies and fills ----------------------------------------------------------------------------------------------

namespace stand_in {

struct copy_box {
  void* to;
  std::size_t to_pitch;
  const void* from;
  std::size_t from_pitch, width, height;
};

inline void copy_now(const copy_box& b) {
  for (std::size_t row = 0; row < b.height; ++row) {
    std::memmove(static_cast<char*>(b.to) + row * b.to_pitch, static_cast<const char*>(b.from) + row * b.from_pitch,
                 b.width);
  }
}

inline cudaError_t copy(runtime& r, copy_box b, cudaMemcpyKind kind, cudaStream_t stream) {
  const auto s = r.find(stream);
  if (!s) return cudaErrorInvalidResourceHandle;
  if (b.width == 0 || b.height == 0) return cudaSuccess;
  if (!b.to || !b.from || b.to_pitch < b.width || b.from_pitch < b.width) return cudaErrorInvalidValue;
  const bool to_device = arena::instance().contains(b.to), from_device = arena::instance().contains(b.from);
  const bool kind_is_right =
      kind == cudaMemcpyDefault || kind == (to_device ? from_device ? cudaMemcpyDeviceToDevice : cudaMemcpyHostToDevice
                                            : from_device ? cudaMemcpyDeviceToHost
                                                          : cudaMemcpyHostToHost);
  if (!kind_is_right) return cudaErrorInvalidValue;
  const bool waits = !to_device && !r.is_pinned(b.to);
  if (waits) {
    if (const auto error = r.refuse_while_capturing(s.get())) return error;
  }
  for (const void* p : {static_cast<const void*>(b.to), b.from}) r.will_use(p, "a copy");
  // The stream reads host memory when it executes the copy, like a GPU that can read pageable memory.
  if (const auto error = r.enqueue(s, [b] { copy_now(b); }, {work::copy, static_cast<double>(b.width * b.height)}))
    return error;
  if (waits) r.await(s);
  return cudaSuccess;
}

}  // namespace stand_in

inline cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                                   cudaStream_t stream = nullptr) {
  return stand_in::call([&](stand_in::runtime& r) {
    return stand_in::copy(r, {to, bytes, from, bytes, bytes, 1}, kind, stream);
  });
}
inline cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  return stand_in::call([&](stand_in::runtime& r) {
    if (const auto error = r.refuse_unsafe()) return error;
    if (const auto error = stand_in::copy(r, {to, bytes, from, bytes, bytes, 1}, kind, nullptr)) return error;
    r.await(r.find(cudaStream_t{nullptr}));
    return cudaSuccess;
  });
}

inline cudaError_t cudaMemset2DAsync(void* to, std::size_t pitch, int value, std::size_t width, std::size_t height,
                                     cudaStream_t stream = nullptr) {
  return stand_in::call_on(stream, [&](stand_in::runtime& r, const stand_in::stream_ptr& s) {
    if (width == 0 || height == 0) return cudaSuccess;
    if (!stand_in::arena::instance().contains(to) && !r.is_pinned(to)) return cudaErrorInvalidValue;
    r.will_use(to, "a fill");
    const auto fill = [=] {
      for (std::size_t row = 0; row < height; ++row) std::memset(static_cast<char*>(to) + row * pitch, value, width);
    };
    return r.enqueue(s, fill, {stand_in::work::fill, static_cast<double>(width * height)});
  });
}
inline cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t stream = nullptr) {
  return cudaMemset2DAsync(to, bytes, value, bytes, 1, stream);
}
inline cudaError_t cudaMemset(void* to, int value, std::size_t bytes) {
  return cudaMemsetAsync(to, value, bytes, nullptr);
}

// ---- the same for pointers to any type -----------------------------------------------------------------------------

template <class T>
cudaError_t cudaMalloc(T** p, std::size_t bytes) {
  return cudaMalloc(reinterpret_cast<void**>(p), bytes);
}
template <class T>
cudaError_t cudaMallocAsync(T** p, std::size_t bytes, cudaStream_t stream) {
  return cudaMallocAsync(reinterpret_cast<void**>(p), bytes, stream);
}
template <class T>
cudaError_t cudaMallocFromPoolAsync(T** p, std::size_t bytes, cudaMemPool_t pool, cudaStream_t stream) {
  return cudaMallocFromPoolAsync(reinterpret_cast<void**>(p), bytes, pool, stream);
}
template <class T>
cudaError_t cudaMallocHost(T** p, std::size_t bytes, unsigned flags = cudaHostAllocDefault) {
  return cudaHostAlloc(reinterpret_cast<void**>(p), bytes, flags);
}
template <class T>
cudaError_t cudaHostAlloc(T** p, std::size_t bytes, unsigned flags) {
  return cudaHostAlloc(reinterpret_cast<void**>(p), bytes, flags);
}
