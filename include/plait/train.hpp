// Training steps: pipelines, optimizers, and what makes a model of layers. Not a trainer; examples/train_llama is one.
#pragma once

#include "plait/comm/host_values.hpp"
#include "plait/models/language_model.hpp"
#include "plait/nn.hpp"
#include "plait/parallel/optim/adamw.hpp"
#include "plait/parallel/optim/chosen_optimizer.hpp"
#include "plait/parallel/optim/lr_schedule.hpp"
#include "plait/parallel/optim/muon.hpp"
#include "plait/parallel/parameter_hashes.hpp"
#include "plait/parallel/pipeline.hpp"
#include "plait/parallel/train_step.hpp"
#include "plait/parallel/world.hpp"
