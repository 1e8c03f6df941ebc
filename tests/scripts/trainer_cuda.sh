#!/bin/sh
# The trainer on GPUs: its errors, its plan and, on a GPU that the CPU stands in for, the losses of the CPU's trainer.
# timeout: 420
# runs: with --all
TRAINER=  # the one that is built for GPUs, if nvcc is found
. "$(dirname "$0")/lib/common.sh"

# refused TEXT PROGRAM ARGUMENTS...: the message contains TEXT (a basic regular expression), and no file is left.
refused() {
  expected=$1 program=$2
  shift 2
  code=0
  timeout 60 "$program" --model config.json --data "$text" --seq 32 --steps 2 --sample 0 --log bad.jsonl --plot bad.svg \
    --device cuda "$@" >stdout 2>stderr || code=$?
  [ "$code" = 1 ] || fail "$*: exit code $code, $(cat stdout stderr)"
  grep -q "^train_llama: .*$expected" stderr || fail "$*: '$expected' is not in: $(cat stderr)"
  ! ls bad.jsonl* bad.svg* 2>/dev/null || fail "$*: left files"
}

# Errors that need no GPU.
refused '--backend mpi moves the host.s memory; with --device cuda, --backend nccl' "$trainer" --backend mpi
refused '--precision double is not supported for --device cuda; legal are float, bf16 and bf16-no-masters' "$trainer" --precision double
refused '--precision float is built for --strategy sp alone; here it is tp' "$trainer" --strategy tp
refused '--tf32 is for --precision float; here it is bf16' "$trainer" --tf32 --precision bf16
refused '--attention-kernel cudnn computes in bf16; with --precision float' "$trainer" --attention-kernel cudnn
refused '--graph on with --dropout 0.1: .* legal are --graph off and --dropout 0' "$trainer" --graph on --dropout 0.1
refused '--threads is 2, but with --device cuda' "$trainer" --threads 2
refused "--graph 'x' is unknown; legal are auto, on, off" "$trainer" --graph x
refused '--attention-sums any is an order of cuDNN' "$trainer" --attention-sums any
refused "--attention-kernel 'x' is unknown; legal are auto, own, cudnn" "$trainer" --attention-kernel x
refused '--backend nccl moves the memory of GPUs: give --device cuda' "$trainer" --backend nccl --device cpu
refused '--tf32 needs --device cuda' "$trainer" --tf32 --device cpu
refused '--graph on needs --device cuda' "$trainer" --graph on --device cpu
refused '--products needs --device cuda' "$trainer" --products p.txt --device cpu
refused '--attention-kernel own needs --device cuda' "$trainer" --attention-kernel own --device cpu
refused '--attention-sums any needs --device cuda' "$trainer" --attention-sums any --device cpu
refused '--offload optimizer: with --device cpu everything is in the host.s memory; legal are none, and --device cuda' \
  "$trainer" --offload optimizer --device cpu
refused "--offload 'all' is unknown; legal are none, optimizer, activations, both" "$trainer" --offload all
refused '--recompute budget:1M with --offload both: a budget counts activations that stay on the device' "$trainer" \
  --offload both --recompute budget:1M
refused '--checkpoint-staging pageable is for --device cuda; on the CPU no memory is pinned' "$trainer" --device cpu \
  --checkpoint-dir none --checkpoint-staging pageable
refused "--checkpoint-staging 'x' is unknown; legal are pinned, pageable" "$trainer" --checkpoint-dir none --checkpoint-staging x
refused '--checkpoint-staging needs --checkpoint-dir' "$trainer" --checkpoint-staging pageable
refused '--peak-tflops is -1' "$trainer" --peak-tflops -1 --device cpu

# A program that cannot use a GPU prints the reason.
if ! ls /dev/nvidia0 >/dev/null 2>&1; then
  refused '--device cuda: \(this program was built without CUDA; .*-DPLAIT_CUDA=ON\|there is no CUDA device here\)' "$trainer"
fi

# The plan of a run on GPUs needs no GPU. Activations and weights in communication have half the bytes of float, and
# bf16 weights have master weights as well.
planned() { sed -n "s/^  $1 *\([0-9.]* [kMGT]*B\)$/\1/p" "$2"; }
plan="--model bench-128 --seq 128 --mesh dp=2,tp=2 --dry-run"
# shellcheck disable=SC2086
"$trainer" $plan --device cuda --precision bf16 >plan.bf16 || fail "the plan in bf16"
# shellcheck disable=SC2086
"$trainer" $plan >plan.float || fail "the plan in float"
grep -q '^operations: .* GFLOP a token' plan.bf16 || fail "the plan on cuda lacks the operations: $(cat plan.bf16)"
! grep -q '^operations' plan.float || fail "the plan on the CPU has operations"
python3 - "$(planned weights plan.float)" "$(planned weights plan.bf16)" "$(planned optimizer plan.float)" \
  "$(planned optimizer plan.bf16)" "$(planned activations plan.float)" "$(planned activations plan.bf16)" <<'PYTHON' ||
import sys
f, b, mf, mb, af, ab = (float(text.split()[0]) for text in sys.argv[1:])
ok = abs(b / f - 0.5) < 0.01 and abs(mb / mf - 1.5) < 0.01 and 0.49 < ab / af < 0.6
sys.exit(0 if ok else f"not as expected: {sys.argv[1:]}")
PYTHON
  fail "the memory of the plans"
# shellcheck disable=SC2086
"$trainer" $plan --device cuda --precision bf16 --offload optimizer >plan.offload || fail "the plan that offloads"
[ "$(planned 'on the host' plan.offload)" = "$(planned optimizer plan.bf16)" ] || fail "another plan: $(cat plan.offload)"
# shellcheck disable=SC2086
"$trainer" $plan --device cuda --precision bf16 --offload activations >plan.away || fail "the plan that offloads activations"
grep -q '^  on the host' plan.away || fail "no activations are on the host: $(cat plan.away)"
[ "$(planned optimizer plan.away)" = "$(planned optimizer plan.bf16)" ] || fail "another plan: $(cat plan.away)"
[ "$(planned activations plan.away)" != "$(planned activations plan.bf16)" ] || fail "activations stay: $(cat plan.away)"
[ "$(planned optimizer plan.offload)" = "0 B" ] || fail "the optimizer's state is on both sides: $(cat plan.offload)"

# Utilisation on the CPU, relative to a given peak: 6 times the weights that multiply, and attention.
train mfu --sample 0 --peak-tflops 0.5 --mesh dp=2,tp=2
grep -q '^peak: 0.5 TFLOP/s, as --peak-tflops says' mfu.out || fail "the peak is not printed: $(cat mfu.out)"
grep -q 'tok/s  MFU ' mfu.err || fail "the progress lines have no MFU: $(cat mfu.err)"
python3 - mfu.jsonl <<'PYTHON' || fail "the MFU of the log"
import json, statistics, sys
lines = [json.loads(line) for line in open(sys.argv[1])]
steps, summary = lines[:-1], lines[-1]["summary"]
flops = 6 * (34976 - 256 * 32) + 12 * 2 * 32 * 32
assert summary["flops_per_token"] == flops and summary["devices"] == 1 and summary["peak_tflops"] == 0.5, summary
for s in steps:
    assert abs(s["mfu"] - s["tokens_per_second"] * flops / 0.5e12) < 1e-9 * s["mfu"], s
assert summary["mfu"] == sorted(s["mfu"] for s in steps)[len(steps) // 2], summary
PYTHON

# From here: a program whose GPU is the CPU.
cpu=$trainer
stand_in=$BIN/../tests/train_llama_stand_in
[ -x "$stand_in" ] || { echo "$stand_in is not built: the rest is left out"; exit 0; }

train cpu --mesh dp=2,tp=2 --sample 20 --held-out 0.001
train cpu_all --mesh dp=2,tp=2 --sample 0
sed 's/"vocab_size": 131/"vocab_size": 256/' "$SOURCE/tests/data/llama_dots1/config.json" >experts.json
trained_model=experts.json
experts="--expert-bias-rate 0.01 --balance-loss 0.01 --expert-limit 1.5 --sample 0"
# shellcheck disable=SC2086
train cpu_experts $experts --mesh dp=2,ep=2 --micro-batch 2
unset trained_model
train cpu_apart --mesh dp=2,cp=2 --documents apart --end-of-document 10 --held-out 0.001 --sample 0
trainer=$stand_in
gpu="--device cuda --held-out 0.001"
# shellcheck disable=SC2086
{
  against cpu 1e-4 gpu $gpu --mesh dp=2,tp=2 --sample 20
  [ "$(sampled cpu)" = "$(sampled gpu)" ] || fail "another text"
  [ "$(logs get cpu.jsonl bytes_sent)" = "$(logs get gpu.jsonl bytes_sent)" ] || fail "other bytes than the CPU"
  grep -q "^on stand-in, attention: plait's, no graph" gpu.out || fail "the device is not printed: $(cat gpu.out)"
  grep -q "^peak: not known for float of 'stand-in'; give --peak-tflops" gpu.out || fail "the peak: $(cat gpu.out)"
  ! grep -q 'comm ' gpu.err || fail "a share of communication that was not measured: $(cat gpu.err)"

  against cpu_all 1e-4 gpu_pp --device cuda --mesh pp=2,cp=2,tp=2 --micro-batch 2 --sample 0 --recompute selective

  trained_model=experts.json
  against cpu_experts 1e-4 gpu_experts $experts --device cuda --mesh ep=2,tp=2 --micro-batch 2
  unset trained_model

  against cpu_apart 1e-4 gpu_apart $gpu --mesh dp=2,cp=2 --documents apart --end-of-document 10 --sample 5

  # A replayed step equals the step.
  train plain --device cuda --precision bf16 --sample 0 --graph off --peak-tflops 1
  train graph --device cuda --precision bf16 --sample 0 --graph on
  logs check plain.jsonl 5 falls
  grep -q 'MFU' plain.err || fail "no MFU on the GPU: $(cat plain.err)"
  grep -q 'each step replayed as a graph' graph.out || fail "no graph: $(cat graph.out)"
  [ "$(hash_of graph)" = "$(hash_of plain)" ] || fail "a graph computes otherwise"
  for what in optimizer activations both; do
    train offload --device cuda --precision bf16 --sample 0 --graph on --offload $what
    [ "$(hash_of offload)" = "$(hash_of plain)" ] || fail "--offload $what computes otherwise"
  done

  # Saving between replays changes no result. A run resumes with the same bits, replayed or not, offloaded or not; on
  # the CPU, and from a state of the CPU, to parity.
  train saving --device cuda --precision bf16 --sample 0 --graph on --checkpoint-dir states --save-every 3
  [ "$(hash_of saving)" = "$(hash_of plain)" ] || fail "saving changes the training"
  train paged --device cuda --precision bf16 --sample 0 --graph on --checkpoint-dir paged --save-every 3 \
    --checkpoint-staging pageable
  cmp states/step-00000003/data/w00000.safetensors paged/step-00000003/data/w00000.safetensors ||
    fail "pageable staging saves other bytes"
  for how in "--graph on" "--graph off" "--graph on --offload optimizer"; do
    rm -f onwards.jsonl
    train onwards --device cuda --precision bf16 --sample 0 $how --resume states/step-00000003
    [ "$(hash_of onwards)" = "$(hash_of plain)" ] || fail "$how: a state goes on with other bits"
  done
  trainer=$cpu
  rm -f onwards.jsonl
  train onwards --precision bf16 --sample 0 --mesh tp=2 --resume states/step-00000003
  logs losses plain.jsonl onwards.jsonl 5e-3 4
  train cpu_states --sample 0 --mesh dp=2,tp=2 --checkpoint-dir cpu_states --save-every 3
  trainer=$stand_in
  train from_cpu --device cuda --sample 0 --mesh tp=2 --resume cpu_states/step-00000003
  logs losses cpu_states.jsonl from_cpu.jsonl 1e-4 4

  # Gradients in bf16 are near those in float, replayed and offloaded or not, and resume from states of either type.
  narrow="--device cuda --precision bf16 --gradients bf16 --sample 0"
  train narrow $narrow --graph off
  logs check narrow.jsonl 5 falls
  [ "$(hash_of narrow)" != "$(hash_of plain)" ] || fail "--gradients bf16 has the bits of float"
  for how in "--graph on" "--graph on --offload optimizer"; do
    train narrow_again $narrow $how
    [ "$(hash_of narrow_again)" = "$(hash_of narrow)" ] || fail "$how: other bits with --gradients bf16"
  done
  train plain_ranks --device cuda --precision bf16 --sample 0 --mesh dp=2,tp=2
  for how in "--data-parallel zero2" "--data-parallel zero3 --reduce-in float" "--optimizer adamw --moments int8"; do
    against plain_ranks 2e-2 narrow_ranks $narrow --mesh dp=2,tp=2 $how
  done
  rm -f onwards.jsonl
  train onwards $narrow --mesh pp=2 --micro-batch 4 --resume states/step-00000003
  logs losses plain.jsonl onwards.jsonl 5e-3 4

  # An evaluation at each save changes no replay.
  train held --device cuda --precision bf16 --sample 0 --graph on --held-out 0.001
  train judged --device cuda --precision bf16 --sample 0 --graph on --held-out 0.001 --checkpoint-dir judged \
    --save-every 1 --keep-best held-out
  [ "$(hash_of held)" = "$(hash_of judged)" ] || fail "--keep-best changes the training"

  # Products measured in the first step, and used from a file by another run.
  PLAIT_STAND_IN_DEVICES=2 train measured $gpu --mesh dp=2 --backend nccl --sample 0 --products products.txt
  head -n 1 products.txt | grep -q '^plait products 1: stand-in, cuBLASLt' || fail "the file: $(cat products.txt)"
  [ "$(wc -l <products.txt)" -gt 10 ] || fail "few products: $(cat products.txt)"
  cp products.txt kept.txt
  PLAIT_STAND_IN_DEVICES=2 train tuned $gpu --mesh dp=2 --backend nccl --sample 0 --products products.txt
  cmp -s products.txt kept.txt || fail "--products writes a file that is there"
  [ "$(hash_of measured)" = "$(hash_of tuned)" ] || fail "other weights"
  echo 'one: two' >>kept.txt
  refused "--products: 'kept.txt': line [0-9]* is not a product with its choice: 'one: two'" "$stand_in" --products kept.txt

  # One GPU for each rank; stages are replayed too.
  PLAIT_STAND_IN_DEVICES=2 against cpu 1e-4 nccl $gpu --mesh dp=2 --backend nccl --sample 5
  grep -q 'each step replayed as a graph' nccl.out || fail "no graph: $(cat nccl.out)"
  PLAIT_STAND_IN_DEVICES=4 against cpu_all 1e-4 nccl_pp --device cuda --mesh pp=2,tp=2 --micro-batch 2 --backend nccl --sample 0
  grep -q 'each step replayed as a graph' nccl_pp.out || fail "no graph: $(cat nccl_pp.out)"
  trained_model=experts.json
  PLAIT_STAND_IN_DEVICES=2 train nccl_padded $experts --device cuda --mesh ep=2 --micro-batch 4 --backend nccl \
    --expert-rows padded
  unset trained_model
  logs same cpu_experts.jsonl nccl_padded.jsonl 1e-4
  grep -q 'each step replayed as a graph' nccl_padded.out || fail "no graph: $(cat nccl_padded.out)"
}

PLAIT_STAND_IN_DEVICES=0 refused '--device cuda: there is no CUDA device here' "$stand_in"
PLAIT_STAND_IN_MAJOR=7 refused '--device cuda: device 0 (stand-in) has compute capability 7.0, must be at least 8.0; choose another by options::device' "$stand_in"
refused '--mesh dp=2 has 2 ranks, but --backend nccl was started as one process, which sees 1 GPU' "$stand_in" \
  --mesh dp=2 --backend nccl
# A process that a launcher started uses no GPU except its own: other processes may use the others exclusively.
launched() {
  RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=1 PLAIT_STAND_IN_DEVICES=2 refused "$@" --mesh dp=2 --backend nccl
}
PLAIT_STAND_IN_TAKEN=0 PLAIT_STAND_IN_MEMORY=1000000 launched 'out of memory on device 1' "$stand_in" --memory-share 1000
PLAIT_STAND_IN_TAKEN=0 PLAIT_STAND_IN_MEMORY=1000000 launched \
  '--memory-share 1: the run needs at least .* of the memory of GPU 1, and .* are available' "$stand_in" --model small
PLAIT_STAND_IN_TAKEN=1 launched '--device cuda: choosing the GPU: cudaErrorDevicesUnavailable' "$stand_in"
PLAIT_STAND_IN_DEVICES=0 refused '--device cuda: there is no CUDA device here (no CUDA-capable device is detected)' "$stand_in" \
  --backend nccl
refused '--graph on with --trace or --timeline: a replayed step records no times; legal is --graph off' "$stand_in" --graph on \
  --trace trace.json
refused '--graph on: a step with experts waits for their counts on the host, which a graph cannot replay; legal are --graph off and --expert-rows padded' \
  "$trainer" --model tiny-experts --graph on
refused '--graph on: 2 ranks that share a GPU' "$stand_in" --mesh dp=2 --graph on
refused '--mesh dp=65: 65 ranks; one GPU' "$stand_in" --mesh dp=65
refused '--attention-kernel cudnn: this program was built without cuDNN' "$stand_in" --attention-kernel cudnn --precision bf16
refused '--attention-sums any: this program was built without cuDNN' "$stand_in" --attention-sums any --precision bf16

# Out of memory, where the limit exceeds the device's memory; the message includes the plan.
"$stand_in" --model small --dry-run --device cuda --precision bf16 >plan.out || fail "the plan"
code=0
PLAIT_STAND_IN_MEMORY=60000000 timeout 60 "$stand_in" --model small --data "$text" --device cuda --precision bf16 --steps 1 \
  --memory-share 1000 >stdout 2>stderr || code=$?
[ "$code" = 1 ] || fail "out of memory: exit code $code, $(cat stderr)"
python3 - "$(planned 'in all' plan.out)" <<'PYTHON' || fail "out of memory: $(cat stderr)"
import re, sys
bytes = int(re.search("out of memory on device 0: .*; the plan for a rank is ([0-9]+)", open("stderr").read())[1])
planned = float(sys.argv[1].split()[0]) * {"B": 1, "kB": 1e3, "MB": 1e6}[sys.argv[1].split()[1]]
sys.exit(0 if abs(bytes / planned - 1) < 0.006 else f"{bytes} is not {planned}")
PYTHON
