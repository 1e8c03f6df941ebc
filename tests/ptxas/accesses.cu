// The memory-bound kernels in bf16, whose global accesses accesses.py counts in their PTX. Each line
//   accesses KERNEL: WIDE wide, NARROW narrow
// gives the minimum of 16-byte accesses of KERNEL, and the maximum of smaller ones: statistics of a row, and ends of
// rows that do not fill 16 bytes.
//
// accesses attention_delta_rows<8, bf16, bf16>: 2 wide, 1 narrow
// accesses attention_delta_rows<8, bf16, float>: 3 wide, 1 narrow
// accesses merge_heads<8, float, bf16>: 5 wide, 3 narrow
// accesses merge_heads<4, float, float>: 3 wide, 3 narrow
// accesses rope_kernel<8, bf16, float>: 8 wide, 0 narrow
// accesses row_map_kernel<8, swiglu_rows<bf16> >: 12 wide, 0 narrow
// accesses norm_forward_kernel<8, false, false, bf16, float>: 16 wide, 1 narrow
// accesses norm_forward_kernel<8, false, true, bf16, float>: 16 wide, 1 narrow
// accesses map_kernel<8, unchanged, bf16, float>: 3 wide, 14 narrow
#include <cstdint>

#include "plait/kernels/cuda/attention.hpp"
#include "plait/kernels/cuda/elementwise.hpp"
#include "plait/kernels/cuda/norms.hpp"

namespace plait::kernels {

template void attention_delta<bf16, bf16>(cuda&, const bf16*, const bf16*, float*, const attention_shape&);
template void attention_delta<bf16, float>(cuda&, const float*, const bf16*, float*, const attention_shape&);
template void merge_lse<float, bf16>(cuda&, float*, float*, const bf16*, const float*, std::int64_t,
                                     const attention_shape&);
template void merge_lse<float, float>(cuda&, float*, float*, const float*, const float*, std::int64_t,
                                      const attention_shape&);
template void cast<float, bf16>(cuda&, const float*, bf16*, std::int64_t);
template void norm_forward<bf16>(cuda&, const bf16*, const bf16*, const bf16*, bf16*, float*, float*, std::int64_t,
                                 std::int64_t, double, const bf16*, bf16*);
template void rope_forward<bf16>(cuda&, const bf16*, std::int64_t, bf16*, const float*, const float*, std::int64_t,
                                 std::int64_t, std::int64_t, std::int64_t, std::int64_t);
template void swiglu_forward<bf16>(cuda&, const bf16*, bf16*, std::int64_t, std::int64_t);

}  // namespace plait::kernels
