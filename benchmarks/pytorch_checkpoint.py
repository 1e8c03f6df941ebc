"""pytorch_checkpoint.py DIRECTORY MEGABYTES ROUNDS [ROWS]: does the work of benchmarks/checkpoint_save.cpp with PyTorch's
distributed checkpoint (DCP), DTensors and four processes on gloo. Prints medians of seconds as JSON. Needs torch.
"""
import json
import os
import shutil
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

COLUMNS = 4096


def state(mesh, ranks_along_tp, rows, count):
    local = rows // ranks_along_tp
    return {f"matrix.{i}": DTensor.from_local(torch.full((local, COLUMNS), 0.5), mesh, [Replicate(), Shard(0)],
                                              run_check=False) for i in range(count)}


def forget(directory):
    os.sync()
    time.sleep(0.3)
    for folder, _, files in os.walk(directory):
        for name in files:
            descriptor = os.open(os.path.join(folder, name), os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def work(rank, directory, rows, count, rounds, answer):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29533")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=4)
    behind = dist.new_group(backend="gloo")  # two threads must not call collectives on one group
    saved = state(init_device_mesh("cpu", (2, 2)), 2, rows, count)
    other = state(init_device_mesh("cpu", (1, 4)), 4, rows, count)
    times = {"save": [], "stall": [], "async": [], "load": [], "reshard": []}

    def longest(begin):
        seconds = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return seconds.item()

    def timed(kind, do):
        if rank == 0:
            forget(directory)
        dist.barrier()
        begin = time.perf_counter()
        out = do()
        times[kind].append(longest(begin))
        return begin, out

    def fresh(name):
        path = os.path.join(directory, name)
        if rank == 0:
            shutil.rmtree(path, ignore_errors=True)
        dist.barrier()
        return path

    for _ in range(rounds + 1):  # the first warms up
        path = fresh("sync")
        timed("save", lambda: dcp.save(saved, storage_writer=dcp.FileSystemWriter(path, sync_files=True)))
        path = fresh("async")
        begin, future = timed("stall", lambda: dcp.async_save(
            saved, storage_writer=dcp.FileSystemWriter(path, sync_files=True), process_group=behind))
        future.result()
        times["async"].append(longest(begin))
        timed("load", lambda: dcp.load(saved, checkpoint_id=path))
        timed("reshard", lambda: dcp.load(other, checkpoint_id=path))
    if rank == 0:
        with open(answer, "w", encoding="utf-8") as file:
            json.dump({kind: statistics.median(t[1:]) for kind, t in times.items()}, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    # A folder of its own, because it is removed.
    where, megabytes, repeats = os.path.join(sys.argv[1], "pytorch"), int(sys.argv[2]), int(sys.argv[3])
    height = int(sys.argv[4]) if len(sys.argv) > 4 else 1024
    shutil.rmtree(where, ignore_errors=True)
    os.makedirs(where)
    out = os.path.join(where, "times.json")
    matrices = max(1, megabytes * 2**20 // (height * COLUMNS * 4))
    mp.spawn(work, (where, height, matrices, repeats, out), nprocs=4)
    print(open(out, encoding="utf-8").read())
    shutil.rmtree(where)
