"""A conversation as data, and as a file: the body of a request to OpenAI's API."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, Self

import msgspec

from minisgl.config import SamplingParams
from minisgl.openai.protocol import CHAT, parse_request
from minisgl.results import Cost

Messages = list[dict[str, str]]


class Score(NamedTuple):
    """A token of an answer as text, the logarithm of its probability, and the likeliest in its place."""

    text: str
    logprob: float
    top: Sequence[tuple[str, float]]  # likeliest first


class End(NamedTuple):
    """Why an answer ended, and what it took, as far as the backend counts it."""

    reason: str  # stop, length, or what else a server says
    tokens_in: int | None = None
    cached: int | None = None
    tokens_out: int | None = None
    joules: float | None = None  # of the GPUs


class Part(NamedTuple):
    """What came of an answer; the last part has the end."""

    text: str = ""
    thinking: str = ""
    token_ids: Sequence[int] = ()  # where they are known
    scores: Sequence[Score] = ()
    prompt_ids: Sequence[int] = ()  # with the first part, where they are known
    end: End | None = None


@dataclass(kw_only=True, eq=False)
class Turn:
    """A question and its answer, which is complete as soon as it is part of a conversation."""

    question: str
    model: str = ""  # that answered
    answer: str = ""
    thinking: str = ""
    prompt_ids: list[int] = field(default_factory=list)  # all that was asked, where an own engine answered
    token_ids: list[int] = field(default_factory=list)  # and what it answered
    scores: list[Score] = field(default_factory=list)  # as far as they were asked for
    cost: Cost | None = None  # None of one that was loaded

    def add(self, part: Part) -> None:
        """Take in what came."""
        self.answer += part.text
        self.thinking += part.thinking
        self.prompt_ids += part.prompt_ids
        self.token_ids += part.token_ids
        self.scores += part.scores


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """What was said so far. It never changes: each step makes another."""

    system: str | None = None
    turns: tuple[Turn, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of it, as the last answer tells; 0 where nothing does."""
        return num_tokens(self.turns[-1]) if self.turns else 0

    def messages(self, question: str | None = None) -> Messages:
        """As OpenAI's API has it, with a question at the end."""
        said = [("system", self.system)]
        said += [pair for turn in self.turns for pair in (("user", turn.question), ("assistant", turn.answer))]
        return [{"role": role, "content": text} for role, text in [*said, ("user", question)] if text is not None]

    def with_turns(self, turns: Sequence[Turn]) -> Self:
        """The same system message, and these turns."""
        return replace(self, turns=tuple(turns))


def num_tokens(turn: Turn) -> int:
    """Tokens of the conversation up to a turn's end; 0 where nobody has said."""
    return 0 if turn.cost is None else (turn.cost.tokens_in or 0) + (turn.cost.tokens_out or 0)


def given(sampling: SamplingParams) -> dict[str, Any]:
    """The parameters that are set."""
    return {f.name: value for f in fields(sampling) if (value := getattr(sampling, f.name)) is not None}


def request_body(model: str, messages: Messages, sampling: SamplingParams, thinking: bool | None) -> dict[str, Any]:
    """The body of a request for a chat completion, with the settings that are set."""
    body = {"model": model, "messages": messages, **given(sampling)}
    if "logprobs" in body:
        body |= {"logprobs": True, "top_logprobs": body["logprobs"]}
    return body if thinking is None else body | {"chat_template_kwargs": {"enable_thinking": thinking}}


class Saved(NamedTuple):
    """What a file holds."""

    conversation: Conversation
    question: str | None  # the last one, where it has no answer
    sampling: SamplingParams
    thinking: bool | None


def read_saved(data: bytes) -> Saved:
    """Read what `request_body` makes, or a list of messages alone; raises ValueError for what is neither."""
    try:
        body = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {error}") from error
    body = {"messages": body} if isinstance(body, list) else body
    asked = parse_request(CHAT, body, [str(body.get("model"))] if isinstance(body, dict) else [])
    system, question, turns = None, None, []
    for number, message in enumerate(asked.messages):
        match message:
            case {"role": "system", "content": str(text)} if number == 0:
                system = text
            case {"role": "user", "content": str(text)} if question is None:
                question = text
            case {"role": "assistant", "content": str(text)} if question is not None:
                turns.append(Turn(question=question, answer=text))
                question = None
            case _:
                raise ValueError(
                    f"message {number} is {message!r:.80}; a conversation here is a system message or none, and then "
                    "texts of user and assistant in turns"
                )
    thinking = asked.template_options.get("enable_thinking")
    if not isinstance(thinking, bool | None):
        raise ValueError(f"enable_thinking must be true or false, got {thinking!r:.80}")
    return Saved(Conversation(system=system, turns=tuple(turns)), question, asked.sampling, thinking)
