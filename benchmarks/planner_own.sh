#!/bin/sh
# Compares the planner's times of steps with measured ones on this machine. It first calibrates on collectives and
# kernels, and then trains on meshes that the calibration has not measured. Usage:
#
#   planner_own.sh TRAIN_LLAMA PLAN_LLAMA [STEPS]
#
# RUNS may name fewer runs, each BACKEND:MESH:MICRO_BATCH:SCHEDULE; HIDDEN and SEQ make the model smaller. The last
# lines are the median and the worst error. Give it a quiet machine.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
trainer=$(readlink -f "$1")
planner=$(readlink -f "$2")
steps=${3:-20}
hidden=${HIDDEN:-256}
seq=${SEQ:-128}
runs=${RUNS:-threads:dp=2:4:1f1b threads:tp=2:4:1f1b threads:pp=2:2:1f1b threads:cp=2:4:1f1b threads:dp=2,tp=2:2:1f1b
  threads:pp=2,tp=2:2:zb_h1 threads:dp=2,pp=2:2:interleaved:2 threads:dp=2,cp=2,tp=2:2:1f1b
  mpi:dp=2:4:1f1b mpi:tp=2:4:1f1b mpi:dp=2,tp=2:2:1f1b mpi:pp=4:2:1f1b}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat >"$work/config.json" <<JSON
{"model_type": "llama", "hidden_size": $hidden, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
 "intermediate_size": $((hidden * 3)), "vocab_size": 256, "max_position_embeddings": 4096}
JSON
export OMPI_MCA_mpi_yield_when_idle=1 OMPI_MCA_hwloc_base_binding_policy=none
launch() { mpirun --allow-run-as-root --oversubscribe -n "$@"; }

ranks=1
for run in $runs; do  # the calibration has as many ranks as the largest mesh
  extents=$(echo "$run" | cut -d: -f2 | tr -c '0-9\n' ' ')
  product=1
  for extent in $extents; do product=$((product * extent)); done
  if [ "$product" -gt "$ranks" ]; then ranks=$product; fi
done
"$planner" --calibrate "$work/threads.json" --ranks "$ranks"
case $runs in
  *mpi:*) launch "$ranks" "$planner" --calibrate "$work/mpi.json" --backend mpi ;;
esac

printf '\n%-8s %-16s %6s %-14s %12s %12s %8s\n' backend mesh micro schedule 'predicted ms' 'measured ms' 'error %'
for run in $runs; do
  backend=$(echo "$run" | cut -d: -f1)
  mesh=$(echo "$run" | cut -d: -f2)
  micro=$(echo "$run" | cut -d: -f3)
  schedule=$(echo "$run" | cut -d: -f4-)
  product=1
  for extent in $(echo "$mesh" | tr -c '0-9\n' ' '); do product=$((product * extent)); done
  command=
  if [ "$backend" = mpi ]; then command="launch $product"; fi
  $command "$trainer" --backend "$backend" --mesh "$mesh" --model "$work/config.json" --data "$here/../examples/data/kjv.txt" \
    --seq "$seq" --global-batch 16 --micro-batch "$micro" --schedule "$schedule" --steps "$steps" --sample 0 \
    --cluster "$work/$backend.json" --log "$work/log.jsonl" >"$work/out" 2>&1 || { cat "$work/out" >&2; exit 1; }
  tail -n 1 "$work/log.jsonl" |
    sed -n 's/.*"prediction": {.*"step_seconds": \([^,]*\),.*"measured_step_seconds": \([^,]*\),.*/\1 \2/p' >"$work/times"
  [ -s "$work/times" ] || { echo "$run has no prediction: $(tail -n 1 "$work/log.jsonl")" >&2; exit 1; }
  awk -v backend="$backend" -v mesh="$mesh" -v micro="$micro" -v schedule="$schedule" '{
    printf "%-8s %-16s %6d %-14s %12.2f %12.2f %8.1f\n", backend, mesh, micro, schedule, 1e3 * $1, 1e3 * $2, 100 * ($1 / $2 - 1)
  }' "$work/times" | tee -a "$work/table"
done
awk '{ e = $NF < 0 ? -$NF : $NF; print e }' "$work/table" | sort -n | awk '{ e[NR] = $1 } END {
  printf "median error of %d meshes: %.1f %%\nworst error: %.1f %%\n", NR, e[int((NR + 1) / 2)], e[NR]
}'
