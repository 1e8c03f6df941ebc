// Collectives, kernels and layers for C: a program lists those that it needs in a header of its own, by these macros. A
// C compiler reads prototypes and one struct type per array. One C++ file of the program defines PLAIT_C_DEFINE, and
// compiles the functions.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
#define PLAIT_C_FUNCTION extern "C"
#else
#define PLAIT_C_FUNCTION
#endif

// Only C++ reads this part. In the file that defines PLAIT_C_DEFINE, it has the functions' bodies and the C++ types of
// arrays and layers.
#if defined(__cplusplus) && defined(PLAIT_C_DEFINE)
#include "plait/c.hpp"
#define PLAIT_C_CALL(type, signature, ...)                          \
  PLAIT_C_FUNCTION type signature { return plait::c::__VA_ARGS__; } \
  PLAIT_C_END
#define PLAIT_C_SPEC(name, type, ...)                                    \
  template <>                                                            \
  struct plait::c::array<name> : plait::c::array_of<type, __VA_ARGS__> { \
    static constexpr char text[] = #name;                                \
  }
#define PLAIT_C_RULE(name, ...) static_assert(plait::c::follows_rule(__VA_ARGS__, name))
#define PLAIT_C_LAYER(name, ...)                     \
  struct name final : plait::c::layer<__VA_ARGS__> { \
    using plait::c::layer<__VA_ARGS__>::layer;       \
    static constexpr char text[] = #name;            \
  }
#else
#define PLAIT_C_CALL(type, signature, ...) PLAIT_C_FUNCTION type signature
#define PLAIT_C_SPEC(name, type, ...) PLAIT_C_END
#define PLAIT_C_RULE(name, ...) PLAIT_C_END
#define PLAIT_C_LAYER(name, ...) PLAIT_C_END
#endif
#define PLAIT_C_LIST(...) __VA_ARGS__
#define PLAIT_C_END struct plait_context /* before a semicolon that C++ or C would not take */

/// One rank: its place on the mesh, its layers, and the text of its error. Only one thread may use it. Arrays are in
/// the CPU's memory.
typedef struct plait_context plait_context;
/// The function that a rank runs. It returns 0, or another number after an error; then all ranks end.
typedef int (*plait_body)(plait_context* c, void* user);

#ifdef __cplusplus
extern "C" {
#endif

// A function that makes an array or a layer returns it. Every other function returns 0, or 1 after an error. After the
// first error on a context, all calls do nothing, and those that return a number return 1. The rank's run then ends
// with an error. No function throws an exception.

/// Returns 1 after an error on this context, else 0. A program calls it before it writes to arrays that it has made.
int plait_failed(const plait_context* c);
/// Returns the text of the context's error, or an empty text.
const char* plait_error(const plait_context* c);
/// Returns the number of this rank.
int plait_rank(const plait_context* c);
/// Returns the number of ranks.
int plait_ranks(const plait_context* c);
/// Runs `body` on `ranks` threads. After an error of one rank all ranks end, and `text` gets up to `size` bytes of the
/// error's text.
int plait_run_threads(int ranks, plait_body body, void* user, char* text, size_t size);
/// Begins a step of all layers: checks that values are equal on the ranks where types promise it, and sets gradients to
/// 0.
int plait_begin_step(plait_context* c);
/// Completes the gradients of all layers: sums each over the ranks that hold a partial sum of it.
int plait_reduce_gradients(plait_context* c);

#ifdef __cplusplus
}
#endif

#if defined(__cplusplus) && defined(PLAIT_C_DEFINE)
int plait_failed(const plait_context* c) { return c == nullptr || *c->text() != 0; }
const char* plait_error(const plait_context* c) { return c == nullptr ? "the context is null" : c->text(); }
int plait_rank(const plait_context* c) { return c == nullptr ? -1 : c->ranks.rank(); }
int plait_ranks(const plait_context* c) { return c == nullptr ? 0 : c->ranks.size(); }
int plait_run_threads(int ranks, plait_body body, void* user, char* text, size_t size) {
  return plait::c::run_threads(ranks, body, user, text, size);
}
int plait_begin_step(plait_context* c) { return plait::c::begin_step(c); }
int plait_reduce_gradients(plait_context* c) { return plait::c::reduce_gradients(c); }
#endif

/// The mesh and the sizes of a program: PLAIT_C_SIZES(mlp, (tp), (batch, hidden, ffn)) makes `mlp_sizes`, a struct of
/// these numbers, and
///
///     int mlp_begin(plait_context* c, mlp_sizes sizes);    // once, before other calls; on all ranks
#define PLAIT_C_SIZES(name, axes, dims)                        \
  typedef struct name##_sizes {                                \
    int64_t PLAIT_C_LIST axes;                                 \
    int64_t PLAIT_C_LIST dims;                                 \
  } name##_sizes;                                              \
  PLAIT_C_CALL(                                                \
      int, name##_begin(plait_context* c, name##_sizes sizes), \
      begin<plait::type_list<PLAIT_C_LIST axes>, plait::type_list<PLAIT_C_LIST dims>>(c, #name "_begin", sizes))

/// An array: its name, the type of its elements, and its spec. PLAIT_C_ARRAY(rows, float, pl::spec<batch, hidden>)
/// makes the struct type `rows` and
///
///     int64_t rows_size(plait_context* c);                              // this rank's elements; 0 after an error
///     rows rows_of(plait_context* c, float* data);                      // gives memory its type
///     int rows_take(plait_context* c, const float* whole, rows part);   // copies this rank's part
#define PLAIT_C_ARRAY(name, type, ...)                                                                \
  typedef type name##_element;                                                                        \
  typedef struct name {                                                                               \
    type* data;                                                                                       \
    int64_t size;                                                                                     \
  } name;                                                                                             \
  PLAIT_C_SPEC(name, type, __VA_ARGS__);                                                              \
  PLAIT_C_CALL(int64_t, name##_size(plait_context* c), size_of<name>(c, #name "_size"));              \
  PLAIT_C_CALL(name, name##_of(plait_context* c, type* data), give_type<name>(c, #name "_of", data)); \
  PLAIT_C_CALL(int, name##_take(plait_context* c, const type* whole, name part), take(c, #name "_take", whole, part))

/// A sum over ranks, in place: PLAIT_C_ALL_REDUCE(sum_terms, terms, rows, tp) makes
///
///     rows sum_terms(plait_context* c, terms in);    // in the memory of `in`
///
/// Here and below, the axes after the arrays name the group of ranks.
#define PLAIT_C_ALL_REDUCE(name, from, to, ...) \
  PLAIT_C_CALL(to, name(plait_context* c, from in), all_reduce<to, __VA_ARGS__>(c, #name, in))

/// An all-gather or a reduce-scatter of the first dim: PLAIT_C_ALL_GATHER(gather_rows, my_rows, rows, tp) makes
///
///     rows gather_rows(plait_context* c, my_rows in, float* memory);    // in this memory
#define PLAIT_C_ALL_GATHER(name, from, to, ...)                           \
  PLAIT_C_CALL(to, name(plait_context* c, from in, to##_element* memory), \
               all_gather<to, __VA_ARGS__>(c, #name, in, memory))
#define PLAIT_C_REDUCE_SCATTER(name, from, to, ...)                       \
  PLAIT_C_CALL(to, name(plait_context* c, from in, to##_element* memory), \
               reduce_scatter<to, __VA_ARGS__>(c, #name, in, memory))

/// A change of the spec only, as from invariant to replicated: PLAIT_C_RELABEL(copy_rows, rows, copies) makes
///
///     copies copy_rows(plait_context* c, rows in);    // nothing is sent or copied
#define PLAIT_C_RELABEL(name, from, to) PLAIT_C_CALL(to, name(plait_context* c, from in), relabel<to>(c, #name, in))

/// Messages along an axis: PLAIT_C_SEND(send_rows, rows, pp) and PLAIT_C_RECEIVE(receive_rows, rows, pp) make
///
///     int send_rows(plait_context* c, rows x, int peer, int tag);    // `peer`: a place along the axis
///     int receive_rows(plait_context* c, rows x, int peer, int tag);
#define PLAIT_C_SEND(name, array, ...) \
  PLAIT_C_CALL(int, name(plait_context* c, array x, int peer, int tag), send<__VA_ARGS__>(c, #name, x, peer, tag))
#define PLAIT_C_RECEIVE(name, array, ...) \
  PLAIT_C_CALL(int, name(plait_context* c, array x, int peer, int tag), receive<__VA_ARGS__>(c, #name, x, peer, tag))

/// A broadcast of one rank's array: PLAIT_C_BROADCAST(share_rows, rows, tp) makes
///
///     int share_rows(plait_context* c, rows x, int root);
#define PLAIT_C_BROADCAST(name, array, ...) \
  PLAIT_C_CALL(int, name(plait_context* c, array x, int root), broadcast<__VA_ARGS__>(c, #name, x, root))

/// A kernel of the program, in C: its name, its parameters, and its rule (layout/apply.hpp). The first array is the
/// output, the others are operands. The C++ compiler checks that their specs satisfy the rule:
///
///     PLAIT_C_KERNEL(gelu, (inner y, inner x), pl::rule::nonlinear);    // void gelu(inner y, inner x);
#define PLAIT_C_KERNEL(name, parameters, ...) \
  PLAIT_C_FUNCTION void name parameters;      \
  PLAIT_C_RULE(name, __VA_ARGS__)

/// A linear layer on the program's memory, y = x W', of these arrays: PLAIT_C_LINEAR(up, rows, inner, up_weight) makes
///
///     up* up_make(plait_context* c, up_weight weight, float* gradient);    // on all ranks; `c` owns it
///     int up_forward(plait_context* c, up* layer, rows x, inner y);
///     int up_backward(plait_context* c, up* layer, rows x, inner dy, rows dx);
///
/// `backward` adds to the weight's gradient and overwrites dx; it computes no dx if that is {0}. A gradient has the
/// type of the array that it belongs to.
#define PLAIT_C_LINEAR(name, input, output, weight)                                  \
  PLAIT_C_PASSES(name, input, output, weight);                                       \
  PLAIT_C_CALL(name*, name##_make(plait_context* c, weight w, weight##_element* dw), \
               make_layer<name>(c, #name "_make", w, dw))
/// A linear layer with a bias, y = x W' + b: PLAIT_C_BIASED_LINEAR(up, rows, inner, up_weight, up_bias) makes the same
/// functions, but the first also takes a bias and its gradient:
///
///     up* up_make(plait_context* c, up_weight weight, float* gradient, up_bias bias, float* bias_gradient);
#define PLAIT_C_BIASED_LINEAR(name, input, output, weight, bias)                                                 \
  PLAIT_C_PASSES(name, input, output, weight, bias);                                                             \
  PLAIT_C_CALL(name*, name##_make(plait_context* c, weight w, weight##_element* dw, bias b, bias##_element* db), \
               make_layer<name>(c, #name "_make", w, dw, b, db))
#define PLAIT_C_PASSES(name, input, output, ...)                                                  \
  typedef struct name name;                                                                       \
  PLAIT_C_LAYER(name, input, output, __VA_ARGS__);                                                \
  PLAIT_C_CALL(int, name##_forward(plait_context* c, name* layer, input x, output y),             \
               forward(c, #name "_forward", layer, x, y));                                        \
  PLAIT_C_CALL(int, name##_backward(plait_context* c, name* layer, input x, output dy, input dx), \
               backward(c, #name "_backward", layer, x, dy, dx))
