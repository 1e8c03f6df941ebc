#!/bin/sh
# The trainer with a process per rank: it has the losses of threads; each error is printed once and ends every process.
# timeout: 480
# runs: with --all
. "$(dirname "$0")/lib/common.sh"

command -v mpirun >/dev/null || { echo "no mpirun"; exit 77; }
"$trainer" --backend mpi --dry-run >probe.out 2>&1 || {
  grep -q 'built without MPI' probe.out && { cat probe.out; exit 77; }
  fail "--backend mpi --dry-run: $(cat probe.out)"
}
launch="timeout 60 mpirun -n 4 --allow-run-as-root --oversubscribe $trainer --backend mpi --model config.json --seq 32
  --global-batch 8 --steps 5"

# shellcheck disable=SC2086
for precision in double:1e-10 float:1e-5; do
  tolerance=${precision#*:} precision=${precision%:*}
  train threads --mesh dp=2,tp=2 --precision $precision --sample 40
  $launch --data "$text" --mesh dp=2,tp=2 --precision $precision --sample 40 --log mpi.jsonl --plot mpi.svg \
    >mpi.out 2>mpi.err || fail "mpirun: $(cat mpi.err)"
  logs same threads.jsonl mpi.jsonl "$tolerance"
  [ "$(logs get threads.jsonl bytes_sent)" = "$(logs get mpi.jsonl bytes_sent)" ] || fail "other bytes than threads"
  [ -s mpi.svg ] || fail "there is no picture"
  [ "$(grep -c 'sampled text' mpi.out)" = 1 ] || fail "the text is not printed once: $(cat mpi.out)"
done

# The number of processes is the plan's number of ranks.
# shellcheck disable=SC2086
$launch --data "$text" --plan auto --cluster cpu --sample 0 >mpi.out 2>mpi.err || fail "--plan auto: $(cat mpi.err)"
grep -q '^predicted: .* a step and .* of a rank; measured: ' mpi.out || fail "no prediction: $(cat mpi.out)"
[ $(($(sed -n 's/^plan: --mesh dp=\(.*\),pp=\(.*\),cp=\(.*\),tp=\([0-9]*\) .*/\1*\2*\3*\4/p' mpi.out))) = 4 ] ||
  fail "the plan is not of four ranks: $(cat mpi.out)"

# refused TEXT ARGUMENTS...: one message on stderr with this text, a non-zero exit code, no file.
refused() {
  expected=$1
  shift
  code=0
  # shellcheck disable=SC2086
  $launch --log bad.jsonl --plot bad.svg "$@" >bad.out 2>bad.err || code=$?
  case $code in 0 | 124) fail "mpirun $*: exit code $code" ;; esac
  [ "$(grep -c "^train_llama: .*$expected" bad.err)" = 1 ] || fail "mpirun $*: not '$expected' once: $(cat bad.err)"
  ! ls bad.jsonl* bad.svg* 2>/dev/null || fail "mpirun $*: left files"
}
refused 'dp=2 \* pp=1 \* ep=1 \* cp=1 \* tp=4 multiply to 8 ranks, and there are 4' --data "$text" --mesh dp=2,tp=4
refused '--cluster cpu:8 names 8 ranks, but --backend mpi was started with 4; they must be equal' --data "$text" \
  --plan auto --cluster cpu:8
refused "--memory-share 1e-09: the run needs at least [0-9.]* [kM]B of this host's memory" --data "$text" \
  --mesh dp=2,tp=2 --memory-share 1e-9
refused '--nosuch' --data "$text" --mesh dp=2,tp=2 --nosuch
refused "cannot open 'missing.txt'" --data missing.txt --mesh dp=2,tp=2

# Ranks with different options: an error before the first step, printed once.
odd_one="timeout 20 mpirun --allow-run-as-root --oversubscribe"
ours="$trainer --backend mpi --model config.json --data $text --seq 32 --global-batch 8 --steps 5 --sample 0 --mesh dp=2,tp=2"
# disagree TEXT ARGUMENTS...: only rank 2 of four has ARGUMENTS.
disagree() {
  expected=$1
  shift
  code=0
  # shellcheck disable=SC2086
  $odd_one -n 2 $ours --log bad.jsonl : -n 1 $ours "$@" : -n 1 $ours >bad.out 2>bad.err || code=$?
  case $code in 0 | 124) fail "rank 2 with $*: exit code $code" ;; esac
  [ "$(grep -c '^train_llama: ' bad.err)" = 1 ] || fail "rank 2 with $*: not one message: $(cat bad.err)"
  grep -q "^train_llama: .*$expected" bad.err || fail "rank 2 with $*: '$expected' is not in: $(cat bad.err)"
  ! ls bad.jsonl* 2>/dev/null || fail "rank 2 with $*: left files"
}
all="; every rank needs the same options$"
disagree "rank 2 was started with --lr 0.01, ranks 0, 1, 3 with --lr 0.003$all" --lr 0.01
disagree "rank 2 was started with --steps 7, ranks 0, 1, 3 with --steps 5$all" --steps 7
disagree "rank 2 was started with --seed 4611686018427387904, ranks 0, 1, 3 with --seed 1$all" --seed 4611686018427387904
disagree "rank 2 was started with --dry-run, ranks 0, 1, 3 without --dry-run$all" --dry-run
disagree "rank 2 was started with --trace, ranks 0, 1, 3 without --trace$all" --trace trace.json
disagree "rank 2 was started with --help, ranks 0, 1, 3 without --help$all" --help
disagree "rank 2 was started with --prompt '', ranks 0, 1, 3 with --prompt 'And '$all" --prompt ''
mkdir elsewhere
sed '1s/./#/' "$text" >elsewhere/kjv.txt # of the same name and size
disagree "rank 2 was started with --data 'kjv.txt of [0-9]* bytes with digest [0-9a-f]*', ranks 0, 1, 3 with --data 'kjv.txt of" \
  --data elsewhere/kjv.txt
sed 's/"rms_norm_eps": [^,]*,//; s/{/{"rms_norm_eps": 1e-4, /' config.json >elsewhere/config.json
disagree "rank 2 was started with --model's rms_norm_eps 0.0001, ranks 0, 1, 3 with --model's rms_norm_eps" \
  --model elsewhere/config.json
# An error of one rank only is reported for that rank.
disagree "rank 2: --data: cannot open 'missing.txt'" --data missing.txt
# Options with equal meaning, and options that may differ, train: another folder, another spelling, outputs of rank 0.
cp "$text" elsewhere/kjv.txt
cp config.json elsewhere/same.json
# shellcheck disable=SC2086
$odd_one -n 2 $ours --log one.jsonl : -n 2 $ours --lr 3e-3 --data elsewhere/kjv.txt --model elsewhere/same.json \
  --threads 2 --peak-tflops 1 >same.out 2>same.err || fail "the same options in other words: $(cat same.err)"
[ "$(logs get one.jsonl steps)" = 5 ] || fail "the same options in other words: not 5 steps"

# Model directories with the same weights in different folders: every process reads and writes its parts.
convert="$trainer --backend mpi --seq 32 --steps 0 --sample 0 --mesh pp=2,tp=2"
model=$SOURCE/tests/data/llama_mha
mkdir copied
for file in config.json model.safetensors; do cat "$model/$file" >"copied/$file"; done
# shellcheck disable=SC2086
$odd_one -n 2 $convert --init-from $model --export-hf exported : -n 2 $convert --init-from copied --export-hf exported \
  >convert.out 2>convert.err || fail "a conversion: $(cat convert.err)"
python3 "$here/lib/tensors.py" "$model" exported || fail "other tensors were exported"
[ "$(grep -c "^the model is in 'exported'" convert.out)" = 1 ] || fail "not said once: $(cat convert.out)"
printf '\001' | dd of=copied/model.safetensors bs=1 seek="$(($(wc -c <copied/model.safetensors) - 1))" conv=notrunc 2>/dev/null
# shellcheck disable=SC2086
! $odd_one -n 2 $convert --init-from $model : -n 2 $convert --init-from copied >convert.out 2>convert.err ||
  fail "ranks begin with different weights"
grep -q "^train_llama: ranks 2, 3 were started with --init-from '21 tensors, digest [0-9a-f]*', ranks 0, 1 with" convert.err ||
  fail "different weights: $(cat convert.err)"

# --backend mpi is missing: four trainings of one rank each would write to the same files. Each process finds this
# itself.
# shellcheck disable=SC2086
! $launch --backend threads --data "$text" --log bad.jsonl >bad.out 2>bad.err || fail "lonely processes train"
grep -q '^train_llama: --backend threads: this is one of 4 processes' bad.err || fail "$(cat bad.err)"
! ls bad.jsonl* 2>/dev/null || fail "lonely processes left files"

# A process that stops without the launcher noticing: the others end after the deadline.
# shellcheck disable=SC2086
$launch --data "$text" --mesh dp=2,tp=2 --steps 1000000 --sample 0 --deadline 2 --log stopped.jsonl \
  >stopped.out 2>stopped.err &
launcher=$!
until [ -s stopped.jsonl ]; do
  kill -s 0 "$launcher" 2>/dev/null || fail "--deadline 2: $(cat stopped.err)"
  sleep 0.1
done
stopped=$(ps -o pid= --ppid "$(ps -o pid= --ppid "$launcher" | tr -d ' ')" | tail -n 1 | tr -d ' ')
rank=$(tr '\0' '\n' <"/proc/$stopped/environ" | sed -n 's/^OMPI_COMM_WORLD_RANK=//p')
kill -s STOP "$stopped"
code=0
wait "$launcher" || code=$?
case $code in 0 | 124 | 137) fail "a process that stops: exit code $code" ;; esac
grep -q "did not finish within its deadline of 2 s: .*rank $rank is silent" stopped.err || fail "a process that stops: $(cat stopped.err)"

# A directory on a disk of one host only: an error before the first step. A separate mount stands in for it.
mkdir own
if unshare -m mount -t tmpfs none own 2>/dev/null; then
  for option in "--checkpoint-dir own" "--export-hf own/model"; do
    # shellcheck disable=SC2086,SC2016
    ! $odd_one -n 3 $ours $option : -n 1 unshare -m sh -c 'mount -t tmpfs none own && exec "$@"' sh $ours $option \
      >own.out 2>own.err || fail "$option: ranks train with two directories"
    grep -q "^train_llama: ${option%% *}: 'own' is not one directory for all ranks: rank 3 on .* cannot see" own.err ||
      fail "$option: $(cat own.err)"
    ! grep -q '^step ' own.out own.err || fail "$option: steps were made before: $(cat own.out)"
  done
fi

# A dry run prints one plan, for any number of processes.
# shellcheck disable=SC2086
[ "$($launch --mesh dp=2,tp=2 --dry-run | grep -c '^memory of a rank')" = 1 ] || fail "the plan is not printed once"

# Errors of a dry run after the start of the ranks are printed once too.
refused "there is no 'absent'" --data "$text" --mesh dp=2,tp=2 --resume absent --dry-run

# Ranks in processes read, exchange and save a step: other parts, the same numbers.
train saving --steps 3 --sample 0 --mesh dp=2 --checkpoint-dir saved
for mesh in tp=4 pp=2,tp=2 "dp=2,tp=2 --data-parallel zero3"; do
  rm -rf copied
  # shellcheck disable=SC2086
  $launch --steps 3 --sample 0 --mesh $mesh --resume saved --checkpoint-dir copied >copied.out 2>&1 ||
    fail "mpirun --mesh $mesh --resume: $(cat copied.out)"
  "$BIN/checkpoint_tool" diff saved/step-00000003 copied/step-00000003 >diff.out || fail "$mesh: $(cat diff.out)"
done
begin="--model config.json --data $text --seq 32 --global-batch 8 --steps 1 --sample 0 --backend mpi --mesh tp=4"
# shellcheck disable=SC2086
$odd_one -n 4 "$trainer" $begin --init-from saved >begun.out 2>&1 || fail "mpirun --init-from: $(cat begun.out)"
grep -q "^weights: those of 'saved/step-00000003', with a new optimizer$" begun.out || fail "no source: $(cat begun.out)"
train second --steps 3 --sample 0 --mesh dp=2 --seed 2 --checkpoint-dir second
# shellcheck disable=SC2086
! $odd_one -n 2 "$trainer" $begin --init-from saved : -n 2 "$trainer" $begin --init-from second >begun.out 2>&1 ||
  fail "ranks begin with the weights of two runs"
grep -q "ranks 0, 1 were started with --init-from 'step-00000003, digest [0-9a-f]*', ranks 2, 3 with\|ranks 2, 3 were started with --init-from 'step-00000003, digest" begun.out ||
  fail "two runs: $(cat begun.out)"
