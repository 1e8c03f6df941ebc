// Compares mixtures of experts on meshes with golden values from transformers (tests/data/make_mixture_goldens.py).
#pragma once

#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "plait/models/hugging_face_directory.hpp"
#include "plait/models/mixture_llama.hpp"
#include "support/golden_model.hpp"
#include "support/test_data.hpp"

namespace plait::test {

inline std::string folder_of(const std::string& name) { return test_data() + "/llama_" + name; }

/// The limits are those of `check_golden`.
template <class T, strategy S>
void check_golden_mixtures(const std::vector<mesh_shape>& meshes, double limit, double limit_of_gradients) {
  for (const char* name : {"mixtral", "qwen2_moe", "qwen3_moe", "dots1", "olmoe"}) {
    const model_directory from = open_model_directory(folder_of(name));
    for (const mesh_shape& mesh : meshes) {
      CAPTURE(name);
      CAPTURE(describe(mesh));
      check_golden(run_golden<mixture_llama<T, S>, S>(folder_of(name), from.config, from.entries, mesh), 20, limit,
                   limit_of_gradients);
    }
  }
}

}  // namespace plait::test
