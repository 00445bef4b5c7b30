"""What a model folder must hold: config.json, safetensors, a tokenizer (made, where there is only another kind)."""

import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

from minisgl.source.cache_folder import Report, cache_folder, fingerprint, publish, workspace
from minisgl.source.fields import Fields, read_json

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_EXTRAS = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json")
# What a tokenizer.json can be made from, any one set of them.
TOKENIZER_SOURCES = (("tokenizer.model",), ("vocab.json", "merges.txt"))
TOKENIZER_SOURCE_EXTRAS = ("added_tokens.json",)

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_MAKER_VERSION = 1  # raise it when a tokenizer.json made by older code must be made again
_MAKE_TOKENIZER = """
import sys
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], local_files_only=True, trust_remote_code=False)
tokenizer.backend_tokenizer.save(sys.argv[2])
"""


def weight_index(names: Collection[str], where: object) -> str | None:
    """The index to read among a model's files, or None where one file holds all the weights.

    Raises ValueError where there are neither: other formats are not read, pickles least of all.
    """
    if _SINGLE in names:
        return None
    if _INDEX in names:
        return _INDEX
    others = sorted(name for name in names if name.endswith((".bin", ".pt", ".pth", ".gguf", ".safetensors")))
    found = f"; it has {', '.join(others[:4])}{', …' if len(others) > 4 else ''}" if others else ""
    hint = ""
    if any(name.endswith(".gguf") for name in others):
        hint = ": download the .gguf file that you want, and give its path"
    elif others:
        hint = ": convert it to safetensors (transformers' save_pretrained does)"
    raise ValueError(f"{where} has neither {_SINGLE} nor {_INDEX}{found}{hint}")


def indexed_files(index: Path) -> list[str]:
    """The weight files that an index names, in order."""
    weight_map = Fields(read_json(index), str(index)).get("weight_map")
    names = set(weight_map.values()) if isinstance(weight_map, dict) else set()
    if not names or not all(isinstance(n, str) and n.endswith(".safetensors") and "/" not in n for n in names):
        raise ValueError(f"{index}: weight_map must name the safetensors file of every tensor")
    return sorted(names)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up a model's weights: model.safetensors, else those that the index names.

    Raises ValueError if they are not all there.
    """
    index = weight_index([path.name for path in folder.iterdir()], folder)
    names = [_SINGLE] if index is None else indexed_files(folder / index)
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise ValueError(f"{folder} lacks {', '.join(missing)}, which {index} names")
    return [folder / name for name in names]


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
    names = {path.name for path in folder.iterdir()}
    if TOKENIZER in names or not any(names.issuperset(source) for source in TOKENIZER_SOURCES):
        return folder
    files = sorted((path, path.stat().st_size, path.stat().st_mtime_ns) for path in folder.iterdir() if path.is_file())
    place = cache_folder() / "imported" / f"{name}-{fingerprint(_MAKER_VERSION, folder.resolve(), *files)}"
    if place.is_dir():
        return place
    with workspace(place, report) as scratch:
        if not place.is_dir():
            report(f"making a tokenizer.json for {name}", 0, None)
            built = scratch / "folder"
            built.mkdir()
            _make_tokenizer(folder, built / TOKENIZER)
            for path, _, _ in files:
                (built / path.name).symlink_to(path.resolve())
            publish(built, place)
    return place


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
