// Training steps: pipelines, optimizers, and what makes a model of layers. Not a trainer; examples/train_llama is one.
#pragma once

#include "plait/models/language_model.hpp"
#include "plait/nn.hpp"
#include "plait/pipeline/pipeline.hpp"
#include "plait/pipeline/world.hpp"
#include "plait/train/optim/adamw.hpp"
#include "plait/train/optim/chosen_optimizer.hpp"
#include "plait/train/optim/lr_schedule.hpp"
#include "plait/train/optim/muon.hpp"
#include "plait/train/step_communication.hpp"
#include "plait/train/train_step.hpp"
#include "plait/train/weights_hash.hpp"
