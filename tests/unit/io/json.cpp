// program: files
#include "plait/io/json.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "support/temp_folder.hpp"

namespace {

/// Returns the strings of a list.
std::vector<std::string> strings_of(const std::string& text) {
  const std::string source = "x";
  plait::json_parser in(text, source);
  std::vector<std::string> out;
  in.list({"here"}, [&] { out.push_back(in.text({"in the list"})); });
  in.end();
  return out;
}
std::uint64_t whole_number_of(const std::string& text) {
  const std::string source = "x";
  plait::json_parser in(text, source);
  const std::uint64_t number = in.whole_number({"here"});
  in.end();
  return number;
}
void skip(const std::string& text) {
  const std::string source = "x";
  plait::json_parser in(text, source);
  in.skip();
  in.end();
}
bool is_accepted(const std::string& text) {
  try {
    skip(text);
    return true;
  } catch (const plait::error&) {
    return false;
  }
}

}  // namespace

TEST_CASE("strings are read unchanged, with every escape of JSON") {
  for (const std::string text : {"", "plain", "a\"\\/\b\f\n\r\t\x01\x7f", "\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80"})
    CHECK(strings_of("[" + plait::json_string(text) + "]") == std::vector{text});
  CHECK(strings_of(R"(["\"\\\/\b\f\n\r\t", "\u0041\u00e9\u20AC\ud83d\ude00", "\u0000"])") ==
        std::vector<std::string>{"\"\\/\b\f\n\r\t", "A\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80", std::string(1, '\0')});
  for (const char* bad : {"\"\\x\"", "\"\\u12g4\"", "\"\\u12", "\"\\ud83d\"", "\"\\ud83d\\u0041\"", "\"\\ude00\"",
                          "\"\n\"", "\"\xff\"", "\"\xc3\"", "\"a", "\""})
    CHECK_ERROR(strings_of("[" + std::string(bad) + "]"), "x: malformed JSON: ");
}

TEST_CASE("whole numbers from 0 to 2^64 - 1, and nothing else for them") {
  CHECK(whole_number_of(" 0\n") == 0);
  CHECK(whole_number_of("18446744073709551615") == std::numeric_limits<std::uint64_t>::max());
  for (const char* other : {"-1", "-0", "1.0", "1e3", "18446744073709551616", "null", "\"1\""})
    CHECK_ERROR(whole_number_of(other), "x: found ", " here, where a whole number from 0 is legal");
  for (const char* bad : {"", "01", "+1", "-", "1.", "1.x", "1e", "1e+", ".5", "nul", "1 2"})
    CHECK_ERROR(whole_number_of(bad), "x: malformed JSON: ");
}

TEST_CASE("errors give the place of malformed JSON, and deep nesting is refused") {
  CHECK_ERROR(skip("{\"a\": 1,}"), "x: malformed JSON: there is '}' at byte 8, where a key in quotes is legal");
  CHECK_ERROR(skip("[1, 2"), "malformed JSON: the text ends at byte 5, where ']' is legal");
  CHECK_ERROR(skip("{\"a\" 1}"), "there is '1' at byte 5, where ':' is legal");
  CHECK_ERROR(skip("[] x"), "there is 'x' at byte 3, where the end of the text is legal");
  CHECK_ERROR(skip(std::string("[]\0", 3)), "there is a zero byte at byte 2");
  CHECK_ERROR(skip("[\xff]"), "there is a byte 255 at byte 1, where a value is legal");
  CHECK_ERROR(skip(std::string(100000, '[')), "x: the JSON has more than 64 levels");
  CHECK_ERROR(strings_of("{}"), "x: found an object here, where an array is legal");
  CHECK_ERROR(strings_of("[[]]"), "x: found an array in the list, where a string is legal");
  CHECK_ERROR(strings_of("[true]"), "x: found true in the list, where a string is legal");
}

TEST_CASE("any text is accepted or refused as by nlohmann's parser") {
  const std::string good = R"({"a": [1, -2.5E-3, "\u00e9\n", {}], "b": {"c": null, "d": [true, false, 0]}, "e": "f"})";
  const std::string alphabet = "{}[]\",:0123456789 -.\\u\xc3\xa9tfn";
  std::mt19937 random(5);
  int accepted = 0, refused = 0;
  for (int trial = 0; trial < 20000; ++trial) {
    std::string text = good;
    for (std::uint32_t edits = 1 + random() % 4; edits > 0; --edits) {
      const std::size_t at = random() % (text.size() + 1);
      const std::uint32_t how = random() % 3;
      if (how == 0)
        text.insert(at, 1, alphabet[random() % alphabet.size()]);
      else if (how == 1)
        text.erase(at, random() % 8);
      else if (at < text.size())
        text[at] = alphabet[random() % alphabet.size()];
    }
    CAPTURE(text);
    REQUIRE(is_accepted(text) == nlohmann::json::accept(text));
    ++(is_accepted(text) ? accepted : refused);
  }
  CHECK(accepted > 1000);
  CHECK(refused > 1000);
}
