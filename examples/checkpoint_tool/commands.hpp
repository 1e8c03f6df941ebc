#pragma once

#include <cstdint>
#include <string>

inline constexpr int exit_equal = 0, exit_found = 1, exit_error = 2;

struct inspect_options {
  std::string path;
  bool tensors = false, files = false, json = false;
};
/// Prints the content of a step or of a folder of steps.
void inspect(const inspect_options& opt);

/// Reads every byte of a step, or of all steps of a folder. Returns whether all checksums are right.
bool verify(const std::string& path);

struct diff_options {
  std::string a, b;
  double tolerance = 0;  ///< relative to the largest element of a tensor
};
/// Compares two steps, which may have been saved on different layouts. Returns whether they are equal.
bool diff(const diff_options& opt);

/// Compares the logs of two runs, with hashes of their parameters. Returns whether all common steps are equal.
bool compare_runs(const std::string& a, const std::string& b);

struct export_options {
  std::string step, out;
  bool weights_only = false;
};
/// Writes whole tensors of a step as one safetensors file, which must not exist.
void export_safetensors(const export_options& opt);

struct export_hf_options {
  std::string step, out;
  std::string config;                         ///< a config.json, or a model directory
  std::string dtype;                          ///< empty: that of the step
  std::uint64_t shard_bytes = 5'000'000'000;  ///< most bytes of tensors in a file
  std::string weights_order = "hugging-face";
};
/// Writes the weights of a step as a Hugging Face model directory, which must not exist.
void export_hf(const export_hf_options& opt);

struct import_hf_options {
  std::string model;   ///< a model directory
  std::string folder;  ///< of steps
  std::string dtype;   ///< empty: that of each tensor
  std::string weights_order = "hugging-face";
};
/// Writes the weights of a model directory as step 0 of a folder of steps.
void import_hf(const import_hf_options& opt);

struct reshard_options {
  std::string step, folder;
  std::int64_t writers = 1;
};
/// Writes a copy of a step into a folder of steps, cut evenly over a number of writers.
void reshard(const reshard_options& opt);
