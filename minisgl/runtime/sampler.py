"""From logits to tokens: greedy or drawn, row by row, in plain torch."""

import numpy as np
import torch
from torch import Tensor

from minisgl.batch import Int32, Joins

GREEDY_BELOW = 1e-5
"""Temperatures up to here are greedy: nothing but rounding separates them from it."""
NOISE_RANGE = 26.0
"""Gumbel noise as drawn here lies within (-2.9, 23.0): a token this far below the best cannot win."""


class Sampler:
    """Holds each slot's sampling parameters, on the device for the work and on the host to choose it.

    A draw is argmax(logits / temperature + Gumbel noise), the noise a function of (seed, position, token id)
    alone: a seeded request gets the same tokens whatever runs beside it.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._temperature = torch.zeros(num_slots, device=device)
        self._top_k = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._top_p = torch.ones(num_slots, device=device)
        self._seed = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._draws = np.zeros(num_slots, dtype=np.bool_)
        self._filters = np.zeros(num_slots, dtype=np.bool_)

    def join(
        self, joins: Joins, slots: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, seed: Tensor
    ) -> None:
        """Write the rows of requests that join: `joins` on the host, the rest the same on the device, [J] each."""
        draws = (joins.temperature > GREEDY_BELOW) & (joins.top_k != 1)
        self._draws[joins.slots] = draws
        self._filters[joins.slots] = draws & ((joins.top_k > 0) | (joins.top_p < 1))
        self._temperature[slots] = temperature
        self._top_k[slots] = top_k.long()
        self._top_p[slots] = top_p
        self._seed[slots] = seed

    def sample(self, logits: Tensor, rows: Int32, slots: Tensor, positions: Tensor) -> Tensor:
        """One token for each row of `logits` [S, V]; `rows` are their slots on the host, `slots` on the device.

        `positions` [S] is the index that each token will have. Returns int64 [S]; -1 where logits are not numbers.
        """
        logits = logits.float()
        greedy = lowest_argmax(logits)
        if not self._draws[rows].any():
            return greedy
        temperature = self._temperature[slots]
        drawn = (temperature > GREEDY_BELOW) & (self._top_k[slots] != 1)
        scale = torch.where(drawn, temperature, 1.0)[:, None]
        scaled = (logits - logits.amax(dim=-1, keepdim=True)) / scale  # [S, V], the best is 0
        if self._filters[rows].any():
            top_k = torch.where(drawn, self._top_k[slots], 0)
            top_p = torch.where(drawn, self._top_p[slots], 1.0)
            scaled = keep_top(scaled, top_k, top_p)
        token = lowest_argmax(add_noise(scaled, self._seed[slots], positions))
        return torch.where(drawn & (greedy >= 0), token, greedy)


def lowest_argmax(logits: Tensor) -> Tensor:
    """The lowest id among the largest of each row of [S, V]: int64 [S], -1 where there is a NaN."""
    vocab = logits.shape[-1]
    ids = torch.arange(vocab, device=logits.device)
    best = torch.where(logits == logits.amax(dim=-1, keepdim=True), ids, vocab).amin(dim=-1)
    return torch.where(best == vocab, -1, best)


def keep_top(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Set to -inf what top-k (0: off) and then top-p leave out, row by row of [S, V]; of equals the lowest ids stay.

    Top-p keeps the fewest likeliest tokens whose probability, among those that top-k left, reaches p.
    """
    values, order = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scaled.shape[-1], device=scaled.device)
    values = values.masked_fill((top_k[:, None] > 0) & (rank >= top_k[:, None]), -torch.inf)
    mass = values.softmax(dim=-1)
    before = mass.cumsum(dim=-1) - mass  # probability of all that is likelier
    dropped = (before >= top_p[:, None]) & (top_p[:, None] < 1)
    dropped[:, 0] = False
    values = values.masked_fill(dropped, -torch.inf)
    return torch.empty_like(scaled).scatter_(-1, order, values)


def add_noise(scaled: Tensor, seed: Tensor, positions: Tensor) -> Tensor:
    """Add Gumbel noise to [S, V], whose rows' best is 0; on a CPU, where few tokens can still win, to these alone."""
    if not scaled.is_cuda:
        rows, ids = (scaled > -NOISE_RANGE).nonzero(as_tuple=True)
        if len(ids) < scaled.numel() // 8:
            noisy = torch.full_like(scaled, -torch.inf)
            noisy[rows, ids] = scaled[rows, ids] + noise_at(seed[rows], positions[rows], ids)
            return noisy
    return scaled + noise(seed, positions, scaled.shape[-1])


def noise(seed: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Standard Gumbel noise for every token: float32 [S, V] for int64 [S] seeds and positions.

    Philox4x32-10 with the seed as key and (token, position) as counter. Tokens go in tiles of 4,096: the four words
    of one counter serve tokens 1,024 apart.
    """
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
    """Four words of Philox4x32-10, each uniform in [0, 2**32) as int64: a 64-bit key, a counter of two words.

    Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.
    """
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
