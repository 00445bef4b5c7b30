"""Fill a decoder: from safetensors, tensor by tensor, or with random numbers."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minisgl.model.decoder import Decoder
from minisgl.model.layers import Embedding, Linear, RMSNorm
from minisgl.source.folder import weight_files

logger = logging.getLogger(__name__)

_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_NOT_WEIGHTS = ("rotary_emb.inv_freq",)  # ends of names that older checkpoints carry, although the config says it all
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"


Region = tuple[slice, ...]
"""Rows, and columns where there are some, of a whole tensor."""


@dataclass(frozen=True, eq=False)
class _Piece:
    """A parameter, or what one of several projections has of it."""

    name: str
    tensor: Tensor
    shape: tuple[int, ...]  # of the whole, of which this rank may have a part
    region: Region  # this rank's part of the whole


@dataclass(frozen=True, eq=False)
class _Place:
    """Where one checkpoint tensor goes: the pieces of the model that are set by it, and where each is found in it."""

    shape: tuple[int, ...]
    pieces: list[tuple[_Piece, Region]]


@dataclass(frozen=True)
class _Source:
    """One tensor of a checkpoint, not read yet."""

    path: Path
    name: str  # as the file spells it
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]

    def copy(self, pieces: Iterable[tuple[Tensor, Region]]) -> None:
        """Set each tensor to what a region has."""
        # Opened anew for every tensor: pages of a mapped file count as this process's memory until it is closed.
        with _open(self.path) as file:
            stored = file.get_slice(self.name)
            for tensor, region in pieces:
                tensor.copy_(stored[region])


def load_weights(model: Decoder, folder: Path, report: Callable[[int, int], None] | None = None) -> None:
    """Copy a checkpoint into `model`, cast to its dtype, holding one tensor at a time beside the model.

    `report` is told the bytes read so far, and in all. Everything is checked before the first weight is read.
    Raises ValueError with the name of a tensor that is missing, unknown, there twice, of another shape or not plain
    floating point, and with the name of a file that is missing or broken.
    """
    sources = _sources(folder)
    untied = None  # an output head beside the embedding that it is tied to
    if model.lm_head is None and _HEAD in sources:
        head = sources.pop(_HEAD)
        if _EMBEDDING in sources:
            untied = head
        else:
            sources[_EMBEDDING] = head
    places = _places(model)
    _check(sources, places, folder)

    done_bytes, total_bytes = 0, sum(source.num_bytes for source in sources.values())
    for name, source in sources.items():
        source.copy((piece.tensor, region) for piece, region in places[name].pieces)
        done_bytes += source.num_bytes
        if report is not None:
            report(done_bytes, total_bytes)
    if untied is not None:
        (embedding,) = _pieces(model.embed_tokens, _EMBEDDING, model.embed_tokens.weight)
        _warn_if_other(untied, embedding)


def dummy_weights(model: Decoder, seed: int = 0) -> None:
    """Random weights in place, the same for a seed and a kind of device: normal with std 0.02, norms 1.

    Several ranks have parts of the same: each draws all numbers and keeps its own.
    """
    generator = torch.Generator(device=model.norm.weight.device).manual_seed(seed)
    for name, place in _places(model, by_parts=False).items():
        if name.endswith("norm.weight"):
            place.pieces[0][0].tensor.fill_(1)
            continue
        drawn = model.norm.weight.new_empty(place.shape).normal_(std=0.02, generator=generator)
        for piece, region in place.pieces:
            piece.tensor.copy_(drawn[region])


def _places(model: Decoder, by_parts: bool = True) -> dict[str, _Place]:
    """Every name that a checkpoint may use, without the leading "model.", and its place.

    A parameter of several projections has a place under its own name, and, `by_parts`, one for each of them.
    """
    places: dict[str, _Place] = {}
    for path, module in model.named_modules():
        if not isinstance(module, Embedding | Linear | RMSNorm):
            continue
        for kind, parameter in module.named_parameters(recurse=False):
            pieces, placed, first = _pieces(module, f"{path}.{kind}", parameter), [], 0
            for piece in pieces:
                rows, *columns = piece.region
                placed.append((piece, (slice(first + rows.start, first + rows.stop), *columns)))
                first += piece.shape[0]
            if by_parts:
                places |= {piece.name: _Place(piece.shape, [(piece, piece.region)]) for piece in pieces}
            places[f"{path}.{kind}"] = _Place((first, *pieces[0].shape[1:]), placed)
    return places


def _pieces(module: Embedding | Linear | RMSNorm, name: str, parameter: Tensor) -> list[_Piece]:
    """What the projections of a module have of one of its parameters, by the names that a checkpoint gives them."""
    path, _, kind = name.rpartition(".")
    parent = path.rpartition(".")[0]
    across = (module.inputs,) if parameter.ndim == 2 else ()
    outputs, pieces = module.outputs, []
    tensors = parameter.split([rows.size for rows in outputs.values()])
    for (part, rows), tensor in zip(outputs.items(), tensors, strict=True):
        dims = (rows, *across)
        region = tuple(slice(dim.start, dim.stop) for dim in dims)
        pieces.append(_Piece(f"{parent}.{part}.{kind}" if part else name, tensor, tuple(d.whole for d in dims), region))
    return pieces


def _sources(folder: Path) -> dict[str, _Source]:
    """Every tensor of a checkpoint by its name without the leading "model."."""
    sources: dict[str, _Source] = {}
    for path in weight_files(folder):
        with _open(path) as file:
            for name in file.keys():  # noqa: SIM118 (a safetensors file is no mapping)
                key = name.removeprefix("model.")
                if key.endswith(_NOT_WEIGHTS):
                    continue
                if key in sources:
                    raise ValueError(f"{name} is there twice: in {sources[key].path} and in {path}")
                tensor = file.get_slice(name)
                sources[key] = _Source(path, name, tensor.get_dtype(), tuple(tensor.get_shape()))
    return sources


def _check(sources: dict[str, _Source], places: dict[str, _Place], folder: Path) -> None:
    """Each piece of the model is set by exactly one tensor, which fits it."""
    if unknown := [source.name for name, source in sources.items() if name not in places]:
        raise ValueError(f"{folder} has tensors that the model has no place for: {_listed(unknown)}")
    missing = {piece.name for place in places.values() for piece, _ in place.pieces}
    for name, source in sources.items():
        place = places[name]
        if source.dtype not in _ITEM_BYTES:
            raise ValueError(f"{source.name} is {source.dtype}; weights must be one of {', '.join(_ITEM_BYTES)}")
        if source.shape != place.shape:
            raise ValueError(
                f"{source.name} has shape {list(source.shape)} in {source.path.name}, "
                f"but the model's config asks for {list(place.shape)}"
            )
        if not (pieces := {piece.name for piece, _ in place.pieces}) <= missing:
            raise ValueError(f"{source.name} sets what another tensor of {folder} sets too, fused or by parts")
        missing -= pieces
    if missing:
        hint = "; without it, tie_word_embeddings must be true in config.json" if _HEAD in missing else ""
        raise ValueError(f"{folder} lacks tensors that the model needs: {_listed(missing)}{hint}")


def _warn_if_other(head: _Source, embedding: _Piece) -> None:
    other = torch.empty_like(embedding.tensor)
    if head.shape == embedding.shape:
        head.copy([(other, embedding.region)])
    if head.shape != embedding.shape or not torch.equal(other, embedding.tensor):
        logger.warning(
            "%s differs from the embedding, but config.json ties them (tie_word_embeddings): the embedding is used",
            head.name,
        )


@contextmanager
def _open(path: Path) -> Iterator[safe_open]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(
            f"{path} is not a complete safetensors file ({error}): remove it and fetch it again"
        ) from error


def _listed(names: Iterable[str], most: int = 5) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - most} more" if len(ordered) > most else ""
    return ", ".join(ordered[:most]) + more
