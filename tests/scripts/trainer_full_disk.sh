#!/bin/sh
# A disk with room for one training state but not for two. The error names the file and the cause, the previous state
# stays complete, and training continues as if there were no save. With more room a run resumes from that state.
# timeout: 300
# runs: with --all
if [ -z "${PLAIT_MAY_MOUNT:-}" ]; then
  for how in -m -rm; do # mounts that no other process sees: as root, or in a user namespace with the rights of root
    # shellcheck disable=SC2016
    unshare $how sh -c 'd=$(mktemp -d) && trap "rmdir $d" EXIT && mount -t tmpfs none "$d" && umount "$d"' 2>/dev/null ||
      continue
    PLAIT_MAY_MOUNT=1 exec unshare $how sh "$0" "$@"
  done
  echo "no tmpfs may be mounted here"
  exit 77
fi
. "$(dirname "$0")/lib/common.sh"
trap 'umount small 2>/dev/null || true; rm -rf "$work"' EXIT

train whole --steps 6 --sample 0 --mesh dp=2 --micro-batch 4 --checkpoint-dir whole --save-every 2 --keep 9
bytes=$(du -sB1 whole/step-00000002 | cut -f 1)
mkdir small

# full OPTIONS...: saves after steps 2, 4 and 6, of which only the first fits.
full() {
  mount -t tmpfs -o size=$((bytes * 3 / 2)) none small
  code=0
  timeout 60 "$trainer" --model config.json --data "$text" --seq 32 --global-batch 8 --steps 6 --sample 0 \
    --log full.jsonl --checkpoint-dir small/ck --save-every 2 "$@" >full.out 2>full.err || code=$?
  [ "$code" = 1 ] || fail "$*: exit code $code and not 1: $(cat full.err)"
  for step in 4 6; do
    grep -q "^train_llama: step $step is NOT saved: .*cannot write 'small/ck/step-0000000$step.tmp-.*': No space left on device" \
      full.err || fail "$*: the failure of step $step is not told: $(cat full.err)"
  done
  grep -q '^train_llama: .*the last state is not saved: .*No space left on device' full.err ||
    fail "$*: the run does not end with what is lost: $(cat full.err)"
  grep -q '^saved step 2: ' full.out || fail "$*: the first state is not saved: $(cat full.out)"
  [ "$(logs get full.jsonl steps)" = 6 ] || fail "$*: a full disk ends the training"
  [ "$(hash_of full)" = "$(hash_of whole)" ] || fail "$*: a full disk changes the training"
  "$BIN/checkpoint_tool" verify small/ck >verified 2>&1 || fail "$*: the first state is damaged: $(cat verified)"
  [ "$(find small/ck -mindepth 1 -maxdepth 1 -name 'step-*')" = small/ck/step-00000002 ] ||
    fail "$*: not the first state alone: $(ls -a small/ck)"
}

# more: gives the disk more room and resumes.
more() {
  mount -o remount,size=$((bytes * 8)) small
  train more --steps 6 --sample 0 --mesh dp=2 --micro-batch 4 --checkpoint-dir small/ck --resume auto --save-every 2 \
    --keep 1
  "$BIN/checkpoint_tool" verify small/ck >verified 2>&1 || fail "$*: $(cat verified)"
  [ -f small/ck/step-00000006/COMMIT ] || fail "the run that goes on does not save: $(ls small/ck)"
  [ ! -e small/ck/step-00000002 ] || fail "--keep 1 keeps more: $(ls small/ck)"
  "$BIN/checkpoint_tool" diff whole/step-00000006 small/ck/step-00000006 >differs 2>&1 ||
    fail "the run that goes on comes to other numbers: $(cat differs)"
  umount small
}
full --mesh dp=2 --micro-batch 4 --keep 1
more
full --mesh dp=2 --micro-batch 4 --keep 3 --checkpoint-io threads
umount small

# No folder can replace a mount point, so an export there is an error before the first step.
mount -t tmpfs none small
code=0
timeout 60 "$trainer" --model config.json --data "$text" --seq 32 --global-batch 8 --steps 1 --sample 0 \
  --export-hf small >stdout 2>stderr || code=$?
[ "$code" = 1 ] || fail "an export to a mount point: exit code $code and not 1: $(cat stdout stderr)"
grep -q "^train_llama: --export-hf: the folder 'small' cannot be replaced .*; name a new folder in it$" stderr ||
  fail "an export to a mount point: $(cat stderr)"
[ -z "$(find . small -maxdepth 1 -name '*.tmp-*')" ] || fail "what was tried is left: $(ls . small)"
train within --steps 1 --sample 0 --export-hf small/model
[ -f small/model/model.safetensors ] || fail "a folder in a mount point: $(ls small)"
umount small
