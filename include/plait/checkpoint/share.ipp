// The definitions of share.hpp, which includes them unless they are compiled apart (core/compiled.hpp).
#pragma once

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plait/core/compiled.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/text.hpp"

namespace plait {

namespace detail {

// A note is numbers, each with a blank behind it, and texts, each behind its length: millions of boxes are read in a
// second or two.

template <class Integer>
void add_to_note(std::string& note, Integer value) {
  char digits[24];
  note.append(digits, std::to_chars(digits, digits + sizeof digits, value).ptr);
  note += ' ';
}
inline void add_text_to_note(std::string& note, std::string_view text) {
  add_to_note(note, text.size());
  note += text;
}

class note_reader {
 public:
  explicit note_reader(std::string_view note) : rest_(note) {}
  template <class Integer>
  void next(Integer& value) {
    const auto [end, problem] = std::from_chars(rest_.data(), rest_.data() + rest_.size(), value);
    const auto used = static_cast<std::size_t>(end - rest_.data());
    if (problem != std::errc{} || used >= rest_.size() || *end != ' ') bad();
    rest_.remove_prefix(used + 1);
  }
  std::size_t number() {
    std::size_t value = 0;
    next(value);
    return value;
  }
  /// How many things follow, of each of which there are so many bytes at least.
  std::size_t count(std::size_t bytes) {
    const std::size_t n = number();
    if (n > rest_.size() / bytes) bad();
    return n;
  }
  std::string text() {
    const std::size_t n = count(1);
    std::string out(rest_.substr(0, n));
    rest_.remove_prefix(n);
    return out;
  }
  void end() const {
    if (!rest_.empty()) bad();
  }

 private:
  [[noreturn]] void bad() const { fail({"checkpoint: a writer's note is cut off or damaged"}); }
  std::string_view rest_;
};

}  // namespace detail

PLAIT_INLINE std::string note_text(const written_share& share) {
  using detail::add_text_to_note, detail::add_to_note;
  std::string note;
  add_text_to_note(note, share.file.path);
  add_to_note(note, share.file.bytes);
  add_to_note(note, share.file.header_bytes);
  add_to_note(note, share.file.header_crc32c);
  add_to_note(note, int{share.read_again.has_value()});
  add_to_note(note, share.read_again.value_or(0));
  add_to_note(note, share.tensors.size());
  for (const stored_tensor& t : share.tensors) {
    add_text_to_note(note, t.name);
    add_text_to_note(note, name_of(t.dtype));
    add_to_note(note, t.shape.size());
    for (const std::int64_t n : t.shape) add_to_note(note, n);
    add_to_note(note, t.boxes.size());
    for (const stored_box& b : t.boxes) {
      for (std::size_t d = 0; d < t.shape.size(); ++d) {
        add_to_note(note, b.offset[d]);
        add_to_note(note, b.extent[d]);
      }
      add_to_note(note, b.stored.position);
      add_to_note(note, b.stored.bytes);
      add_to_note(note, b.stored.crc32c);
    }
  }
  return note;
}

PLAIT_INLINE written_share parse_note(const std::string& text) {
  detail::note_reader note(text);
  written_share share;
  share.file.path = note.text();
  note.next(share.file.bytes);
  note.next(share.file.header_bytes);
  note.next(share.file.header_crc32c);
  const bool again = note.number() != 0;
  std::uint64_t step = 0;
  note.next(step);
  if (again) share.read_again = step;
  share.tensors.resize(note.count(8));
  for (stored_tensor& t : share.tensors) {
    t.name = note.text();
    const std::string type = note.text();
    const auto known = find_safetensors_dtype(type);
    if (!known) fail({"checkpoint: a writer's note has the unknown dtype '", type, "'"});
    t.dtype = *known;
    t.shape.resize(note.count(2));
    if (t.shape.size() > static_cast<std::size_t>(max_dims)) fail({"checkpoint: a writer's note has too many dims"});
    for (std::int64_t& n : t.shape) note.next(n);
    t.boxes.resize(note.count(6));
    for (stored_box& b : t.boxes) {
      for (std::size_t d = 0; d < t.shape.size(); ++d) {
        note.next(b.offset[d]);
        note.next(b.extent[d]);
      }
      note.next(b.stored.position);
      note.next(b.stored.bytes);
      note.next(b.stored.crc32c);
    }
  }
  note.end();
  return share;
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
