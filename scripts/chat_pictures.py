"""Draw the pictures of docs/chat.md: sessions of `minisgl chat` on the default model, as their user sees them.

python scripts/chat_pictures.py [FOLDER]

Each is typed into a real terminal of 80 or 120 columns; what its screen shows then is written as SVG, dark and light.
"""

import os
import re
import sys
import tempfile
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.style import Style
from rich.terminal_theme import TerminalTheme
from rich.text import Text

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests" / "host")]

from server_process import MINISGL  # noqa: E402  # pyright: ignore[reportMissingImports]
from terminal import Terminal  # noqa: E402  # pyright: ignore[reportMissingImports]

COLORS = [(0, 0, 0), (205, 49, 49), (13, 148, 80), (190, 145, 0), (36, 114, 200), (168, 63, 168), (17, 140, 180)]
GRAYS = [(200, 200, 200), (118, 118, 118)]
DARK = TerminalTheme((24, 24, 27), (222, 222, 222), [*COLORS, *GRAYS[:1]], [GRAYS[1], *COLORS[1:], (255, 255, 255)])
LIGHT = TerminalTheme((252, 252, 252), (40, 40, 40), [*COLORS, *GRAYS[:1]], [GRAYS[1], *COLORS[1:], (255, 255, 255)])
NAMES = {"brown": "yellow"}
"""Colours that pyte calls otherwise."""


def talk(terminal: Any) -> None:
    """A question, a piece of code, what the prefix cache did, and an answer that is stopped."""
    terminal.type("Write a Python function that adds two numbers, and say how it works.\r")
    terminal.wait_for("tok/s")
    terminal.type("/fork 0\r")
    terminal.wait_for("0 turns")
    terminal.type("Why is the sky blue?\r")
    terminal.wait_for(r"(?s)sky blue.*tok/s")
    terminal.settle()


def look(terminal: Any) -> None:
    """What the engine did: tokens by probability, and the alternatives to one of them."""
    terminal.type("What is the capital of France?\r")
    terminal.wait_for("tok/s")
    terminal.type("/tokens\r")
    terminal.wait_for("/logprobs N")
    terminal.type("/logprobs 1\r")
    terminal.wait_for(r"(?s)/logprobs 1$.*%.*%")
    terminal.type("/regne\r")
    terminal.wait_for("did you mean")
    terminal.settle()


def draw(terminal: Any, title: str, theme: TerminalTheme, path: Path) -> None:
    """What was seen from the beginning on, cell by cell."""
    console = Console(record=True, width=terminal.screen.columns, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    rows = [*terminal.screen.history.top, *(terminal.screen.buffer[y] for y in range(terminal.screen.lines))]
    lines = [_line(row, terminal.screen.columns) for row in rows]
    last = max(number for number, line in enumerate(lines) if line.plain.strip())
    for line in lines[: last + 1]:
        console.print(line, no_wrap=True, crop=True)
    svg = console.export_svg(title=title, theme=theme)
    path.write_text(
        re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL), encoding="utf-8"
    )  # no fonts from elsewhere


def _line(row: Any, columns: int) -> Text:
    line = Text()
    for (fg, bg, bold, italic, underline, *_), cells in groupby(
        (row[x] for x in range(columns)), lambda cell: cell[1:]
    ):
        style = Style(color=_color(fg), bgcolor=_color(bg), bold=bold, italic=italic, underline=underline)
        line.append("".join(cell.data for cell in cells), style)
    return line


def _color(name: str) -> str | None:
    if name == "default":
        return None
    name = NAMES.get(name, name).replace("bright", "bright_")
    return f"#{name}" if len(name) == 6 and all(c in "0123456789abcdef" for c in name) else name


def main() -> None:
    """Make every picture."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/pictures")
    folder.mkdir(parents=True, exist_ok=True)
    sessions: dict[str, Callable[[Any], None]] = {"talk": talk, "look": look}
    for name, session in sessions.items():
        for columns in (80, 120):
            with tempfile.TemporaryDirectory() as home:
                command = (*MINISGL, "chat", "--seed", "3", "--max-tokens", "160")
                with Terminal(command, columns=columns, lines=24, XDG_STATE_HOME=home) as terminal:
                    terminal.wait_for("^> ?$")
                    session(terminal)
                    for theme, colors in {"dark": DARK, "light": LIGHT}.items():
                        draw(terminal, "minisgl chat", colors, folder / f"chat-{name}-{columns}-{theme}.svg")


if __name__ == "__main__":
    main()
