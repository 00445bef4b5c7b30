"""Print how long our own decode attention takes on a CUDA device, by rows and tokens: µs a layer, of 28 in a graph.

    python scripts/gpu_attention.py 16/8 40/8 32/4 [--beside FILE]

A shape is QUERY_HEADS/KEY_HEADS, of 128 each. FILE is another version of minisgl/kernels/decode_attention.py, whose
times, in turns with this one's, are printed beside them. Launched early, as in the engine, the 28 overlap a little.
"""

import argparse
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from minisgl.kernels import decode_attention

SIZES = [(1, 128), (1, 600), (1, 2000), (1, 4000), (1, 16_000), (4, 600), (8, 600), (32, 600), (256, 32), (256, 600)]
LAYERS, TURNS, PAGE_SIZE, HEAD_SIZE = 28, 3, 64, 128

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Queries, keys, values, tables and lengths."""


def main() -> None:
    """Print a table for each shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+")
    parser.add_argument("--beside", type=Path)
    parser.add_argument("--device", default="cuda")
    asked = parser.parse_args()
    versions = [decode_attention, *([version(asked.beside)] if asked.beside else [])]
    for shape in asked.shapes:
        heads, kv_heads = map(int, shape.split("/"))
        print(f"{shape:>16}", "this, µs", *("beside, µs" for _ in versions[1:]))
        for rows, tokens in SIZES:
            inputs = made(rows, tokens, heads, kv_heads, torch.device(asked.device))
            made_of = [captured(each, inputs, heads, kv_heads) for each in versions]
            times = [[microseconds(graph) for graph, *_ in made_of] for _ in range(TURNS)]
            cells = (f"{min(each):9.2f}" for each in zip(*times, strict=True))
            print(f"{rows:>7} × {tokens:>6,}", *cells, flush=True)


def version(file: Path) -> ModuleType:
    """A module by its file."""
    spec = spec_from_file_location("beside", file)
    assert spec is not None and spec.loader is not None
    module = sys.modules["beside"] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def made(rows: int, tokens: int, heads: int, kv_heads: int, device: torch.device) -> Inputs:
    """Of so many rows."""
    pages = -(-tokens // PAGE_SIZE)
    keys, values = torch.randn(2, rows * pages, PAGE_SIZE, kv_heads, HEAD_SIZE, dtype=torch.bfloat16, device=device)
    tables = torch.randperm(rows * pages, device=device).int().view(rows, pages)
    lengths = torch.full((rows,), tokens, dtype=torch.int32, device=device)
    return torch.randn(rows, heads, HEAD_SIZE, dtype=torch.bfloat16, device=device), keys, values, tables, lengths


def captured(module: ModuleType, inputs: Inputs, heads: int, kv_heads: int) -> tuple[torch.cuda.CUDAGraph, Any, Tensor]:
    """A graph of the layers of a step, and what it needs; AssertionError where an answer is not the reference's."""
    q, keys, values, tables, lengths = inputs
    run, out, scale = module.DecodeAttention(heads, kv_heads, HEAD_SIZE, q.device), torch.empty_like(q), HEAD_SIZE**-0.5
    run.plan(lengths, PAGE_SIZE)
    torch.cuda.synchronize()  # in a model there is a kernel between the two that is launched as usual
    run(*inputs, scale, out)
    expected = decode_attention.decode_attention_reference(*inputs, scale)
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAYERS):
            run(q, keys, values, tables, lengths, scale, out)
    return graph, run, out


def microseconds(graph: torch.cuda.CUDAGraph) -> float:
    """Of one layer."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    begin.record()
    for _ in range(5):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / 5 / LAYERS


if __name__ == "__main__":
    main()
