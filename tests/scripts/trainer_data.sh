#!/bin/sh
# Data: token files from examples/tokenize_text.py, weighted sources and separate documents, on several meshes. A
# resumed run continues at the exact sample, and data that differ from the previous data are an error.
# timeout: 240
# runs: with --all
. "$(dirname "$0")/lib/common.sh"

tokenize() { python3 "$SOURCE/examples/tokenize_text.py" "$@" >tokenize.out 2>&1 || fail "tokenize $*: $(cat tokenize.out)"; }
# run NAME ARGUMENTS...: as train, with the data that the arguments name.
run() {
  name=$1
  shift
  rm -f "$name.jsonl"
  timeout 60 "$trainer" --model config.json --seq 32 --global-batch 8 --steps 4 --sample 0 --log "$name.jsonl" "$@" \
    >"$name.out" 2>"$name.err" || fail "$name ($*) ended with $?: $(tail -n 3 "$name.err")"
}
# same A B: losses, numbers of tokens and held-out losses agree to 1e-5.
same() { logs losses "$1.jsonl" "$2.jsonl" 1e-5; }

head -c 60000 "$text" >first.txt
tail -c 90000 "$text" >second.txt
python3 - <<'PY'
import json
lines = open("first.txt", encoding="utf-8", errors="ignore").read().split("\n")
with open("first.jsonl", "w") as f:
    for line in lines: f.write(json.dumps({"text": line, "id": 1}) + "\n")
PY

# Token files of bytes of a text contain that text.
tokenize --tokenizer bytes --output plain first.txt
run as_text --data first.txt
run as_tokens --data plain.bin --mesh dp=2
same as_text as_tokens
python3 - <<'PY' || fail "plain.idx is not what Megatron reads"
import struct
index, tokens = open("plain.idx", "rb").read(), open("plain.bin", "rb").read()
count = len(open("first.txt", "rb").read())
assert index == b"MMIDIDX\0\0" + struct.pack("<QBQQiqqq", 1, 8, 1, 2, count, 0, 0, 1)
assert tokens == b"".join(struct.pack("<H", b) for b in open("first.txt", "rb").read())
PY

# Documents: each line is one and ends with token 0. The index and the end tokens agree.
tokenize --tokenizer bytes --output lines --end-of-document 0 first.jsonl
grep -q 'documents end in token 0' tokenize.out || fail "$(cat tokenize.out)"
run apart --data lines.bin --documents apart --held-out 0.1
n=0
while read -r mesh; do
  n=$((n + 1))
  # shellcheck disable=SC2086  # a list of options
  run other --data lines.bin --documents apart --held-out 0.1 --mesh $mesh
  same apart other
done <<'MESHES'
dp=2,cp=2 --micro-batch 2
pp=2,tp=2 --schedule zb_h1 --split measured
cp=4 --attention all_gather_kv:contiguous --data-parallel zero3
cp=2,tp=2 --attention ulysses --recompute full
dp=2 --micro-batch 2 --end-of-document 0
MESHES
[ "$n" = 5 ] || fail "only $n meshes were tried"
run joined --data lines.bin --held-out 0.1
python3 - <<'PY' || fail "documents kept apart are trained on as joined ones are"
import json
apart, joined = ([json.loads(l) for l in open(f"{name}.jsonl")] for name in ("apart", "joined"))
assert apart[0]["loss"] != joined[0]["loss"] and apart[-1]["summary"]["held_out_loss"] != joined[-1]["summary"]["held_out_loss"]
PY
run sampled --data lines.bin --documents apart --mesh cp=2 --sample 5 --prompt ab
run planned --data lines.bin --documents apart --recompute budget:4M --mesh tp=2
"$trainer" --model config.json --seq 32 --data lines.bin --documents apart --dry-run >planned.out || fail "no plan"

# A tokenizer of Hugging Face, made here.
if python3 -c 'import tokenizers' 2>/dev/null; then
  python3 - <<'PY'
import json, os, tokenizers
from tokenizers import models, pre_tokenizers, processors, trainers
os.mkdir("model")
t = tokenizers.Tokenizer(models.BPE())
t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
t.train(["first.txt"], trainers.BpeTrainer(vocab_size=600, special_tokens=["<s>", "</s>"], show_progress=False,
                                           initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
t.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
t.save("model/tokenizer.json")
json.dump({"eos_token": {"content": "</s>"}}, open("model/tokenizer_config.json", "w"))
PY
  tokenize --tokenizer model --output subwords first.jsonl
  python3 - <<'PY' || fail "the tokens are not the tokenizer's"
import json, struct, tokenizers
t = tokenizers.Tokenizer.from_file("model/tokenizer.json")
expected = []
for line in open("first.jsonl"):
    ids = t.encode(json.loads(line)["text"], add_special_tokens=False).ids
    expected += ids + [1] if ids else []
raw = open("subwords.bin", "rb").read()
assert list(struct.unpack("<%dH" % (len(raw) // 2), raw)) == expected
PY
  sed 's/"vocab_size": 256/"vocab_size": 600/' config.json >subwords.json
  run subwords --model ./subwords.json --data subwords.bin --documents apart --mesh dp=2,tp=2
else
  echo "the package tokenizers is not there: only bytes were tried"
fi

# Weighted sources: the weights and their multiples give the same samples on every mesh; each source resumes at its
# place.
blend="--data lines.bin second.txt --data-weights"
# shellcheck disable=SC2086
refused_format() { "$trainer" --model config.json --seq 32 $blend 1,2 --documents apart 2>&1 | grep -q -e "$1" || fail "no '$1'"; }
refused_format "--documents: 'second.txt' is read as bytes, which does not say where documents end"
tokenize --tokenizer bytes --output more --end-of-document 0 second.txt
blend="--data lines.bin more --data-weights"
# shellcheck disable=SC2086
run blended $blend 0.7,0.3 --steps 6 --documents apart --mesh dp=2 --checkpoint-dir ck --save-every 3 --held-out 0.05
while read -r mesh; do
  # shellcheck disable=SC2086
  run other $blend 7,3 --steps 6 --documents apart --held-out 0.05 --mesh $mesh
  same blended other
done <<'MESHES'
dp=1 --micro-batch 8
dp=4 --micro-batch 2
pp=2 --micro-batch 8
MESHES
# shellcheck disable=SC2086
run resumed $blend 0.7,0.3 --steps 6 --documents apart --mesh dp=2 --resume ck/step-00000003 --held-out 0.05
[ "$(hash_of resumed)" = "$(hash_of blended)" ] || fail "a resumed run does not go on at its sample"
run halves --data lines.bin --steps 6 --documents apart --mesh dp=2 --held-out 0.05
[ "$(hash_of halves)" != "$(hash_of blended)" ] || fail "the second source is not read"

# Data that differ from the previous data are an error.
given="--model config.json --seq 32 --global-batch 8 --steps 6 --sample 0"
new="is not what 'ck/step-00000003' was saved with.* it was \[.*\], and is \[.*\]; --on-new-data begin continues with"
refused "$new" --data lines.bin --mesh dp=2 --resume ck/step-00000003
# shellcheck disable=SC2086
refused "$new" $blend 0.6,0.4 --mesh dp=2 --resume ck/step-00000003 --held-out 0.05
# shellcheck disable=SC2086
refused "$new" $blend 0.7,0.3 --mesh dp=2 --resume ck/step-00000003 --held-out 0.1
run tokens --data lines.bin --steps 2 --checkpoint-dir tokens
new2="is not what .* was saved with.* as megatron, .*, and is \\[.* as bytes, "
# New data start at their first sample, and a run that resumes from there knows this.
run begun --data second.txt --steps 6 --mesh dp=2 --resume ck/step-00000003 --on-new-data begin --checkpoint-dir new --save-every 1
run again --data second.txt --steps 6 --mesh dp=2 --resume new/step-00000005
[ "$(hash_of again)" = "$(hash_of begun)" ] || fail "a run on new data does not go on at its sample"
run copied --steps 5 --mesh pp=2 --resume new/step-00000005 --checkpoint-dir copied
run again --data second.txt --steps 6 --mesh dp=2 --resume copied
[ "$(hash_of again)" = "$(hash_of begun)" ] || fail "a copy forgets the place in the data"
refused "--data is missing: 5 of --steps 6 are done" --resume new/step-00000005
refused "$new2" --data lines.bin --data-format bytes --resume tokens
cat first.txt >changed.txt
run base --data changed.txt --steps 2 --checkpoint-dir changed
printf x | dd of=changed.txt bs=1 seek=30000 conv=notrunc status=none
refused "is not what .* was saved with" --data changed.txt --resume changed

refused "--data-weights 1,x: 'x' is not a number" --data first.txt second.txt --data-weights 1,x
refused "--data-weights 1: 1 weights for 2 --data" --data first.txt second.txt --data-weights 1
refused "--data-weights: -1 is no weight" --data first.txt second.txt --data-weights 1,-1
refused "--end-of-document 0 is for --documents apart" --data first.txt --end-of-document 0
refused "--end-of-document is 256; legal are the tokens, 0 to 255" --data first.txt --documents apart --end-of-document 256
refused "--documents: 'first.txt' is read as bytes" --data first.txt --documents apart
refused "--documents 'split' is unknown; legal are joined, apart" --data first.txt --documents split
refused "--on-new-data begin is for --resume" --data first.txt --on-new-data begin
# Documents of one token have no targets, so there is no loss.
yes '{"text": "a"}' | head -n 4000 >letters.jsonl
tokenize --tokenizer bytes --output letters letters.jsonl
refused "--data: no token of step 1 has a target" --data letters.bin --documents apart --mesh dp=2
refused "--held-out: no held-out token has a target" --data letters.bin --documents apart --held-out 0.1 --steps 0

# Errors of the script.
# no_tokens TEXT ARGUMENTS...
no_tokens() {
  expected=$1
  shift
  if python3 "$SOURCE/examples/tokenize_text.py" "$@" >stdout 2>stderr; then fail "tokenize $* was accepted"; fi
  grep -q -e "^tokenize_text.py: .*$expected" stderr || fail "tokenize $*: '$expected' is not in: $(cat stderr)"
}
printf '{"text": "a\\ud800"}\n' >half.jsonl
no_tokens "'half.jsonl', line 1: 'text' (--field) has '.ud800', half of a surrogate pair" --tokenizer bytes --output x half.jsonl
# Input that is not text, or JSON lines under another name, would be trained on as raw text.
gzip -c first.txt >first.jsonl.gz
no_tokens "'first.jsonl.gz' is compressed by gzip; unpack it first" --tokenizer bytes --output x first.jsonl.gz
cp first.jsonl lines.json
no_tokens "'lines.json' has an object with 'text' (--field) in its first line.*ends in .jsonl" --tokenizer bytes --output x lines.json
# The largest token number decides the width of tokens, not the number of tokens.
mkdir stub
cat >stub/tokenizers.py <<'PY'
class Tokenizer:
    from_file = staticmethod(lambda file: Tokenizer())
    no_padding = no_truncation = lambda self: None
    get_vocab = lambda self, with_added_tokens: {"a": 0, "zed": 70000}
    encode_batch = lambda self, texts, add_special_tokens: [type("Ids", (), {"ids": [0, 70000]}) for _ in texts]
PY
touch stub/tokenizer.json
PYTHONPATH=stub python3 "$SOURCE/examples/tokenize_text.py" --tokenizer stub --output gap first.txt >tokenize.out 2>&1 ||
  fail "numbers with a gap: $(cat tokenize.out)"
grep -q 'a vocab_size of at least 70001' tokenize.out || fail "numbers with a gap: $(cat tokenize.out)"
[ "$(od -An -td4 gap.bin | tr -s ' ')" = " 0 70000" ] || fail "numbers with a gap: $(od -An -td4 gap.bin)"
# A killed worker process, as by the out-of-memory killer, ends the script.
cat >killed.py <<'PY'
import os, sys
import tokenize_text
def encode(texts):
    os.kill(os.getpid(), 9)
encode.__module__ = "tokenize_text"
tokenize_text.encode = encode
tokenize_text.main()
PY
code=0
PYTHONPATH=$SOURCE/examples timeout 60 python3 killed.py --tokenizer bytes --output x --workers 2 first.jsonl >stdout 2>stderr || code=$?
[ "$code" = 1 ] || fail "a killed process: exit code $code, $(cat stderr)"
grep -q "^tokenize_text.py: a process that encodes was killed, .* fewer than 2 --workers" stderr || fail "a killed process: $(cat stderr)"
[ ! -e x.bin.tmp ] || fail "a killed process leaves its files"
no_tokens "there is no file 'absent'" --tokenizer bytes --output x absent
no_tokens "'first.jsonl', line 1: no object with a text 'body' (--field)" --tokenizer bytes --output x --field body first.jsonl
: >empty.txt
no_tokens "there is no text" --tokenizer bytes --output x empty.txt
no_tokens "'</s>' is no token" --tokenizer bytes --output x --end-of-document '</s>' first.txt
no_tokens "300 is no token; the vocabulary has 256" --tokenizer bytes --output x --end-of-document 300 first.txt
no_tokens "would overwrite 'lines.bin', which is read" --tokenizer bytes --output lines lines.bin
no_tokens "cannot\|No such file" --tokenizer bytes --output nowhere/x first.txt
[ -z "$(find . -name '*.tmp' -o -name 'x.*')" ] || fail "what was not finished is left: $(find . -name '*.tmp' -o -name 'x.*')"
