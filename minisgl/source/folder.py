"""What a model folder must hold: config.json, safetensors, a tokenizer (made, where there is only another kind)."""

import os
import re
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

from minisgl.source.cache_folder import Report, imported_folder, make_once
from minisgl.source.fields import Fields, read_json

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
TOKENIZER = "tokenizer.json"
_TOKENIZER_EXTRAS = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json")
# What a tokenizer.json can be made from, any one set of them.
_TOKENIZER_SOURCES = (("tokenizer.model",), ("vocab.json", "merges.txt"))

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_MAKER_VERSION = 1  # raise it when a tokenizer.json made by older code must be made again
_MAKE_TOKENIZER = """
import sys
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], local_files_only=True, trust_remote_code=False)
tokenizer.backend_tokenizer.save(sys.argv[2])
"""


def small_files(names: Collection[str]) -> list[str]:
    """Those among a model's files that are read, other than config.json and the weights."""
    wanted = {GENERATION_CONFIG, TOKENIZER, *_TOKENIZER_EXTRAS}
    if TOKENIZER not in names:
        wanted |= {"added_tokens.json"}.union(*_TOKENIZER_SOURCES)
    return [name for name in names if name in wanted or re.fullmatch(r"additional_chat_templates/[^/]+\.jinja", name)]


def weight_index(names: Collection[str], where: object) -> str | None:
    """The index to read among a model's files, or None where one file holds all the weights.

    Raises ValueError where there are neither: other formats are not read, pickles least of all.
    """
    if _SINGLE in names:
        return None
    if _INDEX in names:
        return _INDEX
    others = sorted(name for name in names if name.endswith((".bin", ".pt", ".pth", ".gguf", ".safetensors")))
    hint = ""
    if any(name.endswith(".gguf") for name in others):
        hint = ": download the .gguf file that you want, and give its path"
    elif others:
        hint = ": pickled weights and other layouts are not read, convert them to safetensors (save_pretrained does)"
    found = f"; it has {', '.join(others[:4])}{', …' if len(others) > 4 else ''}" if others else ""
    raise ValueError(f"{where} has neither {_SINGLE} nor {_INDEX}{found}{hint}")


def weight_names(folder: Path, index: str | None) -> list[str]:
    """The safetensors files that make up a model's weights: the only one, or in order those that the index names."""
    if index is None:
        return [_SINGLE]
    weight_map = Fields(read_json(folder / index), str(folder / index)).get("weight_map", dict)
    names = sorted(set(map(str, weight_map.values())))
    wrong = [name for name in names if not name.endswith(".safetensors") or "/" in name]
    if wrong or not names:
        named = ", ".join(wrong) or "nothing"
        raise ValueError(f"{folder / index} names {named}, which is not a file in its folder that ends in .safetensors")
    return names


def weight_files(folder: Path) -> list[Path]:
    """The files of `weight_names` in a model folder. Raises ValueError if they are not all there."""
    index = weight_index([path.name for path in folder.iterdir()], folder)
    files = [folder / name for name in weight_names(folder, index)]
    for file in files:
        if not file.is_file():
            raise ValueError(f"{folder / (index or '')} names {file.name!r}, which is not a file")
    return files


def check_folder(folder: Path, weights: bool) -> None:
    """Raise ValueError unless the folder has a config.json and, if asked, all of its weights."""
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} is not a model folder: it has no {CONFIG}")
    if weights:
        weight_files(folder)


def with_tokenizer(folder: Path, name: str, report: Report) -> Path:
    """The folder itself, or one in the cache that links to all of it and adds the tokenizer.json it lacks.

    That is made once, by transformers, in a process of its own. A folder without any tokenizer stays as it is: its
    prompts are token ids. Raises ValueError if the tokenizer cannot be made.
    """
    content = sorted(folder.iterdir())
    names = {path.name for path in content}
    if TOKENIZER in names or not any(names.issuperset(source) for source in _TOKENIZER_SOURCES):
        return folder
    stats = [(path, path.stat().st_size, path.stat().st_mtime_ns) for path in content]
    place = imported_folder(name, _MAKER_VERSION, folder.resolve(), *stats)

    def make(scratch: Path) -> Path:
        report(f"making a tokenizer.json for {name}", 0, None)
        _make_tokenizer(folder, scratch / TOKENIZER)
        for path in content:
            (scratch / path.name).symlink_to(path.resolve())
        return scratch

    return place if place.is_dir() else make_once(place, make, report)


def _make_tokenizer(folder: Path, made: Path) -> None:
    command = [sys.executable, "-P", "-c", _MAKE_TOKENIZER, str(folder.resolve()), str(made)]
    offline = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=offline, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise ValueError(
            f"{folder} has no tokenizer.json, and transformers cannot make one from its other tokenizer files "
            f"({lines[-1].strip()}); `pip install transformers sentencepiece protobuf`, or add a tokenizer.json"
        )
