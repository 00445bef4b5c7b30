"""Print how long a decode step's matmuls take on a CUDA device, by number of rows and by library.

    python scripts/gpu_matmuls.py MODEL [--rows 8 64 256]

MODEL is a folder with a config.json. Each figure is µs of one matmul: the median of ten replays of a CUDA graph that
goes through so many matrices of its shape that the L2 cache cannot hold them.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from minisgl.source.model_config import ModelConfig, read_model_config

MATRICES_BYTES, REPLAYS = 256 << 20, 10


def shapes(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of each matmul."""
    q_size, width = model.num_heads * model.head_size, model.hidden_size
    return {
        "qkv_proj": (q_size + 2 * model.num_kv_heads * model.head_size, width),
        "o_proj": (width, q_size),
        "gate_up_proj": (2 * model.intermediate_size, width),
        "down_proj": (width, model.intermediate_size),
        "lm_head": (model.vocab_size, width),
    }


def microseconds(weights: Sequence[Tensor], rows: int) -> float:
    """Of one matmul."""
    x = torch.randn(rows, weights[0].shape[1], dtype=weights[0].dtype, device="cuda")
    out = x.new_empty(rows, weights[0].shape[0])
    torch.mm(x, weights[0].t(), out=out)  # the library sets itself up outside the graph
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            torch.mm(x, weight.t(), out=out)
    times = []
    for _ in range(REPLAYS + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(weights))
    return median(times[1:])


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, *range(32, 257, 32)])
    asked = parser.parse_args()
    parts = shapes(read_model_config(asked.model))
    print(f"{'':>14}{'rows':>6}{''.join(f'{name:>14}' for name in parts)}")
    for library in ("cublas", "cublaslt"):
        torch.backends.cuda.preferred_blas_library(library)
        table: dict[int, list[float]] = {rows: [] for rows in asked.rows}
        for shape in parts.values():
            copies = 1 + MATRICES_BYTES // (2 * shape[0] * shape[1])
            weights = [torch.randn(shape, dtype=torch.bfloat16, device="cuda") * 0.02 for _ in range(copies)]
            for rows, times in table.items():
                times.append(microseconds(weights, rows))
        for rows, times in table.items():
            print(f"{library:>14}{rows:>6}{''.join(f'{time:>14.1f}' for time in times)}")


if __name__ == "__main__":
    main()
