// Coordinates on a mesh with static extents are the divisions that one would write by hand.
#include "plait/layout/mesh.hpp"

using namespace plait;
using std::int64_t;

using pod = mesh<axis<pp, 2>, axis<dp, 3>, axis<cp, 2>, axis<tp, 4>>;
using elastic = mesh<axis<dp>, axis<cp>, axis<tp, 8>>;

extern "C" {

int64_t typed_innermost(int64_t rank) { return pod().coordinate<tp>(rank); }
int64_t raw_innermost(int64_t rank) { return rank % 4; }

int64_t typed_middle(int64_t rank) { return pod().coordinate<dp>(rank); }
int64_t raw_middle(int64_t rank) { return rank / 8 % 3; }

int64_t typed_absent(int64_t rank) { return pod().coordinate<ep>(rank); }
int64_t raw_absent(int64_t) { return 0; }

int64_t typed_index_in_group(int64_t rank) { return pod().index_in<cp, tp>(rank); }
int64_t raw_index_in_group(int64_t rank) { return rank / 4 % 2 * 4 + rank % 4; }

int64_t typed_index_in_other_order(int64_t rank) { return pod().index_in<tp, dp>(rank); }
int64_t raw_index_in_other_order(int64_t rank) { return rank % 4 * 3 + rank / 8 % 3; }

// Element (row, column) of the global [rows, 512] matrix whose rows are sharded over cp and tp, in this rank's part.
const float* typed_local_element(const float* part, int64_t rank, int64_t rows, int64_t row, int64_t column) {
  constexpr pod ranks;
  const int64_t local_rows = rows / (ranks.extent<cp>() * ranks.extent<tp>());
  return part + (row - ranks.index_in<cp, tp>(rank) * local_rows) * 512 + column;
}
const float* raw_local_element(const float* part, int64_t rank, int64_t rows, int64_t row, int64_t column) {
  const int64_t local_rows = rows / 8;
  return part + (row - (rank / 4 % 2 * 4 + rank % 4) * local_rows) * 512 + column;
}

// Only dynamic extents are stored and loaded.
int64_t typed_dynamic(const elastic* ranks, int64_t rank) { return ranks->coordinate<dp>(rank); }
int64_t raw_dynamic(const int64_t* extents, int64_t rank) { return rank / (extents[1] * 8) % extents[0]; }

int64_t typed_static_inside_dynamic(const elastic* ranks, int64_t rank) { return ranks->coordinate<tp>(rank); }
int64_t raw_static_inside_dynamic(const int64_t*, int64_t rank) { return rank % 8; }

}  // extern "C"
