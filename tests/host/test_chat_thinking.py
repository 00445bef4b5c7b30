"""Thoughts between tags are parted from the answer, wherever the text is cut."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.tokenizer.thinking import ThinkingSplitter, opens_thinking

WORDS = ("<think>", "</think>", "<", "think", ">", "</", " ", "\n", "word", "é", "<thin", "k>")


def split(pieces: Sequence[str], opened: bool = False) -> tuple[str, str]:
    splitter = ThinkingSplitter(opened)
    parts = [*(splitter.push(piece) for piece in pieces), splitter.finish()]
    return "".join(part.thinking for part in parts), "".join(part.answer for part in parts)


@pytest.mark.parametrize(
    ("text", "opened", "thinking", "answer"),
    [
        ("just an answer", False, "", "just an answer"),
        ("<think>why</think>so", False, "why", "so"),
        ("\n<think>\nwhy not\n\n</think>\n\nso it is\n", False, "why not", "so it is\n"),
        ("<think>\n\n</think>\n\nat once", False, "", "at once"),
        ("why\n</think>\n\nso", True, "why", "so"),
        ("<think>never ends </thin", False, "never ends </thin", ""),
        ("never ends", True, "never ends", ""),
        ("a <think>tag</think> later", False, "", "a <think>tag</think> later"),
        ("<think>a</think>b<think>c</think>", False, "a", "b<think>c</think>"),
        ("<thinking about it", False, "", "<thinking about it"),
        ("<thi", False, "", "<thi"),
        ("", False, "", ""),
        ("  two spaces", False, "", "  two spaces"),
    ],
)
def test_thoughts_stand_at_the_beginning(text: str, opened: bool, thinking: str, answer: str):
    assert split([text], opened) == split([*text], opened) == (thinking, answer)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(WORDS)).map("".join), st.lists(st.integers(0, 60)), st.booleans())
def test_it_does_not_matter_how_the_text_falls_into_pieces(text: str, cuts: list[int], opened: bool):
    ends = sorted(min(cut, len(text)) for cut in cuts)
    pieces = [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]
    thinking, answer = split(pieces, opened)
    assert (thinking, answer) == split([text], opened)
    if not opened and not text.lstrip().startswith("<think>"):
        assert (thinking, answer) == ("", text)


def test_nothing_is_held_longer_than_it_takes_to_know():
    splitter = ThinkingSplitter()
    pieces = ("<", "think", ">wh", "y ", "not <", "b", "</thi", "nk>", "\n", "so", " it")
    parts = [splitter.push(piece) for piece in pieces]
    assert [part.thinking for part in parts] == ["", "", "wh", "y", " not", " <b", "", "", "", "", ""]
    assert [part.answer for part in parts] == [*[""] * 9, "so", " it"]


def test_a_prompt_may_have_opened_the_thoughts():
    assert opens_thinking("<|assistant|><think>\n")
    assert not opens_thinking("<think>\n\n</think>\n\n")
