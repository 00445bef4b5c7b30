"""What rank 0 tells the others: batches, and now and then an order, over a socket to each."""

from dataclasses import fields, is_dataclass
from functools import cache
from typing import IO, Any

import msgspec
import numpy as np

from minisgl.batch import Batch, Joins

_HEADER_BYTES = 8  # of a message: its length


def receive(line: IO[bytes]) -> Batch | str | None:
    """The next batch or order; None when there are no more, because rank 0 has closed the line or has ended."""
    size = int.from_bytes(line.read(_HEADER_BYTES), "little")
    body = line.read(size)
    return unpack(body) if body and len(body) == size else None


def pack(message: Batch | str) -> bytes:
    """A batch, or an order, as a message."""
    body = msgspec.msgpack.encode(_plain(message))
    return len(body).to_bytes(_HEADER_BYTES, "little") + body


def unpack(body: bytes) -> Batch | str:
    """A batch, or an order, from a message without its header."""
    plain = msgspec.msgpack.decode(body)
    return plain if isinstance(plain, str) else _built(Batch, plain)


def _plain(value: Any) -> Any:
    """Dataclasses as the list of their fields, arrays as type, shape and bytes; nothing where nobody joins."""
    if isinstance(value, Joins) and not len(value.slots):
        return None
    if isinstance(value, np.ndarray):
        return [value.dtype.str, value.shape, value.tobytes()]
    if is_dataclass(value):
        return [_plain(getattr(value, field.name)) for field in fields(value)]
    return value


@cache
def _nobody() -> Joins:
    return Joins.greedy(np.empty(0, np.int32))


def _built(kind: Any, plain: Any) -> Any:
    if plain is None:
        return _nobody()
    if is_dataclass(kind):
        return kind(*(_built(field.type, each) for field, each in zip(fields(kind), plain, strict=True)))  # pyright: ignore
    if isinstance(plain, list):
        dtype, shape, data = plain
        return np.frombuffer(data, dtype).reshape(shape).copy()  # one's own, and so writable, as torch wants it
    return plain
