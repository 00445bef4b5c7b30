"""The kernel between projection and attention against its reference: interpreted on a CPU, compiled on a GPU."""

import numpy as np
import pytest
import torch

from minisgl.kernels.rotary import Rotation, rotate, rotate_and_store_fused, rotate_and_store_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
UNTOUCHED = 77.0


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def random_rotation(tokens, size, max_position=500):
    angles = torch.outer(torch.arange(max_position).float(), 1e4 ** -(torch.arange(0, size, 2) / size))
    positions = torch.randint(0, max_position, (tokens,), generator=torch.Generator().manual_seed(tokens))
    return Rotation(torch.cat((angles.cos(), angles.sin()), dim=-1).to(DEVICE), positions.to(DEVICE))


def random_norms(size, dtype):
    return random(size, dtype=dtype, seed=8), random(size, dtype=dtype, seed=9), 1e-6


def random_entries(tokens, count):
    return torch.randperm(count, generator=torch.Generator().manual_seed(count))[:tokens].to(DEVICE)


def assert_close(got, expected, *, normed):
    """Equal but for a few values that fused multiplications, or a norm's sum, let round the other way."""
    eps = torch.finfo(got.dtype).eps
    if got.dtype == torch.float32:
        torch.testing.assert_close(got, expected, rtol=8 * eps, atol=4e-6)
        return
    # What rounds the other way before the rotation shows in both of a pair, however small one of them becomes.
    atol = 4 * eps * float(expected.abs().max()) if normed else 1e-5
    torch.testing.assert_close(got, expected, rtol=eps, atol=atol)
    if got.dtype != torch.bfloat16 or DEVICE == "cuda":  # interpreted, what bfloat16 has no room for is cut off
        assert (got != expected).float().mean() < 0.02


def check(heads, num_kv_heads, rotation, norms, caches, expected_caches, entries):
    num_heads = heads.shape[1] - 2 * num_kv_heads
    before = heads.clone()
    q = rotate_and_store_fused(heads, rotation, norms, *caches, entries)
    expected = rotate_and_store_reference(heads, rotation, norms, *expected_caches, entries)
    assert torch.equal(heads, before)
    assert q.is_contiguous() and q.dtype == heads.dtype and q.shape == (len(heads), num_heads, heads.shape[2])
    assert_close(q, expected, normed=norms is not None)
    for cache, expected_cache in zip(caches, expected_caches, strict=True):
        assert_close(cache[entries], expected_cache[entries], normed=norms is not None)
        untouched = torch.ones(len(cache), dtype=torch.bool, device=DEVICE)
        untouched[entries] = False
        assert (cache[untouched] == UNTOUCHED).all()
    assert torch.equal(caches[1][entries], heads[:, num_heads + num_kv_heads :])


def filled(*shape, dtype):
    return torch.full(shape, UNTOUCHED, dtype=dtype, device=DEVICE)


SHAPES = [  # H, K, D
    (9, 3, 64),
    (16, 8, 128),
    (5, 1, 128),
    (1, 1, 64),
    (8, 2, 80),
    (6, 2, 96),
    (14, 2, 64),
    (4, 4, 256),
    (3, 1, 2),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("has_norms", [False, True])
def test_it_is_the_reference(shape, dtype, has_norms):
    num_heads, num_kv_heads, size = shape
    heads = random(3, num_heads + 2 * num_kv_heads, size, dtype=dtype)
    caches, expected = (
        [filled(7, num_kv_heads, size, dtype=dtype) for _ in range(2)] for _ in range(2)
    )  # keys, values
    norms = random_norms(size, dtype) if has_norms else None
    check(heads, num_kv_heads, random_rotation(3, size), norms, caches, expected, random_entries(3, 7))


@pytest.mark.parametrize("has_norms", [False, True])
def test_tensors_may_be_views(has_norms):
    heads = random(5, 3, 10, 64, dtype=torch.bfloat16)[:, 1]  # rows are 1,920 apart
    kv = filled(3, 8, 2, 2, 2, 64, dtype=torch.bfloat16)  # [page, place, other things, keys or values, head, element]
    expected = kv.clone()
    views, expected_views = ([x[:, :, 1, i].flatten(0, 1) for i in range(2)] for x in (kv, expected))
    assert views[0].stride() == (512, 64, 1) and views[0].data_ptr() != kv.data_ptr()
    norms = random_norms(64, torch.bfloat16) if has_norms else None
    check(heads, 2, random_rotation(5, 64), norms, views, expected_views, random_entries(5, 24))
    assert (kv[:, :, 0] == UNTOUCHED).all()


@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, torch.int16), (torch.float32, torch.int32)])
def test_values_are_stored_bit_for_bit(dtype, bits):
    heads = random(2, 6, 64, dtype=dtype)
    heads[0, 5, 30:34] = torch.tensor([torch.nan, -0.0, torch.inf, -torch.inf])  # in both halves
    keys, values = (filled(4, 2, 64, dtype=dtype) for _ in range(2))
    entries = torch.tensor([3, 0], device=DEVICE)
    with np.errstate(invalid="ignore"):  # interpreted, values are rotated too, in vain
        rotate_and_store_fused(heads, random_rotation(2, 64), random_norms(64, dtype), keys, values, entries)
    assert torch.equal(values[entries].view(bits), heads[:, 4:].view(bits))
    assert keys[entries].isfinite().all()


def test_a_head_does_not_feel_its_neighbours():
    heads, entries = random(3, 8, 64, dtype=torch.bfloat16), torch.tensor([2, 1, 0], device=DEVICE)
    rotation, norms = random_rotation(3, 64), random_norms(64, torch.bfloat16)
    clean = rotate_and_store_fused(heads, rotation, norms, *filled(2, 3, 2, 64, dtype=heads.dtype), entries)
    heads[1, 2] = torch.nan
    got = rotate_and_store_fused(heads, rotation, norms, *filled(2, 3, 2, 64, dtype=heads.dtype), entries)
    assert got[1, 2].isnan().all()
    got[1, 2] = clean[1, 2]
    assert torch.equal(got, clean)


def test_no_tokens_change_nothing():
    heads = random(0, 8, 64)
    keys, values = filled(2, 3, 2, 64, dtype=torch.float32)
    entries = torch.empty(0, dtype=torch.int64, device=DEVICE)
    q = rotate_and_store_fused(heads, random_rotation(0, 64), None, keys, values, entries)
    assert q.shape == (0, 4, 64) and (keys == UNTOUCHED).all() and (values == UNTOUCHED).all()


def test_a_rotation_multiplies_each_pair_as_a_complex_number():
    x, rotation = random(4, 3, 80), random_rotation(4, 80)
    cos, sin = rotation.table[rotation.positions].double().chunk(2, dim=-1)
    left, right = x.double().chunk(2, dim=-1)
    turned = torch.complex(left, right) * torch.complex(cos, sin)[:, None]
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    torch.testing.assert_close(rotate(x, rotation.factors).double(), expected, rtol=0, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(16, 8, 128), (40, 8, 128), (64, 8, 128), (9, 3, 64), (28, 4, 128)], ids=str)
@pytest.mark.parametrize("tokens", [1, 256, 8192])
def test_real_sizes_are_the_references(shape, dtype, tokens):
    num_heads, num_kv_heads, size = shape
    heads = random(tokens, num_heads + 2 * num_kv_heads, size, dtype=dtype)
    caches, expected = ([filled(9000, num_kv_heads, size, dtype=dtype) for _ in range(2)] for _ in range(2))
    rotation, entries = random_rotation(tokens, size, 40_960), random_entries(tokens, 9000)
    check(heads, num_kv_heads, rotation, random_norms(size, dtype), caches, expected, entries)


@pytest.mark.gpu
def test_the_cache_and_the_heads_may_have_more_than_2_31_elements():
    rotation = random_rotation(3, 128)
    count = 2**31 // (8 * 128) + 5
    keys, values = (torch.zeros(count, 8, 128, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    small = [torch.zeros(3, 8, 128, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
    rows = 2**31 // (32 * 128) + 4
    heads = torch.empty(rows, 32, 128, dtype=torch.bfloat16, device=DEVICE)[-3:]
    heads.copy_(random(3, 32, 128, dtype=torch.bfloat16))
    far = torch.arange(count - 3, count, device=DEVICE)
    q = rotate_and_store_fused(heads, rotation, None, keys, values, far)
    expected = rotate_and_store_fused(heads.clone(), rotation, None, *small, torch.arange(3, device=DEVICE))
    assert torch.equal(q, expected)
    assert torch.equal(keys[far], small[0]) and torch.equal(values[far], small[1])
    assert (keys[:-3] == 0).all() and (values[:-3] == 0).all()

    long = torch.zeros(rows, 32, 128, dtype=torch.bfloat16, device=DEVICE)
    long[-3:] = heads
    positions = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    positions[-3:] = rotation.positions
    q = rotate_and_store_fused(
        long, Rotation(rotation.table, positions), None, keys, values, torch.arange(rows, device=DEVICE)
    )
    assert torch.equal(q[-3:], expected) and (q[:-3] == 0).all()
