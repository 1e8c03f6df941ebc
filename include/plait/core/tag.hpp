// Axes and dims as tags: base classes for a user's tags, tag ids for `constexpr` code, and the tags of the literature.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <type_traits>

#include "plait/core/text.hpp"

namespace plait {

/// A name of at most 16 characters, stored in two words. As a template argument, all compilers print, compare and
/// mangle it alike (nvcc breaks arrays of characters).
struct name {
  std::uint64_t low = 0;
  std::uint64_t high = 0;

  constexpr name(std::uint64_t low_word, std::uint64_t high_word)
      : low(low_word), high(high_word) {}  // nvcc generates calls of this constructor
  template <std::size_t N>
    requires(N <= 17)
  consteval name(const char (&text)[N]) {  // NOLINT: implicit, so that a literal can be a template argument
    for (std::size_t i = 0; i + 1 < N; ++i)
      (i < 8 ? low : high) |= std::uint64_t{static_cast<unsigned char>(text[i])} << (8 * (i % 8));
  }
};

/// A tag at run time: its name as a zero-terminated string, and a hash of its type's qualified name.
struct tag_info {
  char text[17]{};
  std::uint64_t type = 0;

  constexpr tag_info(plait::name n, std::uint64_t type_hash) : type(type_hash) {
    for (int i = 0; i < 16; ++i) text[i] = static_cast<char>(((i < 8 ? n.low : n.high) >> (8 * (i % 8))) & 0xff);
  }
};

namespace detail {

/// Returns a hash of a type's qualified name, as the compiler writes it: "... [with T = plait::tp; ...]" (g++,
/// nvcc) or "... [T = plait::tp]" (clang).
template <class T>
constexpr std::uint64_t hash_of_type() {
  const std::string_view text = __PRETTY_FUNCTION__;
  const std::size_t begin = text.find_first_not_of(' ', text.find('=', text.find('[')) + 1);  // nvcc writes no space
  return fnv1a(text.substr(begin, text.find_first_of(";]", begin) - begin));
}

}  // namespace detail

/// Base of every axis: `struct tp : plait::axis_tag<"tp"> {};`, at namespace scope.
template <name Name>
struct axis_tag {
  static constexpr plait::name plait_axis_name = Name;
};

/// Base of every dim: `struct hidden : plait::dim_tag<"hidden"> {};`, at namespace scope.
template <name Name>
struct dim_tag {
  static constexpr plait::name plait_dim_name = Name;
};

template <class T>
concept axis_like = std::is_class_v<T> && requires { T::plait_axis_name; };
template <class T>
concept dim_like = std::is_class_v<T> && requires { T::plait_dim_name; };

template <axis_like T>
inline constexpr tag_info axis_info_of{T::plait_axis_name, detail::hash_of_type<T>()};
template <dim_like T>
inline constexpr tag_info dim_info_of{T::plait_dim_name, detail::hash_of_type<T>()};

/// Identity of a tag at run time and in `constexpr` code: the address of a variable that knows the tag. Shared
/// libraries that hide their symbols each have such a variable, so at run time two variables of one type count as one
/// identity. Two tags with one name are two identities. `Kind` distinguishes axes and dims.
template <class Kind>
struct tag_id {
  const tag_info* info = nullptr;

  constexpr const char* text() const { return info ? info->text : "(none)"; }
  constexpr explicit operator bool() const { return info != nullptr; }
  friend constexpr bool operator==(tag_id a, tag_id b) {
    if (a.info == b.info) return true;
    if (std::is_constant_evaluated()) return false;
    return a.info && b.info && a.info->type == b.info->type;
  }
  /// Order by name, for canonical forms. Tags that share a name have no order, so they must not share a mesh.
  friend constexpr bool before(tag_id a, tag_id b) {
    const char* x = a.text();
    const char* y = b.text();
    while (*x && *x == *y) ++x, ++y;
    return static_cast<unsigned char>(*x) < static_cast<unsigned char>(*y);
  }
};
struct axis_kind;
struct dim_kind;
using axis_id = tag_id<axis_kind>;
using dim_id = tag_id<dim_kind>;

template <axis_like T>
inline constexpr axis_id axis_of{&axis_info_of<T>};
template <dim_like T>
inline constexpr dim_id dim_of{&dim_info_of<T>};

/// The axes and dims of the training literature. plait treats a user's own tags in the same way.
struct dp : axis_tag<"dp"> {};
struct pp : axis_tag<"pp"> {};
struct cp : axis_tag<"cp"> {};
struct tp : axis_tag<"tp"> {};
struct ep : axis_tag<"ep"> {};

struct batch : dim_tag<"batch"> {};
struct seq : dim_tag<"seq"> {};
/// The sequence in zigzag order, which balances causal attention over ranks (plait/tensor/sequence_order.hpp).
struct zseq : dim_tag<"zseq"> {};
struct hidden : dim_tag<"hidden"> {};
struct heads : dim_tag<"heads"> {};
struct kv_heads : dim_tag<"kv_heads"> {};
struct head_dim : dim_tag<"head_dim"> {};
struct ffn : dim_tag<"ffn"> {};
struct vocab : dim_tag<"vocab"> {};
/// The experts of a mixture, the rows of one expert, and the experts of one token.
struct experts : dim_tag<"experts"> {};
struct expert_slot : dim_tag<"slot"> {};
struct expert_choice : dim_tag<"choice"> {};
/// The width of the expert that all tokens share, and the single output of its gate.
struct shared_ffn : dim_tag<"shared_ffn"> {};
struct shared_gate : dim_tag<"shared_gate"> {};
/// The MLP width of layers without experts, in a model where other layers have experts.
struct dense_ffn : dim_tag<"dense_ffn"> {};
/// The rows of a table of learned positions.
struct position : dim_tag<"position"> {};
/// The sequence of the encoder's output, which a decoder's cross-attention reads.
struct source_seq : dim_tag<"source_seq"> {};
/// The width of a low-rank adapter.
struct rank_dim : dim_tag<"rank"> {};

}  // namespace plait
