#!/bin/sh
# Models saved by transformers, through the trainer on a mesh of 2 x 2 x 2 and back: the loss of the first step is that
# of transformers, which reads the same bits from the export and generates the same tokens.
# timeout: 300
# runs: with --all
. "$(dirname "$0")/lib/common.sh"
python3 -c 'import torch, transformers' 2>/dev/null || { echo "SKIPPED: there is no transformers"; exit 77; }

convert() {
  timeout 60 "$trainer" --init-from "$1" --seq 32 --steps 0 --sample 0 --mesh dp=2,pp=2,tp=2 --export-hf "$2" >out 2>err ||
    fail "$1 ended with $?: $(cat err)"
}
HF_HUB_OFFLINE=1 python3 "$here/lib/saved_models.py" save models >log 2>&1 || fail "no models: $(tail -n 3 log)"
mkdir back
for model in models/*; do
  convert "$model" "back/${model#models/}"
done
HF_HUB_OFFLINE=1 python3 "$here/lib/saved_models.py" compare models back >log 2>&1 || fail "$(tail -n 3 log)"

# Two windows, which are one batch: each step sees all of the text.
mkdir logs
head -c 65 "$text" >text.txt
for model in models/*; do
  timeout 60 "$trainer" --init-from "$model" --data text.txt --data-format bytes --seq 32 --global-batch 2 --micro-batch 1 --steps 1 --sample 0 \
    --mesh dp=2,pp=2,tp=2 --log "logs/${model#models/}.jsonl" >out 2>err || fail "$model ended with $?: $(cat err)"
done
HF_HUB_OFFLINE=1 python3 "$here/lib/saved_models.py" losses models text.txt logs >log 2>&1 || fail "$(tail -n 3 log)"
