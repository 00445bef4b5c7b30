"""Markdown for a terminal, where it may still be growing: nothing of the text is lost, and what can change is known."""

import re
from typing import ClassVar

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich import markdown
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment, Segments
from rich.syntax import Syntax
from rich.theme import Theme

THEME = Theme(dict.fromkeys(("markdown.code", "markdown.code_block"), "cyan"))
"""Without backgrounds: it is to be read on dark and on light."""

# What a terminal obeys: a model's text may not move the cursor.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """The text with U+FFFD for what a terminal would obey."""
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text.replace("\r\n", "\n"))


class _Code(markdown.CodeBlock):
    """Without spaces around it, so that it can be copied."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Syntax(str(self.text).rstrip("\n"), self.lexer_name, theme="ansi_light", word_wrap=True)


class Markdown(markdown.Markdown):
    """Blocks that `parse` has found."""

    elements: ClassVar = {**markdown.Markdown.elements, "fence": _Code, "code_block": _Code}

    def __init__(self, blocks: list[Token]) -> None:
        super().__init__("", hyperlinks=False)
        self.parsed = blocks


def parser() -> MarkdownIt:
    """CommonMark with tables, but for what would not be seen: HTML, the addresses of images, definitions of links."""
    return MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"]).disable(["reference", "image"])


def parse(parser: MarkdownIt, text: str) -> list[Token]:
    """The text's blocks. Where a line ends it is meant to: models write poems and lists of their own like that."""
    blocks = parser.parse(text)
    for child in (child for block in blocks for child in block.children or ()):
        child.type = "hardbreak" if child.type == "softbreak" else child.type
    return blocks


def last_block(blocks: list[Token]) -> int:
    """The line on which the last block begins: more text can change that block, but none before it."""
    return max((block.map[0] for block in blocks if block.level == 0 and block.map), default=0)


def lines(console: Console, content: RenderableType) -> list[str]:
    """Something as lines for the terminal, without spaces at their ends."""
    with console.capture() as captured:
        for line in console.render_lines(content, pad=False):
            while line and not line[-1].text.strip():
                line.pop()
            end = [Segment(line[-1].text.rstrip(), line[-1].style)] if line else []
            console.print(Segments([*line[:-1], *end, Segment.line()]), end="", soft_wrap=True)
    return captured.get().split("\n")[:-1]
