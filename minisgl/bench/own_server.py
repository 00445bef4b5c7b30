"""A `minisgl serve` of our own to measure: a child process with the engine's options, ended on every way out."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from minisgl.config import EngineConfig

END_S = 10.0
"""How long the server may take to end when it is asked to."""
READY = re.compile(r"ready at (http://\S+);")
PROGRAM = (
    "import ctypes, sys; ctypes.CDLL(None).prctl(1, 15); "  # when the parent ends, however it does, get SIGTERM
    "from minisgl_cli.main import main; sys.exit(main())"
)
OPTIONS = {"host": "127.0.0.1", "port": 0, "drain_timeout": 1, "log_interval": 0, "log_level": "warning"}


@contextmanager
def own_server(config: EngineConfig, frontends: int, say: Callable[[str], None]) -> Iterator[str]:
    """The URL of a server that is ready; what it says goes to `say`. Raises ValueError if it cannot start.

    It listens on a free port of this machine only. The terminal's Ctrl-C does not reach it.
    """
    with tempfile.TemporaryDirectory(prefix="minisgl-bench-") as folder:
        file = Path(folder, "serve.toml")
        options = serve_options(config, model=_with_tokenizer(config, Path(folder)), frontends=frontends)
        file.write_text(options, encoding="utf-8")
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", PROGRAM, "serve", "--config", file],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={k: v for k, v in os.environ.items() if not k.startswith("MINISGL_") or k == "MINISGL_CACHE"},
            text=True,
            errors="replace",
            start_new_session=True,
        )
        with process:  # which closes the pipe and waits
            try:
                yield _ready(process, say)
            finally:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(END_S)
                process.kill()  # without effect on one that has ended


def serve_options(config: EngineConfig, **more: Any) -> str:
    """The file for `minisgl serve --config` that has these options. Of JSON's values, all but null are TOML's too."""
    given = {name: value for name, value in (asdict(config) | OPTIONS | more).items() if value is not None}
    return "".join(f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in given.items())


def _ready(process: subprocess.Popen[str], say: Callable[[str], None]) -> str:
    """Wait until it is, and from then on pass on what it says."""
    assert process.stderr is not None
    last = ""
    for line in process.stderr:
        last = line.strip()
        if found := READY.search(last):
            threading.Thread(target=_forward, args=(process.stderr, say), daemon=True).start()
            return found[1]
        if not last.startswith("Error: "):
            say(last)
    raise ValueError(f"the server has not started: {last.removeprefix('Error: ')}")


def _forward(lines: Iterable[str], say: Callable[[str], None]) -> None:
    for line in lines:
        if not line.startswith(("curl ", "stopping;")):  # its example, and what is no news
            say(line.strip())


def _with_tokenizer(config: EngineConfig, folder: Path) -> str:
    """The model; of a local one with random weights and no tokenizer, a copy with a made-up one, under the same name.

    A server that has no tokenizer has no text to stream, and so no events whose times could be measured.
    """
    source = Path(config.model)
    if config.load_format != "dummy" or not (source / "config.json").is_file() or (source / "tokenizer.json").exists():
        return config.model
    made = folder / source.resolve().name
    made.mkdir()
    shutil.copy(source / "config.json", made)
    write_word_tokenizer(made)
    return str(made)


def write_word_tokenizer(folder: Path) -> None:
    """Beside the `config.json` in a folder, a tokenizer in which every token is a word of its own."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    size = json.loads((folder / "config.json").read_bytes())["vocab_size"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(f"Ġ{number:x}" for number in range(size - len(alphabet)))]
    backend = tokenizers.Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
