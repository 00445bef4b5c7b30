"""What an all-reduce takes the GPUs of this host: NCCL's, and those over memory that they see of each other.

    torchrun --nproc-per-node 2 scripts/all_reduce.py [--dtype bfloat16]

The figures are those by which an engine chooses at its start: a call in a CUDA graph of twenty, on the slowest rank.
"""

import argparse
import os

from minisgl.config import EngineConfig
from minisgl.parallel.crew import find_place
from minisgl.parallel.linked import LinkedSum
from minisgl.parallel.meeting import make_ranks, open_store


def main() -> None:
    """Print a table from rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    arguments = parser.parse_args()
    config = EngineConfig(tp=int(os.environ["WORLD_SIZE"]), device="cuda", dtype=arguments.dtype)
    place = find_place(config)
    store, _ = open_store(place)
    ranks = make_ranks(place, config, store, place.host)
    if ranks.rank == 0 and isinstance(ranks.sum_small, LinkedSum):
        names = list(next(iter(ranks.sum_small.times_s.values())))
        print(f"{'bytes':>10}", *(f"{name + ', µs':>14}" for name in names))
        for size, times_s in ranks.sum_small.times_s.items():
            print(f"{size:>10,}", *(f"{times_s[name] * 1e6:>14.1f}" for name in names))
    elif ranks.rank == 0:
        print("these GPUs see nothing of each other's memory: NCCL alone")
    ranks.end()


if __name__ == "__main__":
    main()
