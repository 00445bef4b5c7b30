"""Typed look-ups in what a file says of itself: JSON objects and GGUF metadata."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


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


@dataclass(frozen=True)
class Fields:
    """Named values of one file. Every look-up checks the type; every complaint names file, field and value.

    A field that is absent is an error unless it is `optional`; a null counts as absent.
    """

    values: Mapping[str, Any]
    where: str  # the file, and what in it

    def get(self, name: str) -> Any:
        value = self.values.get(name)
        if value is None:
            raise ValueError(f"{self.where} has no {name!r}")
        return value

    def integer(self, name: str, least: int = 1) -> int:
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.wrong(name, f"a whole number of at least {least}")
        return value

    def number(self, name: str, least: float = -math.inf) -> float:
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < least:
            raise self.wrong(name, "a finite number" if least == -math.inf else f"a number of at least {least}")
        return float(value)

    def positive(self, name: str) -> float:
        value = self.number(name)
        if value <= 0:
            raise self.wrong(name, "a number above 0")
        return value

    def boolean(self, name: str) -> bool:
        value = self.get(name)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def text(self, name: str) -> str:
        value = self.get(name)
        if not isinstance(value, str):
            raise self.wrong(name, "a string")
        return value

    def list_of(self, name: str, kind: type[T]) -> list[T]:
        values = self.get(name)
        if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
            raise self.wrong(name, f"a list of {kind.__name__}")
        return values

    def optional_integer(self, name: str, least: int = 0) -> int | None:
        return None if self.values.get(name) is None else self.integer(name, least)

    def optional_number(self, name: str) -> float | None:
        return None if self.values.get(name) is None else self.number(name)

    def optional_text(self, name: str) -> str | None:
        return None if self.values.get(name) is None else self.text(name)

    def wrong(self, name: str, allowed: str) -> ValueError:
        """The error for a value that is not what is allowed."""
        shown = repr(self.values[name])
        return ValueError(
            f"{self.where}: {name} must be {allowed}, got {shown if len(shown) < 80 else shown[:76] + '…'}"
        )
