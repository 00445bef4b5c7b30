"""Tokens from logits: the largest, or a draw by Gumbel-max, argmax(logits / temperature + noise).

Noise depends on (seed, position, token) alone, so a seeded request gets the same tokens whatever runs beside it. It
comes from Philox4x32-7 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011, where no fewer rounds pass
all tests) with the seed as key and (token, position) as counter. Tokens go in tiles of 4,096: the four words of one
counter serve tokens 1,024 apart.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from minisgl.kernels.compiler import power_of_two, tl, triton

ROUNDS = 7
TILE = 4096
NOISE_RANGE = 26.0
"""Noise lies within (-2.9, 23.0): a token this far below the best cannot win."""

Part = tuple[int, int, Callable[[Tensor], Tensor]]
"""Of a vocabulary: its first token, how many the largest part has, and what gathers what all find, [parts, …]."""


def sample(
    logits: Tensor, slots: Tensor, temperature: Tensor, seed: Tensor, positions: Tensor, part: Part | None = None,
    last: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """One token for each row of logits [S, V] of any float dtype, -inf at tokens that are out: int64 [S].

    `slots` and `positions` are int32 or int64 [S]; `temperature` float32 and `seed` int64 go by slot. A row of
    temperature 0 gets the largest, the lowest id of equals; one that holds a NaN or whose largest is not finite, -1.
    Where the vocabulary is parted, the logits are those of this `part`, and the tokens of all. In `last`, int64, each
    slot's place gets its token, or 0 for -1.
    """
    first, widest, gather = part or (0, 0, _alone)
    tiles = -(-logits.shape[1] // TILE) if part is None else widest // TILE + 2
    find, choose = (find_fused, choose_fused) if logits.is_cuda else (find_reference, choose_reference)
    return choose(gather(find(logits, slots, temperature, seed, positions, first, tiles)), slots, temperature, last)


def _alone(found: Tensor) -> Tensor:
    return found[None]


def find_reference(
    logits: Tensor, slots: Tensor, temperature: Tensor, seed: Tensor, positions: Tensor, first: int, tiles: int
) -> Tensor:
    """`find_fused` in torch, which knows of one tile."""
    del tiles
    largest, best = logits.max(dim=-1)  # of equals, torch promises the first; a NaN is larger than anything
    largest = largest.float()
    score = torch.zeros_like(largest)
    drawn = ((temperature[slots] > 0) & largest.isfinite()).nonzero()[:, 0]
    if len(drawn):
        scaled = (logits[drawn].float() - largest[drawn, None]) / temperature[slots[drawn], None]
        score[drawn], best[drawn] = draw(scaled, seed[slots[drawn]], positions[drawn].long(), first)
    largest = largest.masked_fill(largest.isnan(), torch.inf)
    return torch.stack([largest, score, (best + first).float()])[..., None]


def choose_reference(found: Tensor, slots: Tensor, temperature: Tensor, last: Tensor | None = None) -> Tensor:
    """`choose_fused` in torch."""
    largest, score, ids = found.permute(1, 2, 0, 3).flatten(2)  # [S, parts * tiles] each
    best, heat = largest.amax(dim=-1, keepdim=True), temperature[slots, None]
    score = torch.where(heat > 0, (largest - best) / heat + score, largest)
    score = score.masked_fill(largest == -torch.inf, -torch.inf)
    token = ids.masked_fill(score < score.amax(dim=-1, keepdim=True), torch.inf).amin(dim=-1)
    token = torch.where(best[:, 0].isfinite(), token, -1).long()
    if last is not None:
        last[slots] = token.clamp(min=0)
    return token


def find_fused(
    logits: Tensor, slots: Tensor, temperature: Tensor, seed: Tensor, positions: Tensor, first: int, tiles: int
) -> Tensor:
    """The best token of each tile, in one pass over the logits, whose rows are contiguous: float32 [3, S, tiles].

    For each its tile's largest logit (infinite where one is no number), the rest of its score, and its id, which
    float32 holds exactly up to 2**24. Tiles begin with the one that `first` lies in.
    """
    rows, vocab = logits.shape
    found = torch.empty(3, rows, tiles, dtype=torch.float32, device=logits.device)
    _candidates_kernel[(rows, tiles)](
        logits, logits.stride(0), slots, temperature, seed, positions, found, vocab,
        first,  # pyright: ignore[reportArgumentType]  # launches take numbers for constexprs
    )  # fmt: skip
    return found


def choose_fused(found: Tensor, slots: Tensor, temperature: Tensor, last: Tensor | None = None) -> Tensor:
    """The best of the candidates [parts, 3, S, tiles] of each row: int64 [S]; also to its slot's place in `last`."""
    parts, _, rows, tiles = found.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=found.device)
    _winners_kernel[(rows,)](
        found, slots, temperature, tokens, last, parts, tiles,
        power_of_two(parts * tiles),  # pyright: ignore[reportArgumentType]
    )  # fmt: skip
    return tokens


def draw(scaled: Tensor, seed: Tensor, positions: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
    """The largest score with noise, and where it is, in each row of [S, V] float32, whose best is 0: two [S].

    `seed` and `positions` are int64 [S]; rows begin with token `first`, and hold no NaN. The reference; on a CPU only
    tokens that can still win get their noise.
    """
    near = scaled > -NOISE_RANGE
    if scaled.is_cuda or int(near.sum()) >= scaled.numel() // 8:
        noisy = scaled + noise(seed, positions, first + scaled.shape[-1])[:, first:]
    else:
        rows, ids = near.nonzero(as_tuple=True)
        noisy = torch.full_like(scaled, -torch.inf)
        noisy[rows, ids] = scaled[rows, ids] + noise_at(seed[rows], positions[rows], ids + first)
    score, at = noisy.max(dim=-1)  # of equals, torch promises the first
    return score, at


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
    uniform = bits.float() * (2.0**-32 - 2.0**-56) + 2.0**-33  # (0, 1): the largest is 1 - 2**-24
    return -(-torch.log1p(-uniform)).log()


def philox(key: Tensor, counter0: Tensor, counter1: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four words of Philox4x32-7, each uniform in [0, 2**32) as int64: a 64-bit key, a counter of two words."""
    mask = 0xFFFFFFFF
    k0, k1 = key & mask, (key >> 32) & mask
    c0, c1 = torch.broadcast_tensors(counter0 & mask, counter1 & mask)
    c2 = c3 = torch.zeros_like(c0)
    for _ in range(ROUNDS):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        high0, high1 = (p0 >> 32) & mask, (p1 >> 32) & mask
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, p1 & mask, high0 ^ c3 ^ k1, p0 & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return c0, c1, c2, c3


if triton is not None:
    INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # pyright: ignore[reportAttributeAccessIssue]
    LOG2_E = tl.constexpr(math.log2(math.e))
    PHILOX_ROUNDS = tl.constexpr(ROUNDS)

    @triton.jit
    def _candidates_kernel(
        logits, row_stride, slots, temperatures, seeds, positions, found, vocab, FIRST: tl.constexpr
    ):
        """The best token of one tile, and what its score is made of: the tile's largest logit, and the rest.

        With noise -log(-log(1 - u)), the largest of (logit - largest) / temperature + noise is also the largest of
        log(1 - u) * exp((largest - logit) / temperature), negative all, which takes two fast functions a token. Logits
        relative to the tile's largest are exact near it, however low the temperature. Logs and exps are to base 2.
        """
        row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1) + FIRST // 4096
        slot = tl.load(slots + row)
        temperature = tl.load(temperatures + slot)
        lane = tl.arange(0, 1024)
        first = tile * 4096 + lane
        source = logits + row * row_stride
        x0 = _load_tokens(source, first - FIRST, vocab, FIRST)
        x1 = _load_tokens(source, first - FIRST + 1024, vocab, FIRST)
        x2 = _load_tokens(source, first - FIRST + 2048, vocab, FIRST)
        x3 = _load_tokens(source, first - FIRST + 3072, vocab, FIRST)
        x = (x0, x1, x2, x3)
        with_nan: tl.constexpr = tl.PropagateNan.ALL
        largest = tl.maximum(tl.maximum(x0, x1, with_nan), tl.maximum(x2, x3, with_nan), with_nan)
        largest = tl.max(tl.where(largest == largest, largest, float("inf")), axis=0)  # no number is no finite number

        if temperature > 0:
            words = _philox(tl.load(seeds + slot), tile * 1024 + _like(lane, x0), tl.load(positions + row))
            scale = -LOG2_E / temperature
            top = tl.where(tl.abs(largest) < float("inf"), largest, 0.0)  # else nothing that follows counts
            best = tl.full((1024,), -float("inf"), tl.float32)
            word = tl.full((1024,), 0, tl.int32)
            for i in tl.static_range(4):
                value = _log2_of_rest(words[i]) * tl.exp2((x[i] - top) * scale)
                word = tl.where(value > best, i, word)
                best = tl.maximum(value, best)
            winner = tl.max(best, axis=0)
            score = -tl.log2(-winner)
            token = tl.min(tl.where(best == winner, first + word * 1024, 2147483647), axis=0)
        else:
            score = 0.0
            word = tl.full((1024,), 4, tl.int32)
            for i in tl.static_range(4):
                word = tl.where(x[3 - i] == largest, 3 - i, word)
            token = tl.min(first + word * 1024, axis=0)
        rows, tiles = tl.num_programs(0), tl.num_programs(1)
        out = found + row * tiles + tl.program_id(1)
        tl.store(out, largest)
        tl.store(out + rows * tiles, score)
        tl.store(out + 2 * rows * tiles, token.to(tl.float32))

    @triton.jit
    def _load_tokens(source, at, vocab, FIRST: tl.constexpr):
        """Logits as float32, -inf where there are none."""
        inside = at < vocab
        if FIRST % 4096 != 0:
            inside &= at >= 0
        return tl.load(source + at, mask=inside, other=-float("inf")).to(tl.float32)

    @triton.jit
    def _winners_kernel(found, slots, temperatures, tokens, last, parts, tiles, BLOCK: tl.constexpr):
        """The best of a row's candidates."""
        row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
        slot = tl.load(slots + row)
        temperature = tl.load(temperatures + slot)
        index = tl.arange(0, BLOCK)
        exists = index < parts * tiles
        at = found + (index // tiles * 3 * rows + row) * tiles + index % tiles
        largest = tl.load(at, mask=exists, other=-float("inf"))
        best = tl.max(largest, axis=0)
        score = largest
        if temperature > 0:
            rest = tl.load(at + rows * tiles, mask=exists, other=0)
            score = (largest - best) * (LOG2_E / temperature) + rest
        score = tl.where(largest > -float("inf"), score, -float("inf"))
        token = tl.load(at + 2 * rows * tiles, mask=exists, other=0).to(tl.int32)
        token = tl.min(tl.where(score == tl.max(score, axis=0), token, 2147483647), axis=0)
        is_number = tl.abs(best) < float("inf")
        tl.store(tokens + row, tl.where(is_number, token, -1).to(tl.int64))
        if last is not None:
            tl.store(last + slot, tl.where(is_number, token, 0).to(tl.int64))

    @triton.jit
    def _philox(key, counter0, counter1):
        """As `philox`. Triton's own multiplies twice where once gives both halves of the product."""
        k0, k1 = key.to(tl.uint32), (key >> 32).to(tl.uint32)
        c0 = counter0.to(tl.uint32)
        c2, c3 = c0 * 0, c0 * 0
        c1 = c2 + counter1.to(tl.uint32)
        for _ in tl.static_range(PHILOX_ROUNDS):  # pyright: ignore[reportGeneralTypeIssues]
            p0, p1 = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
            c0, c1 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0, p1.to(tl.uint32)
            c2, c3 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1, p0.to(tl.uint32)
            k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
        return c0, c1, c2, c3

    @triton.jit
    def _log2_of_rest(bits):
        """log2(1 - u), where u is what `to_gumbel` makes of the bits, off by a factor of 1 + 1e-5 at most."""
        u = bits.to(tl.float32) * (2.0**-32 - 2.0**-56) + 2.0**-33
        series = u * (-LOG2_E - u * (LOG2_E / 2 + u * (LOG2_E / 3)))  # where 1 - u would lose u's digits
        return tl.where(u < 2.0**-5, series, _fast_log2(1 - u))

    @triton.jit
    def _fast_log2(x):
        """Off by 2**-22 at most: one instruction, for which Triton has no name, in place of twenty."""
        if INTERPRETED:
            return tl.log2(x)
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)

    @triton.jit
    def _like(x, other):
        """x, in the layout that `other` was loaded in: else all noise would move there through shared memory."""
        if INTERPRETED:
            return x
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [x, other], x.dtype, is_pure=True, pack=1)
