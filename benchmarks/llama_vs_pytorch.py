"""Compares tokens per second of plait's trainer and of PyTorch on the same model, in turn, on this machine's processor.

    python3 benchmarks/llama_vs_pytorch.py --python /path/to/python/with/torch [--binary build/bin/train_llama]

The models are the presets bench-512, bench-128 and bench-experts (4 layers, vocabulary 4096), in float, with one thread per
rank. Both sides begin with the weights that PyTorch writes, and take the same sequences in each step: the script fails
if their losses differ. The rate of each side is that of its fastest step over all rounds. Replicated parameters are
compared with DistributedDataParallel, and --data-parallel zero3 with FSDP2. If tensor-parallel ranks may shard the
vocabulary, PyTorch runs with and without it, and the better result counts. In bench-experts (512 wide, 2 of 8 experts
for each token) plait shards experts over data-parallel ranks. In PyTorch each rank has them all; transformers runs
with grouped and with separate products of experts, and the better result counts. The script needs only the standard
library. PyTorch's side is pytorch_llama.py.

With --processor-time the rates are tokens per second of all ranks' processor time in steps, which other work on the
machine changes little. plait's is the mean of the measured steps: the time of a run less that of a run of 3 steps.
"""
import argparse
import json
import math
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
SHAPES = {"512": {"hidden": 512, "layers": 4, "heads": 8, "ffn": 1536, "vocab": 4096, "experts": 0},
          "128": {"hidden": 128, "layers": 4, "heads": 4, "ffn": 384, "vocab": 4096, "experts": 0},
          "experts": {"hidden": 512, "layers": 4, "heads": 8, "ffn": 768, "vocab": 4096, "experts": 8}}
MESHES = {"512": [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)], "128": [(2, 1), (1, 2), (4, 1), (1, 4), (2, 2)],
          "experts": [(1, 1), (4, 1)]}
TARGETS = {"512": 1.0, "128": 1.5}
EXPERTS_TARGET = 2.0
DATA_PARALLEL_TARGET = 2.0


def target_of(model: str, dp: int, tp: int):
    if model == "experts":
        return EXPERTS_TARGET
    if dp > 1 and tp == 1:
        return DATA_PARALLEL_TARGET
    return TARGETS[model] if dp * tp > 1 or model == "512" else None


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default=str(HERE.parent / "build/bin/train_llama"), help="plait's trainer")
    parser.add_argument("--python", default="python3", help="an interpreter that has torch and transformers")
    parser.add_argument("--model", choices=sorted(SHAPES), action="append", help="one model only; may be repeated")
    parser.add_argument("--mesh", action="append", help="one mesh only, as DPxTP; may be repeated")
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--micro-batch", type=int, default=2, help="sequences per data-parallel rank")
    parser.add_argument("--steps", type=int, default=10, help="measured steps of a run, after 3 that are not")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each side")
    parser.add_argument("--processor-time", action="store_true", help="measure processor time in place of wall time")
    parser.add_argument("--json", help="also write the rows to this file")
    parser.add_argument("--markdown", help="also write the table to this file")
    options = parser.parse_args()
    try:
        options.meshes = [tuple(map(int, text.split("x"))) for text in options.mesh or []]
    except ValueError:
        options.meshes = [()]
    if any(len(mesh) != 2 or min(mesh) < 1 for mesh in options.meshes):
        parser.error(f"--mesh is {options.mesh}, must be two positive numbers, such as 2x1")
    return options


def checked(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"failed ({done.returncode}): {' '.join(command)}\n{done.stderr[-2000:]}")
    return done.stdout


def processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def plait_steps(options: argparse.Namespace, run: dict, folder: str, steps: int) -> list[dict]:
    log = pathlib.Path(folder, "log.jsonl")
    log.unlink(missing_ok=True)
    data = "ep" if SHAPES[run["model"]]["experts"] else "dp"
    checked([options.binary, "--mesh", f"{data}={run['dp']},tp={run['tp']}", "--init-from", folder, "--data",
             f"{folder}/tokens.bin", "--seq", str(options.seq), "--micro-batch", str(options.micro_batch), "--steps",
             str(steps), "--threads", "1", "--sample", "0", "--precision", "float", "--data-parallel",
             run["data_parallel"], "--lr", "1e-4", "--lr-schedule", "constant", "--warmup", "0", "--log", str(log)])
    return [row for row in map(json.loads, log.read_text().splitlines()) if "step" in row]


def run_plait(options: argparse.Namespace, run: dict, folder: str) -> dict:
    before = processor_seconds()
    rows = plait_steps(options, run, folder, options.steps + 3)
    result = {"losses": [row["loss"] for row in rows]}
    if options.processor_time:
        after = processor_seconds()
        plait_steps(options, run, folder, 3)
        tokens = options.seq * options.micro_batch * run["dp"] * options.steps
        rate = tokens / ((after - before) - (processor_seconds() - after))
        return {**result, "best": rate, "median": rate}
    rates = [row["tokens_per_second"] for row in rows][3:]
    return {**result, "best": max(rates), "median": statistics.median(rates)}


def run_torch(options: argparse.Namespace, run: dict, folder: str, variant: list[str]) -> dict:
    shape = SHAPES[run["model"]]
    sizes = {**shape, "kv-heads": shape["heads"], "seq": options.seq, "micro-batch": options.micro_batch,
             "dp": run["dp"], "tp": run["tp"], "steps": options.steps}
    out = checked([options.python, str(HERE / "pytorch_llama.py"), "--export", folder, *variant,
                   *(word for name, size in sizes.items() for word in (f"--{name}", str(size))),
                   *(["--fsdp"] if run["data_parallel"] == "zero3" else [])])
    row = json.loads(out.strip().splitlines()[-1])
    rate = "tokens_per_processor_second" if options.processor_time else "tokens_per_second"
    return {"best": row[rate], "median": row[f"{rate}_median"], "losses": row["losses"], "framework": row["framework"]}


def variants(run: dict) -> list[list[str]]:
    """Options of PyTorch's side, of which the best counts."""
    if SHAPES[run["model"]]["experts"]:
        return [["--experts-implementation", name] for name in ("grouped_mm", "eager")]
    return [[], ["--sharded-vocab"]] if run["tp"] > 1 else [[]]


def check_losses(plait: list[dict], torch: list[dict]) -> float:
    """Returns the largest relative difference of two losses of a step."""
    apart = [[abs(of_plait / of_torch - 1) for of_plait, of_torch in zip(plait[0]["losses"], run["losses"], strict=True)]
             for run in torch]
    if max(run[0] for run in apart) > 1e-5 or max(map(max, apart)) > 1e-3:
        sys.exit(f"the losses differ: {plait[0]['losses']} of plait, and {[run['losses'] for run in torch]}")
    return max(map(max, apart))


def compare(options: argparse.Namespace, run: dict) -> dict:
    plait, torch = [], [[] for _ in variants(run)]
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.rounds):
            for variant, runs in zip(variants(run), torch):
                runs.append(run_torch(options, run, folder, variant))
            plait.append(run_plait(options, run, folder))
    best = lambda runs: max(one["best"] for one in runs)
    median = lambda runs: statistics.median(one["median"] for one in runs)
    return {**run, "seq": options.seq, "micro_batch": options.micro_batch, "framework": torch[0][0]["framework"],
            "plait": best(plait), "torch": max(map(best, torch)), "ratio": best(plait) / max(map(best, torch)),
            "ratio_of_medians": median(plait) / max(map(median, torch)),
            "losses_differ_by": check_losses(plait, [one for runs in torch for one in runs]),
            "target": target_of(run["model"], run["dp"], run["tp"])}


def main() -> None:
    options = parse()
    rows = []
    per = "core-second" if options.processor_time else "s"
    lines = [f"| model | ranks | dp x tp | data parallel | plait tokens/{per} | PyTorch tokens/{per} | ratio | of medians | target |",
             "|---|---:|---|---|---:|---:|---:|---:|---:|"]
    print("\n".join(lines), flush=True)
    for model in options.model or list(SHAPES):
        for dp, tp in options.meshes or MESHES[model]:
            for policy in ["replicated", "zero3"] if dp > 1 and tp == 1 and model != "experts" else ["replicated"]:
                row = compare(options, {"model": model, "dp": dp, "tp": tp, "data_parallel": policy})
                rows.append(row)
                target = "" if row["target"] is None else f"{row['target']:.1f}"
                lines.append(f"| bench-{model} | {dp * tp} | {dp} x {tp} | {policy if dp > 1 else ''} | {row['plait']:.0f} | "
                             f"{row['torch']:.0f} | {row['ratio']:.2f} | {row['ratio_of_medians']:.2f} | {target} |")
                print(lines[-1], flush=True)
    mean = math.exp(statistics.fmean(math.log(row["ratio"]) for row in rows))
    apart = max(row["losses_differ_by"] for row in rows)
    print(f"\n{rows[0]['framework']}; seq {options.seq}, micro-batch {options.micro_batch}; geometric mean of the ratios {mean:.2f}; "
          f"losses of {options.steps + 3} steps differ by up to {apart:.1e}")
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")
    if options.markdown:
        pathlib.Path(options.markdown).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
