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
from minisgl.model.layers import FusedLinear, RMSNorm
from minisgl.source.folder import weight_files

logger = logging.getLogger(__name__)

_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_NOT_WEIGHTS = ("rotary_emb.inv_freq",)  # ends of names that older checkpoints carry, although the config says it all
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, eq=False)
class _Place:
    """Where one checkpoint tensor goes, and which pieces of the model are set by it."""

    tensor: Tensor  # a parameter, or a slice of a fused one
    pieces: frozenset[str]


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

    def read(self) -> Tensor:
        # Opened anew for every tensor: pages of a mapped file count as this process's memory until it is closed.
        with _open(self.path) as file:
            return file.get_tensor(self.name)


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
        places[name].tensor.copy_(source.read())
        done_bytes += source.num_bytes
        if report is not None:
            report(done_bytes, total_bytes)
    if untied is not None:
        _warn_if_other(untied, model.embed_tokens.weight)


def dummy_weights(model: Decoder, seed: int = 0) -> None:
    """Random weights in place, the same for a seed and a kind of device: normal with std 0.02, norms 1."""
    generator = torch.Generator(device=model.norm.weight.device).manual_seed(seed)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if isinstance(module, RMSNorm):
                parameter.fill_(1)
            else:
                parameter.normal_(std=0.02, generator=generator)


def _places(model: Decoder) -> dict[str, _Place]:
    """Every name that a checkpoint may use, without the leading "model.", and its place.

    A fused parameter has a place under its own name, and one for each of its parts.
    """
    places: dict[str, _Place] = {}
    for path, module in model.named_modules():
        for kind, parameter in module.named_parameters(recurse=False):
            if isinstance(module, FusedLinear):
                parent = path.rpartition(".")[0]
                parts = [f"{parent}.{part}.{kind}" for part in module.parts]
                slices = parameter.split(tuple(module.parts.values()))
                places |= {name: _Place(piece, frozenset([name])) for name, piece in zip(parts, slices, strict=True)}
            else:
                parts = [f"{path}.{kind}"]
            places[f"{path}.{kind}"] = _Place(parameter, frozenset(parts))
    return places


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
    missing = {piece for place in places.values() for piece in place.pieces}
    for name, source in sources.items():
        place = places[name]
        if source.dtype not in _ITEM_BYTES:
            raise ValueError(f"{source.name} is {source.dtype}; weights must be one of {', '.join(_ITEM_BYTES)}")
        if source.shape != tuple(place.tensor.shape):
            raise ValueError(
                f"{source.name} has shape {list(source.shape)} in {source.path.name}, "
                f"but the model's config asks for {list(place.tensor.shape)}"
            )
        if not place.pieces <= missing:
            raise ValueError(f"{source.name} sets what another tensor of {folder} sets too, fused or by parts")
        missing -= place.pieces
    if missing:
        hint = "; without it, tie_word_embeddings must be true in config.json" if _HEAD in missing else ""
        raise ValueError(f"{folder} lacks tensors that the model needs: {_listed(missing)}{hint}")


def _warn_if_other(head: _Source, embedding: Tensor) -> None:
    if head.shape != tuple(embedding.shape) or not torch.equal(head.read().to(embedding), embedding):
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
