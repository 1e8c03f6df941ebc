"""Draws trainings and layouts of the trainer at random, and checks that no layout changes a training.

    random_options.py TRAINER TEXT ROUNDS SEED

A round draws a training and two layouts. The training runs without interruption on one rank. It also runs on the first
layout, which saves half way, and from that step on the second one. Both have the losses and gradient norms of one rank, bit
for bit with --deterministic, and send the predicted bytes. A failure is printed as command lines to run again in the
folder of the test.
"""
import json
import pathlib
import random
import shlex
import subprocess
import sys

STEPS, BATCH = 4, 8


def training(draw: random.Random) -> dict:
    """A training: options that may change the numbers, which must be equal on every layout."""
    layers = draw.choice([2, 4, 6, 8])
    config = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": layers, "num_attention_heads": 8,
              "num_key_value_heads": draw.choice([4, 8]), "intermediate_size": draw.choice([64, 96]),
              "vocab_size": draw.choice([250, 256]), "max_position_embeddings": 64}
    if draw.random() < 0.4: config["tie_word_embeddings"] = True
    if draw.random() < 0.2: config["attention_bias"] = True
    precision = draw.choice(["float", "float", "double", "bf16", "bf16-no-masters"])
    optimizer = "muon" if precision != "bf16-no-masters" and draw.random() < 0.3 else "adamw"
    deterministic = draw.random() < 0.4
    moments = draw.choice(["full", "full", "bf16"] + ([] if optimizer == "muon" or deterministic else ["int8"]))
    what = ["--seq", "32", "--global-batch", str(BATCH), "--steps", str(STEPS), "--warmup", "1", "--sample", "0", "--lr",
            "0.01", "--precision", precision, "--optimizer", optimizer, "--moments", moments]
    for field, value, chance in (("--dropout", "0.1", .2), ("--label-smoothing", "0.1", .2), ("--z-loss", "1e-3", .2),
                                ("--clip", draw.choice(["0", "0.5"]), .3), ("--lr-schedule", "constant", .2),
                                ("--seed", str(draw.randrange(1, 100)), .3)):
        if draw.random() < chance: what += [field, value]
    if draw.random() < 0.2: what += ["--documents", "apart", "--end-of-document", "10"]
    if deterministic: what += ["--deterministic", "8,8,4"]
    return {"config": config, "what": what, "precision": precision, "optimizer": optimizer, "moments": moments,
            "deterministic": deterministic, "apart": "apart" in what}


def layout(draw: random.Random, t: dict) -> list[str]:
    """A valid layout for a training, on up to eight ranks."""
    layers, kv = t["config"]["num_hidden_layers"], t["config"]["num_key_value_heads"]
    while True:
        dp, pp, cp, tp = (draw.choice(extents) for extents in ([1, 2, 2, 4], [1, 2, 2, 4], [1, 1, 2], [1, 1, 2, 4]))
        if dp * pp * cp * tp <= 8 and tp <= kv and pp <= layers: break
    micro = draw.choice([m for m in (1, 2, 4, 8) if BATCH % (m * dp) == 0])
    microbatches = BATCH // (micro * dp)
    words = ["--mesh", f"dp={dp},pp={pp},cp={cp},tp={tp}", "--micro-batch", str(micro)]
    strategy = "tp" if t["precision"] != "bf16-no-masters" and draw.random() < 0.2 else "sp"
    words += ["--strategy", strategy]
    if cp > 1:
        kinds = ["ring", "all_gather_kv"]
        if (t["config"]["num_key_value_heads"] // tp) % cp == 0: kinds.append("ulysses")
        order = draw.choice(["", ":zigzag"] + ([":contiguous"] if strategy == "sp" else []))
        words += ["--attention", draw.choice(kinds) + order]
    if pp > 1:
        kinds = ["1f1b", "gpipe", "zb_h1", "zb_h2", "automatic"]
        if layers >= 2 * pp:
            kinds += ["zb_v", "v_half", "v_min", "automatic:2"]
            if microbatches >= 2 * pp: kinds.append("dualpipe_v")
            if microbatches % pp == 0: kinds.append("interleaved:2")
        words += ["--schedule", draw.choice(kinds), "--split", draw.choice(["flops", "even"])]
    data = dp * cp
    levels = ["replicated"] + (["zero1", "zero2", "zero3"] if data > 1 else [])
    level = draw.choice(levels)
    words += ["--data-parallel", level]
    if level != "replicated":
        cuts = ["whole"] if t["optimizer"] == "muon" else ["whole", "blocks"] if t["moments"] == "int8" else [
            "even", "whole", "blocks"]
        words += ["--shard", draw.choice(cuts)]
        if dp > 1 and cp > 1: words += ["--replicate-over", draw.choice(["none", "dp", "cp"])]
        if level == "zero3":
            words += ["--prefetch", str(draw.choice([0, 1, 2])), "--reshard-after-forward", draw.choice(["on", "off"])]
    if data > 1 and draw.random() < 0.3: words += ["--overlap", draw.choice(["on", "off"])]
    if tp > 1 and not t["deterministic"] and draw.random() < 0.3: words += ["--tensor-overlap", "2"]
    words += ["--recompute", draw.choice(["none", "selective", "full", "every:2", "budget:10M"])]
    return words


class failure(Exception):
    pass


def steps_of(log: str) -> list[dict]:
    lines = [json.loads(line) for line in pathlib.Path(log).read_text().splitlines()]
    if "summary" not in lines[-1]: raise failure(f"{log} has no summary")
    if lines[-1]["summary"]["bytes_as_predicted"] is not True: raise failure(f"{log}: the bytes are not as predicted")
    return [line for line in lines if "step" in line and "loss" in line] + [lines[-1]["summary"]]


def run(trainer: str, text: str, name: str, words: list[str]) -> list[dict]:
    log = pathlib.Path(f"{name}.jsonl")
    log.unlink(missing_ok=True)
    command = [trainer, "--model", "config.json", "--data", text, "--log", str(log), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        raise failure(f"does not end: {shlex.join(command)}") from None
    if done.returncode != 0:
        raise failure(f"ended with {done.returncode}: {shlex.join(command)}\n{done.stderr.strip()[-600:]}")
    return steps_of(str(log))


def compare(t: dict, alone: list[dict], other: list[dict], command: str) -> None:
    """Checks that the steps of `other` equal the last ones of `alone`."""
    tolerance = 0.0 if t["deterministic"] else {"double": 1e-10, "float": 2e-5}.get(t["precision"], 0.02)
    if t["moments"] == "int8": tolerance = max(tolerance, 0.02)  # split blocks have other scales
    if t["optimizer"] == "muon" and tolerance < 1e-3 and t["precision"] == "float": tolerance *= 10
    for a, b in zip(alone[:-1][-len(other) + 1:], other[:-1], strict=True):
        for key in ("loss", "grad_norm"):
            least = tolerance * (5 if key == "grad_norm" else 1)
            if not abs(a[key] - b[key]) <= least * abs(a[key]):
                raise failure(f"{key} of step {a['step']} is {b[key]!r}, and on one rank {a[key]!r}: {command}")
    if t["deterministic"] and alone[-1]["weights_hash"] != other[-1]["weights_hash"]:
        raise failure(f"other weights than on one rank: {command}")


def one_round(trainer: str, text: str, draw: random.Random) -> None:
    t = training(draw)
    first, second = layout(draw, t), layout(draw, t)
    pathlib.Path("config.json").write_text(json.dumps(t["config"]))
    subprocess.run(["rm", "-rf", "saved"], check=True)
    alone = run(trainer, text, "alone", [*t["what"], "--micro-batch", str(BATCH)])
    half = [*t["what"], *first, "--checkpoint-dir", "saved", "--save-every", str(STEPS // 2)]
    compare(t, alone, run(trainer, text, "first", half), shlex.join(half))
    rest = [*t["what"], *second, "--resume", f"saved/step-{STEPS // 2:08}"]
    compare(t, alone, run(trainer, text, "second", rest), f"after {shlex.join(half)}\n{shlex.join(rest)}")


def main() -> None:
    trainer, text, rounds, seed = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    failed = 0
    for number in range(seed, seed + rounds):
        try:
            one_round(trainer, text, random.Random(number))
        except failure as e:
            failed += 1
            print(f"round {number}: {e}\n{pathlib.Path('config.json').read_text()}\n", flush=True)
    print(f"{rounds - failed} of {rounds} rounds agree, from seed {seed} on")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
