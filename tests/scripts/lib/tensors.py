"""tensors.py DIRECTORY...: exits with an error unless all model directories have the same tensors, bit for bit."""
import pathlib
import sys

import safetensors_file


def read(folder: str) -> dict:
    tensors = {}
    for file in pathlib.Path(folder).glob("model*.safetensors"):
        tensors |= safetensors_file.read(file)[1]
    return tensors or sys.exit(f"{folder} has no model.safetensors and no shards")


first, *others = sys.argv[1:]
expected = read(first)
for other in others:
    got = read(other)
    wrong = sorted(name for name in expected.keys() | got.keys() if expected.get(name) != got.get(name))
    if wrong:
        sys.exit(f"{other} differs from {first}: {', '.join(wrong)}")
