"""losses.py FOLDER: compares the trainer's losses on a GPU, in FOLDER/trainer-*.steps, with those on the CPU.

The exit code is 1 if a log is missing or short, if the bits of replayed steps differ from launched ones, or if the mean
loss of the last 20 steps differs from the CPU's by more than 2 % (float) or 4 % (bf16).
"""
import json
import pathlib
import sys

STEPS = 200


def read(path: pathlib.Path) -> list[float]:
    if not path.exists():
        return []
    entries = (json.loads(line) for line in path.read_text().splitlines())
    return [entry["loss"] for entry in entries if "loss" in entry and "step" in entry][:STEPS]


def main() -> int:
    folder = pathlib.Path(sys.argv[1])
    names = ["cpu", *(f"{p}-graph-{g}" for p in ("float", "bf16") for g in ("on", "off"))]
    losses = {name: read(folder / f"trainer-{name}.steps") for name in names}
    means = {name: sum(all_[-20:]) / 20 for name, all_ in losses.items() if len(all_) == STEPS}
    bad = [f"{name}: {len(losses[name])} losses of {STEPS}" for name in names if name not in means]
    print("| run | first loss | mean of the last 20 | beside the processor's |\n|---|---:|---:|---:|")
    for name, mean in means.items():
        beside = mean / means["cpu"] if "cpu" in means else float("nan")
        print(f"| {name} | {losses[name][0]:.6f} | {mean:.6f} | {beside:.4f} |")
        if not abs(beside - 1) <= (0.04 if name.startswith("bf16") else 0.02):
            bad.append(f"{name}: {beside:.4f} of the processor's loss")
    for precision in ("float", "bf16"):
        if losses[f"{precision}-graph-on"] != losses[f"{precision}-graph-off"]:
            bad.append(f"{precision}: replayed steps differ from launched ones")
    print("\n".join(f"FAILED {why}" for why in bad) or "replayed steps have the losses of launched ones")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
