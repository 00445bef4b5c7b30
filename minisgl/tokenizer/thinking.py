"""Parts what a model thinks from what it answers, where it writes its thoughts between `<think>` and `</think>`."""

from typing import NamedTuple

OPEN, CLOSE = "<think>", "</think>"


class Split(NamedTuple):
    """Text that is certain by now."""

    answer: str
    thinking: str


class ThinkingSplitter:
    """One answer's text as it streams; what is joined does not depend on how the text falls into pieces.

    Thoughts stand at the beginning, before anything but white space: who writes the tag later means the word. White
    space at the edges of thoughts, and between them and the answer, belongs to neither.
    """

    def __init__(self, opened: bool = False) -> None:
        """`opened`: the prompt has opened the thoughts already, see `opens_thinking`."""
        self._state = "thinking" if opened else "before"  # then "thinking", "after" them, and "answer"
        self._bare = True  # of thinking, nothing but white space has come
        self._held = ""  # may become a tag, or is white space that may be at an edge

    def push(self, text: str) -> Split:
        """Take in more text."""
        thinking, text = "", self._held + text
        self._held = ""
        if self._state == "before":
            text = self._begin(text)
        if self._state == "thinking":
            thinking, text = self._think(text)
        if self._state == "after":
            text = text.lstrip()
            self._state = "answer" if text else "after"
        return Split(text, thinking)

    def finish(self) -> Split:
        """Nothing more comes: what is held is what it looks like."""
        held, self._held = self._held, ""
        return Split("", held.rstrip()) if self._state == "thinking" else Split(held, "")

    def _begin(self, text: str) -> str:
        begun = text.lstrip()
        if OPEN.startswith(begun) and begun != OPEN:
            self._held = text
            return ""
        self._state = "thinking" if begun.startswith(OPEN) else "answer"
        return begun.removeprefix(OPEN) if self._state == "thinking" else text

    def _think(self, text: str) -> tuple[str, str]:
        """Certain thoughts, and what stands behind them."""
        thinking, closed, rest = text.partition(CLOSE)
        if self._bare:
            thinking = thinking.lstrip()
        if closed:
            self._state = "after"
            return thinking.rstrip(), rest
        self._bare = self._bare and not thinking
        most = min(len(thinking), len(CLOSE) - 1)
        tag = next((n for n in range(most, 0, -1) if CLOSE.startswith(thinking[-n:])), 0)
        certain = thinking[: len(thinking) - tag].rstrip()
        self._held = thinking[len(certain) :]
        return certain, ""


def opens_thinking(prompt: str) -> bool:
    """Whether a prompt ends within thoughts, as some chat templates write it."""
    return prompt.rstrip().endswith(OPEN)
