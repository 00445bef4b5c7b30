"""SwiGLU's kernel against its reference: interpreted on a CPU, compiled on a GPU."""

import numpy as np
import pytest
import torch

from minisgl.kernels.activation import silu_and_mul_fused, silu_and_mul_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _quiet_infinities():
    """Interpreted kernels compute in numpy, which warns of infinities that are meant."""
    with np.errstate(all="ignore"):
        yield


def random(*shape, dtype):
    return (3 * torch.randn(*shape, generator=torch.Generator().manual_seed(shape[-1]))).to(dtype).to(DEVICE)


def assert_same(gate_up):
    """Equal but for a few values that the last digits of an exp let round the other way."""
    got, expected = silu_and_mul_fused(gate_up), silu_and_mul_reference(gate_up)
    assert got.dtype == gate_up.dtype and got.is_contiguous()
    # Interpreted kernels cut off what bfloat16 has no room for.
    rounds = got.dtype != torch.bfloat16 or DEVICE == "cuda"
    ulps = 16 if got.dtype == torch.float32 else 2 if rounds else 4
    limits = torch.finfo(got.dtype)
    torch.testing.assert_close(
        got, expected, rtol=ulps * limits.eps, atol=limits.smallest_normal * limits.eps * 1e3, equal_nan=True
    )
    if got.dtype != torch.float32 and rounds and got.numel() > 1000:
        assert (got != expected).float().mean() < 0.01


@pytest.mark.parametrize("width", [1, 31, 96, 1023, 1024, 1025, 3072])
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_the_reference(width, dtype):
    gate_up = random(4, 2 * width, dtype=dtype)
    before = gate_up.clone()
    assert_same(gate_up)
    assert torch.equal(gate_up, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_gates_are_the_references(dtype):
    gates = torch.tensor([0.0, -0.0, 20, -20, 90, -90, 3e4, -3e4, torch.inf, -torch.inf, torch.nan, 1e-7])
    gate_up = torch.cat((gates, torch.linspace(-2, 2, len(gates))))[None]
    assert_same(gate_up.to(dtype).to(DEVICE))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_need_not_follow_each_other(dtype):
    wide = random(5, 300, dtype=dtype)
    assert torch.equal(silu_and_mul_fused(wide[::2, 50:150]), silu_and_mul_fused(wide[::2, 50:150].contiguous()))


def test_no_rows_give_no_rows():
    assert silu_and_mul_fused(random(0, 96, dtype=torch.float32)).shape == (0, 48)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [3072, 17_408])
def test_real_sizes_are_the_references(width, dtype):
    assert_same(random(8192, 2 * width, dtype=dtype))


@pytest.mark.gpu
def test_tensors_may_have_more_than_2_31_elements():
    gate_up = torch.zeros(2**31 // 17_408 + 3, 2 * 17_408, dtype=torch.bfloat16, device=DEVICE)
    gate_up[-3:] = random(3, 2 * 17_408, dtype=torch.bfloat16)
    got = silu_and_mul_fused(gate_up)
    assert torch.equal(got[-3:], silu_and_mul_fused(gate_up[-3:].clone()))
    assert (got[:-3] == 0).all()
