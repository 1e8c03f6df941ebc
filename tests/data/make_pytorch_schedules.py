"""make_pytorch_schedules.py FOLDER: pipeline schedules made and written by PyTorch.

Writes pytorch_NAME_pP_mM.csv by the `_dump_csv` of torch.distributed.pipelining's own schedule classes. Nothing runs:
the stages are stand-ins with the few members that the classes read.
"""
import pathlib
import sys

from torch.distributed.pipelining import schedules


class Stage:
    """The members of a pipeline stage that a schedule's constructor reads."""

    def __init__(self, group_size: int, num_stages: int, index: int):
        self.group_size, self.num_stages, self.group_rank, self.stage_index = group_size, num_stages, 0, index
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self.submod = None
        self.has_backward = True


CASES = [  # name, class, ranks, stages per rank, microbatches
    ("interleaved_1f1b", schedules.ScheduleInterleaved1F1B, 4, 2, 8),
    ("interleaved_zero_bubble", schedules.ScheduleInterleavedZeroBubble, 4, 2, 8),
    ("zbv", schedules.ScheduleZBVZeroBubble, 4, 2, 8),
    ("dualpipe_v", schedules.ScheduleDualPipeV, 4, 2, 8),
]


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    for name, kind, ranks, per_rank, microbatches in CASES:
        stages = [Stage(ranks, ranks * per_rank, i * ranks) for i in range(per_rank)]
        schedule = kind(stages, microbatches, loss_fn=None)
        schedule._dump_csv(folder / f"pytorch_{name}_p{ranks}_m{microbatches}.csv", format="compute_only")


if __name__ == "__main__":
    main()
