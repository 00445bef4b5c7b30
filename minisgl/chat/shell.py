"""The shell: it reads lines, obeys or asks, and sees to it that Ctrl-C stops what goes on and nothing else."""

import asyncio
import os
import signal
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from functools import partial
from importlib import import_module
from pathlib import Path

from minisgl.chat.backend import Backend, Opener
from minisgl.chat.commands import COMMANDS, enter, load
from minisgl.chat.config import ChatConfig
from minisgl.chat.prompt import PROMPT, PipedPrompt, TerminalPrompt
from minisgl.chat.screen import Screen
from minisgl.chat.session import Session
from minisgl.config import EngineConfig, SamplingParams
from minisgl.source.cache_folder import Report


def chat(config: ChatConfig, sampling: SamplingParams, engine: EngineConfig) -> int:
    """Talk until the user leaves; the exit code. Raises ValueError where there is nobody to talk to."""
    names = [f.name for f in fields(engine) if f.name != "model" and getattr(engine, f.name) != f.default]
    if config.url and names:
        raise ValueError(f"url is of a server, which has an engine of its own: leave out {', '.join(names)}")
    return asyncio.run(Shell(config, sampling, partial(_open, config, engine), config.url or engine.model).run())


async def _open(config: ChatConfig, engine: EngineConfig, report: Report) -> Backend:
    """See `Opener`. What takes long to import is imported while the prompt is there already."""
    module = await asyncio.to_thread(import_module, f"minisgl.chat.{'remote' if config.url else 'local'}")
    return await module.open_backend(config, engine, report)


class Shell:
    """One run of `minisgl chat`."""

    def __init__(self, config: ChatConfig, sampling: SamplingParams, opener: Opener, name: str) -> None:
        """`name` is shown until the model is there."""
        self._config, self._sampling, self._opener, self._name = config, sampling, opener, name
        self._typed = sys.stdin is not None and sys.stdin.isatty()
        self._live = self._typed and sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb")
        self._work: asyncio.Task[None] | None = None  # what Ctrl-C stops
        self._end: int | BaseException = asyncio.CancelledError()  # why it was cancelled

    async def run(self) -> int:
        """See `chat`."""
        self._session = session = Session(self._opener, Screen(self._live), self._sampling, self._config.system)
        self._listen(session)
        try:
            if self._config.load:
                await load(session, self._config.load)
            with _quiet_keys() if self._live else nullcontext():
                await self._talk(session)
        except asyncio.CancelledError:
            if not isinstance(self._end, int):
                raise self._end from None
            return self._end
        finally:
            await session.close()
        return int(session.faults > 0 and not self._typed)

    def _listen(self, session: Session) -> None:
        """See to what ends it: a signal, or a model that cannot be loaded. Ctrl-C does where no user could go on."""
        loop, main = asyncio.get_running_loop(), asyncio.current_task()
        assert main is not None

        def end(why: int | BaseException | None) -> None:
            if why is not None:
                self._end, session.over = why, True
                main.cancel()

        session.opening.add_done_callback(lambda task: task.cancelled() or end(task.exception()))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, end, 128 + number)
        if self._typed:
            loop.add_signal_handler(signal.SIGINT, lambda: self._work and self._work.cancel())

    def _prompt(self) -> TerminalPrompt | PipedPrompt:
        if not self._live:
            return PipedPrompt(PROMPT if self._typed else "")
        words = [*COMMANDS, *(f"/set {f.name}" for f in fields(SamplingParams)), "/show thinking"]
        history = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "minisgl/chat_history"
        prompt = TerminalPrompt(history if self._config.history else None, words, self._status)
        self._session.changed = prompt.redraw
        return prompt

    def _status(self) -> str:
        """The line below the prompt."""
        session, backend = self._session, self._session.ready
        if backend is None:
            return f"{session.progress or f'loading {self._name}'} …"
        used = f"{backend.name} · {session.conversation.num_tokens} of {backend.context or '?'} tokens"
        return used + f" · {len(session.attached)} attached" * bool(session.attached)

    async def _talk(self, session: Session) -> None:
        """Obey or ask line by line, each in a task that Ctrl-C cancels."""
        prompt = self._prompt()
        while not session.over and (line := await prompt.read(session.draft)) is not None:
            self._work = asyncio.create_task(enter(session, line))
            try:
                await asyncio.wait({self._work})
            finally:
                self._work.cancel()
                await asyncio.wait({self._work})


@contextmanager
def _quiet_keys() -> Iterator[None]:
    """Leave what is typed to the next prompt: while none is there it is not shown, nor does Ctrl-D mean anything."""
    before = termios.tcgetattr(0)
    termios.tcsetattr(0, termios.TCSANOW, [*before[:3], before[3] & ~(termios.ECHO | termios.ICANON), *before[4:]])
    try:
        yield
    finally:
        termios.tcsetattr(0, termios.TCSANOW, before)
