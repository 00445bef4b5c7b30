"""`minisgl chat` without a model: `python tests/host/fake_chat.py MODE ARGUMENTS…`.

What is asked says how it is answered: its first word is a key of `ANSWERS`, or the question itself is the answer. The
mode says how the model loads: `ready`; `loading`, until the file LOADED exists; `absent`.
"""

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Callable, Mapping
from pathlib import Path
from typing import Any

from minisgl.chat import shell
from minisgl.chat.backend import ContextFull
from minisgl.config import SamplingParams
from minisgl.openai.conversation import End, Messages, Part, Score, Turn

CODE = "Here it is:\n\n```python\ndef f(x):\n    return x  # same\n```\n\n* one\n* two\n\n"
CODE += "| a | b |\n|---|---|\n| 1 | 日本 |\n"
ANSWERS = {
    "code": CODE,
    "long": "\n".join(f"line {number}" for number in range(1, 61)),
    "endless": " ".join(f"word{number}" for number in range(100_000)),
    "escape": "before \x1b[2J\x1b[31m after \x07 end",
    "html": "a <b>bold</b> word, <think>that</think> and ![alt](http://image) stay",
}
CONTEXT = 1000


class FakeBackend:
    """A token is a word. It remembers what it was asked."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.name, self.context = "fake", CONTEXT
        self.asked: list[tuple[Messages, SamplingParams, bool | None]] = []
        self.left: list[str] = []  # questions whose answers were stopped
        self.closed = False
        self.news = ""
        self._delay_s = delay_s

    async def ready(self) -> str:
        return self.news

    async def answer(
        self, messages: Messages, sampling: SamplingParams, thinking: bool | None
    ) -> AsyncGenerator[Part, None]:
        self.asked.append((messages, sampling, thinking))
        question = messages[-1]["content"]
        word = question.split(" ", 1)[0]
        count = sum(len(message["content"].split()) for message in messages)
        if count >= CONTEXT:
            yield Part(prompt_ids=list(range(count)))
            raise ContextFull(f"the prompt has {count} tokens; the context holds {CONTEXT}")
        if word == "refused":
            raise ValueError("the template takes no such thing")
        if word == "unforeseen":
            raise KeyError("a fault of ours")
        if word == "once" and len(self.asked) > 1:
            raise ValueError("that was answered once")
        yield Part(prompt_ids=list(range(count)))
        made = 0
        try:
            if word in ("think", "ponder"):
                for thought in ("first this, ", "then\nthat, ", "so:"):
                    yield Part(thinking=thought, token_ids=[0])
                    await asyncio.sleep(10 * self._delay_s)
            for piece in ANSWERS.get(word, question).split(" ") if word not in ("silent", "ponder") else ():
                text = f" {piece}" if made else piece
                made += 1
                yield Part(text, token_ids=[made], scores=[Score(piece, -0.1, [(piece, -0.1), ("other", -3.0)])])
                await asyncio.sleep(self._delay_s)
                if word == "broken" and made == 2:
                    raise ValueError("the engine has died: signal SIGKILL")
                if made == sampling.max_tokens:
                    break
        except (asyncio.CancelledError, GeneratorExit):
            self.left.append(question)
            raise
        cut = made == sampling.max_tokens
        yield Part(end=End("length" if cut else "stop", count, count // 2, made))

    async def score(self, turn: Turn) -> list[Score]:
        return [Score(word, -0.5, [(word, -0.5)]) for word in turn.answer.split()]

    async def facts(self) -> Mapping[str, Any]:
        return {"model": self.name, "context": self.context}

    async def use(self, model: str) -> None:
        if model == "absent":
            raise ValueError("absent is not here")
        self.name = model

    async def close(self) -> None:
        self.closed = True
        print("closed", file=sys.stderr)


def opener(mode: str) -> Callable[..., Any]:
    async def open_backend(config: Any, engine: Any, report: Callable[[str, float, float | None], None]) -> FakeBackend:
        report("loading fake", 1, 4)
        if mode == "absent":
            await asyncio.sleep(0.3)
            raise ValueError("fake is not here")
        while mode == "loading" and not Path(os.environ["LOADED"]).exists():
            await asyncio.sleep(0.02)
        return FakeBackend(0.01)

    return open_backend


if __name__ == "__main__":
    from cli.main import main

    shell._open = opener(sys.argv.pop(1))  # type: ignore[assignment]
    sys.argv.insert(1, "chat")
    sys.exit(main())
