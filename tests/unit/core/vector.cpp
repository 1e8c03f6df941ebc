#include "plait/core/vector.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

using plait::dynamic_vector;

namespace {

int alive = 0;
int copies_left = 0;

/// Counts its objects; a copy throws once `copies_left` are made.
struct counted {
  int value = 7;
  explicit counted(int v) : value(v) { ++alive; }
  counted() { ++alive; }
  counted(counted&& from) noexcept : value(std::exchange(from.value, 0)) { ++alive; }
  counted(const counted& from) : value(from.value) {
    if (copies_left-- == 0) throw std::runtime_error("no more copies");
    ++alive;
  }
  counted& operator=(counted&& from) noexcept {
    value = std::exchange(from.value, 0);
    return *this;
  }
  ~counted() { --alive; }
  friend bool operator==(const counted& a, const counted& b) { return a.value == b.value; }
};

dynamic_vector<counted> copy_of(const dynamic_vector<counted>& v) { return v; }

struct pair_of_texts {
  std::string a, b;
};

struct alignas(64) wide {
  char bytes[64];
};

}  // namespace

TEST_CASE("a vector keeps its elements in order, and destroys each once") {
  {
    dynamic_vector<counted> v;
    for (int i = 0; i < 20; ++i) CHECK(v.emplace_back(i).value == i);
    v.erase(v.begin() + 3, v.begin() + 5);
    v.insert(v.begin() + 1, counted(100));
    REQUIRE(v.size() == 19);
    CHECK(v[0].value == 0);
    CHECK(v[1].value == 100);
    CHECK(v[3].value == 2);
    CHECK(v[4].value == 5);
    CHECK(v.back().value == 19);
    v.resize(25);
    CHECK(v.back().value == 7);
    v.resize(2);
    CHECK(alive == 2);
    copies_left = 2;
    dynamic_vector<counted> w = v;
    CHECK(w == v);
    w = std::move(v);
    CHECK(w.size() == 2);
    w.clear();
    CHECK(w.empty());
  }
  CHECK(alive == 0);
}

TEST_CASE("a copy that throws leaves nothing behind") {
  dynamic_vector<counted> v;
  for (int i = 0; i < 5; ++i) v.emplace_back(i);
  copies_left = 3;
  CHECK_THROWS_WITH(copy_of(v), "no more copies");
  CHECK(alive == 5);
}

TEST_CASE("a vector takes elements of its own, aggregates, lists and types that only move") {
  dynamic_vector<std::string> texts{"one", "two", "three", "four"};
  texts.push_back(texts[2]);
  texts.append(texts.data() + 0, texts.data() + 0);
  CHECK(texts.back() == "three");
  CHECK(texts == dynamic_vector<std::string>{"one", "two", "three", "four", "three"});
  CHECK(!(texts == dynamic_vector<std::string>(5, "one")));

  dynamic_vector<pair_of_texts> pairs;
  CHECK(pairs.emplace_back("a", "b").b == "b");

  dynamic_vector<std::unique_ptr<int>> owners(2);
  owners[1] = std::make_unique<int>(3);
  owners.push_back(std::make_unique<int>(4));
  CHECK(*owners[1] + *owners.back() == 7);

  const dynamic_vector<wide> aligned(3);
  CHECK(reinterpret_cast<std::uintptr_t>(aligned.data()) % 64 == 0);
}
