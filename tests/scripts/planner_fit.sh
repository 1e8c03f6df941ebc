#!/bin/sh
# The script that fits the planner finds the constants that made a table, and reports the rows that it did not fit.
# timeout: 300
# runs: with --all
. "$(dirname "$0")/lib/base.sh"

# Two tables in the form of published ones, priced on a machine with other constants than H100's; one is not fitted.
python3 - "$BIN/plan_llama" "$SOURCE/benchmarks/planner" "$work" <<'PYTHON' || fail "the made-up tables"
import csv, json, pathlib, subprocess, sys
program, scripts, work = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])
sys.path.insert(0, scripts)
import fit, published
machine = json.loads(subprocess.run([program, "--print-hardware", "h100"], check=True, capture_output=True, text=True).stdout)
machine["product_share"]["bf16"], machine["product_share"]["fp8"], machine["attention_share"] = 0.58, 0.52, 0.42
columns = ("releases model system precision gpus seq layers_run gbs mbs tp pp cp vp dp recompute step_time_s").split()
runs = [(m, p, g, s, b, t, k, c, v) for p in ("BF16", "FP8") for m, g, s, b, t, k, c, v in (
    ("Llama3.1-8B", 8, 8192, 128, 1, 1, 2, 1), ("Llama3.1-8B", 8, 8192, 128, 1, 1, 1, 1), ("Llama3.1-70B", 64, 8192, 128, 4, 4, 2, 5),
    ("Llama3.1-405B", 512, 8192, 256, 8, 8, 2, 8), ("Nemotron4-15B", 64, 4096, 256, 2, 1, 1, 1), ("Nemotron4-340B", 256, 4096, 64, 8, 8, 1, 12))]
layers = {"Llama3.1-8B": 32, "Llama3.1-70B": 80, "Llama3.1-405B": 126, "Nemotron4-15B": 32, "Nemotron4-340B": 96}
def write(times):
    with open(work / "dgxc_h100_gb200_step_times.csv", "w", newline="") as file:
        out = csv.writer(file)
        out.writerow(columns)
        for (m, p, g, s, b, t, k, c, v), time in zip(runs, times):
            out.writerow(["v25", m, "H100", p, g, s, layers[m], b, 1, t, k, c, v, g // (t * k * c), "", time])
write([1] * len(runs))
rows = list(published.dgxc(work))
plain = [float(p["step_seconds"]) for p in fit.price(program, rows, machine, work)]
# The parts and network of a row in a table apply to that row's machine only.
part = {"memory_bandwidth": machine["memory_bandwidth"] / 2, "levels": {1: {"bandwidth": 1e9}}}
changed = fit.of_part(machine, part)
assert changed["levels"][0] == machine["levels"][0] and changed["levels"][1] == {**machine["levels"][1], "bandwidth": 1e9}
assert {k for k in machine if machine[k] != changed[k]} == {"memory_bandwidth", "levels"}
apart = [float(p["step_seconds"]) for p in fit.price(program, [{**rows[0], "part": part}, *rows[1:]], machine, work)]
assert apart[0] > plain[0] and apart[1:] == plain[1:], (apart, plain)
write(plain)
with open(work / "megatron_core_h100.csv", "w", newline="") as file:
    out = csv.writer(file)
    out.writerow("model layers hidden heads seq vocab gpus global_batch tp pp cp dp derived_iter_s".split())
    out.writerow(["7.1B", 30, 4096, 32, 4096, 131072, 96, 192, 2, 1, 1, 48, 100])
PYTHON

python3 "$SOURCE/benchmarks/planner/fit.py" "$work" "$BIN/plan_llama" --fit --out "$work/residuals.csv" --show megatron_core >"$work/out" ||
  fail "the fit: $(cat "$work/out")"
python3 - "$work" <<'PYTHON' || fail "what was fitted: $(cat "$work/out")"
import ast, csv, pathlib, re, sys
work = pathlib.Path(sys.argv[1])
out = (work / "out").read_text()
found = ast.literal_eval(re.search(r"^h100 (\{.*\}) loss", out, re.MULTILINE).group(1))
assert abs(found["product_share.bf16"] / 0.58 - 1) < 0.04 and abs(found["product_share.fp8"] / 0.52 - 1) < 0.04, found
lines = {l.split()[0]: l.split() for l in out.splitlines() if re.match(r"(dgxc|megatron_core) ", l)}
assert lines["dgxc"][1] == "*" and float(lines["dgxc"][3]) < 1.5, lines  # the median error where it was fitted
assert float(lines["megatron_core"][2]) > 95, lines  # a published time of 100 s is far from possible
residuals = list(csv.DictReader(open(work / "residuals.csv")))
assert len(residuals) == 13 and {r["fitted"] for r in residuals} == {"yes", "no"}
assert all(abs(float(r["predicted_s"]) / float(r["published_s"]) - 1 - float(r["error_percent"]) / 100) < 2e-3 for r in residuals)
# Made-up runs need not fit in memory: sequences of 8192 of the 8B model without sharding do not, in either precision.
refused = [r for r in residuals if r["fits"] == "no"]
assert re.search(rf"^of 13 published configurations that ran, {len(refused)} are said not to fit: ", out, re.MULTILINE), out
assert re.search(rf"^memory of dgxc: {len(refused)} of 12 that ran are said not to fit$", out, re.MULTILINE), out
assert len(refused) == 2 and all(r["configuration"].startswith("Llama3.1-8B") for r in refused), refused
assert "a100" not in out.splitlines()[-1]
PYTHON
