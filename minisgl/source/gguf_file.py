"""Reads a GGUF file: its metadata, and its tensors as they lie there.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The gguf package's own reader makes several numpy
arrays of every string, which takes seconds for a vocabulary; of the package, only what it knows of the quantised types
is used.
"""

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, eq=False)
class GgufTensor:
    """A tensor in the file, not decoded."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]  # rows first, as in numpy
    rows: NDArray[np.uint8]  # [rows, bytes of a row], mapped from the file; one row for a vector

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    def decode(self, start: int = 0, stop: int | None = None) -> NDArray[np.float32]:
        """The values of some rows in float32, [rows, elements of a row]. ValueError if their type cannot be read."""
        try:
            return np.asarray(dequantize(self.rows[start:stop], self.kind), dtype=np.float32)
        except NotImplementedError:
            raise ValueError(f"tensor {self.name} is of type {self.kind.name}, which is not supported") from None


@dataclass(frozen=True, eq=False)
class GgufFile:
    """What a GGUF file holds."""

    metadata: Mapping[str, Any]
    tensors: tuple[GgufTensor, ...]


def read_gguf(path: Path) -> GgufFile:
    """Read all but the tensors' data, which is mapped. ValueError for what is not a whole GGUF file, version 2 or 3."""
    with open(path, "rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file")
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        return _parse(_Cursor(content, offset=4))
    except (ValueError, struct.error) as error:
        raise ValueError(f"{path} is not a whole and sound GGUF file: {error}") from error


class _Cursor:
    """Takes one value after the other from a file's bytes; struct.error or ValueError at its end."""

    def __init__(self, content: mmap.mmap, offset: int) -> None:
        self.content, self.offset = content, offset

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self.content, self.offset)
        self.offset += struct.calcsize(code)
        return value

    def skip(self, num_bytes: int) -> int:
        """Where a run of bytes starts that is passed over."""
        start, end = self.offset, self.offset + num_bytes
        if end > len(self.content):
            raise ValueError(f"it ends at byte {len(self.content)}, where {end} are needed")
        self.offset = end
        return start

    def string(self) -> str:
        start = self.skip(self.scalar("Q"))
        return self.content[start : self.offset].decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            kind, count = self.scalar("I"), self.scalar("Q")
            if (code := _SCALARS.get(kind)) is None:
                return [self.value(kind) for _ in range(count)]
            start = self.skip(count * struct.calcsize(code))
            return np.frombuffer(self.content, dtype=f"<{code}", count=count, offset=start).tolist()
        if kind not in _SCALARS:
            raise ValueError(f"value type {kind} is not known")
        return self.scalar(_SCALARS[kind])


def _parse(cursor: _Cursor) -> GgufFile:
    version = cursor.scalar("I")
    if version not in (2, 3):
        swapped = " (its byte order is the other one)" if version & 0xFFFF == 0 else ""
        raise ValueError(f"version {version} is not supported{swapped}")
    num_tensors, num_pairs = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = {cursor.string(): cursor.value(cursor.scalar("I")) for _ in range(num_pairs)}
    headers = []
    for _ in range(num_tensors):
        name, num_dims = cursor.string(), cursor.scalar("I")
        shape = tuple(cursor.scalar("Q") for _ in range(num_dims))[::-1]
        headers.append((name, shape, cursor.scalar("I"), cursor.scalar("Q")))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"alignment {alignment!r} is not a positive number")
    data_start = cursor.offset + -cursor.offset % alignment
    return GgufFile(metadata, tuple(_tensor(cursor, data_start, *header) for header in headers))


def _tensor(cursor: _Cursor, data_start: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
    quantization = GGMLQuantizationType(kind)
    block_elements, block_bytes = GGML_QUANT_SIZES[quantization]
    if not shape or min(shape) < 1 or shape[-1] % block_elements:
        raise ValueError(f"tensor {name} cannot have shape {shape} in type {quantization.name}")
    num_rows, row_bytes = math.prod(shape[:-1]), shape[-1] // block_elements * block_bytes
    cursor.offset = data_start + offset
    start = cursor.skip(num_rows * row_bytes)
    data = np.frombuffer(cursor.content, dtype=np.uint8, count=num_rows * row_bytes, offset=start)
    return GgufTensor(name, quantization, shape, data.reshape(num_rows, row_bytes))
