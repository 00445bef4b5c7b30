"""Draws by Gumbel-max: argmax(logits / temperature + noise), where noise depends on (seed, position, token) alone.

So a seeded request gets the same tokens whatever runs beside it. Noise comes from Philox4x32-10 (Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3", 2011) with the seed as key and (token, position) as counter. Tokens go
in tiles of 4,096: the four words of one counter serve tokens 1,024 apart.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    import triton
    import triton.language as tl
else:
    try:
        import triton
        import triton.language as tl
    except ImportError:  # a CPU needs only the reference
        triton = tl = None

NOISE_RANGE = 26.0
"""Noise lies within (-2.9, 23.0): a token this far below the best cannot win."""


def draw(scaled: Tensor, seed: Tensor, positions: Tensor) -> Tensor:
    """One token for each row of [S, V] float32, whose best is 0 and which hold no NaN: int64 [S].

    `seed` and `positions` are int64 [S]. The reference; on a CPU only tokens that can still win get their noise.
    """
    if not scaled.is_cuda:
        rows, ids = (scaled > -NOISE_RANGE).nonzero(as_tuple=True)
        if len(ids) < scaled.numel() // 8:
            noisy = torch.full_like(scaled, -torch.inf)
            noisy[rows, ids] = scaled[rows, ids] + noise_at(seed[rows], positions[rows], ids)
            return lowest_argmax(noisy)
    return lowest_argmax(scaled + noise(seed, positions, scaled.shape[-1]))


def draw_fused(logits: Tensor, best: Tensor, temperature: Tensor, seed: Tensor, positions: Tensor) -> Tensor:
    """The same in one pass over logits [S, V] of any float dtype, whose rows' largest values are `best` [S].

    `temperature` is float32 [S] and positive. Returns int64 [S].
    """
    rows, vocab = logits.shape
    tiles = -(-vocab // 4096)
    value = torch.empty(rows, tiles, dtype=torch.float32, device=logits.device)
    token = torch.empty(rows, tiles, dtype=torch.int64, device=logits.device)
    _draw_kernel[(rows, tiles)](logits, logits.stride(0), best, temperature, seed, positions, value, token, vocab)
    largest = value == value.amax(dim=-1, keepdim=True)
    return torch.where(largest, token, vocab).amin(dim=-1)


def lowest_argmax(logits: Tensor) -> Tensor:
    """The lowest id among the largest of each row of [S, V]: int64 [S], -1 where that is no finite number."""
    best, first = logits.max(dim=-1)  # of equals, torch promises the first; a NaN is larger than anything
    return torch.where(best.isfinite(), first, -1)


def noise(seed: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Standard Gumbel noise for every token: float32 [S, V] for int64 [S] seeds and positions."""
    tiles, lanes = -(-vocab // 4096), min(vocab, 1024)
    counters = torch.arange(tiles, device=seed.device)[:, None] * 1024 + torch.arange(lanes, device=seed.device)
    words = philox(seed[:, None], counters.flatten(), positions[:, None])  # 4 of [S, tiles * lanes]
    bits = torch.stack([w.unflatten(-1, (tiles, lanes)) for w in words], dim=2)  # [S, tiles, 4, lanes]
    return to_gumbel(bits.flatten(1)[:, :vocab])


def noise_at(seed: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """The same noise for single tokens: three int64 [n] to float32 [n]."""
    words = torch.stack(philox(seed, tokens // 4096 * 1024 + tokens % 1024, positions))  # [4, n]
    return to_gumbel(words.gather(0, (tokens % 4096 // 1024)[None])[0])


def to_gumbel(bits: Tensor) -> Tensor:
    """Uniform 32-bit integers to standard Gumbel noise, float32; fine-grained where noise is large."""
    uniform = ((bits.float() + 0.5) * 2.0**-32).clamp_(max=1 - 2.0**-24)
    return -(-torch.log1p(-uniform)).log()


def philox(key: Tensor, counter0: Tensor, counter1: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four words of Philox4x32-10, each uniform in [0, 2**32) as int64: a 64-bit key, a counter of two words."""
    mask = 0xFFFFFFFF
    k0, k1 = key & mask, (key >> 32) & mask
    c0, c1 = torch.broadcast_tensors(counter0 & mask, counter1 & mask)
    c2 = c3 = torch.zeros_like(c0)
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        high0, high1 = (p0 >> 32) & mask, (p1 >> 32) & mask
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, p1 & mask, high0 ^ c3 ^ k1, p0 & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return c0, c1, c2, c3


if triton is not None:

    @triton.jit
    def _gumbel(bits):
        uniform = tl.minimum(
            (bits.to(tl.uint32).to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1 - 5.960464477539063e-08
        )
        # log1p(-u), by its series where 1 - u would lose u's digits.
        small = uniform * (1 + uniform * (0.5 + uniform * (1.0 / 3)))
        exponential = tl.where(uniform < 1e-3, small, -tl.log(1 - uniform))
        return -tl.log(exponential)

    @triton.jit
    def _draw_kernel(logits, row_stride, best, temperature, seed, position, value_out, token_out, vocab):
        row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
        scale, top = 1.0 / tl.load(temperature + row), tl.load(best + row).to(tl.float32)
        lane = tl.arange(0, 1024)
        zero = lane * 0
        words = tl.philox(
            tl.load(seed + row), tile * 1024 + lane, zero + tl.load(position + row).to(tl.int32), zero, zero
        )
        value, token = -float("inf"), vocab
        for word in tl.static_range(4):
            ids = tile * 4096 + word * 1024 + lane
            x = tl.load(logits + row * row_stride + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32)
            x = tl.where(ids < vocab, (x - top) * scale + _gumbel(words[word]), -float("inf"))
            largest = tl.max(x, axis=0)
            first = tl.min(tl.where(x == largest, ids, vocab), axis=0)
            token = tl.where(largest > value, first, token)  # ids rise, so of equals the first stays
            value = tl.maximum(value, largest)
        out = row * tl.num_programs(1) + tile
        tl.store(value_out + out, value)
        tl.store(token_out + out, token.to(tl.int64))
