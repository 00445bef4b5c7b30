"""Typed look-ups in what a file says of itself: JSON objects and GGUF metadata."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

T = TypeVar("T")

_KINDS: Mapping[type, str] = MappingProxyType(
    {float: "a number above 0", bool: "true or false", str: "a string", dict: "an object"}
)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. ValueError, naming the file, if it is not there, not JSON or not an object."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(values).__name__}")
    return values


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Fields:
    """Named values of one file. Every look-up checks the type; every complaint names file, field and value.

    A null counts as absent, and a field that is absent is an error unless it is `optional`.
    """

    values: Mapping[str, Any]
    where: str  # the file, and what in it

    def get(self, name: str, kind: type[T], least: int = 0) -> T:
        """A value of exactly this kind, though a whole number will do for a float; floats are above 0 and finite."""
        value: Any = self.values.get(name)
        if value is None:
            raise ValueError(f"{self.where} has no {name!r}")
        if kind is float and type(value) is int:
            value = float(value)
        if not _fits(value, kind, least):
            raise self.wrong(name, f"a whole number of at least {least}" if kind is int else _KINDS[kind])
        return value

    def optional(self, name: str, kind: type[T], least: int = 0) -> T | None:
        return None if self.values.get(name) is None else self.get(name, kind, least)

    def list_of(self, name: str, kind: type[T]) -> list[T]:
        values = self.values.get(name)
        if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
            raise self.wrong(name, f"a list of {kind.__name__}")
        return values

    def wrong(self, name: str, allowed: str) -> ValueError:
        """The error for a value that is not what is allowed."""
        return ValueError(f"{self.where}: {name} must be {allowed}, got {self.values.get(name)!r:.120}")


def _fits(value: Any, kind: type, least: int) -> bool:
    if type(value) is not kind or kind not in (int, float):
        return type(value) is kind
    return value >= least if kind is int else 0 < value < math.inf
