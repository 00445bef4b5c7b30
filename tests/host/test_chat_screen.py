"""An answer on a terminal while it streams: pyte is the terminal, and nothing may get lost or come twice."""

import io
import random
import re

import pyte
import pytest
from rich.console import Console

from minisgl.chat.screen import LiveAnswer
from minisgl.markdown import THEME, Markdown, last_block, lines, parse, parser, printable
from minisgl.openai.conversation import Part

TEXT = """\
# A heading

A paragraph with **bold**, `code` and a [link](http://example.org/path), which is long enough to be wrapped somewhere.
Its second line stands
alone, as it was written: 日本語の文章と中文字符 😀 end.

1. first
   * nested
   * another

   with a paragraph
2. second

```python
class A:
    '''A very long line of code that no terminal of eighty columns can hold without wrapping it somewhere, or so.'''

    def f(self):
        return 1
```

| column | other |
|---|---:|
| a | 1 |
| longer text | 22 |

> quoted
> text

---

[1]: http://not.lost
The end <b>of</b> it.
"""


class Terminal(io.StringIO):
    """A file that is a terminal."""

    def __init__(self, columns: int, rows: int) -> None:
        super().__init__()
        self.screen = pyte.HistoryScreen(columns, rows, history=5000)
        self.screen.set_mode(pyte.modes.LNM)  # as a terminal's driver does: a new line begins at the left
        self._stream = pyte.Stream(self.screen)
        self.erased_rows = 0

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._stream.feed(text)
        return len(text)

    def seen(self) -> list[str]:
        above = ["".join(row[x].data for x in range(self.screen.columns)) for row in self.screen.history.top]
        return [line.rstrip() for line in (*above, *self.screen.display)]


def show(text: str, columns: int, rows: int, random_: random.Random, thinking: str = "") -> list[str]:
    """Stream a text in pieces of random size, drawn now and then; what is seen in the end."""
    terminal = Terminal(columns, rows)
    console = Console(file=terminal, force_terminal=True, width=columns, height=rows, theme=THEME, highlight=False)
    view = LiveAnswer(console, lambda: "loading")
    for kind, whole in (("thinking", thinking), ("text", text)):
        while whole:
            size = random_.randint(1, 12)
            view.add(Part(**{kind: whole[:size]}))
            whole = whole[size:]
            if random_.random() < 0.5:
                view._draw()
    view.close()
    seen = terminal.seen()
    while seen and not seen[-1]:
        seen.pop()
    return seen


def whole(text: str, columns: int) -> list[str]:
    """What the text looks like when it is there all at once."""
    console = Console(file=io.StringIO(), width=columns, theme=THEME, highlight=False)
    rendered = lines(console, Markdown(parse(parser(), text)))
    while rendered and not rendered[-1]:
        rendered.pop()
    return rendered


def words(seen: list[str]) -> str:
    """Without the spaces and lines of a table, which grows with its rows: above the screen it stays as it was."""
    return re.sub(r"[\s─]", "", "".join(seen))


@pytest.mark.parametrize(("columns", "rows"), [(80, 100), (120, 100), (80, 10), (40, 6), (20, 4)])
def test_a_streamed_answer_ends_as_it_looks_when_it_is_whole(columns: int, rows: int):
    for seed in range(6):
        seen = show(TEXT, columns, rows, random.Random(seed))
        want = whole(TEXT, columns)
        assert words(seen) == words(want)
        if rows >= 100:
            assert [line for line in seen if line] == [line for line in want if line]


def test_what_is_higher_than_the_screen_scrolls_away_whole():
    text = "\n".join(f"line {number}" for number in range(70))
    for wrapped in (text, f"```\n{text}\n```", re.sub("^", "* ", text, flags=re.MULTILINE)):
        seen = show(wrapped, 30, 8, random.Random(1))
        assert re.findall(r"line (\d+)", "\n".join(seen)) == [str(number) for number in range(70)]


def test_a_block_that_shrinks_loses_nothing():
    code = "\n".join(f"word{number}" for number in range(60))
    for text in (f"Here: `{code}` and after\n\nthe end", f"`{code}`"):
        seen = "".join(show(text, 40, 10, random.Random(3)))
        assert [n for n in range(60) if f"word{n}" not in seen] == []


def test_thoughts_leave_one_line():
    seen = show("The answer.", 60, 10, random.Random(2), thinking="\n".join(f"thought {n}" for n in range(50)))
    assert re.fullmatch(r"thought for \d+\.\d s; /show thinking shows it\n\nThe answer\.", "\n".join(seen))


def test_nothing_of_the_text_is_left_out():
    seen = words(whole(TEXT, 80))
    for part in ("http://example.org/path", "[1]:http://not.lost", "<b>of</b>", "日本語の文章と中文字符😀"):
        assert part in seen


def test_only_lines_that_differ_are_written_again():
    file = io.StringIO()
    view = LiveAnswer(Console(file=file, force_terminal=True, width=40, height=20, theme=THEME), lambda: "")
    view.add(Part("first line\nsecond line\nthird"))
    view._draw()
    file.truncate(0)
    view._draw()
    assert file.getvalue() == "", "nothing has changed"
    view.add(Part(" line"))
    view._draw()
    assert "third line" in file.getvalue() and "second" not in file.getvalue()


def test_the_last_block_is_all_that_more_text_can_change():
    blocks = parse(parser(), "one\n\ntwo\nmore\n\n* three")
    assert last_block(blocks) == 5
    assert last_block(parse(parser(), "one\ntwo")) == last_block([]) == 0


def test_what_a_terminal_would_obey_is_replaced():
    assert printable("a\x1b[2J\x07\x9bm\rb\r\nc\td\n") == "a\ufffd[2J\ufffd\ufffdm\ufffdb\nc\td\n"
