#!/bin/sh
# Installs missing packages (Debian 12, root), builds the trainer, and trains a small Llama on the sample text. Its mesh
# has eight ranks, threads of one process: two pipeline stages, two context-parallel groups that share the sequence, and
# two tensor-parallel ranks in each group.
#
#   sh examples/run.sh [ARGUMENTS...]     arguments go to train_llama, after the ones below
#
# Unless the arguments need more, the trainer is built only for floats, on the CPU, and for dense models in Megatron's
# layout with sequence parallelism. A full build takes several times as long.
set -eu

cd "$(dirname "$0")/.."
. cmake/packages.sh

# shellcheck disable=SC2086  # a list of names
install_packages $plait_build_packages

precisions=float
strategies=megatron_sp
for argument in "$@"; do
  case "$argument" in
    --precision* | --gradients*) precisions=all ;;
    --strategy* | --model*) strategies=all ;;
    --device* | --config*) precisions=all strategies=all ;;
  esac
done

# The build uses a separate folder, so that it does not change a full build in build/. Only plait::compiled, which has the
# kernels, is optimised for speed. Steps are an eighth slower so, and the build takes a quarter less time.
cmake -S . -B build/example -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_FLAGS_RELEASE="-Og -DNDEBUG" \
  -DPLAIT_BUILD_TESTS=OFF -DPLAIT_BUILD_BENCHMARKS=OFF -DPLAIT_TRAINER_PRECISIONS=$precisions \
  -DPLAIT_TRAINER_STRATEGIES=$strategies >/dev/null
cmake --build build/example -j "$(plait_jobs)" --target train_llama

out=build/out
mkdir -p "$out"
build/example/bin/train_llama --mesh dp=1,pp=2,cp=2,tp=2 --backend threads --model tiny --data examples/data/kjv.txt \
  --schedule 1f1b --steps 600 --seq 128 --micro-batch 4 --global-batch 16 --seed 1 \
  --precision float --log "$out/train.jsonl" --plot "$out/loss.svg" --report "$out/run.html" \
  --timeline "$out/timeline.svg" --trace "$out/trace.json" "$@"

cat <<END

The outputs are in $PWD/$out:
  run.html      a page of the run: curves, communication, memory, the step of timeline.svg, options
  loss.svg      the loss curve, for a browser
  timeline.svg  one step of the pipeline, simulated and measured, for a browser
  trace.json    the same step with all collectives and messages, for ui.perfetto.dev
  train.jsonl   one line per step, then a summary
The text's bytes have an entropy of 3.041 nats: a loss clearly below it has learnt more than their frequencies.

To try next:
  sh examples/run.sh --mesh dp=2,tp=4 --data-parallel zero3      the same losses on another layout
  build/example/bin/train_llama --mesh dp=16,tp=8 --model llama-3-8b --seq 4096 --dry-run      the plan of a large run
  examples/guide/README.md      how to write a program of your own; examples/pretrain.cpp is a whole one
END
