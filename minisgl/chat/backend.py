"""What answers, an engine of one's own or a server, as the shell sees either."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from minisgl.config import SamplingParams
from minisgl.openai.conversation import Messages, Score, Turn
from minisgl.source.cache_folder import Report


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


Parts = AsyncGenerator[Part, None]


def take(turn: Turn, part: Part) -> None:
    """Make a part of an answer a part of its turn."""
    turn.answer += part.text
    turn.thinking += part.thinking
    turn.prompt_ids += part.prompt_ids
    turn.token_ids += part.token_ids
    turn.scores += part.scores


class ContextFull(ValueError):
    """The conversation is longer than the context."""


class Backend(Protocol):
    """A model that answers. What cannot be done now its methods raise as a ValueError, in one line."""

    name: str  # of the model
    context: int | None  # tokens of question and answer together that fit, where that is known

    def answer(self, messages: Messages, sampling: SamplingParams, thinking: bool | None) -> Parts:
        """The answer to the last message; leaving it ends it. `thinking` is the user's wish, None without one."""
        ...

    async def score(self, turn: Turn) -> list[Score]:
        """How likely the tokens of an answer were, afterwards."""
        ...

    async def facts(self) -> Mapping[str, Any]:
        """What is to be known of model and engine: a name, and the fact under it."""
        ...

    async def use(self, model: str) -> None:
        """Answer with another model from now on."""

    async def close(self) -> None:
        """Let go of everything."""


Opener = Callable[[Report], Awaitable[Backend]]
"""Makes a backend that can answer, and tells how that goes; raises ValueError where it cannot."""
