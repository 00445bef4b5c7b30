"""One chat: the conversation, its settings, and how a question gets its answer."""

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing

from minisgl.chat.backend import Backend, ContextFull, End, Opener, take
from minisgl.chat.screen import Screen
from minisgl.config import SamplingParams
from minisgl.openai.conversation import Conversation, Turn, num_tokens
from minisgl.results import Cost, streamed_cost


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
        self.draft = ""
        """What the user is given to go on with at the next prompt."""
        self.over, self.faults = False, 0
        self.costs: list[Cost] = []
        """Of all answers, also of those that were undone."""
        self.progress = ""
        """What is done before the model can answer."""
        self.changed: Callable[[], object] = bool
        """Called when that is something else."""
        self.ready: Backend | None = None
        """What answers, once it can."""
        self._before: list[Conversation] = []
        self.opening = asyncio.create_task(self._open(opener))

    async def _open(self, opener: Opener) -> Backend:
        self.ready = await opener(self._report)
        self.progress = ""
        self.changed()
        return self.ready

    def _report(self, what: str, done: float, total: float | None) -> None:
        if not self.screen.live and not self.progress.startswith(what):
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

    def change(self, conversation: Conversation) -> None:
        """Go on with another state of the conversation, from which `undo` leads back."""
        self._before.append(self.conversation)
        self.conversation, self.unanswered = conversation, None

    def undo(self) -> None:
        """Go back to before the last change."""
        if not self._before:
            raise ValueError("there is nothing to undo")
        self.conversation, self.unanswered = self._before.pop(), None

    def fault(self, error: object) -> None:
        """Say what went wrong."""
        self.faults += 1
        self.screen.note(f"Error: {error}", style="red")

    async def ask(self, question: str, after: Conversation | None = None) -> None:
        """Put a question, show the answer as it comes, and keep what came: here, or after an earlier conversation."""
        before, turn = after or self.conversation, Turn(question=question)
        self.unanswered, end, error = question, End("stopped"), None
        asked_s, came_s = time.monotonic(), []
        view = self.screen.answer(lambda: self.progress)
        drawing = asyncio.create_task(view.run())
        try:
            backend = await self.backend()
            asked_s = time.monotonic()
            async with aclosing(backend.answer(before.messages(question), self.sampling, self.thinking)) as parts:
                async for part in parts:
                    if part.text or part.thinking or part.token_ids:
                        came_s.append(time.monotonic())
                    take(turn, part)
                    view.add(part)
                    end = part.end or end
        except asyncio.CancelledError:
            if self.over:
                raise
            # Ctrl-C, which is meant for the answer alone
        except ValueError as fault:
            if self.ready is None:
                raise
            error = fault
        finally:
            drawing.cancel()
            view.close()
            self.progress = "" if self.ready else self.progress  # of a new engine in the place of one that has died
        if came_s:  # what nobody told was counted here
            asked, made = end.tokens_in or len(turn.prompt_ids), end.tokens_out or len(turn.token_ids)
            times = came_s[0] - asked_s, came_s[-1] - came_s[0]
            turn.cost = streamed_cost(asked or None, end.cached, made or None, *times, end.joules)
            self.costs.append(turn.cost)
        if error is not None:
            self.fault(error)
        if turn.answer.strip():
            self.change(before.with_turns([*before.turns, turn]))
        self.screen.note("; ".join(filter(None, (str(turn.cost or ""), self._what_now(end, turn, error)))))

    def _what_now(self, end: End, turn: Turn, error: Exception | None) -> str:
        """How an answer ended, where that is no matter of course, and what the user can do."""
        turns, context = self.conversation.turns, self.ready.context or 0 if self.ready else 0
        if isinstance(error, ContextFull) or (end.reason == "length" and 0 < context <= num_tokens(turn)):
            much = self.conversation.num_tokens - context * 7 // 8  # an eighth is to be free
            drop = next((n for n, each in enumerate(turns, start=1) if context and num_tokens(each) >= much), 1)
            return f"the context is full: /drop {drop} makes room, /clear begins anew"
        if error is not None:
            return "the conversation is kept, and /regen asks again"
        if not turn.answer.strip() and end.reason != "length":
            return f"{'stopped' if end.reason == 'stopped' else 'no text came'}; /regen asks again"
        return {"stop": "", "length": "cut at max_tokens; /set max_tokens N allows more"}.get(end.reason, end.reason)


def checked(sampling: SamplingParams) -> SamplingParams:
    """The same; raises ValueError for what has no meaning in a chat."""
    if sampling.n not in (None, 1) or sampling.prompt_logprobs is not None:
        raise ValueError("n must be 1 and prompt_logprobs unset in a chat: /regen answers anew, /tokens shows scores")
    return sampling
