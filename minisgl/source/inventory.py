"""What is in the caches, minisgl's own and Hugging Face's, and how it is removed."""

import os
import re
import shutil
import stat
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Literal

from minisgl.source.alias import ALIASES
from minisgl.source.cache_folder import cache_folder


@dataclass(frozen=True, kw_only=True)
class CachedModel:
    """A model on this machine."""

    name: str
    kind: Literal["alias", "imported", "hub"]
    size_bytes: int
    used_s: float
    """When a file of it was last read, in seconds since 1970, as far as the disk keeps that: often to the day."""
    remove: Callable[[], None]
    """Remove it from the cache, whole or not at all."""


def cached_models() -> list[CachedModel]:
    """All of them, by name."""
    return sorted([*_own(cache_folder()), *_from_hub()], key=lambda model: model.name)


def find_cached(name: str) -> CachedModel:
    """The one with this name; ValueError, with the nearest, where there is none."""
    models = {model.name: model for model in cached_models()}
    if name in models:
        return models[name]
    near = get_close_matches(name, models, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ValueError(f"there is no {name} in the cache{hint} (`minisgl models` lists what there is)")


def folder_bytes(folder: Path) -> int:
    """The size of all files in a folder, or of one file; links count for nothing."""
    return sum(each.st_size for each in _stats(folder))


def _stats(path: Path) -> list[os.stat_result]:
    """Of a file, or of the files in a folder, links left out; one that vanishes meanwhile is none."""
    stats = []
    for file in [path] if path.is_file() else path.rglob("*"):
        try:
            status = file.lstat()
        except FileNotFoundError:
            continue
        if stat.S_ISREG(status.st_mode):
            stats.append(status)
    return stats


def _own(cache: Path) -> list[CachedModel]:
    """Aliases, each its download and its import, and imported files."""
    imports = {path.name: path for path in (cache / "imported").glob("[!.]*") if path.is_dir()}
    models = []
    for name, alias in ALIASES.items():
        folders = [imports.pop(f) for f in list(imports) if re.fullmatch(rf"{re.escape(name)}-[0-9a-f]{{16}}", f)]
        if paths := [path for path in (cache / alias.file_name, *folders) if path.exists()]:
            models.append(_model(name, "alias", paths))
    return models + [_model(name, "imported", [path]) for name, path in imports.items()]


def _from_hub() -> list[CachedModel]:
    """Also those whose download was interrupted."""
    from huggingface_hub.constants import HF_HUB_CACHE

    repos = [path for path in Path(HF_HUB_CACHE).glob("models--*") if path.is_dir()]
    # All content is in blobs; the small files beside them are read by whoever only looks.
    return [
        _model(path.name.removeprefix("models--").replace("--", "/"), "hub", [path], content=[path / "blobs"])
        for path in repos
    ]


def _model(
    name: str, kind: Literal["alias", "imported", "hub"], paths: list[Path], content: list[Path] | None = None
) -> CachedModel:
    """A model of these files and folders, whose size and use are those of its `content`, if that is less."""
    stats = [each for path in content or paths for each in _stats(path)]
    return CachedModel(
        name=name,
        kind=kind,
        size_bytes=sum(each.st_size for each in stats),
        used_s=max((max(each.st_atime, each.st_mtime) for each in stats), default=0.0),
        remove=partial(_remove, paths),
    )


def _remove(paths: list[Path]) -> None:
    for path in paths:
        # Out of its place in one step, so that half a model never stands there.
        gone = path.with_name(f".{path.name}.removed")
        shutil.rmtree(gone, ignore_errors=True)  # what was interrupted earlier
        path.rename(gone)
        if gone.is_dir() and not gone.is_symlink():
            shutil.rmtree(gone)
        else:
            gone.unlink()
