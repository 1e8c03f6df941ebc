// MPI's calls, for comm/mpi.hpp: their checks, data types, reductions that MPI lacks, counts beyond an int, and the
// speed of links between hosts. Of plait's communicator headers, this one includes <mpi.h>.
#pragma once

#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <limits>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "plait/comm/reduce.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/types.hpp"

namespace plait::mpi::detail {

inline void check(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING + 1] = {};
  int length = 0;
  MPI_Error_string(code, text, &length);
  fail({call, " failed: ", text});
}

inline int world_rank() {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank;
}

/// Prints the reason and ends all processes. The pause lets the launcher forward the text before it kills the
/// processes.
[[noreturn]] inline void end_all(const std::string& why) noexcept {
  std::fprintf(stderr, "rank %d: %s\n", world_rank(), why.c_str());
  std::fflush(stderr);
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  MPI_Abort(MPI_COMM_WORLD, 1);
  std::terminate();
}

inline MPI_Datatype type_of(dtype type) {
  const MPI_Datatype types[] = {MPI_FLOAT, MPI_DOUBLE, MPI_UINT16_T, MPI_INT32_T, MPI_INT64_T, MPI_UINT8_T};
  return types[static_cast<std::size_t>(type)];
}

// inout = in op inout. MPI's own operations do not support bf16, and their max of a NaN is unspecified (Open MPI's
// drops it).
template <reduce_op Op>
void combine(void* in, void* inout, int* length, MPI_Datatype* type) {
  const auto with = [&]<class T>() {
    const auto n = static_cast<std::size_t>(*length);
    const void* const sources[] = {in, inout};
    plait::detail::reduce_range<Op, T>(
        2, [&](int k) { return static_cast<const std::byte*>(sources[k]); }, 0, n,
        [&](std::size_t at, const T* block, std::size_t count) {
          std::copy_n(block, count, static_cast<T*>(inout) + at);
        });
  };
  if (*type == MPI_FLOAT) return with.template operator()<float>();
  if (*type == MPI_DOUBLE) return with.template operator()<double>();
  if (*type == MPI_INT32_T) return with.template operator()<std::int32_t>();
  if (*type == MPI_INT64_T) return with.template operator()<std::int64_t>();
  return with.template operator()<bf16>();
}

/// Whether several threads may call the library at the same time.
inline bool allows_threads() {
  int provided = 0;
  check(MPI_Query_thread(&provided), "MPI_Query_thread");
  return provided == MPI_THREAD_MULTIPLE;
}

/// plait's reductions as MPI operations: made once for a family of communicators, and freed with its last one.
struct operations {
  MPI_Op sum_bf16 = MPI_OP_NULL, max = MPI_OP_NULL, min = MPI_OP_NULL;

  operations() {
    check(MPI_Op_create(&combine<reduce_op::sum>, 1, &sum_bf16), "MPI_Op_create");
    check(MPI_Op_create(&combine<reduce_op::max>, 1, &max), "MPI_Op_create");
    check(MPI_Op_create(&combine<reduce_op::min>, 1, &min), "MPI_Op_create");
  }
  operations(const operations&) = delete;
  operations& operator=(const operations&) = delete;
  ~operations() {
    int over = 0;
    if (MPI_Finalized(&over) != MPI_SUCCESS || over) return;
    for (MPI_Op* op : {&sum_bf16, &max, &min}) MPI_Op_free(op);
  }

  MPI_Op of(reduce_op op, dtype type) const {
    const bool real = type == dtype::f32 || type == dtype::f64 || type == dtype::bf16;
    if (op == reduce_op::sum) return type == dtype::bf16 ? sum_bf16 : MPI_SUM;
    if (op == reduce_op::max) return real ? max : MPI_MAX;
    return real ? min : MPI_MIN;
  }
};

/// A derived type of `count` elements, for counts that may not fit an int.
class big_type {
 public:
  big_type(std::size_t count, dtype type, std::size_t limit) {
    const MPI_Datatype element = type_of(type);
    const std::size_t whole = count / limit, rest = count % limit;
    MPI_Datatype block = MPI_DATATYPE_NULL;
    check(MPI_Type_contiguous(static_cast<int>(limit), element, &block), "MPI_Type_contiguous");
    const int lengths[] = {static_cast<int>(whole), static_cast<int>(rest)};
    const MPI_Aint places[] = {0, static_cast<MPI_Aint>(whole * limit * size_of(type))};
    const MPI_Datatype types[] = {block, element};
    check(MPI_Type_create_struct(2, lengths, places, types, &type_), "MPI_Type_create_struct");
    check(MPI_Type_commit(&type_), "MPI_Type_commit");
    MPI_Type_free(&block);
  }
  big_type(const big_type&) = delete;
  big_type& operator=(const big_type&) = delete;
  ~big_type() { MPI_Type_free(&type_); }  // communication that uses it completes normally
  MPI_Datatype get() const { return type_; }

 private:
  MPI_Datatype type_ = MPI_DATATYPE_NULL;
};

/// The key of an attribute that marks a caller's communicator while plait uses it. Duplicates do not have it.
inline int attached_key() {
  static const int key = [] {
    int made = MPI_KEYVAL_INVALID;
    check(MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, MPI_COMM_NULL_DELETE_FN, &made, nullptr),
          "MPI_Comm_create_keyval");
    return made;
  }();
  return key;
}

/// Returns the library's largest tag, at least 32767.
inline int most_tag() {
  void* value = nullptr;
  int known = 0;
  check(MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &value, &known), "MPI_Comm_get_attr");
  return known ? *static_cast<int*>(value) : 32767;
}

/// Returns the rank in `other` of each rank of `comm`, or MPI_UNDEFINED for a rank that `other` does not have.
inline std::vector<int> ranks_in(MPI_Comm comm, int size, MPI_Comm other) {
  MPI_Group from = MPI_GROUP_NULL, to = MPI_GROUP_NULL;
  check(MPI_Comm_group(comm, &from), "MPI_Comm_group");
  check(MPI_Comm_group(other, &to), "MPI_Comm_group");
  std::vector<int> own(static_cast<std::size_t>(size)), there(own.size());
  std::iota(own.begin(), own.end(), 0);
  check(MPI_Group_translate_ranks(from, size, own.data(), to, there.data()), "MPI_Group_translate_ranks");
  MPI_Group_free(&from);
  MPI_Group_free(&to);
  return there;
}

/// Returns the send rate, in bytes per second, of the slowest rank, while all ranks exchange data with another host at
/// once. It is infinity if all ranks are on one host. Collective; stops after 20 ms or 16 MB, but sends at least 2 MB.
inline double rate_between_hosts(MPI_Comm comm, int rank, int size, const std::vector<char>& far) {
  constexpr int bytes = 1 << 20;
  for (const int shift : {size / 2, 1}) {  // shift 1 finds a pair of hosts wherever hosts differ
    const int to = (rank + shift) % size, from = (rank + size - shift) % size;
    int crosses = far[static_cast<std::size_t>(to)];
    check(MPI_Allreduce(MPI_IN_PLACE, &crosses, 1, MPI_INT, MPI_MAX, comm), "MPI_Allreduce");
    if (crosses == 0) continue;
    std::vector<char> out(bytes), in(bytes);
    double best = std::numeric_limits<double>::infinity(), total = 0;
    for (int round = 0; round < 2 || (round < 16 && total < 0.02); ++round) {
      MPI_Request in_flight[2] = {MPI_REQUEST_NULL, MPI_REQUEST_NULL};
      const double begin = MPI_Wtime();
      if (far[static_cast<std::size_t>(from)])
        check(MPI_Irecv(in.data(), bytes, MPI_BYTE, from, 0, comm, &in_flight[0]), "MPI_Irecv");
      if (far[static_cast<std::size_t>(to)])
        check(MPI_Isend(out.data(), bytes, MPI_BYTE, to, 0, comm, &in_flight[1]), "MPI_Isend");
      check(MPI_Waitall(2, in_flight, MPI_STATUSES_IGNORE), "MPI_Waitall");
      double took = MPI_Wtime() - begin;
      check(MPI_Allreduce(MPI_IN_PLACE, &took, 1, MPI_DOUBLE, MPI_MAX, comm), "MPI_Allreduce");
      total += took;
      if (round > 0) best = std::min(best, took);  // the first round opens connections, and uses a link's burst credit
    }
    return bytes / best;
  }
  return std::numeric_limits<double>::infinity();
}

/// Bytes per second below which a link between hosts is slow. Asynchronous collectives over a slow link go in pieces
/// (`piece_of`). These take up to 1.4 s more processor time for each GB, and hide much of the link's time. Measured
/// (benchmarks/results, two hosts): 6 to 28 % more tokens per second at 1 Gbit/s; at 10 Gbit/s up to 4 % fewer on
/// average.
inline constexpr double slow_link = 4e8;

/// Returns for each rank of a communicator whether its link is slow. The result is equal for all ranks of a host, and
/// for both ranks of a pair. Collective.
inline std::vector<char> ranks_over_slow_link(MPI_Comm comm, int rank, int size) {
  MPI_Comm host = MPI_COMM_NULL, own = MPI_COMM_NULL;
  check(MPI_Comm_split_type(comm, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host), "MPI_Comm_split_type");
  std::vector<char> far;
  for (const int there : ranks_in(comm, size, host)) far.push_back(there == MPI_UNDEFINED);
  MPI_Comm_free(&host);
  check(MPI_Comm_dup(comm, &own), "MPI_Comm_dup");  // the caller's may have other messages in flight
  const bool slow = rate_between_hosts(own, rank, size, far) < slow_link;
  MPI_Comm_free(&own);
  return slow ? far : std::vector<char>(far.size());
}
/// Returns the same for a part of `whole`, without communication.
inline std::vector<char> ranks_over_slow_link(MPI_Comm part, int size, MPI_Comm whole,
                                              const std::vector<char>& of_whole) {
  std::vector<char> slow;
  for (const int there : ranks_in(part, size, whole)) slow.push_back(of_whole[static_cast<std::size_t>(there)]);
  return slow;
}

}  // namespace plait::mpi::detail

#include "plait/core/macros_on.hpp"
