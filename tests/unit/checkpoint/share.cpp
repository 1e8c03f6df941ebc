// program: steps
#include "plait/checkpoint/share.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <limits>
#include <string>

#include "support/temp_folder.hpp"

namespace {

plait::written_share two_tensors() {
  plait::written_share share{{"data/w00003.safetensors", 1234567890123, 4096, 0xffffffff}, {}};
  plait::stored_tensor& matrix = share.tensors.emplace_back();
  matrix.name = "a \"name\" of 2 words\n";
  matrix.dtype = plait::safetensors_dtype::bf16;
  matrix.shape = {std::numeric_limits<std::int64_t>::max(), 7};
  for (std::int64_t i = 0; i < 3; ++i) {
    plait::stored_box& b = matrix.boxes.emplace_back();
    b.offset = {i << 40, 1};
    b.extent = {1, 6};
    b.stored = {0, static_cast<std::uint32_t>(i), static_cast<std::uint64_t>(i) << 50, 12};
  }
  plait::stored_tensor& scalar = share.tensors.emplace_back();
  scalar.name = "s";
  scalar.dtype = plait::safetensors_dtype::f64;
  scalar.boxes.emplace_back().stored = {0, 1, 2, 8};
  return share;
}

}  // namespace

TEST_CASE("a note says all that a writer has written") {
  const plait::written_share share = two_tensors(), back = plait::parse_note(plait::note_text(share));
  CHECK(back.file == share.file);
  CHECK(back.tensors == share.tensors);
  CHECK_FALSE(back.read_again);
  for (const std::uint64_t step : {std::uint64_t{0}, std::numeric_limits<std::uint64_t>::max()}) {
    plait::written_share again = share;
    again.read_again = step;
    CHECK(plait::parse_note(plait::note_text(again)).read_again == step);
  }
  CHECK(plait::parse_note(plait::note_text({})).tensors.empty());
}

TEST_CASE("a note that is cut off or damaged is refused") {
  const std::string whole = plait::note_text(two_tensors());
  for (std::size_t n = 0; n < whole.size(); ++n)
    CHECK_ERROR(plait::parse_note(whole.substr(0, n)), "checkpoint: a writer's note");
  const auto refuse = [&](const std::string& from, const std::string& to, auto... parts) {
    const std::size_t at = whole.find(from);
    REQUIRE_MESSAGE(at != whole.npos, from);
    CHECK_ERROR(plait::parse_note(std::string(whole).replace(at, from.size(), to)), "checkpoint: a writer's note",
                parts...);
  };
  CHECK_ERROR(plait::parse_note(whole + "1 "), "malformed JSON: there is '1'");
  refuse("1234567890123", "99999999999999999999", "found 99999999999999999999");
  refuse("\"boxes\": [", "\"boxes\": [18446744073709551615,", "numbers of boxes", "takes 8");
  refuse("\"BF16\"", "\"F33\"", "unknown dtype 'F33'");
  refuse("\"files\": [", "\"files\": [[\"data/x\",1,1,0],", "names 2 files; legal is 1");
  refuse("\"scalars\": {", "\"scalars\": {\"read_again\": 0.5",
         "has the scalar 'read_again'; legal is read_again, a step");
  refuse("\"scalars\": {", "\"scalars\": {\"lr\": 5", "has the scalar 'lr'");
}
