"""An LLM without a model, for what stands around one: it answers with what it was asked, word by word.

`python tests/host/fake_llm.py MODE ARGUMENTS…` is the `minisgl` command on it, in a process of its own.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Self

import cli.run
from cli.main import main
from minisgl.config import SamplingParams


@dataclass
class FakePiece:
    text: str
    output: Any = None


class FakeLLM:
    """Its `asked` holds every prompt as it came; text has one token a word."""

    def __init__(self, mode: str = "text") -> None:
        self.mode = mode
        self.tokenizer = None if mode == "ids" else object()
        self.asked: list[Any] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        print("closed", file=sys.stderr)

    def chat_prompt(self, messages: Sequence[dict[str, str]]) -> Any:
        return " ".join(f"<{message['role']}> {message['content']}" for message in messages)

    def generate(self, prompts: Sequence[Any], sampling: SamplingParams, *, progress: bool) -> list[Any]:
        return [self._output(prompt) for prompt in prompts]

    def stream(self, prompt: Any, sampling: SamplingParams) -> Iterator[FakePiece]:
        output = self._output(prompt)
        if self.mode == "endless":
            for number in range(1_000_000):
                yield FakePiece(f"{number}\n")
                time.sleep(0.001)
        for word in output.text.split(" ") if self.tokenizer else ():
            yield FakePiece(f"{word} ")
        if self.mode == "broken":
            raise ValueError("the engine says no")
        yield FakePiece("", output)

    def _output(self, prompt: Any) -> Any:
        self.asked.append(prompt)
        words = prompt.split(" ") if isinstance(prompt, str) else prompt
        return SimpleNamespace(
            text=prompt.upper() if self.tokenizer else "",
            prompt_token_ids=list(range(len(words))),
            cached_tokens=1,
            outputs=[SimpleNamespace(token_ids=[7, 8, 9])],
            timing=SimpleNamespace(ttft_s=0.0123, decode_tokens_per_s=45.67),
        )


def start(mode: str) -> FakeLLM:
    """What takes the place of loading a model; `mode` says what goes wrong."""
    failures = {
        "value": ValueError("tp must be 1 here"),
        "disk": OSError(28, "No space left on device"),
        "package": ImportError("this needs: pip install something"),
        "fault": RuntimeError("a fault of ours"),
    }
    if mode in failures:
        raise failures[mode]
    if mode == "hanging":
        print("loading", file=sys.stderr, flush=True)
        time.sleep(60)
    return FakeLLM(mode)


if __name__ == "__main__":
    mode = sys.argv.pop(1)
    cli.run.start = lambda config, console: start(mode)  # type: ignore[assignment, return-value]
    sys.exit(main())
