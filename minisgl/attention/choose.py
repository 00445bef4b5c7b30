"""Which kernels run: `--attention-backend` by name, and what `auto` stands for."""

from minisgl.attention import flash, flashinfer, reference, triton
from minisgl.attention.base import KVCache, PagedAttention, PhaseName, Shape

BACKENDS = {"reference": reference, "flashinfer": flashinfer, "flash": flash, "triton": triton}

PHASES: tuple[PhaseName, PhaseName] = ("prefill", "decode")

_KNOWN = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1))
"""Compute capabilities for which `auto` takes FlashInfer; on any other the reference is what surely runs."""

_MEASURED = ((9, 0),)
"""Where our own decode kernel has been found to be faster."""


def named(backend: str) -> tuple[str, str]:
    """What PREFILL,DECODE or one name for both says; ValueError for an unknown name."""
    names = [name.strip() for name in backend.split(",")]
    if len(names) > 2:
        raise ValueError(f"attention_backend={backend!r}: name one backend, or two as PREFILL,DECODE")
    for name in names:
        if name not in ("auto", *BACKENDS):
            raise ValueError(f"attention_backend={backend!r}: {name!r} is none of auto, {', '.join(BACKENDS)}")
    if names == ["flash"]:
        return "flash", "auto"  # it has no decode
    return ("auto", "triton") if names == ["triton"] else (names[0], names[-1])  # nor this one prefill


def automatic(shape: Shape) -> tuple[tuple[str, str], str | None]:
    """What `auto` stands for, by phase, and, where it is the reference on a CUDA device, why."""
    if shape.capability is None:
        return ("reference", "reference"), None
    if shape.capability not in _KNOWN:
        return ("reference", "reference"), f"no kernels are known to run on {shape.device}"
    if reason := flashinfer.supports(shape, "decode"):
        return ("reference", "reference"), reason
    measured = shape.capability in _MEASURED and shape.page_size >= 64  # smaller pages make smaller tiles
    ours = measured and triton.supports(shape, "decode") is None
    return ("flashinfer", "triton" if ours else "flashinfer"), None


def why_not(name: str, shape: Shape, phase: PhaseName) -> str | None:
    """Why a backend cannot run a phase here; None if it can."""
    return BACKENDS[name].supports(shape, phase)


def best_page_size(names: tuple[str, str]) -> int:
    """The page size that backends like best: kernels read larger pages faster, the reference does not care."""
    return 16 if names == ("reference", "reference") else 64


def attention(names: tuple[str, str], kv: KVCache, shape: Shape) -> PagedAttention:
    """Put the kernels together. `why_not` has been asked."""
    made = {name: BACKENDS[name].phases(kv, shape, shape.head_size**-0.5) for name in names}
    prefill, decode = made[names[0]][0], made[names[1]][1]
    assert decode is not None, "why_not says which backend has no decode"
    return PagedAttention(kv, prefill, decode)
