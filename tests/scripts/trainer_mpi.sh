#!/bin/sh
# The trainer with a process per rank: the losses of threads; errors are said once, end every process and hang none.
# timeout: 240
. "$(dirname "$0")/lib/common.sh"

command -v mpirun >/dev/null || { echo "no mpirun"; exit 77; }
"$trainer" --backend mpi --dry-run >probe.out 2>&1 || {
  grep -q 'built without MPI' probe.out && { cat probe.out; exit 77; }
  fail "--backend mpi --dry-run: $(cat probe.out)"
}
export OMPI_MCA_mpi_yield_when_idle=1 OMPI_MCA_hwloc_base_binding_policy=none
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

# refused TEXT ARGUMENTS...: one message on stderr with this text, an exit code, no file.
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
refused 'dp=2 \* pp=1 \* cp=1 \* tp=4 multiply to 8 ranks, and there are 4' --data "$text" --mesh dp=2,tp=4
refused '--nosuch' --data "$text" --mesh dp=2,tp=2 --nosuch
refused "cannot open 'missing.txt'" --data missing.txt --mesh dp=2,tp=2

# Forgotten --backend mpi: four trainings of one rank each, into the same files. Each process finds out by itself.
# shellcheck disable=SC2086
! $launch --backend threads --data "$text" --log bad.jsonl >bad.out 2>bad.err || fail "lonely processes train"
grep -q '^train_llama: --backend threads: this is one of 4 processes' bad.err || fail "$(cat bad.err)"
! ls bad.jsonl* 2>/dev/null || fail "lonely processes left files"

# A dry run is one plan, however many processes.
# shellcheck disable=SC2086
[ "$($launch --mesh dp=2,tp=2 --dry-run | grep -c '^memory of a rank')" = 1 ] || fail "the plan is not printed once"
