"""A frontend process on a fake engine, as the supervisor would start them, for what speaks HTTP to it."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from queue import Queue
from typing import Any

import msgspec
from made_tokenizers import trained

from minisgl.server.config import ServerConfig
from minisgl.server.messages import Control, EngineFacts, FrontendSettings, Report

HERE = Path(__file__).parent
PROGRAM = ("-m", "minisgl.server.app")
MODEL = "tiny"
CONTEXT = 4096
TEMPLATE = (
    "{% if messages[0].content == 'refuse' %}{{ raise_exception('I take no such conversation') }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{{ persona or 'assistant' }}\n{% endif %}"
)
CORPUS = [
    "The capital of France is Paris. def main(argv):\n    return argv[0]  # the first",
    "日本語の文章と中文字符。 한국어 문장입니다. Ünïcödé naïve café 😀 👩‍👩‍👧 the end",
]


def write_model(folder: Path) -> Path:
    """A folder with a byte-level tokenizer of 400 tokens, some of several bytes, and a chat template."""
    backend = trained(CORPUS, ["<|im_start|>", "<|im_end|>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": TEMPLATE}))
    return folder


class Frontend:
    """A frontend's process, and the owner's end of its line."""

    def __init__(self, settings: FrontendSettings, program: Sequence[str]) -> None:
        pipe, self.log = subprocess.PIPE, tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by `end`)
        command = [sys.executable, *program]
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self.log, cwd=HERE.parents[1])
        self.reports: Queue[Report | None] = Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.say(settings)

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.reports.put(msgspec.json.decode(line, type=Report))
        self.reports.put(None)

    def say(self, line: msgspec.Struct) -> None:
        assert self.process.stdin
        self.process.stdin.write(msgspec.json.encode(line) + b"\n")
        self.process.stdin.flush()

    def wait_ready(self) -> None:
        report = self.reports.get(timeout=30)
        assert report and report.kind == "ready", (report, self.logged())

    def logged(self) -> str:
        number = self.log.fileno()  # not by seek and read: the file's position is where the frontend goes on
        return os.pread(number, os.fstat(number).st_size, 0).decode()

    def end(self) -> None:
        if self.process.stdin:
            self.process.stdin.close()
        self.process.kill()
        self.process.wait()
        if self.process.stdout:
            self.process.stdout.close()
        self.log.close()


class Served:
    """One engine and some frontends on one port."""

    def __init__(
        self, folder: Path, options: Sequence[str], config: Mapping[str, Any], program: Sequence[str] = PROGRAM
    ) -> None:
        self.config = ServerConfig(**config)
        self.socket_folder = tempfile.mkdtemp(prefix="minisgl-test-")
        self.address = f"ipc://{self.socket_folder}/engine"
        self.facts = EngineFacts(
            model_name=MODEL,
            folder=str(folder),
            context=CONTEXT,
            vocab_size=400,
            eos_ids=[1],
            sampling_defaults={},
            config={"model": "some/tiny"},
            page_size=16,
            num_pages=100,
        )
        self.port_holder = socket.socket()
        self.port_holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self.port_holder.bind(("127.0.0.1", 0))
        self.port: int = self.port_holder.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, str(HERE / "fake_engine.py"), self.address, *options]
        self.engine = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=HERE.parents[1])
        self.frontends = [Frontend(self._settings(number), program) for number in range(self.config.frontends)]

    def _settings(self, number: int) -> FrontendSettings:
        return FrontendSettings(
            number=number,
            address=self.address,
            host="127.0.0.1",
            port=self.port,
            server=asdict(self.config),
            log_level="warning",
        )

    def wait_listening(self) -> None:
        assert self.engine.stdout
        self.engine.stdout.readline()
        for frontend in self.frontends:
            frontend.wait_ready()

    def open(self) -> None:
        self.tell(Control(do="ready", facts=self.facts))
        for frontend in self.frontends:
            frontend.wait_ready()

    def tell(self, control: Control) -> None:
        for frontend in self.frontends:
            frontend.say(control)

    def close(self) -> None:
        for frontend in self.frontends:
            frontend.end()
        self.engine.kill()
        self.engine.wait()
        assert self.engine.stdout
        self.engine.stdout.close()
        self.port_holder.close()
        shutil.rmtree(self.socket_folder)


@contextmanager
def served(
    folder: Path, *options: str, ready: bool = True, program: Sequence[str] = PROGRAM, **config: Any
) -> Iterator[Served]:
    """`options` are those of the fake engine, `config` is the server's, `program` is run for a frontend."""
    server = Served(folder, options, config, program)
    try:
        server.wait_listening()
        if ready:
            server.open()
        yield server
    finally:
        server.close()
