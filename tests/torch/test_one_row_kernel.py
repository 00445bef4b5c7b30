"""One token's projections against their reference: interpreted on a CPU, compiled on a GPU."""

import pytest
import torch

from minisgl.kernels import one_row
from minisgl.kernels.one_row import project_fused, project_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def numbers(*shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def check(size, rows, dtype, *, delta=True, norm=True, gated=False, bias=False):
    x, weight = numbers(1, size, dtype=dtype, seed=0), numbers(rows, size, dtype=dtype, seed=1) / size**0.5
    arguments = {
        "bias": numbers(rows, dtype=dtype, seed=2) if bias else None,
        "delta": numbers(1, size, dtype=dtype, seed=3) if delta and norm else None,
        "norm": (numbers(size, dtype=dtype, seed=4), 1e-6) if norm else None,
        "gated": gated,
    }
    total, got = project_fused(x, weight, **arguments)
    expected_total, expected = project_reference(x, weight, **arguments)
    assert got.shape == (1, rows // 2 if gated else rows) and got.dtype == dtype
    torch.testing.assert_close(total, expected_total)
    # A product of two bfloat16 has float32's accuracy; what differs is the order of the sum, and so a last rounding.
    eps = torch.finfo(dtype).eps if dtype != torch.bfloat16 or DEVICE == "cuda" else 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(got.float(), expected.float(), rtol=4 * eps, atol=16 * eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("size", "rows"), [(64, 2), (96, 10), (576, 14), (2049, 6)])
@pytest.mark.parametrize("kind", ["plain", "bias", "norm", "norm without delta", "gated", "gated with bias"])
def test_it_is_the_reference(kind, size, rows, dtype):
    check(
        size,
        rows,
        dtype,
        delta="without" not in kind,
        norm=kind not in ("plain", "bias"),
        gated="gated" in kind,
        bias="bias" in kind,
    )


def test_of_many_rows_none_is_forgotten(monkeypatch):
    monkeypatch.setattr(one_row, "_MANY_ROWS", 64)
    check(32, 67, torch.float32)
    check(32, 2 * 69, torch.float32, gated=True)


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "rows"), [(1024, 4096), (2048, 1024), (3072, 1024), (1024, 151_936), (5120, 7168)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_real_sizes_are_the_reference(size, rows, dtype):
    check(size, rows, dtype)
    check(size, rows, dtype, norm=False)
    check(size, rows, dtype, gated=True)


@pytest.mark.gpu
def test_a_chain_in_a_graph_is_the_chain_without(monkeypatch):
    """Each kernel starts before the one whose result it reads has ended."""
    size = 1024
    weights = [numbers(size, size, dtype=torch.bfloat16, seed=seed) / 32 for seed in range(40)]
    norm = numbers(size, dtype=torch.bfloat16, seed=50), 1e-6

    def chain(x):
        delta = torch.zeros_like(x)
        for weight in weights:
            x, delta = project_fused(x, weight, None, delta, norm, False)
        return x + delta

    x = numbers(1, size, dtype=torch.bfloat16, seed=51)
    expected = x.clone()
    delta = torch.zeros_like(x)
    for weight in weights:
        expected, delta = project_fused(expected, weight, None, delta, norm, False)
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(x)
    for _ in range(50):
        got.zero_()
        graph.replay()
        assert torch.equal(got, expected + delta)
