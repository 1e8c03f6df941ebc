// Checks of a layer's calls that give wrong numbers and no other sign: one that writes what it still reads, and one
// with tensors of other sizes than the layer's. Sizes of the context are checked by nn/layer/made_for.hpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string_view>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/tensor/null_check.hpp"

namespace plait::detail {

/// An array of a call, by its bytes. Null is no array, and one without bytes shares none.
struct named_array {
  template <class T>
  constexpr named_array(const T* begin, std::int64_t elements, const char* called)
      : at(begin), bytes(static_cast<std::size_t>(elements) * sizeof(T)), name(called) {}

  const void* at;
  std::size_t bytes;
  const char* name;
};

/// Throws where one of the arrays that `call` of `layer` reads shares a byte with the one that it writes.
inline void require_apart(std::string_view layer, const char* call, const named_array& written,
                          std::initializer_list<named_array> read) {
  if (written.at == nullptr || written.bytes == 0) return;
  const auto begin_of = [](const named_array& a) { return reinterpret_cast<std::uintptr_t>(a.at); };
  const std::uintptr_t begin = begin_of(written), end = begin + written.bytes;
  for (const named_array& in : read) {
    const std::uintptr_t first = begin_of(in);
    if (in.at == nullptr || in.bytes == 0 || first >= end || begin >= first + in.bytes) continue;
    if (in.at == written.at)
      fail(
          {layer, ": ", call, " writes ", written.name, " while it still reads ", in.name, ", and both are one array"});
    const std::uintptr_t last = first + in.bytes < end ? first + in.bytes : end;
    fail({layer, ": ", call, " writes ", written.name, " while it still reads ", in.name, ", and they share ",
          last - (first > begin ? first : begin), " bytes"});
  }
}

/// Throws unless a tensor of a call has the elements that the layer was made for: sizes are the context's at that time.
inline void require_size(std::string_view layer, const char* name, std::int64_t has, std::int64_t made_for) {
  if (has == made_for) return;
  if (has == 0)
    fail({layer, ": ", name, " has no elements, and the layer was made for ", made_for,
          " on this rank: the tensor was moved from, or never made, or views a null pointer"});
  fail({layer, ": ", name, " has ", has, " elements on this rank, and the layer was made for ", made_for,
        ": call the layer's resize(ctx), or make the layer, with a context of these sizes"});
}

/// Returns the array of an addend, or null where there is none. Throws as `require_size`.
template <class Tensor>
auto addend_array(std::string_view layer, const Tensor* addend, std::int64_t made_for) {
  if (addend) require_size(layer, "addend", addend->size(), made_for);
  return addend ? addend->data() : nullptr;
}

/// Throws under canonical numerics, whose leaves are those of the sizes that a layer was made for.
inline void require_resizable(std::string_view layer, bool canonical) {
  if (canonical)
    fail({layer,
          ": resize under canonical numerics (deterministic), whose leaves are those of the sizes that the layer was "
          "made for: make another layer for other sizes"});
}

}  // namespace plait::detail

#include "plait/core/macros_on.hpp"
