#pragma once

#include <memory>
#include <string>

#include "options.hpp"
#include "plait/models/llama_config.hpp"

/// A model's shape, and what --init-from names.
struct opened_model {
  plait::llama_config config;
  std::shared_ptr<const plait::model_directory> weights{};  ///< null: it names none
  std::string first_step{}, passed_over{};                  ///< as those of `setup`
};
opened_model open_model(const options& opt);

/// Opens --data, for so many data ranks.
void open_data(setup& s);
