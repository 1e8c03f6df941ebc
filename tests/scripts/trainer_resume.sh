#!/bin/sh
# Training states: a run resumes from a saved step with the same bits on the same layout, and to parity on another. It
# survives kill -9, signals save, and old steps are removed. Errors name what is wrong with a step or an option.
# timeout: 400
. "$(dirname "$0")/lib/common.sh"

steps_in() { find "$1" -maxdepth 1 -name 'step-*' -printf '%f\n' | sort | tr '\n' ' '; }
tail_of() { # tail_of LOG FIRST: the steps from FIRST on
  python3 - "$1" "$2" <<'PY'
import json, sys
for line in open(sys.argv[1]):
    r = json.loads(line)
    if "step" in r and r["step"] >= int(sys.argv[2]): print(r["step"], repr(r["loss"]), repr(r["grad_norm"]), r["lr"])
PY
}
given="--model config.json --data $text --seq 32 --global-batch 8 --steps 6 --sample 0"
untold='last operations'  # of ranks that wait for each other

# The same layout: the same bits. Others: parity.
n=0
while read -r saved others; do
  n=$((n + 1))
  # shellcheck disable=SC2086  # a list of options
  train "whole$n" --steps 6 --sample 0 $(echo "$saved" | tr '+' ' ') --checkpoint-dir "ck$n" --save-every 3
  grep -q '^saved step 3: .* during training, which it stopped for ' "whole$n.out" || fail "$saved: step 3 is not saved"
  tail_of "whole$n.jsonl" 4 >whole.tail
  rm -f again.jsonl  # a resumed run adds to its log
  # shellcheck disable=SC2086
  train again --steps 6 --sample 0 $(echo "$saved" | tr '+' ' ') --resume "ck$n/step-00000003"
  grep -q '^continues from step 3$' again.out || fail "it does not say that it goes on: $(cat again.out)"
  [ "$(hash_of again)" = "$(hash_of "whole$n")" ] || fail "$saved: other weights than of the run that went through"
  tail_of again.jsonl 1 >again.tail
  cmp -s whole.tail again.tail || fail "$saved: $(paste whole.tail again.tail)"
  [ "$(logs get again.jsonl bytes_as_predicted)" = true ] || fail "$saved: the bytes are not as predicted"
  for other in $others; do
    rm -f other.jsonl
    # shellcheck disable=SC2086
    train other --steps 6 --sample 0 $(echo "$other" | tr '+' ' ') --resume "ck$n/step-00000003"
    logs losses "whole$n.jsonl" other.jsonl 1e-5 4
  done
done <<'LAYOUTS'
--mesh+dp=2,tp=2+--data-parallel+zero1 --mesh+dp=1 --mesh+dp=2,pp=2+--data-parallel+zero3 --mesh+pp=2,cp=2+--schedule+zb_h1
--mesh+pp=2,tp=2 --mesh+dp=4+--data-parallel+zero2+--micro-batch+2 --mesh+cp=2,tp=2+--data-parallel+zero3+--shard+whole
--mesh+dp=2,pp=2+--data-parallel+zero1+--precision+bf16+--moments+int8+--shard+blocks
--mesh+dp=2+--data-parallel+zero2+--precision+bf16-no-masters+--moments+bf16
--mesh+dp=2,tp=2+--data-parallel+zero2+--optimizer+muon+--shard+whole --mesh+pp=2+--optimizer+muon --mesh+tp=4+--optimizer+muon
LAYOUTS
[ "$n" = 5 ] || fail "only $n layouts were tried"

# Moments of one width resume as those of another. Numbers that are exact in both are bitwise equal: bf16 in float, and
# 8 bits in either. Later steps equal those of the uninterrupted run up to the narrower width's rounding.
for moments in full bf16 int8; do
  train "went_$moments" --steps 6 --sample 0 --mesh dp=2 --moments $moments --checkpoint-dir "of_$moments" --save-every 3
done
for from in full bf16 int8; do
  for to in full bf16 int8; do
    train "$from-$to" --steps 6 --sample 0 --mesh tp=2 --moments $to --resume "of_$from/step-00000003"
    logs losses "went_$from.jsonl" "$from-$to.jsonl" 2e-3 4
    rm -rf through back
    train through --steps 3 --sample 0 --moments $to --resume "of_$from/step-00000003" --checkpoint-dir through
    train back --steps 3 --sample 0 --mesh pp=2 --moments $from --resume through --checkpoint-dir back
    code=0
    "$BIN/checkpoint_tool" diff "of_$from/step-00000003" back/step-00000003 >diff.out || code=$?
    case $from-$to in
      full-bf16 | full-int8 | bf16-int8) [ "$code" = 1 ] || fail "moments in $from come back from $to unrounded: $(cat diff.out)" ;;
      *) [ "$code" = 0 ] || fail "moments in $from do not come back from $to: $(cat diff.out)" ;;
    esac
  done
done

# The step is a key of dropout: a resumed run drops the same elements as the uninterrupted run.
train dropped --steps 6 --sample 0 --mesh dp=2,pp=2 --dropout 0.2 --checkpoint-dir dropped --save-every 3
train again_dropped --steps 6 --sample 0 --mesh dp=2,pp=2 --dropout 0.2 --resume dropped/step-00000003
[ "$(hash_of again_dropped)" = "$(hash_of dropped)" ] || fail "a run with dropout goes on with other bits"
train undropped --steps 6 --sample 0 --mesh dp=2,pp=2 --resume dropped/step-00000003
[ "$(hash_of undropped)" != "$(hash_of dropped)" ] || fail "--dropout drops nothing"
# The message names the options that differ from the previous run's, and no others.
grep -qx 'train_llama: --resume: other options than before: --dropout 0, which was 0.2' undropped.err ||
  fail "another --dropout is not said: $(cat undropped.err)"
! grep -q 'other options' again_dropped.err || fail "the options of before are others: $(cat again_dropped.err)"
train smaller --steps 6 --sample 0 --resume dropped/step-00000003 --dropout 0.2 --clip 0.5 --global-batch 4 --dry-run
grep -qx -- '--resume: other options than before: --global-batch 4, which was 8; --clip 0.5, which was 1' smaller.out ||
  fail "a dry run says nothing of other options: $(cat smaller.out)"

# A model with the same shapes may compute something else.
sed 's/"vocab_size"/"rope_theta": 5000, "vocab_size"/' config.json >theta.json
train theta --steps 6 --sample 0 --resume dropped/step-00000003 --dropout 0.2 --model ./theta.json --dry-run
grep -qx -- '--resume: other options than before: --model:rope_theta 5000, which was 10000' theta.out ||
  fail "another model is not said: $(cat theta.out)"
cp config.json same.json
train same --steps 6 --sample 0 --resume dropped/step-00000003 --dropout 0.2 --model ./same.json --dry-run
! grep -q 'other options' same.out || fail "the model of another file is another: $(cat same.out)"
train others --steps 6 --sample 0 --resume dropped/step-00000003 --dropout 0.2 --documents apart --end-of-document 10 \
  --on-nonfinite skip --dry-run
others='--documents apart, which was joined; --end-of-document 10, which was -1; --on-nonfinite skip, which was stop'
grep -qx -- "--resume: other options than before: $others" others.out || fail "other documents are not said: $(cat others.out)"

# A resumed run traces one of its own steps. If it has no step to make, it reports this, and the previous trace stays.
trace="--steps 6 --sample 0 --mesh dp=2,pp=2 --data-parallel zero3 --trace trace.json --timeline timeline.svg"
# shellcheck disable=SC2086  # a list of options
train traced $trace --resume ck1/step-00000003
grep -q '^bubble of step 6: ' traced.out || fail "step 6 is not traced: $(cat traced.out)"
python3 -c 'import json; assert json.load(open("trace.json"))["traceEvents"]' || fail "the trace is empty"
grep -q 'measured: step 6' timeline.svg || fail "the timeline is of another step"
cp trace.json kept.json
cp timeline.svg kept.svg
# shellcheck disable=SC2086
train over $trace --resume ck1/step-00000006
grep -q '^nothing is traced: ' over.out || fail "it does not say that nothing is traced: $(cat over.out)"
{ cmp -s trace.json kept.json && cmp -s timeline.svg kept.svg; } || fail "a run that traces nothing overwrites a trace"

# The learning-rate schedule is the previous one, or another one on request; a copy keeps it.
course="gives another learning rate than 'ck1/step-00000003' was trained with: it was \[cosine from 0.003 to 0.1 of it in 6 steps, 1 of warm-up\]"
for other in "--steps 9" "--lr 0.001" "--warmup 3" "--min-lr-ratio 0.5" "--lr-schedule linear"; do
  # shellcheck disable=SC2086
  refused "$course.*; --on-new-schedule follow continues at step 4" --resume ck1/step-00000003 $other
done
rm -f longer.jsonl
train longer --steps 9 --sample 0 --resume ck1/step-00000006 --on-new-schedule follow --checkpoint-dir longer --save-every 1
[ "$(tail_of longer.jsonl 1 | wc -l)" = 3 ] || fail "a run that was over does not go on: $(cat longer.jsonl)"
train straight --steps 9 --sample 0 --lr 0.003
[ "$(tail_of longer.jsonl 7 | cut -d ' ' -f 4)" = "$(tail_of straight.jsonl 7 | cut -d ' ' -f 4)" ] ||
  fail "it follows another course: $(tail_of longer.jsonl 7)"
train longer --steps 9 --sample 0 --resume longer/step-00000008
# Old steps without a record of the schedule, or of the data, are resumed only on request.
cp -r ck1/step-00000003 old && mkdir olds && mv old olds/step-00000003
for member in scalars/train.rate scalars/train.data scalars/train.data_begin; do
  python3 "$here/lib/steps.py" unset olds/step-00000003 $member || fail "steps.py unset $member"
done
refused "it was \[not recorded.*; --on-new-data begin continues" --resume olds
refused "it was \[not recorded.*; --on-new-schedule follow continues at step 4" --resume olds --on-new-data begin
train old --steps 6 --sample 0 --resume olds --on-new-data begin --on-new-schedule follow --checkpoint-dir renewed
train old --steps 6 --sample 0 --resume renewed # has both records
train constant --steps 3 --sample 0 --lr-schedule constant --warmup 1 --checkpoint-dir constant
# Does not depend on the last step.
train constant --steps 6 --sample 0 --lr-schedule constant --warmup 1 --resume constant

# kill -9: the next run resumes from the newest saved step.
timeout 60 "$trainer" --model config.json --data "$text" --seq 32 --global-batch 8 --mesh dp=2 --steps 1000000 \
  --warmup 0 --checkpoint-dir killed --save-every 2 --keep 2 --log killed.jsonl >killed.out 2>&1 &
watcher=$!
has_two_saves() { [ "$(find killed -maxdepth 1 -name 'step-????????' 2>/dev/null | wc -l)" -ge 2 ]; }
wait_until has_two_saves
program=$(ps -o pid= --ppid "$watcher" | tr -d ' ')
kill -s KILL "$program"
wait "$watcher" 2>/dev/null && fail "the killed run ended well"
newest=$(find killed -maxdepth 1 -name 'step-????????' -printf '%f\n' | sort | tail -n 1)
[ -n "$newest" ] || fail "nothing was saved before the kill: $(cat killed.out)"
at=$(echo "$newest" | sed 's/step-0*//')
train onwards --steps $((at + 2)) --warmup 0 --sample 0 --mesh tp=2 --checkpoint-dir killed --resume auto \
  --on-new-schedule follow --log killed.jsonl
grep -q "^continues from step $at\$" onwards.out || fail "it does not go on from $at: $(cat onwards.out)"
[ -z "$(find killed -name '*.tmp-*')" ] || fail "what was not finished is left: $(find killed -name '*.tmp-*')"
# The log continues too.
[ "$(tail_of killed.jsonl $((at + 1)) | tail -n 2 | cut -d ' ' -f 1 | tr '\n' ' ')" = "$((at + 1)) $((at + 2)) " ] ||
  fail "the log does not go on: $(tail -n 4 killed.jsonl)"

# Retention: the newest two, and every third.
train kept --steps 8 --sample 0 --mesh dp=2 --checkpoint-dir kept --save-every 1 --keep 2 --keep-every 3
[ "$(steps_in kept)" = "step-00000003 step-00000006 step-00000007 step-00000008 " ] || fail "there are $(steps_in kept)"
# The plot includes the previous steps of the log.
cp kept.jsonl plotted.jsonl
train plotted --steps 8 --sample 0 --mesh dp=2 --resume kept/step-00000006 --plot plotted.svg --report plotted.html
for picture in plotted.svg plotted.html; do
  drawn=$(grep -m 1 'stroke-linejoin="round"' $picture | grep -o '[ML][0-9]' | wc -l)
  [ "$drawn" = 8 ] || fail "$picture has $drawn steps of 8"
done
# Its log has no earlier steps.
train new_log --steps 8 --sample 0 --mesh dp=2 --resume kept/step-00000006 --plot new_log.svg

# The best step is kept too, by the held-out loss at each save, in this run and those that resume from it. A learning
# rate that is far too large after step 2 makes all later steps worse.
train judged --steps 2 --sample 0 --mesh dp=2 --held-out 0.001 --checkpoint-dir best --save-every 1 --keep 1 --keep-best held-out
[ "$(steps_in best)" = "step-00000002 " ] || fail "there are $(steps_in best)"
grep -q '^saved step 2: .*; held-out loss [0-9.]*, the best so far$' judged.out || fail "no held-out loss: $(cat judged.out)"
for last in 4 5; do
  train worse$last --steps $last --sample 0 --mesh pp=2 --held-out 0.001 --checkpoint-dir best --save-every 1 --keep 1 \
    --keep-best held-out --resume auto --lr 5 --lr-schedule constant --warmup 0 --clip 0 --on-new-schedule follow
  [ "$(steps_in best)" = "step-00000002 step-0000000$last " ] || fail "after step $last there are $(steps_in best)"
  grep -q "^saved step $last: .*; held-out loss [0-9.]*\$" worse$last.out || fail "which is the best: $(cat worse$last.out)"
done
python3 - best/step-00000005/manifest.json judged.jsonl <<'PY' || fail "the best is not saved"
import json, sys
scalars = json.load(open(sys.argv[1]))["scalars"]
saves = [r["save"] for r in map(json.loads, open(sys.argv[2])) if "save" in r]
assert scalars["train.best.step"] == 2 and scalars["train.best.held_out_loss"] == saves[-1]["held_out_loss"], (scalars, saves)
assert [s["best"] for s in saves] == [True, True], saves
PY
# Evaluation changes no result of training. In another directory the best step is one of that directory.
train plain --steps 4 --sample 0 --mesh dp=2,pp=2,tp=2 --data-parallel zero3 --micro-batch 1 --held-out 0.001
train judged4 --steps 4 --sample 0 --mesh dp=2,pp=2,tp=2 --data-parallel zero3 --micro-batch 1 --held-out 0.001 \
  --checkpoint-dir best4 --save-every 1 --keep-best held-out --plot judged4.svg --timeline step4.svg --report judged4.html
[ "$(hash_of plain)" = "$(hash_of judged4)" ] || fail "--keep-best changes the training"
[ "$(logs get judged4.jsonl bytes_as_predicted)" = true ] || fail "--keep-best: the bytes are not as predicted"
# The plot has a mark for each held-out loss and one in the legend. The page has the log's numbers and loads nothing.
[ "$(grep -c '<circle' judged4.svg)" = 5 ] || fail "the plot has $(grep -c '<circle' judged4.svg) marks"
"$trainer" report judged4.jsonl alone.html || fail "no page of a log alone"
cmp judged4.html alone.html || fail "the page of the log alone is another one"
python3 - judged4.html judged4.jsonl step4.svg <<'PY' || fail "the page is not the log's"
import json, math, re, sys
page, step = open(sys.argv[1]).read(), open(sys.argv[3]).read()
log = [json.loads(line) for line in open(sys.argv[2])]
steps, summary = [r for r in log if "step" in r], log[-1]["summary"]
def has(text): assert text in page, text
has(f"<dt>last loss<dd>{steps[-1]['loss']:.4f}<")
has(f"<dt>held-out loss, step 4<dd>{summary['held_out_loss']:.4f}<")
has(f"norm (last {steps[-1]['grad_norm']:.3f})")
for axes, last in steps[-1]["communication"].items():
    times = [r["communication"][axes] for r in steps]
    waited, all = (sum(t[k] for t in times) / len(times) for k in ("waited", "seconds"))
    found = re.search(rf"<tr><td>{axes}<td>(\S+) ms<td>(\S+) ms<td>(\S+) %", page)
    for shown, logged in zip(found.groups(), (1e3 * (all - waited), 1e3 * waited, 100 * (1 - waited / all))):
        assert math.isclose(float(shown), logged, rel_tol=6e-3, abs_tol=0.051), (axes, shown, logged)
for part in ("weights", "gradients", "optimizer", "activations"):
    assert summary["memory"][part] > 0
    has(f"<tr><td>{part}<td>")
for name, value in summary["options"].items(): has(f"<span>{name}</span> {value}<")
assert summary["timeline"] == step
has(step)
for loads in ("<script", "<link", "<img", "src=", "href=", "url(", "@import"): assert loads not in page, loads
assert page.count("http") == page.count('xmlns="http://www.w3.org/2000/svg"')
PY
train elsewhere --steps 6 --sample 0 --held-out 0.001 --checkpoint-dir elsewhere --save-every 1 --keep 1 --keep-best held-out \
  --resume best --lr 0.001 --lr-schedule constant --warmup 0 --on-new-schedule follow
[ "$(steps_in elsewhere)" = "step-00000006 " ] || fail "there are $(steps_in elsewhere)"
# The loss within documents is a different one, so the search for the best starts again.
train apart --steps 6 --sample 0 --held-out 0.001 --checkpoint-dir best --save-every 1 --keep 1 --keep-best held-out \
  --resume auto --lr 0.001 --lr-schedule constant --warmup 0 --on-new-schedule follow --documents apart --end-of-document 10
[ "$(steps_in best)" = "step-00000006 " ] || fail "there are $(steps_in best)"
grep -q '^saved step 6: .*, the best so far$' apart.out || fail "which is the best: $(cat apart.out)"

# The same for a loss with another term in addition to cross entropy.
train with_z --steps 7 --sample 0 --held-out 0.001 --checkpoint-dir best --save-every 1 --keep 1 --keep-best held-out \
  --resume auto --lr 0.001 --lr-schedule constant --warmup 0 --on-new-schedule follow --documents apart \
  --end-of-document 10 --z-loss 1
grep -q '^saved step 7: .*, the best so far$' with_z.out || fail "which is the best with --z-loss: $(cat with_z.out)"

# A folder that is not writable can be read; an error names it where a step would be saved there.
chmod 755 .
cp -r ck1 read_only
chmod -R a-w read_only
as=
[ "$(id -u)" = 0 ] && as="setpriv --reuid 65534 --clear-groups" # root may write anywhere
cp "$trainer" here # another user may not enter the folder of a clone, such as one in /root
cp "$text" text
code=0
# shellcheck disable=SC2086  # nothing or a command
timeout 60 $as ./here $given --data text --resume auto --checkpoint-dir read_only >stdout 2>stderr || code=$?
[ "$code" = 1 ] || fail "a folder that is read-only: exit code $code, $(cat stdout)"
grep -q "^train_llama: --checkpoint-dir: .*'read_only.*: Permission denied" stderr || fail "a folder that is read-only: $(cat stderr)"
# shellcheck disable=SC2086
timeout 60 $as ./here $given --data text --mesh dp=2,tp=2 --data-parallel zero1 --resume read_only/step-00000003 >stdout 2>stderr || fail "it is not read: $(cat stderr)"
grep -q "^hash of the weights: $(hash_of whole1)\$" stdout || fail "it is read otherwise: $(cat stdout)"
chmod -R u+w read_only
rm here

# Signals: SIGUSR1 saves and continues; SIGHUP and SIGTERM save and end the run.
timeout 60 env --default-signal=HUP "$trainer" --model config.json --data "$text" --seq 32 --global-batch 8 --mesh dp=2,tp=2 --steps 1000000 \
  --warmup 0 --checkpoint-dir signals --log signals.jsonl >signals.out 2>signals.err &
watcher=$!
wait_until test -s signals.jsonl
program=$(ps -o pid= --ppid "$watcher" | tr -d ' ')
kill -s USR1 "$program"
wait_until grep -q '^saved step' signals.out
kill -s HUP "$program"
code=0
wait "$watcher" || code=$?
[ "$code" = 129 ] || fail "exit code $code after SIGHUP: $(cat signals.err)"
last=$(logs get signals.jsonl steps)
grep -q "^saved step $last: " signals.out || fail "SIGHUP does not save step $last: $(cat signals.out)"
train onwards --steps $((last + 1)) --warmup 0 --sample 0 --checkpoint-dir signals --resume auto \
  --on-new-schedule follow
grep -q "^continues from step $last\$" onwards.out || fail "it does not go on from $last: $(cat onwards.out)"

# Without standard input, output and errors, no text is printed into saved files.
"$trainer" --model config.json --data "$text" --seq 32 --global-batch 8 --mesh dp=2 --data-parallel zero1 --steps 4 \
  --save-every 1 --sample 0 --check always --checkpoint-dir closed <&- >&- 2>&- || fail "exit code $? without standard output"
"$BIN/checkpoint_tool" verify closed >verified 2>&1 || fail "what was saved is damaged: $(cat verified)"
! grep -rl 'tok/s' closed || fail "progress was printed into a saved step"

# A folder without steps.
train fresh --steps 2 --sample 0 --checkpoint-dir fresh --resume auto
grep -q "^--resume auto: nothing is saved in 'fresh' yet" fresh.out || fail "it does not say so: $(cat fresh.out)"

if has_mpi; then
  # shellcheck disable=SC2086
  timeout 100 mpirun -n 4 --allow-run-as-root --oversubscribe "$trainer" $given --backend mpi --mesh dp=2,tp=2 \
    --data-parallel zero1 --checkpoint-dir by_processes --resume ck1/step-00000003 --log mpi.jsonl >mpi.out 2>mpi.err ||
    fail "four processes: $(tail -n 3 mpi.err)"
  [ "$(hash_of mpi)" = "$(hash_of whole1)" ] || fail "four processes come to other weights"
  train from_processes --steps 7 --sample 0 --mesh pp=2 --resume by_processes --on-new-schedule follow
  grep -q '^continues from step 6$' from_processes.out || fail "threads do not go on from processes"
fi

step=ck1/step-00000003
refused '--save-every needs --checkpoint-dir' --save-every 3
refused '--keep is 0; at least 1' --checkpoint-dir x --keep 0
refused '--resume auto needs --checkpoint-dir' --resume auto
refused "--resume: .*there is no 'absent'; legal are a saved step and a folder of them" --resume absent
refused "there is no 'ck1/step-00000099'; there are step-00000006, step-00000003$" --resume ck1/step-00000099/
refused "'ck1/step-00000003/data' is neither a saved step nor a folder that has one" --resume ck1/step-00000003/data
refused "'config.json' is a file; legal are a saved step" --resume config.json
refused "--seed is 2, and '.*' was saved with 1" --resume "$step" --seed 2
refused "--seq is 64, and '.*' was saved with 32" --resume "$step" --seq 64
refused "--steps is 2, and 3 were done before --resume" --resume "$step" --steps 2
refused "the model needs 'optim.model.layers.0.self_attn.q_proj.weight.momentum_buffer'.*, which it has not; nothing in the model is 'optim.* and 8 more" \
  --resume "$step" --optimizer muon
refused "--resume: this run has other options than '$step': --optimizer muon, which was adamw; " --resume "$step" --optimizer muon
refused "--resume: this run has other options than '$step': --optimizer muon, which was adamw; " --resume "$step" --optimizer muon --dry-run
refused "'ck1' has step 6 already, and this run begins after step 0; --resume auto" --checkpoint-dir ck1
refused "'ck1' has step 6 already, and this run begins after step 3" --checkpoint-dir ck1 --resume "$step"
refused "config.json" --checkpoint-dir config.json
refused '--on-new-schedule follow is for --resume' --on-new-schedule follow
refused "--on-new-schedule 'begin' is unknown; legal are stop, follow" --resume "$step" --on-new-schedule begin
refused '--keep-best needs --checkpoint-dir' --keep-best none
refused '--keep-best held-out needs --held-out' --keep-best held-out --checkpoint-dir x
refused "--keep-best 'all' is unknown; legal are none, held-out" --keep-best all --checkpoint-dir x
sed 's/"num_hidden_layers": 2/"num_hidden_layers": 3/' config.json >deeper.json
for mesh in tp=1 pp=3; do
  refused "the model needs .*'model.layers.2.input_layernorm.weight'" --model deeper.json --resume "$step" --mesh $mesh
done
sed 's/"num_hidden_layers": 2/"num_hidden_layers": 1/' config.json >flatter.json
refused "nothing in the model is 'model.layers.1.self_attn.q_proj.weight'.* and [0-9]* more" --model flatter.json --resume "$step"
sed 's/"intermediate_size": 64/"intermediate_size": 96/' config.json >wider.json
refused "'model.layers.0.mlp.down_proj.weight' has the shape \[32, 64\], and the model needs \[32, 96\]" \
  --model wider.json --resume "$step" --mesh dp=2

# Copies a step to another layout without training; and saves a first step from a model directory.
train copied --steps 3 --sample 0 --mesh pp=2 --resume "$step" --checkpoint-dir copied
[ "$(steps_in copied)" = "step-00000003 " ] || fail "there are $(steps_in copied)"
grep -q 'pp=2, replicated' copied/step-00000003/manifest.json || fail "the layout is not said: $(head -c 300 copied/step-00000003/manifest.json)"
rm -f copied.jsonl
train copied --steps 6 --sample 0 --mesh dp=2,tp=2 --data-parallel zero1 --resume copied
[ "$(hash_of copied)" = "$(hash_of whole1)" ] || fail "the copy of step 3 is another state"
timeout 60 "$trainer" --init-from "$SOURCE/tests/data/llama_mha" --steps 0 --mesh pp=2 --seq 32 --checkpoint-dir imported >imported.out 2>&1 ||
  fail "a model directory as step 0: $(cat imported.out)"
[ "$(steps_in imported)" = "step-00000000 " ] || fail "there are $(steps_in imported)"
timeout 60 "$trainer" --init-from "$SOURCE/tests/data/llama_mha" --steps 0 --seq 32 --resume imported --export-hf exported \
  >exported.out 2>&1 || fail "step 0 as a model directory: $(cat exported.out)"
python3 "$here/lib/tensors.py" "$SOURCE/tests/data/llama_mha" exported || fail "the model directory is not what it was"

# Adapters of frozen weights: only they change, and a run resumes with them on another mesh, to parity.
adapted="--steps 6 --sample 0 --lora 4 --lr 0.03"
# shellcheck disable=SC2086  # lists of options
{
  train adapters $adapted --init-from constant --mesh dp=2,tp=2 --data-parallel zero3 --checkpoint-dir adapters --save-every 3 \
    --log-hashes 6
  train one_adapters $adapted --init-from constant
  train on_adapters $adapted --resume adapters/step-00000003 --mesh pp=2,tp=4 --schedule zb_h1
}
[ "$(logs get adapters.jsonl bytes_as_predicted)" = true ] || fail "--lora: the bytes are not as predicted"
logs losses one_adapters.jsonl adapters.jsonl 1e-5
logs losses one_adapters.jsonl on_adapters.jsonl 1e-5 4
python3 - adapters.jsonl adapters.out adapters/step-00000006/manifest.json <<'PY' || fail "what --lora trains"
import json, math, re, sys
before, after = [r["hashes"]["weights"] for r in map(json.loads, open(sys.argv[1])) if "hashes" in r]
changed = {name for name in before if before[name] != after[name]}
adapters = {name for name in before if ".lora_" in name}
assert len(adapters) == 2 * 2 * 7 and changed == adapters, changed ^ adapters
shapes = {name: t["shape"] for name, t in json.load(open(sys.argv[3]))["tensors"].items()}
count = sum(math.prod(shapes[name]) for name in adapters)
assert f"adapters: rank 4, alpha 8, {count} parameters; only these are trained" in open(sys.argv[2]).read(), count
moments = {re.sub(r"^optim\.|\.exp_avg(_sq)?$", "", name) for name in shapes if name.startswith("optim.")}
assert moments == adapters, moments ^ adapters
PY
first_loss() { sed -n 's/^{"step": 1, "loss": \([^,]*\),.*/\1/p' "$1.jsonl"; }
train not_adapted --steps 1 --sample 0 --init-from constant
[ "$(first_loss one_adapters)" = "$(first_loss not_adapted)" ] || fail "new adapters change the model"
train adapters_again --steps 1 --sample 0 --init-from adapters --lora 4
[ "$(first_loss adapters_again)" != "$(first_loss not_adapted)" ] || fail "--init-from loses adapters"
evaluated() { "$trainer" evaluate "$1" --data "$text" --held-out 0.001 | grep '^held-out loss' || fail "evaluate $1"; }
[ "$(evaluated adapters)" != "$(evaluated constant)" ] || fail "evaluate leaves out adapters: $(evaluated adapters)"
# A state saved before any step also records its model and its adapters.
timeout 60 "$trainer" --init-from adapters --lora 4 --steps 0 --sample 0 --seq 32 --checkpoint-dir unmoved >unmoved.out 2>&1 ||
  fail "adapters saved before any step: $(cat unmoved.out)"
[ "$(evaluated unmoved)" = "$(evaluated adapters)" ] || fail "step 0 loses its adapters: $(evaluated unmoved)"
# A model directory has the adapters merged into its weights, and equal bytes from every mesh.
for mesh in tp=1 pp=2,tp=2 "dp=2,pp=2 --data-parallel zero3"; do
  # shellcheck disable=SC2086  # a list of options
  timeout 60 "$trainer" --init-from adapters --lora 4 --steps 0 --sample 0 --seq 32 --mesh $mesh --export-hf "merged_${mesh%% *}" \
    >merged.out 2>&1 || fail "--export-hf of adapters on $mesh: $(cat merged.out)"
  cmp merged_tp=1/model.safetensors "merged_${mesh%% *}/model.safetensors" || fail "$mesh merges adapters otherwise"
done
timeout 60 "$trainer" --init-from merged_tp=1 --data "$text" --seq 32 --global-batch 8 --steps 1 --sample 0 \
  --log on_merged.jsonl >merged.out 2>&1 || fail "--init-from what was merged: $(cat merged.out)"
python3 - "$(first_loss on_merged)" "$(first_loss adapters_again)" <<'PY' || fail "the merged weights are another model"
import sys
merged, adapted = map(float, sys.argv[1:])
assert abs(merged - adapted) < 1e-5 * adapted, (merged, adapted)
PY
refused "--resume: 'adapters/step-00000006' has adapters of rank 4, and --lora is 2; legal is --lora 4" --resume adapters --lora 2
refused "--resume: 'adapters/step-00000006' has adapters of rank 4, and --lora is 0; legal is --lora 4" --resume adapters
refused "--resume: 'constant/step-00000003' has no adapters, and --lora is 4; --init-from begins adapters of its weights" \
  --resume constant --lora 4
refused "--init-from: 'adapters/step-00000006' has adapters of rank 4 and alpha 8, and this run has --lora 4 --lora-alpha 16; \
legal is --lora 4 --lora-alpha 8" --init-from adapters --lora 4 --lora-alpha 16

# A step has the same bytes for every way of writing; io_uring is refused where the system does not have it.
train by_threads --steps 2 --sample 0 --checkpoint-dir by_threads --checkpoint-io threads
grep -q '^steps are written by threads (--checkpoint-io threads)$' by_threads.out || fail "how they are written: $(cat by_threads.out)"
train by_auto --steps 2 --sample 0 --checkpoint-dir by_auto
code=0
timeout 60 "$trainer" --model config.json --data "$text" --seq 32 --global-batch 8 --steps 2 --sample 0 --checkpoint-dir by_uring \
  --checkpoint-io uring >stdout 2>stderr || code=$?
if grep -q '^steps are written through io_uring (--checkpoint-io uring)$' by_auto.out; then
  [ "$code" = 0 ] || fail "io_uring: exit code $code: $(cat stderr)"
  cmp by_uring/step-00000002/data/w00000.safetensors by_threads/step-00000002/data/w00000.safetensors || fail "other bytes"
else
  grep -q '^steps are written by threads, since .* (--checkpoint-io threads)$' by_auto.out || fail "no reason: $(cat by_auto.out)"
  grep -q '^train_llama: --checkpoint-io uring: .*; legal here are --checkpoint-io auto and threads$' stderr ||
    fail "io_uring is not refused: $(cat stderr)"
fi
cmp by_auto/step-00000002/data/w00000.safetensors by_threads/step-00000002/data/w00000.safetensors || fail "other bytes"
refused "--checkpoint-io needs --checkpoint-dir" --checkpoint-io auto
refused "--checkpoint-io 'fast' is unknown; legal are auto, uring, threads" --checkpoint-dir by_auto --checkpoint-io fast

# The error names a damaged step, and the previous one is still valid.
damage() { # damage FILE: flips a bit in its middle
  python3 -c '
import pathlib, sys
f = pathlib.Path(sys.argv[1]); b = bytearray(f.read_bytes()); b[len(b) * 3 // 4] ^= 4; f.write_bytes(b)' "$1"
}
file=$(find ck1/step-00000006/data -name '*.safetensors' | sort | head -n 1)
damage "$file"
refused "'$file' is damaged: tensor '.*' box \[.* another checksum" --resume ck1 --mesh dp=2,tp=2
refused "'$file' is damaged" --resume ck1 --mesh pp=2
truncate -s 1000 "$file"
refused "'$file' is truncated: it ends at byte 1000 and should have .*; an older step is 'ck1/step-00000003'" --resume ck1
rm "$file"
refused "cannot open '$file': No such file or directory; an older step is 'ck1/step-00000003'" --resume ck1
damage ck1/step-00000006/manifest.json
train older --steps 6 --sample 0 --resume ck1
grep -q '^continues from step 3$' older.out || fail "a step without its manifest is not passed over: $(cat older.out)"
grep -q "^train_llama: --resume passes over 'ck1/step-00000006': " older.err || fail "nothing is said of it: $(cat older.err)"
[ "$(find ck1 -maxdepth 1 -name 'step-00000006.damaged-*' | wc -l)" = 0 ] || fail "reading changes the directory"

# A renamed or unfinished step is not a step, and the text gives the reason.
cp -r copied renamed
mv renamed/step-00000003 renamed/step-00000007
text_of_name="'renamed/step-00000007' holds step 3: it was renamed, or copied; a step is loaded under its own name, step-00000003"
refused "$text_of_name" --resume renamed/step-00000007
refused "'renamed' has no step that is whole; 'renamed/step-00000007': $text_of_name" --resume renamed
mv renamed/step-00000007 renamed/best
refused "'renamed/best' does not have the name of a step, which is like step-00000100; give a step that was renamed its name back" --resume renamed/best
mv renamed/best renamed/step-00000003
rm renamed/step-00000003/COMMIT
refused "'renamed/step-00000003' has no COMMIT, which rank 0 writes last: its save was not finished, or" --resume renamed/step-00000003
train again6 --steps 6 --sample 0 --resume auto --checkpoint-dir ck1
[ "$(find ck1 -maxdepth 1 -name 'step-00000006.damaged-*' | wc -l)" = 1 ] || fail "the damaged step is not put aside"
train after6 --steps 6 --sample 0 --resume ck1
grep -q '^continues from step 6$' after6.out || fail "step 6 was not saved again"
