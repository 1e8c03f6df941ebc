// Elements of one type, as a file has them, as elements of another. Reads and writes no file: checkpoint/load_state.hpp
// and models/export_hugging_face.hpp do.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "plait/checkpoint/safetensors_format.hpp"
#include "plait/core/dtype.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/precision.hpp"

namespace plait {

/// Returns the type of a tensor's elements, or nothing where a file's are of no type that weights are written in: F64,
/// F32 and BF16.
constexpr std::optional<dtype> weight_dtype_of(safetensors_dtype type) {
  for (const dtype one : {dtype::f64, dtype::f32, dtype::bf16})
    if (safetensors_dtype_of(one) == type) return one;
  return std::nullopt;
}

/// Converts `n` elements of a file to F64, F32 or BF16, with one rounding; copies them where they are of the type that
/// is asked for, whatever it is. Throws as `copy_elements`, naming `name`, and for another type.
inline void convert_saved(safetensors_dtype from, dtype to, const std::byte* in, std::byte* out, std::int64_t n,
                          const std::string& name) {
  const auto count = static_cast<std::size_t>(n);
  if (safetensors_dtype_of(to) == from) {
    std::memcpy(out, in, count * size_of(to));
    return;
  }
  if (to != dtype::f64 && to != dtype::f32 && to != dtype::bf16)
    fail({"tensor '", name, "' holds ", name_of(from), " elements, which do not become ", plait::name_of(to)});
  const safetensors_entry entry{name, from, {n}, {in, count * size_of(from)}};
  if (to == dtype::f64) {
    std::vector<double> values(count);
    copy_elements(entry, values.data());
    std::memcpy(out, values.data(), count * sizeof(double));
    return;
  }
  std::vector<float> values(count);
  copy_elements(entry, values.data());
  if (to == dtype::f32) {
    std::memcpy(out, values.data(), count * sizeof(float));
  } else {
    std::vector<bf16> rounded(count);
    for (std::size_t i = 0; i < count; ++i) rounded[i] = to_bf16(values[i]);
    std::memcpy(out, rounded.data(), count * sizeof(bf16));
  }
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
