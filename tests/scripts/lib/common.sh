# Sourced by the tests of the trainer: a small model in the scratch folder, and functions to run it.

. "$(dirname "$0")/lib/base.sh"
trainer=${TRAINER:-$BIN/train_llama}
text=$SOURCE/examples/data/kjv.txt
export PYTHONDONTWRITEBYTECODE=1

[ -x "$trainer" ] || fail "$trainer is not there; build it first"
cd "$work"

cat >config.json <<'JSON'
{"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
 "intermediate_size": 64, "vocab_size": 256, "max_position_embeddings": 256}
JSON

logs() { python3 "$here/lib/logs.py" "$@" || fail "logs.py $*"; }
hash_of() { logs get "$1.jsonl" weights_hash; }
has_mpi() { command -v mpirun >/dev/null && "$trainer" --backend mpi --dry-run >/dev/null 2>&1; }

# refused TEXT ARGUMENTS...: the trainer with the options $given and ARGUMENTS ends with TEXT, a basic regular expression,
# and without the text $untold.
refused() {
  expected=$1
  shift
  code=0
  # shellcheck disable=SC2086  # a list of options
  timeout 20 "$trainer" $given "$@" >stdout 2>stderr || code=$?
  [ "$code" = 1 ] || fail "$*: exit code $code: $(cat stderr)"
  [ -z "${untold:-}" ] || ! grep -q "$untold" stderr || fail "$* tells of $untold: $(cat stderr)"
  grep -q -e "^train_llama: .*$expected" stderr || fail "$*: '$expected' is not in: $(cat stderr)"
}

# wait_until COMMAND...: waits until the command succeeds, for at most as long as a run takes that `timeout 60` ends.
wait_until() {
  for _ in $(seq 650); do
    "$@" && return
    sleep 0.1
  done
  fail "not within a minute: $*"
}

# train NAME ARGUMENTS...: trains $trained_model or the small model; the log is NAME.jsonl, the output NAME.out.
train() {
  name=$1
  shift
  timeout 60 "$trainer" --model "${trained_model:-config.json}" --data "$text" --seq 32 --global-batch 8 --steps 5 --log "$name.jsonl" \
    "$@" >"$name.out" 2>"$name.err" || fail "$name ($*) ended with $?: $(tail -n 3 "$name.err")"
}

# against BASE TOLERANCE NAME ARGUMENTS...: trains NAME, which has the losses and gradient norms of the run BASE.
against() {
  base=$1 tolerance=$2
  shift 2
  train "$@"
  logs same "$base.jsonl" "$1.jsonl" "$tolerance"
}
sampled() { sed -n '/^sampled text:$/,$p' "$1.out"; }
