#!/bin/sh
# Invalid input: one line on stderr with the field and its values, a non-zero exit code, and no file written.
# timeout: 480
. "$(dirname "$0")/lib/common.sh"

# refused TEXT ARGUMENTS...: the message contains TEXT (a basic regular expression). ARGUMENTS come last, so they
# override.
cases=0
refused() {
  expected=$1
  shift
  code=0
  timeout 20 "$trainer" --model config.json --data "$text" --seq 32 --steps 2 --sample 0 --log out/log.jsonl \
    --plot out/loss.svg "$@" >stdout 2>stderr || code=$?
  [ "$code" = 1 ] || fail "$*: exit code $code, $(cat stdout stderr)"
  grep -q "^train_llama: .*$expected" stderr || fail "$*: '$expected' is not in: $(cat stderr)"
  [ "$(wc -l <stderr)" = 1 ] || fail "$*: not one line: $(cat stderr)"
  [ ! -s stdout ] || fail "$*: printed $(cat stdout)"
  [ -z "$(ls -A out)" ] || fail "$*: left $(ls -A out)"
  cases=$((cases + 1))
}
mkdir out

# The mesh.
refused '--mesh dp=2,sp=2: unknown axis "sp"; the axes of this mesh are dp, pp, ep, cp, tp' --mesh dp=2,sp=2
refused '--mesh dp=2,dp=2: axis "dp" is given twice' --mesh dp=2,dp=2
refused '--mesh dp=0,tp=2: "dp=0" is not AXIS=EXTENT' --mesh dp=0,tp=2
refused '--mesh dp=-1: "dp=-1" is not' --mesh dp=-1
refused '--mesh dp=two: "dp=two" is not' --mesh dp=two
refused '--mesh dp=2.5: "dp=2.5" is not' --mesh dp=2.5
refused '--mesh dp: "dp" is not' --mesh dp
refused '--mesh 2,2: "2" names no axis; legal is a list of AXIS=EXTENT, as in dp=2,tp=4, of the axes dp, pp, ep, cp, tp' --mesh 2,2
refused '--mesh tp=2 dp=2: "tp=2 dp=2" has a space in it; axes are separated by commas' --mesh 'tp=2 dp=2'
refused "'dp=2' belongs to no option: --mesh takes one word, and has 'tp=2'; a list is one word with commas, as in --mesh tp=2,dp=2" --mesh tp=2 dp=2
refused '--mesh dp=2,: a comma without' --mesh dp=2,
refused '--mesh dp=99999999999999999999: .*beyond' --mesh dp=99999999999999999999
refused '--mesh dp=100000: 100000 ranks; one process .* at most 1024' --mesh dp=100000
if "$trainer" --backend mpi --dry-run >/dev/null 2>&1; then
  refused '--mesh dp=2,tp=2 has 4 ranks, but --backend mpi was started as one process: start it with mpirun -n 4' --mesh dp=2,tp=2 --backend mpi
else
  refused '--backend mpi: this program was built without MPI' --backend mpi
fi

# Models with experts.
refused '--mesh ep=2 has ep=2, and the model has no experts; legal is ep=1' --mesh ep=2
refused "--mesh ep=9: ep=9 is more than the model's num_experts, which is 8" --model tiny-experts --mesh ep=9
refused '--strategy tp is not supported for models with experts; legal is sp' --model tiny-experts --strategy tp
refused '--balance-loss 0.01 is for models with experts, and this one has none; legal is 0' --balance-loss 0.01
refused '--balance-over step is for a --balance-loss, which is 0; legal is sequence' --balance-over step
refused '--expert-limit 1 is for models with experts' --expert-limit 1
refused '--expert-rows padded is for models with experts, and this one has none; legal is counted' --expert-rows padded
refused '--expert-rows padded is not supported under deterministic sums; legal is counted' --model tiny-experts --expert-rows padded --deterministic 4,4,2
refused '--balance-over microbatch: under --deterministic a microbatch has other samples on each mesh; legal are sequence and step' \
  --model tiny-experts --balance-loss 0.01 --balance-over microbatch --deterministic 4,4,2
refused '--attention ulysses:contiguous is not supported for models with experts; legal is ulysses:zigzag' \
  --model tiny-experts --mesh cp=2 --attention ulysses:contiguous
refused '--expert-bias-rate 0.1 is for models whose router has biases, and this one has none; legal is 0, or a model such as tiny-dots1' --model tiny-experts --expert-bias-rate 0.1
refused '--loss-chunks 65: each rank has 64 positions of a sequence; legal are 1 to 64' --mesh tp=2 --seq 128 --loss-chunks 65
refused '--loss-chunks 3: each rank has 64 positions of a sequence; legal with --deterministic are those that divide them' --deterministic 4,4,2 --mesh tp=2 --seq 128 --loss-chunks 3
refused '--loss-chunks 2: 3 ranks have unequally many of 128 positions of a sequence; legal with --deterministic is 1' --deterministic 8,4,4 --mesh cp=3 --seq 128 --attention ring:contiguous --loss-chunks 2
refused '--loss-chunks 2: chunks of 16 positions on each rank are not whole leaves of --deterministic 4; legal there, as the third number, are multiples of 2' --deterministic 4 --loss-chunks 2
refused '--loss-chunks 3: each rank along cp=2 has two pieces .* not whole leaves of --deterministic 4,4,6; legal there, as the third number, are multiples of 4' \
  --deterministic 4,4,6 --mesh cp=2 --seq 96 --loss-chunks 3
refused '--loss-chunks 2: --schedule zb_h1 defers weight gradients, for which the gradients of all logits wait; legal is 1, or a schedule such as 1f1b' --mesh pp=2 --global-batch 8 --schedule zb_h1 --loss-chunks 2
refused '--router-z-loss is -1; legal is at least 0' --model tiny-experts --router-z-loss -1
refused '--deterministic 4,4,1: 1 leaves of the sequence, cannot be divided over cp=1 and, for routers, tp=2; legal are 2 or more' \
  --model tiny-experts --deterministic 4,4,1 --mesh tp=2 --global-batch 8
odd() { # odd KEYS: a model whose shared expert or dense layer cannot be cut in two
  cat >odd.json <<JSON
{"model_type": "qwen2_moe", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
 "max_position_embeddings": 256, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": true, $1}
JSON
}
odd '"intermediate_size": 16, "shared_expert_intermediate_size": 17'
refused '--deterministic 4,4,2: 1 leaves of ffn of shared experts, as many as divide 4 and 17, cannot be divided over tp=2' \
  --model odd.json --deterministic 4,4,2 --mesh tp=2
odd '"shared_expert_intermediate_size": 16, "mlp_only_layers": [0], "intermediate_size": 37'
refused '--deterministic 4,4,2: 1 leaves of ffn of dense layers, as many as divide 4 and 37, cannot be divided over tp=2' \
  --model odd.json --deterministic 4,4,2 --mesh tp=2

# Sizes that the ranks cannot divide.
sized() { # sized HEADS KV_HEADS HIDDEN FFN
  cat >sized.json <<JSON
{"model_type": "llama", "hidden_size": $3, "num_hidden_layers": 1, "num_attention_heads": $1, "num_key_value_heads": $2,
 "intermediate_size": $4, "vocab_size": 256, "max_position_embeddings": 64, "head_dim": 8}
JSON
}
refused 'tp=3 is more than num_key_value_heads, which is 2, and no multiple of it: .*extents of tp up to 64 that suit .* are 1, 2, 4$' --mesh tp=3
refused 'tp=8 is more than the model.s num_attention_heads, which is 4' --mesh tp=8
sized 4 2 32 3
refused 'tp=4 is more than the model.s intermediate_size, which is 3; .* are 1, 2$' \
  --model sized.json --mesh tp=4
sized 4 3 32 64
refused "'sized.json': num_attention_heads is 4 and num_key_value_heads 3" --model sized.json
sized 4 2 30 64
refused '--seq is 257, .*max_position_embeddings is 256' --seq 257
refused '--global-batch is 12, .*--micro-batch 4 times dp=2 = 8; the nearest that are: 8 and 16' --global-batch 12 --mesh dp=2
refused '--global-batch is 6, .* the least that is: 8' --global-batch 6 --mesh dp=2

# Memory: the plan needs more than the machine has.
cat >large.json <<'JSON'
{"model_type": "llama", "hidden_size": 131072, "num_hidden_layers": 8, "num_attention_heads": 1024,
 "intermediate_size": 524288, "vocab_size": 256, "max_position_embeddings": 256}
JSON
refused "--memory-share 1: the run needs at least 3[0-9.]* TB of this host's memory, and .* are available" --model large.json
refused "--memory-share 1e-09: the run needs at least [0-9.]* [kM]B of this host's memory" --memory-share 1e-9 --mesh dp=2

# Values of options that are words.
refused "--backend 'x' is unknown; legal are threads, mpi, nccl" --backend x
refused '--deadline is for --backend mpi and nccl; a deadlock of threads is found without one: leave it out' --deadline 60
refused '--deadline is -1; legal is at least 0' --deadline -1 --backend mpi
refused "--strategy 'x' is unknown; legal are sp, tp" --strategy x
refused "--data-parallel 'x' is unknown; legal are replicated, zero1, zero2, zero3" --data-parallel x
refused '--data-parallel zero2 cuts over the ranks of dp and cp, and with dp=1 and cp=1 there is one rank to cut over' \
  --data-parallel zero2 --mesh tp=2
refused '--data-parallel zero3 cuts over the ranks of dp and cp but --replicate-over cp, and with dp=1 and cp=2' \
  --data-parallel zero3 --mesh cp=2 --replicate-over cp
refused '--replicate-over cp names an axis of one rank; legal is none' --data-parallel zero1 --mesh dp=2 \
  --replicate-over cp
refused '--replicate-over dp is for --data-parallel zero1 to zero3; replicated cuts nothing' --mesh dp=2 \
  --replicate-over dp
refused '--prefetch 3 is for --data-parallel zero3; with zero1 parameters stay gathered' --data-parallel zero1 \
  --mesh dp=2 --prefetch 3
refused '--reshard-after-forward off is for --data-parallel zero3' --reshard-after-forward off
refused '--prefetch is 99, but a rank has [0-9]* units of parameters to gather: .*; legal is 0 to [0-9]*$' --data-parallel zero3 --mesh dp=2 \
  --prefetch 99
refused "--shard 'x' is unknown; legal are even, whole, blocks" --shard x
refused '--shard blocks is for --data-parallel zero1 to zero3; replicated cuts nothing' --shard blocks --mesh dp=2
refused '--shard whole is for --data-parallel zero1 to zero3; replicated cuts nothing' --shard whole --mesh dp=2
refused '--optimizer muon needs whole matrices, which --data-parallel zero1 with --shard even cuts; legal are --shard whole' \
  --optimizer muon --data-parallel zero1 --mesh dp=2
refused '--optimizer muon needs whole matrices, which --data-parallel zero2 with --shard blocks cuts' \
  --optimizer muon --data-parallel zero2 --shard blocks --mesh dp=2
refused "--overlap 'x' is unknown; legal are on, off" --overlap x
refused '--tensor-overlap 4 hides nothing: with tp=1 linears send nothing; legal is 1' --tensor-overlap 4 --mesh dp=2
refused '--tensor-overlap is 0; at least 1 is legal' --tensor-overlap 0 --mesh tp=2
refused '--tensor-overlap is 65, but a rank has 64 tokens of a microbatch to send; legal is 1 to 64$' --tensor-overlap 65 \
  --mesh cp=2,tp=2 --seq 128 --micro-batch 2
for state in on off; do
  refused "--overlap $state hides nothing: with dp=1 and cp=1 no gradient is reduced over data ranks" --overlap $state --mesh tp=2
done
refused '--prefetch 1 is for --data-parallel zero3; with zero2 parameters stay gathered' --data-parallel zero2 --mesh dp=2 \
  --prefetch 1
refused '--reshard-after-forward on is for --data-parallel zero3; with replicated parameters' --reshard-after-forward on
refused '--shard even is for --data-parallel zero1 to zero3; replicated cuts nothing' --shard even --mesh dp=2
for bad in x every every:0 every:2x budget budget:-1 budget:5X budget:1.5G budget:9999999999G; do
  refused "--recompute '$bad' is unknown; legal are none, selective, full, every:K .* and budget:SIZE" --recompute $bad
done
refused '--recompute every:99 recomputes no layer of a model of [0-9]*; legal is every:1 to every:[0-9]*$' --recompute every:99
refused '--recompute budget:9 is 9 bytes, .* still keeps \([0-9]*\); the least that is legal here is budget:\1$' \
  --recompute budget:9
refused '--recompute budget:1G chooses layers before stages are measured; with it, --split flops and even are legal' \
  --recompute budget:1G --split measured --mesh pp=2
refused "--precision 'half' is unknown; legal are float, double, bf16, bf16-no-masters" --precision half
refused '--precision bf16-no-masters is built for --strategy sp alone; here it is tp' \
  --precision bf16-no-masters --strategy tp
refused '--optimizer muon needs master weights, which --precision bf16-no-masters does not have; legal are --optimizer adamw' \
  --precision bf16-no-masters --optimizer muon
refused "--reduce-in 'half' is unknown; legal are full, bf16" --reduce-in half
refused '--reduce-in bf16 is for gradients in float; with --precision double, full' --reduce-in bf16 --precision double --mesh dp=2
refused '--reduce-in bf16 is for gradients that are summed over the ranks of dp and cp, and here there is one' --reduce-in bf16
refused '--reduce-in float is for --gradients bf16; here they are in float, and legal are full and bf16' --reduce-in float --mesh dp=2
refused '--reduce-in float is for --gradients bf16; here they are in double, and legal is full' --reduce-in float \
  --precision double --mesh dp=2
refused "--gradients 'half' is unknown; legal are full, bf16" --gradients half
for precision in float double; do
  refused "--gradients bf16 is for --precision bf16 and bf16-no-masters; with $precision, full is legal" --gradients bf16 \
    --precision $precision
done
refused '--gradients bf16 is built for --strategy sp alone; here it is tp' --gradients bf16 --precision bf16 --strategy tp
refused '--deterministic has one order of sums, which --gradients bf16 does not have; legal is full' --gradients bf16 \
  --precision bf16 --deterministic 8
refused '--reduce-in bf16 is for gradients in float; with --gradients bf16, full is legal, which is bf16, and float' \
  --gradients bf16 --precision bf16 --reduce-in bf16 --mesh dp=2
refused '--reduce-in float is for gradients that are summed over the ranks of dp and cp, and here there is one; legal is full' \
  --gradients bf16 --precision bf16 --reduce-in float --mesh tp=2
refused '--attention ulysses:contiguous is built for --gradients full alone; legal here is ulysses:zigzag' \
  --gradients bf16 --precision bf16 --attention ulysses:contiguous --mesh cp=2
refused '--optimizer muon needs master weights, which --precision bf16-no-masters does not have' \
  --gradients bf16 --precision bf16-no-masters --optimizer muon
refused "--moments 'fp8' is unknown; legal are full, bf16, int8" --moments fp8
refused '--moments int8 is for --optimizer adamw; with muon, full and bf16 are legal' --moments int8 --optimizer muon
refused '--moments int8 has a scale for each 256 elements, which --data-parallel zero1 with --shard even cuts; legal are' \
  --moments int8 --data-parallel zero1 --mesh dp=2
refused "--optimizer 'sgd' is unknown; legal are adamw, muon" --optimizer sgd
refused "--muon-scale 'x' is unknown; legal are match_rms_adamw, original" --optimizer muon --muon-scale x
refused "--lr-schedule: unknown schedule 'x'; legal are constant, linear, cosine" --lr-schedule x
refused "--data-format: unknown format 'x'; legal are" --data-format x
refused "--model: unknown model 'llama-9'; presets are tiny, small, .*config.json" --model llama-9
refused "there is no option --nosuch" --nosuch 3
refused "there is no option --lrate=3" --lrate=3
refused "there is no option -lr" -lr 3
refused "there is no option --gradient; did you mean --gradients?" --gradient bf16
refused "there is no option --data_parallel=zero1; did you mean --data-parallel?" --data_parallel=zero1
refused "extra" extra

# Empty values, which a shell passes for a variable that is not set.
for option in --checkpoint-dir --init-from --export-hf; do
  refused "$option is empty; name a folder, or leave it out" $option ''
done
for option in --log --plot --report --trace --timeline --products; do
  refused "$option is empty; name a file, or leave it out" $option ''
done
refused '--cluster is empty; name hardware, or leave it out' --cluster ''

# Numbers.
refused '--steps is -1; at least 0' --steps -1
refused "--steps is 'ten', which is not a whole number" --steps ten
refused "--steps is '1.5', which is not a whole number" --steps 1.5
refused "--threads is '4294967297', which is not a whole number, or is too large" --threads 4294967297
refused '--seq is 0; at least 1' --seq 0
refused '--micro-batch is 0; at least 1' --micro-batch 0
refused '--micro-batch is 9000000000000000000; at most' --micro-batch 9000000000000000000
refused '--global-batch is -8; at least 0' --global-batch -8
refused '--seed is -1; at least 0' --seed -1
refused "--seed is '99999999999999999999', which is not a whole number, or is too large" --seed 99999999999999999999
refused '--threads is 0; at least 1' --threads 0
refused '--sample is -1; at least 0' --sample -1
refused '--lr: nan is not a learning rate' --lr nan
refused '--lr: inf is not a learning rate' --lr inf
refused '--lr: 0 is not a learning rate' --lr 0
refused '--lr: inf is not a learning rate' --lr 1e400
refused "--lr is 'fast', which is not a number" --lr fast
refused "--tf32 is 'maybe', which is neither true nor false" --tf32=maybe
refused '--warmup is 3; at most 2' --warmup 3
refused '--warmup is -2; at least 0' --warmup -2
refused '--min-lr-ratio: 1.5' --min-lr-ratio 1.5
refused '--min-lr-ratio 0.5 changes nothing with --lr-schedule constant' --lr-schedule constant --min-lr-ratio 0.5
refused '--mesh is empty; name axes and extents' --mesh ' '
refused '--dropout is 1; legal is at least 0 and below 1' --dropout 1
refused '--clip is -1; legal' --clip -1
refused '--label-smoothing is nan' --label-smoothing nan
refused '--z-loss is -1' --z-loss -1
refused '--weight-decay is -1' --weight-decay -1
refused '--muon-momentum is 1; legal is at least 0 and below 1' --optimizer muon --muon-momentum 1
refused '--muon-lr-ratio is 0; legal' --optimizer muon --muon-lr-ratio 0
refused '--muon-momentum is for --optimizer muon; here it is adamw' --muon-momentum 0.9
refused '--muon-scale is for --optimizer muon; here it is adamw' --muon-scale original
refused '--muon-lr-ratio is for --optimizer muon; here it is adamw' --optimizer adamw --muon-lr-ratio 2
refused '--lora is -1; at least 0' --lora -1
refused '--lora-alpha is for --lora, which gives the rank of the adapters' --lora-alpha 16
refused '--lora-linears is for --lora, which gives the rank of the adapters' --lora-linears shared
refused "--lora-linears 'experts' is unknown; legal are all, shared, attention" --lora 4 --lora-linears experts
refused '--lora-alpha is 0; legal is at least 1e-06' --lora 4 --lora-alpha 0
refused '--lora 4 trains adapters alone, and random weights would stay random; name weights by --init-from' --lora 4
refused '--deterministic has one order of sums, which --lora 4 does not have; legal is 0' --lora 4 --deterministic 8
refused '--plan auto: --lora 4 is not priced; leave it out' --lora 4 --dry-run --plan auto --cluster cpu:8 --global-batch 16
refused '--temperature is -1' --temperature -1
refused '--held-out: 1 is no fraction' --held-out 1

# config.json.
config() { # config EDIT: config.json after a sed command, as bad.json
  sed "$1" config.json >bad.json
}
refused "--model: cannot open 'missing.json': No such file" --model missing.json
refused "--model: .*is a folder\|--model: .*directory" --model ./out
: >empty.json
refused "'empty.json'" --model empty.json
truncate -s 65M bad.json
refused "--model: 'bad.json' has 68157440 bytes, too many for a text of this kind" --model bad.json
head -c 60 config.json >bad.json
refused "'bad.json': malformed JSON" --model bad.json
echo '[1, 2]' >bad.json
refused "'bad.json': the JSON is not an object" --model bad.json
config 's/"hidden_size": 32, //'
refused "'bad.json': key 'hidden_size' is missing" --model bad.json
config 's/"model_type": "llama"/"model_type": "gpt2"/'
refused "key 'model_type' is \"gpt2\"; legal is \"dots1\", \"llama\"" --model bad.json
config 's/"hidden_size": 32/"hidden_size": "wide"/'
refused "key 'hidden_size' is \"wide\"; legal is a whole number" --model bad.json
config 's/"num_hidden_layers": 2/"num_hidden_layers": 2.5/'
refused "key 'num_hidden_layers' is 2.5; legal is a whole number" --model bad.json
config 's/"num_hidden_layers": 2/"num_hidden_layers": 0/'
refused "num_hidden_layers is 0; legal are 1 to" --model bad.json
config 's/"hidden_size": 32/"hidden_size": 34/'
refused "hidden_size 34 is not a multiple of num_attention_heads 4" --model bad.json
config 's/"vocab_size": 256/"vocab_size": 256, "hidden_act": "gelu"/'
refused "key 'hidden_act' is \"gelu\"; legal is \"silu\"" --model bad.json
config 's/"vocab_size": 256/"vocab_size": 256, "rope_scaling": {"rope_type": "yarn", "factor": 2}/'
refused "key 'rope_scaling.rope_type' is \"yarn\"; legal is" --model bad.json

# Data.
: >empty.txt
printf 'too short' >short.txt
printf 'abcdefgh%.0s' 1 2 3 4 5 6 7 8 >words.bin
printf 'odd' >odd.bin
printf 'not an index' >paired.idx
cp words.bin paired.bin
refused "--data: cannot open 'missing.txt': No such file" --data missing.txt
refused "--data: 'empty.txt' is empty" --data empty.txt
refused "--data.*'short.txt' holds 9 tokens, and one sample at --seq 32 takes 33" --data short.txt
refused "--data: 'words.bin' has token 25185 at position 0, and the vocabulary of --model has 256" --data words.bin
refused "--data: 'odd.bin' has 3 bytes, an odd number" --data odd.bin
python3 -c 'import array; array.array("I", range(100)).tofile(open("wide.bin", "wb"))'
refused "--data: 'wide.bin' seems to have tokens of 32 or 64 bits.*--data-format nanogpt" --data wide.bin
gzip -c <short.txt >short.txt.gz
refused "--data: 'short.txt.gz' is compressed by gzip; unpack it first" --data short.txt.gz
refused "--data: 'paired.idx' is not a Megatron index" --data paired.bin
refused "--data: '.*kjv.txt' is read as bytes and 'words.bin' as nanogpt" --data "$text" words.bin
refused "--data: .*out" --data out
config 's/"vocab_size": 256/"vocab_size": 100/'
refused "--data: .* has token .* and the vocabulary of --model has 100 tokens" --model bad.json
python3 -c 'open("low.bin", "wb").write(bytes([7, 0] * 400))'
refused "--prompt: its byte 110 is not a token, as the model's vocab_size is 100" --model bad.json --data low.bin --sample 5

# Outputs.
refused "--log: cannot write '/nosuch/log.jsonl': No such file" --log /nosuch/log.jsonl
refused "--plot: cannot write '/nosuch/loss.svg': No such file" --plot /nosuch/loss.svg
refused "--log: 'out' is a folder" --log out
refused "--plot: 'out' is a folder" --plot out
refused "--log and --plot both name 'out/same'" --log out/same --plot out/same
refused "--log and --plot both name 'out/same'" --log out/same --plot ./out/same

# Processes that would each train on their own, and invalid values of --check.
export SLURM_STEP_NUM_TASKS=4
refused '--backend threads: this is one of 4 processes that srun started, and each would train alone; give --backend mpi, and srun --mpi=pmix, or' --mesh dp=1
unset SLURM_STEP_NUM_TASKS
refused '--check now: legal are first, off, always and every:N' --check now
refused '--check every:0: legal are' --check every:0
refused '--check always:2: legal are' --check always:2

# An output that is also an input stays unchanged.
unharmed() { # unharmed FILE TEXT ARGUMENTS...
  kept=$1
  cp "$kept" before
  shift
  refused "$@"
  cmp -s "$kept" before || fail "$*: $kept was overwritten"
}
head -c 4000 "$text" >small.txt
ln -s small.txt link.txt
unharmed small.txt "--log would overwrite './small.txt', which --data reads" --data small.txt --log ./small.txt
unharmed small.txt "--plot would overwrite 'link.txt', which --data reads" --data small.txt --plot link.txt
unharmed config.json "--trace would overwrite 'config.json', which --model reads" --trace config.json
cp "$SOURCE/examples/plan_llama/hardware/h100.json" machine.json
unharmed machine.json "--plot would overwrite 'machine.json', which --cluster reads" --cluster machine.json:1 \
  --plot machine.json
ln -s there.svg dangling
refused "--log and --plot both name 'dangling'" --log dangling --plot there.svg
rm dangling
printf '0F0,0B0\n' >alone.csv
unharmed alone.csv "--timeline would overwrite 'alone.csv', which --schedule reads" --schedule alone.csv \
  --timeline alone.csv

# Steps record the options that made them, in UTF-8.
bytes=$(printf 'model-\377.json')
cp config.json "$bytes"
refused '--model names a path that is not UTF-8, which no step in --checkpoint-dir could repeat; give it another name' \
  --model "$bytes" --checkpoint-dir out/ck
bytes=$(printf 'alone-\377.csv')
cp alone.csv "$bytes"
refused '--schedule names a path that is not UTF-8, which no step' --schedule "$bytes" --checkpoint-dir out/ck

# Pipelines and long sequences.
refused "--schedule 1f1b has 4 stages on pp=4 ranks, but the model has 2 layers" --mesh pp=4
refused "--schedule none: unknown schedule; legal are gpipe, 1f1b, interleaved:V" --schedule none
refused "--schedule interleaved: interleaved needs the number of chunks per rank, 2 to 255" --schedule interleaved
refused "--schedule dualpipe_v: with 2 pipeline ranks and 2 microbatches: .*nearest legal number of microbatches is 4" --mesh pp=2 --schedule dualpipe_v --global-batch 8
refused "--schedule missing.csv: the file cannot be read" --schedule missing.csv
refused "--schedule interleaved:2 orders the stages of a pipeline, and with pp=1 there is none; legal are 1f1b, and more ranks along pp" \
  --schedule interleaved:2
refused "--split measured divides layers over the stages of a pipeline, and with pp=1 there is one; leave it out" --split measured
printf '0F0,0B0\n1B0,1F0\n' >deadlock.csv
refused "--schedule deadlock.csv: .*" --mesh pp=2 --schedule deadlock.csv --micro-batch 8
refused "--seq is 7, and 8 ranks of cp and tp share a sequence, each with a token at least; legal are 8 and more" --mesh cp=4,tp=2 --seq 7
refused "--seq is 35, which is not divisible by the ranks that share a sequence, as --tensor-overlap needs it, = 2; the nearest that are: 34 and 36" --mesh tp=2 --seq 35 --tensor-overlap 2
refused "ulysses shares out the heads of a rank over cp = 8" --mesh cp=8 --attention ulysses
for mask in full window: window:0 window:3x; do
  refused "--attention-mask '$mask' is unknown; legal are model, causal and window:N with N tokens from 1" --attention-mask $mask
done
refused "--attention-mask window:4: config.json: .*it would be dots1, which does not have sliding_window" --model tiny-dots1 --attention-mask window:4
cat >dots.json <<'JSON'
{"model_type": "dots1", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
 "intermediate_size": 48, "max_position_embeddings": 256, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
 "n_shared_experts": 1, "first_k_dense_replace": 1, "norm_topk_prob": true, "routed_scaling_factor": 1, "n_group": 1, "topk_group": 1,
 "sliding_window": 4, "max_window_layers": 0}
JSON
cat >olmoe.json <<'JSON'
{"model_type": "olmoe", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6,
 "intermediate_size": 16, "vocab_size": 256, "max_position_embeddings": 256, "num_experts": 4, "num_experts_per_tok": 2,
 "norm_topk_prob": false}
JSON
refused "--checkpoint-dir steps: config.json: .*it would be dots1, which does not have sliding_window; legal are other models, and no --checkpoint-dir" \
  --model dots.json --checkpoint-dir steps
refused "--export-hf made: config.json: .*it would be olmoe, .*; legal are other models, and no --export-hf" --model olmoe.json --export-hf made
refused "--attention 'fast' is unknown; legal are ring" --attention fast
refused '--attention ring:zigzag says how ranks along cp share a sequence, and --mesh dp=2 has one; leave it out' --mesh dp=2 --attention ring:zigzag
refused "--attention ring:contiguous is built for .* --strategy sp alone; legal here is ring:zigzag" --mesh cp=2 --attention ring:contiguous --strategy tp
refused "--split 'odd' is unknown; legal are flops, measured, even" --split odd
refused "--trace: cannot write '/nosuch/t.json': No such file" --trace /nosuch/t.json
refused '--timeline shows a step, and --steps 0 has none' --steps 0 --timeline out/t.svg
refused '--report shows steps, and --steps 0 has none' --steps 0 --report out/page.html
refused "--report reads --log at the end, and '/dev/null' keeps nothing; name a file" --log /dev/null --report out/page.html
refused "--log and --report both name 'out/same'" --log out/same --report out/same
refused "--trace and --timeline both name 'out/same'" --trace out/same --timeline out/same

# Errors of a page for a log.
reported() { # reported TEXT ARGUMENTS...
  expected=$1
  shift
  code=0
  "$trainer" report "$@" >stdout 2>stderr || code=$?
  [ "$code" = 1 ] || fail "report $*: exit code $code"
  grep -q "^train_llama: $expected" stderr || fail "report $*: '$expected' is not in: $(cat stderr)"
}
printf '{"step": 1, "loss": 2, "grad_norm": 1, "lr": 1}\n{"step": 2, "loss": "2"}\n' >bad.jsonl
reported "LOG: 'bad.jsonl', line 2: loss is \"2\"; legal are numbers and null" bad.jsonl out/page.html
reported "LOG: .*'absent.jsonl'.*No such file" absent.jsonl out/page.html
reported 'report takes a log and the page to write: train_llama report LOG PAGE' bad.jsonl
[ -z "$(ls -A out)" ] || fail "a report that fails left $(ls -A out)"
code=0
timeout 20 "$trainer" --model config.json --data "$text" --report page.html >stdout 2>stderr || code=$?
{ [ "$code" = 1 ] && grep -q '^train_llama: --report needs --log, the file that it is made from' stderr; } || fail "--report: $(cat stderr)"

# Options in a file: written by a run, read again, and overridden by the command line.
"$trainer" --data "$text" --mesh dp=2 --lr 1e-2 --steps 3 --write-config run.toml || fail "--write-config ends with $?"
[ "$(grep -c = run.toml)" = 4 ] || fail "--write-config writes other than what is given: $(cat run.toml)"
"$trainer" --config run.toml --model config.json --mesh dp=1,tp=2 --seq 32 --dry-run >stdout 2>stderr || fail "$(cat stderr)"
grep -q 'tp=2' stdout || fail "the command line does not come before --config: $(cat stdout)"
echo 'lrr = 1' >wrong.toml
refused '--config: there is no option --lrr; did you mean --lr?' --config wrong.toml
echo 'lr = "fast"' >wrong.toml
refused "--lr is 'fast', which is not a number" --config wrong.toml
refused '--config: absent.toml was not readable' --config absent.toml
refused '--write-config: cannot write' --write-config /nosuch/run.toml

# An existing log is unchanged after any other error.
echo kept >kept.jsonl
for options in "--mesh tp=3" "--plot /nosuch/loss.svg" "--data empty.txt" "--lr nan"; do
  # shellcheck disable=SC2086
  refused '' --log kept.jsonl $options
  [ "$(cat kept.jsonl)" = kept ] || fail "$options: the log was overwritten"
done

# No data at all.
code=0
"$trainer" --model config.json --seq 32 >stdout 2>stderr || code=$?
[ "$code" = 1 ] || fail "without --data: exit code $code"
grep -q '^train_llama: --data is missing' stderr || fail "without --data: $(cat stderr)"

# Commands.
mkdir steps
"$trainer" --model config.json --data "$text" --seq 32 --steps 1 --sample 0 --checkpoint-dir steps \
  --held-out "$text" --eval-every 1 >trained.out || fail "training ended with $?"
step=steps/step-00000001
grep -q '^step 1: held-out loss [0-9.]*$' trained.out || fail "no evaluation: $(cat trained.out)"
loss=$(sed -n 's/^step 1: held-out loss //p' trained.out)
"$trainer" evaluate "$step" --held-out "$text" >evaluated.out || fail "evaluate ended with $?"
grep -q "^held-out loss $loss, perplexity [0-9.]*, of [0-9]* sequences of 32 tokens$" evaluated.out ||
  fail "not the loss $loss of training: $(cat evaluated.out)"
[ "$("$trainer" generate "$step" --prompt Abc --sample 3 --temperature 0 --mesh tp=2 | cut -c-3)" = Abc ] || fail "no text was generated"
commanded() { # commanded TEXT ARGUMENTS...
  expected=$1
  shift
  if "$trainer" "$@" >stdout 2>stderr; then fail "$* was accepted"; fi
  grep -q "^train_llama: .*$expected" stderr || fail "$*: '$expected' is not in: $(cat stderr)"
  [ "$(wc -c <stderr)" -lt 400 ] || fail "$*: too long: $(cat stderr)"
}
commanded 'generate needs a saved step, a folder of them or a model directory, as in generate run/step-00000100' generate
commanded '--steps is 3, and generate makes none; leave it out' generate "$step" --steps 3
commanded '--lora is for training, and generate trains nothing; leave it out' generate "$step" --lora 4
commanded '--log is for training, and generate trains nothing; leave it out' generate "$step" --log x
commanded '--sample is 0; generate takes at least 1' generate "$step" --sample 0
commanded 'evaluate needs --held-out, which names a file, or a fraction of --data' evaluate "$step"
commanded "--held-out 'nosuch' is neither a file nor a fraction" evaluate "$step" --held-out nosuch
commanded '--eval-every 2 needs --held-out' --eval-every 2
commanded '--eval-every is -1; at least 0 is legal' --eval-every -1
commanded "--model tiny is not the model of --init-from '$step': its .* is .*, and the step has .*; leave out --model" \
  generate "$step" --model tiny

# A model directory with a tokenizer: the run trains, generates and evaluates on its text as on token files.
sed 's/256,/608,/' config.json >more_words.json
"$trainer" --model more_words.json --seq 32 --steps 0 --sample 0 --export-hf words >made.out || fail "no directory was made"
cp "$SOURCE/tests/data/tokenizers/llama3.json" words/tokenizer.json
python3 - "$SOURCE/tests/data/tokenizers/texts.json" <<'PY'
import array, json, sys
text, tokens, _ = max(json.load(open(sys.argv[1]))["llama3"], key=lambda one: len(one[1]))
open("golden.txt", "w").write(text)
array.array("H", tokens).tofile(open("golden.bin", "wb"))
PY
head -c 20000 "$text" >some.txt
"$trainer" --init-from words --data some.txt --seq 32 --steps 2 --sample 2 --prompt God --checkpoint-dir of_words >trained.out ||
  fail "training on text ended with $?"
grep -q '^God' trained.out || fail "no text was sampled: $(cat trained.out)"
"$trainer" evaluate of_words --held-out golden.txt >by_text.out || fail "evaluate ended with $?"
"$trainer" evaluate of_words --held-out golden.bin --mesh tp=2 >by_tokens.out || fail "evaluate ended with $?"
cmp by_text.out by_tokens.out || fail "not the loss of its tokens: $(cat by_text.out by_tokens.out)"
"$trainer" --model more_words.json --data golden.bin --on-new-data begin --seq 32 --steps 3 --resume of_words \
  --checkpoint-dir resumed --on-new-schedule follow >resumed.out || fail "going on ended with $?"
for from in of_words resumed words; do
  [ "$("$trainer" generate $from --prompt 'Grüße 🙂' --sample 1 | cut -b-12)" = 'Grüße 🙂' ] || fail "no text of $from"
done
# A generated text ends before an end token of the model or of its tokenizer.
cp -r words ends
all=$(python3 -c 'print(list(range(608)))')
echo '{"eos_token": {"content": "a cat"}}' >ends/tokenizer_config.json
commanded "generate: 'ends/tokenizer_config.json': key 'eos_token' is {\"content\":\"a cat\"}; legal is a token, or a list of tokens" \
  generate ends
echo '{"eos_token": "<|end|>"}' >ends/tokenizer_config.json
[ "$("$trainer" generate ends --prompt God --sample 20 | wc -c)" -gt 4 ] || fail "a text ends with any token"
sed -i "s/^{/{\"eos_token_id\": $all,/" ends/config.json
[ "$("$trainer" generate ends --prompt God --mesh tp=2)" = God ] || fail "config.json ends no text"
echo '{"eos_token_id": null}' >ends/generation_config.json
[ "$("$trainer" generate ends --prompt God)" = God ] || fail "null is taken for a token"
echo '{"eos_token_id": 607}' >ends/generation_config.json
[ "$("$trainer" generate ends --prompt God --sample 20 | wc -c)" -gt 4 ] || fail "config.json comes before generation_config.json"
echo '{"eos_token_id": true}' >ends/generation_config.json
commanded "key 'eos_token_id' is true; legal is a token" generate ends
mv words moved
commanded "--init-from: 'of_words/step-00000002' was trained with '/.*/words/tokenizer.json', which does not exist; name it by --tokenizer" \
  generate of_words
"$trainer" generate of_words --tokenizer moved --sample 1 >by_name.out || fail "no tokenizer by name"
commanded "--prompt: its token [0-9]* is not a token, as the model's vocab_size is 256" generate "$step" --tokenizer moved
commanded "--tokenizer: there is no 'out/tokenizer.json'; name a tokenizer.json, or its folder" generate moved --tokenizer out
commanded "--tokenizer moved makes tokens of text, and with --data-format bytes they are bytes; leave out one of the two" \
  generate moved --tokenizer moved --data-format bytes
commanded "--data-format text needs a tokenizer; name a tokenizer.json, or its folder, by --tokenizer" --data some.txt --data-format text
commanded "--held-out: '$trainer': --tokenizer: '/.*/moved/tokenizer.json': the text is not UTF-8" evaluate moved --held-out "$trainer"
commanded "--log would overwrite 'moved/tokenizer.json', which --tokenizer reads" --init-from moved --data some.txt --seq 32 \
  --log moved/tokenizer.json
: >moved/tokenizer.json
commanded "--tokenizer: '/.*/moved/tokenizer.json': malformed JSON" generate moved
mv moved/tokenizer.json moved/tokenizer.model
commanded "generate: 'moved' has a tokenizer.model alone, and no tokenizer is known; name a tokenizer.json, or its folder, by --tokenizer" \
  generate moved
commanded "evaluate: 'moved' has a tokenizer.model alone, and no tokenizer is known" evaluate moved --held-out some.txt
commanded "--data some.txt: it would be read as bytes, and --init-from moved has a tokenizer.model of its own; name its tokenizer.json by" \
  --init-from moved --data some.txt
rm moved/tokenizer.model
commanded "generate: 'moved' has 608 tokens, and no tokenizer is known" generate moved
"$trainer" --init-from moved --data golden.bin --seq 32 --steps 1 --checkpoint-dir of_tokens >trained.out || fail "training ended with $?"
commanded "generate: 'of_tokens' was trained on tokens of a file, and no tokenizer is known" generate of_tokens

python3 "$SOURCE/tests/headers/option_table.py" "$trainer" "$SOURCE/examples/train_llama/README.md" || fail "the page's options"
echo "$cases cases are refused"
