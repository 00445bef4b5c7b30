"""A command in a terminal as its user has it: a real pty, keys that are typed, and the screen that is seen."""

import re
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import pexpect
import pyte
from server_process import ENVIRONMENT, PATIENCE_S

MORE = 2000  # lines that have scrolled away and are kept


class _Screen(pyte.HistoryScreen):
    """Answers what the program asks the terminal, such as where the cursor is."""

    def __init__(self, columns: int, lines: int, answer: Any) -> None:
        super().__init__(columns, lines, history=MORE, ratio=0.5)
        self._answer = answer

    def write_process_input(self, data: str) -> None:
        self._answer(data)

    def select_graphic_rendition(self, *attrs: int, **more: Any) -> None:
        """Dim text, which pyte does not know, is gray here."""
        colored = 38 in attrs or 48 in attrs
        super().select_graphic_rendition(*attrs if colored else (90 if a == 2 else a for a in attrs), **more)


class Terminal:
    """`with` ends what is left of the command. Everything waits for a minute at most."""

    def __init__(self, command: Sequence[str], columns: int = 80, lines: int = 24, **environment: str) -> None:
        inherited = {k: v for k, v in ENVIRONMENT.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = pexpect.spawn(
            command[0],
            list(command[1:]),
            dimensions=(lines, columns),
            env={**inherited, "TERM": "xterm-256color", **environment},  # type: ignore[arg-type]
            timeout=PATIENCE_S,
        )
        self.process.delaybeforesend = None
        self.screen = _Screen(columns, lines, self.process.send)
        self._stream = pyte.ByteStream(self.screen)
        self._text = (0, "")  # made when so much had been written
        self.raw = b""
        """All that the command has written."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None:
            print("\n".join(self.seen()))
        self.process.close(force=True)

    def type(self, text: str) -> None:
        """Press keys; `\\r` is Enter, `\\x03` Ctrl-C, `\\x1b` Alt."""
        self.process.send(text)

    def read(self, wait_s: float = 0.02) -> bool:
        """Take in what the command writes; whether it goes on."""
        try:
            data = self.process.read_nonblocking(1 << 16, wait_s)
        except pexpect.TIMEOUT:
            return True
        except pexpect.EOF:
            return False
        self.raw += data
        self._stream.feed(data)
        return True

    def seen(self) -> list[str]:
        """The lines on the screen, and those above it that have scrolled away."""
        above = ["".join(line[x].data for x in range(self.screen.columns)) for line in self.screen.history.top]
        return [line.rstrip() for line in [*above, *self.screen.display]]

    @property
    def text(self) -> str:
        """What is seen, as one text without empty lines at its end."""
        if self._text[0] != len(self.raw):
            self._text = len(self.raw), "\n".join(self.seen()).rstrip()
        return self._text[1]

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Wait until this is seen."""
        end, goes_on = time.monotonic() + PATIENCE_S, True
        while not (match := re.search(pattern, self.text, re.MULTILINE)):
            assert goes_on and time.monotonic() < end, f"waited for {pattern!r}:\n{self.text}"
            before = len(self.raw)
            while goes_on and len(self.raw) == before and time.monotonic() < end:
                goes_on = self.read()
        return match

    def settle(self, quiet_s: float = 0.25) -> str:
        """Wait until nothing changes on the screen any more, and return what is seen."""
        text, since = self.text, time.monotonic()
        while time.monotonic() < since + quiet_s and self.read():
            if text != self.text:
                text, since = self.text, time.monotonic()
        return text

    def resize(self, columns: int, lines: int) -> None:
        self.process.setwinsize(lines, columns)
        self.screen.resize(lines, columns)
        self._text = (-1, "")

    def wait_for_the_end(self) -> int:
        """The exit code, or 128 and the signal that ended it."""
        end = time.monotonic() + PATIENCE_S
        while self.read():
            assert time.monotonic() < end, self.text
        self.process.wait()
        return self.process.exitstatus if self.process.exitstatus is not None else 128 + self.process.signalstatus
