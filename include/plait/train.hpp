// Training steps: pipelines, optimizers, and models made of layers. examples/train_llama is a full trainer.
#pragma once

#include "plait/comm/host_values.hpp"
#include "plait/models/language_model.hpp"
#include "plait/nn.hpp"
#include "plait/parallel/evaluate.hpp"
#include "plait/parallel/optim/adamw.hpp"
#include "plait/parallel/optim/chosen_optimizer.hpp"
#include "plait/parallel/optim/lr_schedule.hpp"
#include "plait/parallel/optim/muon.hpp"
#include "plait/parallel/parameter_hashes.hpp"
#include "plait/parallel/pipeline.hpp"
#include "plait/parallel/train_step.hpp"
#include "plait/parallel/world.hpp"
#include "plait/schedule/generators.hpp"
