// program: files
#include "train_llama/data/tokenizer.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "plait/io/posix_file_system.hpp"
#include "support/temp_folder.hpp"
#include "support/test_data.hpp"

namespace {

constexpr const char* tokenizers[] = {"gpt2", "llama2", "llama3", "metaspace", "qwen2"};

std::string golden_path(const std::string& name) { return plait::test::test_data() + "/tokenizers/" + name + ".json"; }
nlohmann::json golden_tokenizer(const std::string& name) {
  return nlohmann::json::parse(plait::read_whole(plait::machine_files(), golden_path(name)));
}
/// A tokenizer's file changed by `edit(file)`.
template <class F>
std::string edited_tokenizer(const temp_folder& dir, const std::string& name, F&& edit) {
  nlohmann::json file = golden_tokenizer(name);
  edit(file);
  return dir.write("edited.json", file.dump());
}

}  // namespace

TEST_CASE("tokens and texts are those of Hugging Face's library") {
  const nlohmann::json texts = golden_tokenizer("texts");
  int cases = 0;
  for (const char* name : tokenizers) {
    const plait::tokenizer made(golden_path(name));
    CHECK(made.prefix() == texts.at("prefix").at(name).get<std::vector<std::int64_t>>());
    for (const nlohmann::json& one : texts.at(name)) {
      const auto text = one[0].get<std::string>();
      const std::vector<std::int64_t> tokens = made.encode(text);
      CAPTURE(name);
      CAPTURE(one[0].dump());
      CHECK(tokens == one[1].get<std::vector<std::int64_t>>());
      CHECK(made.decode(tokens) == one[2].get<std::string>());
      ++cases;
    }
  }
  CHECK(cases >= 200);
}

TEST_CASE("an unknown token becomes its number, and an incomplete character stays incomplete") {
  const plait::tokenizer made(golden_path("llama3"));
  CHECK(made.decode(std::vector<std::int64_t>{made.size(), -1}) == "<601><-1>");
  const std::vector<std::int64_t> euro = made.encode("\xe2\x82\xac");
  REQUIRE(euro.size() == 3);
  CHECK(made.decode(std::span(euro).first(2)) == "\xe2\x82");
}

TEST_CASE("the time for a long word is nearly linear in its length") {
  const plait::tokenizer made(golden_path("llama2"));
  std::string text;
  for (int i = 0; i < 10000; ++i) text += "the heaven and ";
  const std::vector<std::int64_t> tokens = made.encode(text);  // one word: quadratic time would be minutes
  CHECK(made.decode(tokens) == text);
}

TEST_CASE("older forms of the same tokenizer are read as well") {
  const temp_folder dir;
  const nlohmann::json texts = golden_tokenizer("texts");
  const auto same = [&](const std::string& name, auto&& change) {
    const plait::tokenizer before(golden_path(name)), after(edited_tokenizer(dir, name, change));
    for (const nlohmann::json& one : texts.at(name))
      CHECK(before.encode(one[0].get<std::string>()) == after.encode(one[0].get<std::string>()));
  };
  same("llama3", [](nlohmann::json& file) {
    for (nlohmann::json& merge : file["model"]["merges"])
      merge = merge[0].get<std::string>() + " " + merge[1].get<std::string>();
  });
  same("gpt2", [](nlohmann::json& file) {  // matches are kept, and there is no text between them
    file["pre_tokenizer"] = nlohmann::json::parse(R"({"type": "Sequence", "pretokenizers": [
      {"type": "ByteLevel", "add_prefix_space": true, "use_regex": true}]})");
    file["normalizer"] = nullptr;
  });
  same("qwen2", [](nlohmann::json& file) {
    file["pre_tokenizer"]["pretokenizers"][0]["behavior"] = "Removed";
    file["pre_tokenizer"]["pretokenizers"][0]["invert"] = true;
  });
  const plait::tokenizer removes(edited_tokenizer(dir, "qwen2", [](nlohmann::json& file) {
    file["pre_tokenizer"]["pretokenizers"][0] =
        nlohmann::json{{"type", "Split"}, {"pattern", {{"String", "+."}}}, {"behavior", "Removed"}, {"invert", false}};
  }));
  CHECK(removes.decode(removes.encode("and+.the.+")) == "andthe.+");
}

TEST_CASE("unsupported members of a tokenizer.json are refused by name") {
  struct refusal {
    const char* name;
    std::function<void(nlohmann::json&)> edit;
    std::string text;
  };
  const auto set = [](const char* pointer, nlohmann::json value) {
    return [=](nlohmann::json& file) { file[nlohmann::json::json_pointer(pointer)] = value; };
  };
  const auto split = [&](const char* expression) {
    return set("/pre_tokenizer/pretokenizers/0/pattern/Regex", expression);
  };
  const refusal refusals[] = {
      {"llama3", [](nlohmann::json& file) { file = 3; }, "this is no JSON object"},
      {"llama3", set("/other", 3), "key 'other' is 3, and its meaning is unknown; legal are version, truncation"},
      {"llama3", set("/padding", 3), "key 'padding' is 3; legal is null"},
      {"llama3", set("/truncation", 3), "key 'truncation' is 3; legal is null"},
      {"llama3", set("/model/type", "Unigram"), R"(key 'model.type' is "Unigram"; legal is "BPE")"},
      {"llama3", set("/model/dropout", 0.5), "key 'model.dropout' is 0.5; legal is 0"},
      {"llama3", set("/model/continuing_subword_prefix", "##"), R"(is "##"; legal is "")"},
      {"llama3", set("/model/end_of_word_suffix", "@"), R"(key 'model.end_of_word_suffix' is "@"; legal is "")"},
      {"llama3", set("/model/vocab", 3), "key 'model.vocab' is 3; legal is an object"},
      {"llama3", set("/model/vocab/x", -1), "key 'model.vocab' has -1 for 'x'; legal is a number below 16777216"},
      {"llama3", set("/model/vocab/new", 7), "key 'model.vocab' has 7 for 'new', and for '"},
      {"llama3", set("/model/unk_token", "new"),
       "key 'model.unk_token' needs the token 'new', which model.vocab lacks"},
      {"llama3", set("/model/byte_fallback", true), "key 'model.byte_fallback' needs the token '<0x00>'"},
      {"llama3", set("/model/merges", 3), "key 'model.merges' is no list"},
      {"llama3", set("/model/merges/0", "a"), R"(key 'model.merges' has "a"; legal are two tokens)"},
      {"llama3", set("/model/merges/0", "a b c"), R"(key 'model.merges' has "a b c"; legal are two tokens)"},
      {"llama3", set("/model/merges/0", nlohmann::json{"a", "zqz"}), "key 'model.merges' needs the token 'azqz'"},
      {"llama3", set("/model/merges/0", nlohmann::json{"q", "z"}), "key 'model.merges' needs the token 'qz'"},
      {"llama3", set("/added_tokens", 3), "key 'added_tokens' is no list"},
      {"llama3", set("/added_tokens/1", 3), "key 'added_tokens[1]' is not an object"},
      {"llama3", set("/added_tokens/1/lstrip", true), "key 'added_tokens[1].lstrip' is true; legal is false"},
      {"llama3", set("/added_tokens/1/content", ""), R"(key 'added_tokens[1].content' is ""; legal is a text)"},
      {"llama3", set("/added_tokens/1/id", 9), "key 'added_tokens[1].id' has 9 for '<|end|>', and for '"},
      {"llama3", set("/added_tokens/1/id", 900), "key 'added_tokens[1].id' has 900 for '<|end|>', which is 1, too"},
      {"qwen2", set("/normalizer", 3), "key 'normalizer' is not an object"},
      {"qwen2", set("/normalizer/type", "Lowercase"), "legal is Sequence, NFC, NFD, NFKC, NFKD, Prepend or Replace"},
      {"qwen2", set("/normalizer/left", 3), "key 'normalizer.left' is 3, and its meaning is unknown"},
      {"llama2", set("/normalizer/normalizers", 3), "key 'normalizer.normalizers' is no list"},
      {"llama2", set("/normalizer/normalizers/1/pattern", nlohmann::json{{"Regex", "a"}}),
       "normalizers[1].pattern.Regex' is"},
      {"llama2", set("/normalizer/normalizers/1/pattern", nlohmann::json{{"String", ""}}),
       R"(.String' is ""; legal is a text)"},
      {"llama3", set("/pre_tokenizer/type", "Whitespace"), "legal is Sequence, ByteLevel, Split, Digits or Metaspace"},
      {"llama3", set("/pre_tokenizer/pretokenizers/0/behavior", "Contiguous"), "legal is Isolated or Removed"},
      {"llama3", split("(a"), "'(a' is no regular expression: at byte 2, missing closing parenthesis"},
      {"llama3", split("a*"), "'a*' matches the empty text, which splits nothing"},
      {"llama3", split("a\\w"),
       "'a\\w' has '\\' at byte 1; legal are letters, classes, \\s, \\d, \\r, \\n, \\t, \\p{}"},
      {"llama3", split("\\p{Han}"), "' at byte 0; legal are letters"},
      {"llama3", split("a[b[c]]"), "' at byte 1; legal are letters"},
      {"llama3", split("[a&&b]"), "' at byte 0; legal are letters"},
      {"llama3", split("^a"), "has '^' at byte 0; legal are letters"},
      {"llama3", split("a{1,3}+"), "' at byte 1; legal are letters"},
      {"llama3", split("(?m:a)"), "' at byte 0; legal are letters"},
      {"metaspace", set("/pre_tokenizer/pretokenizers/1/replacement", "__"), "legal is one character beyond ASCII"},
      {"metaspace", set("/pre_tokenizer/pretokenizers/1/prepend_scheme", "last"), "legal is always, first or never"},
      {"llama2", set("/post_processor/type", "BertProcessing"), "legal is Sequence, ByteLevel or TemplateProcessing"},
      {"llama2", set("/post_processor/single", nlohmann::json::array()),
       "legal is special tokens, and then the sequence A"},
      {"llama2", set("/post_processor/single/1/Sequence/id", "B"), "legal is special tokens, and then the sequence A"},
      {"llama2", set("/post_processor/single/0", nlohmann::json{{"Sequence", 1}}), "legal is special tokens, and then"},
      {"llama2", set("/post_processor/special_tokens/<s>/ids/0", 9999), "legal is a list of tokens of the vocabulary"},
      {"llama2", set("/decoder", nullptr), "key 'decoder' is missing"},
      {"llama2", set("/decoder/decoders/0/type", "CTC"), "legal is Sequence, ByteLevel, ByteFallback, Fuse, Replace"},
      {"llama2", set("/decoder/decoders/3/content", ""), R"(decoders[3].content' is ""; legal is a character)"},
  };
  const temp_folder dir;
  for (const refusal& r : refusals) {
    const std::string path = edited_tokenizer(dir, r.name, r.edit);
    CHECK_ERROR(plait::tokenizer(path, "--tokenizer"), "--tokenizer: '" + path + "': ", r.text);
  }
  CHECK_ERROR(plait::tokenizer(dir / "none.json", "--tokenizer"), "--tokenizer: cannot open '", "none.json'");

  CHECK_ERROR(plait::tokenizer(golden_path("llama3")).encode("a\xff"), "llama3.json': the text is not UTF-8");
  const std::string without =
      edited_tokenizer(dir, "metaspace", [](nlohmann::json& file) { file["model"]["unk_token"] = nullptr; });
  CHECK_ERROR(plait::tokenizer(without).encode("a\xe2\x82\xac"),
              "the vocabulary has no token for '\xe2\x82\xac', and no unk_token");
  const plait::tokenizer slow(edited_tokenizer(dir, "llama3", split("(?:a+)+[bc]")));
  CHECK_ERROR(slow.encode(std::string(40, 'a')), "at byte 0 of a text, match limit exceeded");
}
