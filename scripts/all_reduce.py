"""What an all-reduce takes the GPUs of this host: NCCL's, and those over memory that they see of each other.

    torchrun --nproc-per-node 2 scripts/all_reduce.py [--dtype bfloat16] [--width 5120]

First the figures by which an engine chooses at its start, by bytes; then, for rows of a model's width, what each way
takes and how far its sum is from the right one. A call is one in a CUDA graph of twenty, on the slowest rank.
"""

import argparse
import os
from collections.abc import Callable

import torch
from torch import Tensor

from minisgl.config import EngineConfig
from minisgl.parallel.crew import find_place
from minisgl.parallel.linked import LinkedSum, seconds
from minisgl.parallel.meeting import make_ranks, open_store
from minisgl.parallel.ranks import Ranks

ROWS = (1, 2, 8, 32, 64, 128, 192, 256, 320)


def main() -> None:
    """Print two tables from rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--width", type=int, default=5120)
    arguments = parser.parse_args()
    config = EngineConfig(tp=int(os.environ["WORLD_SIZE"]), device="cuda", dtype=arguments.dtype)
    place = find_place(config)
    store, _ = open_store(place)
    ranks = make_ranks(place, config, store, place.host)
    linked = ranks.sum_small
    if isinstance(linked, LinkedSum):
        names = list(next(iter(linked.times_s.values())))
        table(ranks, "bytes", names, {size: [times[name] for name in names] for size, times in linked.times_s.items()})
    elif ranks.rank == 0:
        print("these GPUs see nothing of each other's memory: NCCL alone")
    by_rows(ranks, linked if isinstance(linked, LinkedSum) else None, getattr(torch, arguments.dtype), arguments.width)
    ranks.end()


def table(ranks: Ranks, first: str, names: list[str], rows: dict[int, list[float]]) -> None:
    """Times in microseconds, from rank 0."""
    if ranks.rank == 0:
        print(f"{first:>10}", *(f"{name + ', µs':>18}" for name in names))
        for number, times_s in rows.items():
            print(f"{number:>10,}", *(f"{time_s * 1e6:>18.1f}" for time_s in times_s), flush=True)


def by_rows(ranks: Ranks, linked: LinkedSum | None, dtype: torch.dtype, width: int) -> None:
    """Every way for the sums that a decoder of this width needs; an error is the largest, over the sum's last place."""
    nccl = Ranks(ranks.rank, ranks.size, ranks.group)
    ways: dict[str, Callable[[Tensor], Tensor]] = {"NCCL": nccl.all_reduce}
    if linked is not None:
        ways |= {"one shot": linked.one_shot, "two shots": linked.two_shots, "as chosen": ranks.all_reduce}
    times: dict[int, list[float]] = {}
    worst = dict.fromkeys(ways, 0.0)
    for rows in ROWS:
        generator = torch.Generator("cuda").manual_seed(rows + 1000 * ranks.rank)
        mine = torch.randn(rows, width, generator=generator, device="cuda").to(dtype)
        right = ranks.gather(mine).double().sum(dim=0)
        place = torch.finfo(dtype).eps * right.abs().clamp_min(1e-3)
        fits = [name for name in ways if name in ("NCCL", "as chosen") or mine.nbytes <= 1 << 22]
        for name in fits:
            error = float(((ways[name](mine.clone()).double() - right).abs() / place).max())
            worst[name] = max(worst[name], error)
        zeros = torch.zeros_like(mine)  # whose sum over and over stays finite
        own = [seconds(ways[name], zeros) if name in fits else float("nan") for name in ways]
        times[rows] = ranks.gather(torch.tensor(own, device="cuda")).amax(dim=0).tolist()
    table(ranks, f"× {width}", list(ways), times)
    if ranks.rank == 0:
        print("largest error, in units of the last place:", ", ".join(f"{name} {worst[name]:.2f}" for name in ways))


if __name__ == "__main__":
    main()
