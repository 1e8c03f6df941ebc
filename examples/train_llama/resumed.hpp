#pragma once

#include <optional>
#include <string>

#include "options.hpp"
#include "plait/models/llama_config.hpp"

namespace plait {
struct loaded_state;
}
struct run_plan;

/// Throws `plait::error_of_all`, naming the option, where the run cannot go on from a saved state: its place in the
/// data would be another. No fmt here: nvcc compiles it.
void check_resumed(const setup& s, const plait::loaded_state& loaded);

/// The options by which a step's numbers are made, but for those of data and learning rate, which have texts of their
/// own: "--global-batch 8, --optimizer adamw". It is saved with a step.
std::string training_text(const setup& s);

/// Which of them the saved text has otherwise, such as "--clip 0.5, which was 1": nothing where none is, or where the
/// step was saved before steps had the text. A run may go on with others: it says which.
std::string changed_options(const setup& s, const plait::loaded_state& loaded);

/// The model that a saved state is of, as it says; nothing where it was saved before states did, or by no run.
std::optional<plait::llama_config> saved_model(const plait::loaded_state& loaded);

/// Whether the run takes held-out losses of other tokens than the step that it goes on from.
bool judges_otherwise(const setup& s, const plait::loaded_state& loaded);

/// Returns what the error of a state that cannot be loaded begins with: "this run has other options than 'step': ...; "
/// where it has, and nothing where it has not or that cannot be read.
std::string other_options_of(const setup& s, const std::string& path);

/// Returns a text that a step tells of its run, such as "train.rate": empty where no step had been made, and words that
/// equal no other run's where it was saved before steps had it, so that the option that allows a change is asked for.
std::string told_by(const plait::loaded_state& loaded, const char* scalar);

/// Returns lines on what --init-from, --resume and --checkpoint-dir name, for a dry run: nothing if they name nothing
/// that is saved. Throws `plait::error`, naming the option, where the run would refuse it: what is not there, is not
/// whole by its manifest, or does not fit the run. No tensor is read, and nothing is written.
std::string planned_state_text(const setup& s, const run_plan& plan);
