"""One chat: the conversation, its settings, and how a question gets its answer."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import aclosing
from itertools import accumulate

from minisgl.chat.backend import Backend, ContextFull, Opener
from minisgl.chat.screen import Screen
from minisgl.config import SamplingParams
from minisgl.openai.conversation import Conversation, End, Turn, num_tokens
from minisgl.results import Cost, streamed_cost

logger = logging.getLogger(__name__)


class Session:
    """A conversation with a model that may still be loading."""

    def __init__(self, opener: Opener, screen: Screen, sampling: SamplingParams, system: str | None) -> None:
        """To be made inside the event loop: the model begins to load."""
        self.screen, self.sampling, self.conversation = screen, checked(sampling), Conversation(system=system)
        self.thinking: bool | None = None
        """Whether the model is to think; None leaves it to the model."""
        self.attached: list[str] = []
        """Texts that go with the next question."""
        self.unanswered: str | None = None
        """The last question, where nothing came of it."""
        self.only_thoughts: Turn | None = None
        """The last answer, where no text came after its thoughts."""
        self.draft = ""
        """What the user is given to go on with at the next prompt."""
        self.draft_after: Conversation | None = None
        """What a draft is to be asked after, in the place of what follows there."""
        self.over, self.faults = False, 0
        self.costs: list[Cost] = []
        """Of all answers, also of those that were undone."""
        self.progress = ""
        """What is done before the model can answer."""
        self.changed: Callable[[], object] = bool
        """Called when that is something else."""
        self.ready: Backend | None = None
        """What answers, once it can."""
        self._asking = False  # the screen belongs to an answer
        self._before: list[tuple[Conversation, str | None]] = []  # with the question that had no answer
        self.opening = asyncio.create_task(self._open(opener))

    async def _open(self, opener: Opener) -> Backend:
        self.ready = await opener(self._report)
        self.progress = ""
        self.changed()
        return self.ready

    def _report(self, what: str, done: float, total: float | None) -> None:
        # Who waits for an answer on a terminal sees it there.
        if (not self.screen.live or (self.ready and not self._asking)) and not self.progress.startswith(what):
            self.screen.note(f"{what} …")
        self.progress = f"{what} {done / total:.0%}" if total else what
        self.changed()

    async def backend(self) -> Backend:
        """What answers, once it can; raises ValueError where it never will."""
        return await asyncio.shield(self.opening)

    async def close(self) -> None:
        """End the engine."""
        self.opening.cancel()
        await asyncio.wait({self.opening})
        if self.ready is not None:
            await self.ready.close()

    def change(self, conversation: Conversation, unanswered: str | None = None) -> None:
        """Go on with another state of the conversation, from which `undo` leads back."""
        self._before.append((self.conversation, self.unanswered))
        self.conversation, self.unanswered, self.only_thoughts = conversation, unanswered, None

    def undo(self) -> None:
        """Go back to before the last change."""
        if not self._before:
            raise ValueError("there is nothing to undo")
        (self.conversation, self.unanswered), self.only_thoughts = self._before.pop(), None

    def fault(self, error: Exception) -> None:
        """Say what went wrong; the log says where."""
        self.faults += 1
        self.screen.note(f"Error: {str(error) or repr(error)}", style="red")
        logger.debug("where it went wrong", exc_info=error)

    async def ask(self, question: str, after: Conversation | None = None) -> None:
        """Put a question, show the answer as it comes, and keep what came: here, or after an earlier conversation."""
        before, turn = after or self.conversation, Turn(question=question)
        end, error, news = End("stopped"), None, ""
        asked_s, came_s = time.monotonic(), []
        self._asking = True
        view = self.screen.answer(lambda: self.progress)
        drawing = asyncio.create_task(view.run())
        try:
            backend = await self.backend()
            news = await backend.ready()
            turn.model, self.progress, asked_s = backend.name, "", time.monotonic()
            async with aclosing(backend.answer(before.messages(question), self.sampling, self.thinking)) as parts:
                async for part in parts:
                    if part.text or part.thinking or part.token_ids:
                        came_s.append(time.monotonic())
                    turn.add(part)
                    view.add(part)
                    end = part.end or end
        except asyncio.CancelledError:
            if self.over:
                raise
            # Ctrl-C, which is meant for the answer alone
        except Exception as fault:
            error = fault
        finally:
            drawing.cancel()
            view.close()
            self._asking = False
        if came_s:  # what nobody told was counted here
            asked, made = end.tokens_in or len(turn.prompt_ids), end.tokens_out or len(turn.token_ids)
            times = came_s[0] - asked_s, came_s[-1] - came_s[0]
            turn.cost = streamed_cost(asked or None, end.cached, made or None, *times, end.joules)
            self.costs.append(turn.cost)
        if error is not None:
            self.fault(error)
        if turn.answer.strip():
            self.change(before.with_turns([*before.turns, turn]))
        elif after is None:  # else what stood there stays
            self.change(before, question)
        self.only_thoughts = turn if turn.thinking and not turn.answer.strip() else None
        self.screen.note("; ".join(filter(None, (news, str(turn.cost or ""), self._what_now(end, turn, error)))))

    def _what_now(self, end: End, turn: Turn, error: Exception | None) -> str:
        """How an answer ended, where that is no matter of course, and what the user can do."""
        context = self.ready.context or 0 if self.ready else 0
        if isinstance(error, ContextFull) or 0 < context <= max(num_tokens(turn), len(turn.prompt_ids)):
            return f"the context is full: {self._make_room(turn, context)}"
        if error is not None:
            return "the conversation is kept, and /regen asks again"
        if not turn.answer.strip() and end.reason != "length":
            return f"{'stopped' if end.reason == 'stopped' else 'no text came'}; /regen asks again"
        return {"stop": "", "length": "cut at max_tokens; /set max_tokens N allows more"}.get(end.reason, end.reason)

    def _make_room(self, turn: Turn, context: int) -> str:
        """How an eighth of the context becomes free; tokens of a part of the text are estimated by its bytes."""
        talk = self.conversation
        said = [*accumulate(len((each.question + each.answer).encode()) for each in talk.turns)]
        whole = max(said, default=0) + (0 if turn in talk.turns else len(turn.question.encode()))
        tokens = num_tokens(turn) or len(turn.prompt_ids) or max(context, talk.num_tokens + len(turn.question) // 4)
        surplus = 1 - context * 7 / 8 / tokens if context else 0.0
        drop = next((n for n, length in enumerate(said, start=1) if length >= surplus * whole), None)
        return f"/drop {drop} makes room, /clear begins anew" if drop else "shorten the question"


def checked(sampling: SamplingParams) -> SamplingParams:
    """The same; raises ValueError for what has no meaning in a chat."""
    if sampling.n not in (None, 1) or sampling.prompt_logprobs is not None:
        raise ValueError("n must be 1 and prompt_logprobs unset in a chat: /regen answers anew, /tokens shows scores")
    return sampling
