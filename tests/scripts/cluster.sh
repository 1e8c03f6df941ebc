#!/bin/sh
# Checks examples/cluster/train.sbatch: its syntax is valid, and the trainer has the options in it and in its README. If
# Slurm is installed, runs it on a cluster of this machine only. Four ranks that receive SIGTERM save, the job is queued
# again and resumes from that step; scancel ends it.
# timeout: 300
. "$(dirname "$0")/lib/common.sh"

folder=$SOURCE/examples/cluster
bash -n "$folder/train.sbatch" || fail "train.sbatch is not a script of bash"
"$trainer" --help >help.out
# Lines that end in a backslash continue. Options after the program's or the script's name are the trainer's.
cat "$folder/train.sbatch" "$folder/README.md" | sed -e ':a' -e '/\\$/N; s/\\\n//; ta' |
  sed -n 's/.*\(train_llama\|train.sbatch\|\$trainer"\) //p' | grep -o -e '--[a-z][a-z-]*' | sort -u >options
[ "$(wc -l <options)" -ge 8 ] || fail "only these options are named: $(cat options)"
while read -r option; do
  grep -q -e "^ *${option}[ ,]" help.out || fail "the trainer has no $option"
done <options

PATH=$PATH:/usr/sbin
for program in slurmctld slurmd sbatch munged; do
  command -v $program >/dev/null || { echo "there is no $program"; exit 77; }
done
"$trainer" --backend mpi --dry-run >probe.out 2>&1 || { cat probe.out; exit 77; }

# A cluster of one node, whose daemons run as this user, on this machine's address.
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
node=$(uname -n | cut -d. -f1)
mkdir state spool
cat >slurm.conf <<CONF
ClusterName=test
SlurmctldHost=$node(127.0.0.1)
SlurmctldPort=$port
SlurmdPort=$((port > 60000 ? port - 1 : port + 1))
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$work/munge.socket,cred_expire=5
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
NodeName=$node NodeAddr=127.0.0.1 CPUs=4
PartitionName=all Nodes=ALL Default=YES
CONF
export SLURM_CONF="$work/slurm.conf"
head -c 128 /dev/urandom >munge.key
chmod 600 munge.key
daemons=""
leave() {
  [ -z "${job:-}" ] || { scancel "$job" && until_line '' squeue -h; } 2>/dev/null || :
  # shellcheck disable=SC2086  # a list of numbers
  [ -z "$daemons" ] || { kill $daemons && wait $daemons; } 2>/dev/null || :
  rm -rf "$work"
}
trap leave EXIT
start() {
  "$@" >"$1.out" 2>&1 &
  daemons="$daemons $!"
}
# until_line REGEX COMMAND...: waits until the command prints such a line, or no line if REGEX is empty.
until_line() {
  expected=$1
  shift
  for _ in $(seq 300); do
    if [ -z "$expected" ]; then [ -n "$("$@" 2>/dev/null)" ] || return 0; fi
    if [ -n "$expected" ] && "$@" 2>/dev/null | grep -q "$expected"; then return 0; fi
    sleep 0.2
  done
  return 1
}
start munged --foreground --force --key-file="$work/munge.key" --socket="$work/munge.socket" \
  --pid-file="$work/munged.pid" --seed-file="$work/munge.seed" --log-file="$work/munge.log"
until_line munge.socket ls || { cat munged.out && exit 77; }
start slurmctld -D
start slurmd -D
until_line '^idle' sinfo -h -o %T || { echo "Slurm does not start here" && cat slurmctld.out slurmd.out && exit 77; }
srun --mpi=list 2>&1 | grep -qw pmix || { echo "this Slurm has no pmix, with which Open MPI's processes start"; exit 77; }

export TRAINER="$trainer"
job=$(sbatch --parsable --nodes=1 --cpus-per-task=1 --output=job.out "$folder/train.sbatch" --model config.json \
  --data "$text" --seq 32 --global-batch 8 --steps 1000000 --mesh dp=2,tp=2 --sample 0 --log run.jsonl) ||
  fail "sbatch refuses train.sbatch"
said() { tr '\r' '\n' <job.out; }
# saved NUMBER: the step number in the NUMBERth line that reports a saved step.
saved() { said | sed -n 's/^saved step \([0-9]*\): .*/\1/p' | sed -n "$1p"; }

until_line '"step": *2,' cat run.jsonl || fail "no rank trains: $(said)"
[ "$(said | grep -c ' 4 ranks (dp=2, tp=2)')" = 1 ] || fail "there are not four ranks: $(said)"
scancel --signal=TERM "$job"
until_line '^continues from step' said || fail "the job does not resume: $(said) $(scontrol show job "$job")"
[ -n "$(saved 1)" ] || fail "SIGTERM saves nothing: $(said)"
said | grep -q "^continues from step $(saved 1)$" || fail "not what was saved: $(said)"
until_line "\"step\": *$(($(saved 1) + 2))," cat run.jsonl || fail "the resumed job does not train: $(said)"

scancel "$job"
until_line '' squeue -h || fail "scancel does not end the job: $(squeue)"
[ "$(saved 2)" -gt "$(saved 1)" ] || fail "scancel saves nothing: $(said)"
scontrol show job "$job" >shown
if ! grep -q 'JobState=CANCELLED' shown || ! grep -q 'Restarts=1 ' shown; then fail "$(cat shown)"; fi
