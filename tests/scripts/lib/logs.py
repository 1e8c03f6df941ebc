"""Checks the trainer's logs.

    logs.py check LOG STEPS [falls]      the log is well-formed: STEPS steps, then a summary; the loss falls
    logs.py same LOG OTHER TOLERANCE     OTHER is well-formed, too, and has LOG's losses and gradient norms, relative
    logs.py bits LOG OTHER               OTHER sent what was predicted, ends with LOG's weights, and its steps have the losses and
                                         norms of LOG's last ones in every digit
    logs.py losses LOG OTHER TOLERANCE [FIRST]   OTHER has LOG's steps from FIRST (1) on, with its losses, relative, and learning
                                         rates, and its held-out loss
    logs.py get LOG KEY                  prints a member of the summary
    logs.py sent LOG PLANNED             the summary's bytes_sent are STEPS times the planned bytes of a step (JSON)
"""

import json
import math
import sys

STEP_KEYS = ["step", "loss", "grad_norm", "lr", "tokens_per_second", "comm_share"]


def read(path):
    with open(path, encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    if not lines or list(lines[-1]) != ["summary"]:
        sys.exit(f"{path}: the last line is no summary")
    return [line for line in lines[:-1] if "hashes" not in line], lines[-1]["summary"]


def require(condition, text):
    if not condition:
        sys.exit(text)


def check(path, steps, falls=""):
    records, summary = read(path)
    require([r["step"] for r in records] == list(range(1, int(steps) + 1)), f"{path}: the steps are not 1 to {steps}")
    for r in records:
        require([k for k in r if k not in ("mfu", "communication", "auxiliary", "expert_imbalance", "routers")] == STEP_KEYS,
                f"{path}: a step has the keys {list(r)}")
        for layer, of in r.pop("routers", {}).items():
            require([k for k in of if k != "dropped"] == ["load", "entropy"] and sum(of["load"]) > 0, f"{path}: {of}")
        communication = r.pop("communication", {})
        require(bool(communication) == bool(summary["bytes_sent"]), f"{path}: communication is {communication}")
        for axes, of in communication.items():
            require(list(of) == ["seconds", "waited", "hidden", "worst", "worst_rank"], f"{path}: {axes}: {of}")
            if of["seconds"] is None: continue  # not measured, on a GPU
            require(0 <= of["waited"] <= of["seconds"] and -1e-9 <= of["worst"] <= of["hidden"] + 1e-9 <= 1 + 2e-9,
                    f"{path}: {axes}: {of}")
        r = {k: v for k, v in r.items() if k != "comm_share" or v is not None}  # null: not measured, on a GPU
        require(all(isinstance(v, (int, float)) and math.isfinite(v) for v in r.values()), f"{path}: {r}")
        require(r["loss"] > 0 and r["grad_norm"] > 0 and r["lr"] > 0 and r["tokens_per_second"] > 0, f"{path}: {r}")
        require(0 <= r.get("comm_share", 0) <= 1, f"{path}: comm_share is {r.get('comm_share')}")
    require(summary["steps"] == int(steps), f"{path}: the summary counts {summary['steps']} steps")
    require(summary["interrupted"] is False, f"{path}: interrupted")
    require(isinstance(summary["peak_bytes"], int) and summary["peak_bytes"] > 0, f"{path}: peak_bytes")
    require(summary["bytes_as_predicted"] is True, f"{path}: the bytes are not those predicted")
    require(all(isinstance(n, int) and n > 0 for n in summary["bytes_sent"].values()), f"{path}: bytes_sent")
    require(len(summary["weights_hash"]) == 16 and int(summary["weights_hash"], 16) >= 0, f"{path}: weights_hash")
    if falls:
        require(records[-1]["loss"] < records[0]["loss"] - 0.1, f"{path}: the loss does not fall")
        require(summary["loss"] == records[-1]["loss"], f"{path}: the summary's loss is not the last step's")


def same_held_out(path, other, tolerance):
    a, b = (read(log)[1].get("held_out_loss") for log in (path, other))
    require(a == b or abs(a - b) <= float(tolerance) * a, f"{path} and {other}: the held-out losses are {a} and {b}")


def losses(path, other, tolerance, first=1):
    a, b = ({r["step"]: r for r in read(log)[0] if "loss" in r} for log in (path, other))
    require(b and list(b) == [step for step in a if step >= int(first)], f"{other} has the steps {list(b)}, {path} {list(a)}")
    for step in b:
        x, y = a[step], b[step]
        require(abs(x["loss"] - y["loss"]) <= float(tolerance) * x["loss"] and x["lr"] == y["lr"], f"{other}: {y}, not {x}")
    same_held_out(path, other, tolerance)


def same(path, other, tolerance):
    first, (second, summary) = read(path)[0], read(other)
    check(other, len(first), "falls")
    require(summary["bytes_sent"], f"{other}: nothing was sent")
    same_held_out(path, other, tolerance)
    for a, b in zip(first, second):
        for key in ("loss", "grad_norm"):
            gap = abs(a[key] - b[key]) / abs(a[key])
            require(gap <= float(tolerance), f"{path} and {other}: {key} of step {a['step']} differs by {gap:.1e}")
        require(a["lr"] == b["lr"], f"{path} and {other}: lr of step {a['step']}")


def bits(path, other):
    (first, of_first), (second, of_second) = read(path), read(other)
    require(of_second["bytes_as_predicted"] is True, f"{other}: the bytes are not those predicted")
    hashes = of_first["weights_hash"], of_second["weights_hash"]
    require(hashes[0] == hashes[1], f"{other} has other weights than {path}: {hashes[1]}, {hashes[0]}")
    first, second = ([r for r in steps if "loss" in r] for steps in (first, second))  # lines of saves have no loss
    require(0 < len(second) <= len(first), f"{other} has {len(second)} steps, {path} {len(first)}")
    for a, b in zip(first[-len(second):], second):  # a resumed run has the last steps
        for key in ("loss", "grad_norm"):
            require(a[key] == b[key], f"{other}: {key} of step {b['step']} is {b[key]!r}, not {a[key]!r}")


def get(path, key):
    value = read(path)[1].get(key)
    print(value if isinstance(value, str) else json.dumps(value))


def sent(path, planned):
    records, summary = read(path)
    expected = {axis: n * len(records) for axis, n in json.loads(planned).items() if n > 0}
    require(summary["bytes_sent"] == expected, f"{path}: sent {summary['bytes_sent']}, planned {expected}")


if __name__ == "__main__":
    commands = {"check": check, "same": same, "bits": bits, "losses": losses, "get": get, "sent": sent}
    commands[sys.argv[1]](*sys.argv[2:])
