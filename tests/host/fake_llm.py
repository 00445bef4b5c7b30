"""An LLM without a model, for what stands around one: it answers with what it was asked, word by word.

`python tests/host/fake_llm.py MODE ARGUMENTS…` is the `minisgl` command on it, in a process of its own.
"""

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Self

import cli.run
from cli.main import main
from minisgl.config import EngineConfig, SamplingParams
from minisgl.request import FinishReason
from minisgl.results import Completion, Piece, RequestOutput, Timing, TokenLogprob


class FakeTokenizer:
    """A token is a character."""

    def token_bytes(self, token: int) -> bytes:
        return chr(token).encode()


class FakeLLM:
    """Its `asked` holds every prompt as it came; text has one token a word, and every answer three."""

    def __init__(self, mode: str = "text") -> None:
        self.mode = mode
        self.tokenizer = None if mode == "ids" else FakeTokenizer()
        self.config = EngineConfig(model="some/fake", max_running_requests=2)
        self.model_name = "fake"
        self.asked: list[Any] = []
        self.sampling: list[SamplingParams] = []
        self.at_once = 0  # most prompts that were taken and not yet answered
        self.generated_tokens = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        print("closed", file=sys.stderr)

    def chat_prompt(self, messages: Sequence[dict[str, str]], /, **options: Any) -> Any:
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError("message 0 must be an object")
        text = " ".join(f"<{message['role']}> {message['content']}" for message in messages)
        return " ".join([text, *map(str, options.items())])

    def tokenize(self, text: str) -> Any:
        return text

    def check(self, prompt: Any, sampling: SamplingParams) -> None:
        if len(prompt) > 1000:
            raise ValueError(f"the prompt has {len(prompt)} tokens; the context holds 1000")

    def stats(self) -> Any:
        return SimpleNamespace(
            running=2, waiting=1, pages_free=5, pages_cached=3, pages_locked=2, prompt_tokens=8, prefix_hit_tokens=6
        )

    def feed(self, prompts: Iterable[tuple[Any, SamplingParams]]) -> Iterator[list[tuple[int, RequestOutput]]]:
        """Takes as many prompts as may run; the last one taken is finished first, in its second step."""
        coming, running = enumerate(prompts), []
        while True:
            while len(running) < self.config.max_running_requests and (entry := next(coming, None)):
                number, (prompt, sampling) = entry
                running.append((number, prompt, self._output(prompt, sampling)))
                self.at_once = max(self.at_once, len(running))
            if not running:
                return
            yield []
            number, prompt, output = running.pop()
            if self.mode == "slow":
                time.sleep(0.2)
            if self.mode == "failing" and "fail" in prompt:
                raise ValueError("the engine says no")
            self.generated_tokens += 3 * len(output.outputs)
            yield [(number, output)]

    def stream(self, prompt: Any, sampling: SamplingParams) -> Iterator[Piece]:
        output = self._output(prompt, sampling)
        if self.mode == "endless":
            for number in range(1_000_000):
                yield piece(f"{number}\n")
                time.sleep(0.001)
        for word in output.text.split(" ") if self.tokenizer else ():
            yield piece(f"{word} ")
        if self.mode == "broken":
            raise ValueError("the engine says no")
        yield piece("", output)

    def _output(self, prompt: Any, sampling: SamplingParams) -> RequestOutput:
        self.asked.append(prompt)
        self.sampling.append(sampling)
        words = prompt.split(" ") if isinstance(prompt, str) else prompt
        return output(
            (prompt if isinstance(prompt, str) else str(prompt)).upper() if self.tokenizer else "",
            prompt_token_ids=list(range(len(words))),
            count=sampling.n or 1,
            logprobs=sampling.logprobs,
            finish_reason="error" if self.mode == "nan" or "NaN" in prompt else "stop",
        )


def piece(text: str, output: RequestOutput | None = None) -> Piece:
    return Piece(request_id=0, index=0, text=text, token_ids=[], output=output)


def output(
    text: str,
    prompt_token_ids: Sequence[int] = (1, 2),
    count: int = 1,
    logprobs: int | None = None,
    finish_reason: FinishReason = "stop",
) -> RequestOutput:
    """A result with `count` answers of the three tokens abc."""
    tokens = [ord(letter) for letter in "abc"]
    scores = [TokenLogprob(token_id=t, logprob=-0.5, top=dict([(t, -0.5), (65, -1.5)][:logprobs])) for t in tokens]
    return RequestOutput(
        request_id=0,
        prompt=None,
        prompt_token_ids=list(prompt_token_ids),
        prompt_logprobs=None,
        cached_tokens=1,
        outputs=[
            Completion(
                index=index,
                text=text,
                token_ids=tokens,
                finish_reason=finish_reason,
                stop_reason=None,
                logprobs=None if logprobs is None else scores,
            )
            for index in range(count)
        ],
        timing=Timing(ttft_s=0.0123, total_s=0.1, decode_tokens_per_s=45.67),
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
