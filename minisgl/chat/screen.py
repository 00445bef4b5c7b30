"""What the user sees: an answer while it streams, and what is said around it."""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from minisgl.markdown import THEME, Markdown, last_block, lines, parse, parser, printable
from minisgl.openai.conversation import Part

FRAME_S = 0.05
"""Between two looks at whether the screen is up to date."""
THOUGHTS = 6
"""Lines of what the model thinks that are seen while it does."""


class Screen:
    """Where things are written: what was asked for to stdout, and notes beside it.

    On a terminal that is the same; elsewhere notes go to stderr, and nothing has an escape code.
    """

    def __init__(self, live: bool) -> None:
        """`live`: input and output are a terminal that can do what an ordinary one can."""
        self.live = live
        plain: dict[str, Any] = {} if live else {"color_system": None, "force_terminal": False}
        self._out = Console(theme=THEME, highlight=False, **plain)
        self._notes = self._out if live else Console(stderr=True, highlight=False, **plain)

    def note(self, line: str, style: str = "dim") -> None:
        """A line of what goes on."""
        self._notes.print(Text(printable(line), style=style), soft_wrap=not self.live)

    def show(self, content: RenderableType | Mapping[str, Any]) -> None:
        """What a command was asked for; of a mapping, names and what is to be known under each."""
        if isinstance(content, Mapping):
            facts, content = content, Table.grid(padding=(0, 2))
            for name, value in facts.items():
                content.add_row(Text(name, "bold", overflow="fold"), Text(printable(str(value)), overflow="fold"))
        print(*lines(self._out, content), sep="\n", file=self._out.file)

    def answer(self, why: Callable[[], str]) -> "LiveAnswer | PlainAnswer":
        """A view of the next answer; `why` says what is waited for."""
        return LiveAnswer(self._out, why) if self.live else PlainAnswer(self._out)


class PlainAnswer:
    """The text as it comes, without thoughts."""

    def __init__(self, out: Console) -> None:
        self._out, self._last = out.file, "\n"

    def add(self, part: Part) -> None:
        """Write what came."""
        self._last = part.text[-1:] or self._last
        print(printable(part.text) if self._out.isatty() else part.text, end="", file=self._out, flush=True)

    async def run(self) -> None:
        """Nothing is left to draw."""

    def close(self) -> None:
        """End the last line."""
        print(end="" if self._last == "\n" else "\n", file=self._out, flush=True)


class LiveAnswer:
    """Markdown as it streams. What cannot change any more is printed once, and scrolls away like all else.

    Only the block that is being written is drawn again, and of it the lines that differ. Where it is higher than the
    screen its upper lines are taken for final, so that nothing has to be drawn that has scrolled away.
    """

    def __init__(self, console: Console, why: Callable[[], str]) -> None:
        self._console, self._why, self._parser = console, why, parser()
        self._text = ""  # of the blocks that are not final
        self._given = 0  # upper lines of these that are
        self._height = 0  # lines of them all
        self._begun = False  # a block is final
        self._thoughts = ""
        self._since_s = time.monotonic()  # that nothing comes, or thoughts do
        self._tail: list[str] = []  # the last lines on the screen, which can change
        self._write("\x1b[?25l")  # without a cursor

    def add(self, part: Part) -> None:
        """Take in what came."""
        if part.thinking and not self._thoughts:
            self._since_s = time.monotonic()
        self._thoughts += printable(part.thinking)
        text = printable(part.text)
        self._text += text if self._text or self._begun else text.lstrip()

    async def run(self) -> None:
        """Keep the screen up to date."""
        while True:
            began_s = time.monotonic()
            self._draw()
            await asyncio.sleep(max(FRAME_S, 2 * (time.monotonic() - began_s)))  # a long block takes its time

    def close(self) -> None:
        """Draw what there is as it stays."""
        self._draw(last=True)
        self._write("\x1b[?25h")

    def _draw(self, last: bool = False) -> None:
        room = max(1, self._console.height - 2)
        if not self._text and not last:
            waited_s = int(time.monotonic() - self._since_s)
            line = f"{self._why()} … {waited_s} s" if waited_s > 1 else f"{self._why()} …"
            self._put([], self._dim(self._thoughts or line)[-min(THOUGHTS, room) :])
            return
        final = []
        if self._thoughts:  # folded, once
            final = [*self._dim(f"thought for {time.monotonic() - self._since_s:.1f} s; /show thinking shows it"), ""]
            self._thoughts = ""
        if cut := last_block(parse(self._parser, self._text)):
            source = self._text.split("\n")
            final += self._block("\n".join(source[:cut]))
            self._text, self._given, self._height, self._begun = "\n".join(source[cut:]), 0, 0, True
        tail = self._block(self._text)
        over = len(tail) if last else max(0, len(tail) - room)
        self._given += over
        self._put(final + tail[:over], tail[over:])

    def _block(self, text: str) -> list[str]:
        """The lines of blocks that are not final yet, with an empty one above where others are."""
        shown = lines(self._console, Markdown(parse(self._parser, text)))
        if len(shown) < self._height:  # as where a code span of many lines is closed: what is final is another text
            self._given = 0
        self._height = len(shown)
        return ([""] * self._begun + shown)[self._given :] if shown else []

    def _dim(self, text: str) -> list[str]:
        source = text.strip().split("\n")[-THOUGHTS:]
        return lines(self._console, Text("\n".join(source), style="dim italic"))

    def _put(self, final: list[str], tail: list[str]) -> None:
        """Put lines that stay, and below them a new tail, in the place of the old tail."""
        new, same = [*final, *tail], 0
        while same < min(len(new), len(self._tail)) and new[same] == self._tail[same]:
            same += 1
        # A terminal that has become narrower has wrapped what was too wide.
        widths = [Text.from_ansi(line).cell_len for line in self._tail[same:]]
        up = sum(max(1, -(-width // self._console.width)) for width in widths)
        # A line is cleared first: behind a full one the cursor still stands on its last character.
        changed = "".join(f"\x1b[K{line}\n" for line in new[same:])
        if up or changed:
            self._write((f"\x1b[{up}A\r" if up else "") + changed + ("\x1b[J" if up else ""))
        self._tail = tail

    def _write(self, text: str) -> None:
        print(text, end="", file=self._console.file, flush=True)
