"""What is sent to a server: the JSON of requests for OpenAI's routes."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from minisgl.bench.answer import Answer, ServerFault
from minisgl.bench.load import Endpoint
from minisgl.bench.workload import Job

ROUTES: Mapping[Endpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
WORD = re.compile(r"\s*\S+")

Said = Sequence[int] | str
"""A part of a conversation: tokens, or a text where only texts can be sent."""


@dataclass
class Words:
    """Stand-ins for tokens where a server takes only text: words with the blanks before them, numbered as they come."""

    _numbers: dict[str, int] = field(default_factory=dict)

    def tokenize(self, text: str) -> list[int]:
        """The numbers of its words."""
        return [self._numbers.setdefault(word, len(self._numbers)) for word in WORD.findall(text)]

    def text(self, numbers: Sequence[int]) -> str:
        """The words that have these numbers; a number that none has, as the random ones, is a word itself."""
        words = list(self._numbers)
        return "".join(words[number] if number < len(words) else f" {number}" for number in numbers)


@dataclass(frozen=True)
class Asking:
    """What all requests have in common."""

    model: str
    sampling: Mapping[str, Any]
    counts_on: bool  # whether the server can count tokens in every event
    words: Words | None = None  # messages of these are sent, and no token ids

    def route(self, job: Job) -> str:
        """Where a request goes."""
        return job.route or ROUTES["chat" if self.words else "completions"]

    def body(self, job: Job, said: Sequence[Said]) -> bytes:
        """The JSON of a request for the next answer in a conversation: a prompt, or an answer and a prompt by turns."""
        options = {"include_usage": True} | ({"continuous_usage_stats": True} if self.counts_on else {})
        asked: dict[str, Any] = {"model": self.model, "stream": True, "stream_options": options}
        if job.body is not None:
            return msgspec.json.encode(job.body | asked)
        asked |= {"max_tokens": job.output_len, **self.sampling}
        if self.words is not None:
            texts = [part if isinstance(part, str) else self.words.text(part) for part in said]
            roles = ("user", "assistant")
            asked["messages"] = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
            return msgspec.json.encode(asked)
        asked["prompt"] = [token for part in said for token in part]
        return msgspec.json.encode(asked | ({"return_token_ids": True} if job.later else {}))

    def reply(self, answer: Answer) -> Said:
        """What an answer adds to a conversation; raises ServerFault where the server does not show its tokens."""
        if self.words is not None:
            return answer.text
        if len(answer.token_ids) != answer.record.completion_tokens:
            raise ServerFault("the server shows no token ids, which the next turn of a conversation needs")
        return answer.token_ids
