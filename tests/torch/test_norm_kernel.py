"""RMSNorm's kernel against its reference: interpreted on a CPU, compiled on a GPU."""

import pytest
import torch

from minisgl.kernels.norm import add_rms_norm_fused, add_rms_norm_reference, rms_norm_fused, rms_norm_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-6


def random(*shape, dtype=torch.float32, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed + shape[-1])
    return (scale * torch.randn(*shape, generator=generator)).to(dtype).to(DEVICE)


def by_definition(x, weight):
    wide = x.double()
    return (wide * (wide.pow(2).mean(-1, keepdim=True) + EPS).rsqrt()).to(x.dtype) * weight


def rounds(dtype):
    """Whether kernels round to this dtype: interpreted ones cut off what bfloat16 has no room for."""
    return dtype != torch.bfloat16 or DEVICE == "cuda"


def assert_same(got, expected):
    """Equal but for a few values that the order of a sum lets round the other way."""
    assert got.dtype == expected.dtype and got.is_contiguous()
    ulps = 32 if got.dtype == torch.float32 else 2 if rounds(got.dtype) else 4
    torch.testing.assert_close(got, expected, rtol=ulps * torch.finfo(got.dtype).eps, atol=1e-6, equal_nan=True)
    if got.dtype != torch.float32 and rounds(got.dtype) and got.numel() > 1000:
        assert (got != expected).float().mean() < 0.01


def assert_sum(total, x, delta):
    if rounds(total.dtype):
        assert torch.equal(total, x + delta)
    else:
        torch.testing.assert_close(total, x + delta, rtol=torch.finfo(total.dtype).eps, atol=0)


@pytest.mark.parametrize("size", [1, 7, 64, 100, 576, 1024, 1025, 5120])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_is_the_reference(size, dtype):
    x, weight = random(5, size, dtype=dtype, scale=3.0), random(size, dtype=dtype, seed=1)
    x[1] *= 1e-4  # eps matters
    x[2] = 0
    got = rms_norm_fused(x, weight, EPS)
    assert_same(got, rms_norm_reference(x, weight, EPS))
    assert_same(got, by_definition(x, weight))
    assert (got[2] == 0).all()


@pytest.mark.parametrize("size", [1, 100, 576, 1025])
@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_rounds_the_sum_and_normalises_what_it_rounded(size, dtype):
    x, delta = random(4, size, dtype=dtype, scale=30.0), random(4, size, dtype=dtype, seed=1)
    weight, before = random(size, dtype=dtype, seed=2), x.clone()
    total, got = add_rms_norm_fused(x, delta, weight, EPS)
    assert_sum(total, before, delta)
    assert torch.equal(x, before)
    assert torch.equal(got, rms_norm_fused(total, weight, EPS))
    assert_same(got, rms_norm_reference(total, weight, EPS))


def test_the_reference_adds_first():
    x, delta, weight = random(4, 100, dtype=torch.bfloat16), random(4, 100, dtype=torch.bfloat16, seed=1), random(100)
    total, got = add_rms_norm_reference(x, delta, weight, EPS)
    assert torch.equal(total, x + delta) and torch.equal(got, rms_norm_reference(x + delta, weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_need_not_follow_each_other(dtype):
    wide = random(6, 5, 100, dtype=dtype)
    weight = random(100, dtype=dtype, seed=1)
    for x in (wide[:, 2], wide[::2, 1:4], wide[3], wide[0, 0]):
        assert torch.equal(rms_norm_fused(x, weight, EPS), rms_norm_fused(x.contiguous(), weight, EPS))
    total, got = add_rms_norm_fused(wide[:, 1], wide[:, 4], weight, EPS)
    assert_sum(total, wide[:, 1], wide[:, 4])
    assert torch.equal(got, rms_norm_fused(total, weight, EPS))


def test_a_nan_stays_in_its_row():
    x, weight = random(3, 100), random(100, seed=1)
    x[1, 7] = torch.nan
    got = rms_norm_fused(x, weight, EPS)
    assert got[1].isnan().all()
    assert torch.equal(got[[0, 2]], rms_norm_fused(x[[0, 2]], weight, EPS))


def test_no_rows_give_no_rows():
    x, weight = random(0, 100), random(100)
    assert rms_norm_fused(x, weight, EPS).shape == (0, 100)
    assert [part.shape for part in add_rms_norm_fused(x, x, weight, EPS)] == [(0, 100)] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(8192, 1024), (8192, 5120), (3, 16_384), (256, 8191)])
def test_real_sizes_are_the_references(rows, size, dtype):
    x, delta = random(rows, size, dtype=dtype), random(rows, size, dtype=dtype, seed=1)
    weight = random(size, dtype=dtype, seed=2)
    assert_same(rms_norm_fused(x, weight, EPS), rms_norm_reference(x, weight, EPS))
    total, got = add_rms_norm_fused(x, delta, weight, EPS)
    assert torch.equal(total, x + delta)
    assert_same(got, rms_norm_reference(total, weight, EPS))


@pytest.mark.gpu
def test_tensors_may_have_more_than_2_31_elements():
    x = torch.zeros(2**31 // 16_384 + 3, 16_384, dtype=torch.bfloat16, device=DEVICE)
    x[-3:] = random(3, 16_384, dtype=torch.bfloat16)
    weight = random(16_384, dtype=torch.bfloat16, seed=1)
    total, got = add_rms_norm_fused(x, x, weight, EPS)
    assert torch.equal(total[-3:], x[-3:] + x[-3:])
    assert torch.equal(got[-3:], rms_norm_fused(total[-3:], weight, EPS))
    assert (got[:-3] == 0).all()
