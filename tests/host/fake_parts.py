"""An engine and a frontend without a model, for what stands around them: processes that speak the control channel.

`python tests/host/fake_parts.py ARGUMENTS…` is the `minisgl` command on them. The model's name says how they behave,
as words: `refused`, `crash`, `loading`, `silent` (engine); `stuck` (all); `endless`, `late` (frontends that drain).
"""

import json
import os
import signal
import socket
import sys
import threading
import time
from functools import partial
from typing import Any

from minisgl.server.child import Owner
from minisgl.server.messages import Control, EngineFacts, EngineSettings, FrontendSettings, Report


def engine(owner: Owner, settings: EngineSettings) -> None:
    name = settings.config["model"]
    open(settings.address.removeprefix("ipc://"), "w").close()  # stands for the socket's file
    owner.listen(lambda control: None, lambda: os._exit(1))
    owner.tell(Report(kind="progress", text=f"loading {name}", done=1, total=2))
    if "refused" in name:
        owner.tell(Report(kind="fatal", text=f"{name} is not here"))
    if "refused" in name or "crash" in name:
        sys.exit(3)
    if "stuck" in name:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "loading" not in name:
        owner.tell(Report(kind="ready", facts=facts(settings)))
    while True:
        if "silent" not in name:
            owner.tell(Report(kind="beat"))
        time.sleep(0.05)


def facts(settings: EngineSettings) -> EngineFacts:
    return EngineFacts(
        model_name=next(iter(settings.served_names), "fake"),
        folder="/nowhere",
        context=100,
        vocab_size=10,
        eos_ids=[],
        sampling_defaults={},
        config=settings.config,
        page_size=1,
        num_pages=100,
    )


class Frontend:
    """Answers `model` on every connection; one that sends `wait` first gets its answer when the server ends."""

    def __init__(self, owner: Owner, settings: FrontendSettings) -> None:
        self.owner, self.settings = owner, settings
        self.model = ""
        self.waiting: list[socket.socket] = []
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        self.listener = socket.create_server((settings.host, settings.port), family=family, reuse_port=True)

    def run(self) -> None:
        self.owner.tell(Report(kind="ready"))
        self.owner.listen(self.hear, lambda: os._exit(1))
        while True:
            client, _ = self.listener.accept()
            if client.recv(100) == b"wait":
                self.waiting.append(client)
                client.send(b"waiting")
            else:
                client.send(f"{self.settings.number} {os.getpid()} {self.model}".encode())
                client.close()

    def hear(self, control: Control) -> None:
        if control.facts is not None:
            self.model = control.facts.config["model"]
            self.owner.tell(Report(kind="ready"))
        elif control.do == "stalled":
            for client in self.waiting:
                client.send(json.dumps([control.do, control.reason]).encode())
        elif "stuck" not in self.model and not (control.do == "drain" and "endless" in self.model):
            if control.do == "drain" and "late" in self.model:
                threading.Event().wait(0.3)
            for client in self.waiting:
                client.send(json.dumps([control.do, control.reason]).encode())
            os._exit(1 if control.do == "fail" else 0)


def main() -> None:
    owner = Owner()
    settings = owner.settings(dict[str, Any])
    if "number" in settings:
        Frontend(owner, FrontendSettings(**settings)).run()
    else:
        engine(owner, EngineSettings(**settings))


def serve() -> int:
    from cli.main import main
    from minisgl.server import supervisor

    supervisor.Supervisor = partial(supervisor.Supervisor, modules=("fake_parts", "fake_parts"))  # type: ignore[misc]
    return main()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(serve())
    main()
