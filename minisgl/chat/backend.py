"""What answers, an engine of one's own or a server, as the shell sees either."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, Protocol

from minisgl.config import SamplingParams
from minisgl.openai.conversation import Messages, Part, Score, Turn
from minisgl.source.cache_folder import Report

Parts = AsyncGenerator[Part, None]


class ContextFull(ValueError):
    """The conversation is longer than the context; raised where the shell cannot see that from the tokens."""


class Backend(Protocol):
    """A model that answers. What cannot be done now its methods raise as a ValueError, in one line."""

    name: str  # of the model
    context: int | None  # tokens of question and answer together that fit, where that is known

    async def ready(self) -> str:
        """Wait until it can answer; what the user is to know of that, in one line, or nothing."""
        return ""

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
