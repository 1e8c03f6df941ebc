#pragma once

#include <doctest/doctest.h>

#include <map>
#include <string>
#include <vector>

#include "plait/testing/layer_parity.hpp"

/// The checks of plait/testing as doctest checks, and the sizes that most tests of layers use.
namespace plait::test {

using namespace plait::testing;

inline void check_near(const std::vector<double>& a, const std::vector<double>& b, double tolerance,
                       const std::string& what) {
  INFO(what);
  REQUIRE(a.size() == b.size());
  CHECK(largest_difference(a, b) <= tolerance);
}

/// The values of one rank, after its gradients passed a check against finite differences.
template <class Mesh, class Make>
layer_values check_one(const Mesh& one, const dim_sizes& sizes, Make&& make, std::int64_t samples = 40) {
  layer_values at = run_on(one, sizes, make)[0];
  CHECK(at.found.text() == "");
  CHECK(check_differences(one, sizes, at, make, samples).text() == "");
  return at;
}

inline std::map<std::string, layer_values>& checked_values() {
  static std::map<std::string, layer_values> all;
  return all;
}
/// The same for policies that have equal values on one rank, and so one name: the first is checked, and later ones are
/// compared with it.
template <class Mesh, class Make>
const layer_values& check_once(const std::string& name, const Mesh& one, const dim_sizes& sizes, Make&& make,
                               std::int64_t samples = 40) {
  const auto [values, is_new] = checked_values().try_emplace(name);
  if (is_new)
    values->second = check_one(one, sizes, make, samples);
  else
    CHECK(check_mesh(one, sizes, values->second, make).text() == "");
  return values->second;
}
/// Linears have equal values on one rank if their dims are the same.
template <class Policy>
std::string name_on_one_rank() {
  std::string name = describe(whole_of(layout_v<typename Policy::input>));
  name += describe(whole_of(layout_v<typename Policy::weight>)) + describe(whole_of(layout_v<typename Policy::output>));
  if constexpr (requires { Policy::bias; }) name += Policy::bias ? " with a bias" : "";
  return name;
}

/// Compares every rank of the meshes with the values of one rank.
template <class Mesh, class Make>
void check_meshes(std::initializer_list<Mesh> meshes, const dim_sizes& sizes, const layer_values& one, Make&& make) {
  for (const Mesh& mesh : meshes) CHECK(check_mesh(mesh, sizes, one, make).text() == "");
}

inline dim_sizes transformer_sizes(std::int64_t batch_size = 4, std::int64_t seq_size = 8) {
  dim_sizes s;
  s.set(dim_of<batch>, batch_size);
  s.set(dim_of<seq>, seq_size);
  s.set(dim_of<zseq>, seq_size);
  s.set(dim_of<hidden>, 8);
  s.set(dim_of<heads>, 4);
  s.set(dim_of<kv_heads>, 2);
  s.set(dim_of<head_dim>, 4);
  s.set(dim_of<ffn>, 16);
  s.set(dim_of<vocab>, 12);
  return s;
}

}  // namespace plait::test
