"""The engine process: takes clients' messages in between two steps, and sends each client what a step brought it."""

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray

from minisgl.batch import Logprobs
from minisgl.config import EngineConfig, SamplingParams
from minisgl.engine import Engine
from minisgl.generation import NEUTRAL
from minisgl.request import Request
from minisgl.scheduler import Committed
from minisgl.server import messages
from minisgl.server.child import Owner
from minisgl.server.messages import CLIENT_BITS
from minisgl.server.metrics import LoadLog, Metrics

logger = logging.getLogger(__name__)

IDLE_MS = 500
"""How long it waits for a message before it shows that it is alive."""
BEAT_S = 1.0
NO_KEYS = np.empty(0, dtype=np.int64)
MOST_MESSAGES = 256
"""Taken in between two steps: those who run do not wait for thousands who ask."""


class Worker:
    """Serves the clients of one engine, turn by turn.

    Requests are the engine's as soon as they were added; here they are known by the keys that clients gave them, until
    their end has been reported.
    """

    def __init__(
        self,
        engine: Engine,
        socket: "zmq.Socket[bytes]",
        facts: messages.EngineFacts,
        settings: messages.EngineSettings,
        device_lost: Callable[[], bool],
    ) -> None:
        """`socket` is a bound ROUTER; `device_lost` is asked after a step that raised."""
        self._engine, self._socket, self._facts = engine, socket, facts
        self._max_queued, self._device_lost = settings.max_queued_requests, device_lost
        self._requests: dict[int, Request] = {}  # by key, as long as their end was not reported
        # What came when the queue was full, and is tried again after a step.
        self._held: tuple[bytes, messages.Add] | None = None
        self._recording: Any = None  # of a profile, as profiling.capture has it
        self._changed = False  # a request came or went since the last step
        self._metrics = Metrics(facts.model_name)
        self._log = LoadLog(self._metrics, engine.stats(), settings.log_interval_s)
        self._decode = msgspec.msgpack.Decoder(messages.ToEngine).decode
        self._encode = msgspec.msgpack.Encoder().encode

    def turn(self) -> None:
        """Take in what clients have sent, and make one step; without work, wait a moment for more."""
        self._take_messages()
        began_s = time.monotonic()
        if self._engine.has_work:
            self._step()
            self._metrics.busy_s += time.monotonic() - began_s
        else:
            self._socket.poll(IDLE_MS)
            self._engine.check()
            self._metrics.idle_s += time.monotonic() - began_s
        if self._log.is_due:
            self._log.write(self._engine.stats())

    # Messages

    def _take_messages(self) -> None:
        """What is wrong with a message is logged: nothing that a client sends ends the engine."""
        held, self._held = self._held, None
        if held is not None:
            self._add(*held)
        for _ in range(MOST_MESSAGES):
            if self._held is not None:
                return
            try:
                client, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                (frame,) = frames
                self._take(client, self._decode(frame))
            except Exception as error:
                logger.error("a client's message is wrong, and without effect: %s", error, exc_info=True)

    def _take(self, client: bytes, message: messages.ToEngine) -> None:
        match message:
            case messages.Add():
                self._add(client, message)
            case messages.Finish():
                for key in message.keys:
                    if (request := self._requests.get(key)) is not None:
                        self._engine.finish(request, message.reason)
                        self._changed = True
            case messages.Observation():
                self._metrics.observe(message)
            case messages.Ask():
                answer = messages.Answer(message.number)
                try:
                    answer.value = self._answer(message)
                finally:  # whoever asks waits for an answer
                    self._send(client, answer)

    def _answer(self, ask: messages.Ask) -> Any:
        if ask.what == "flush_cache":
            return self._engine.flush_cache()
        if ask.what == "profile":
            return self._profile(ask.steps)
        stats = self._engine.stats()
        return asdict(stats) if ask.what == "stats" else self._metrics.text(stats)

    def _profile(self, steps: int) -> bytes | bool | None:
        """See `EngineClient.profile`. What was recorded stays until it is asked for."""
        from minisgl.profiling.capture import record  # which nobody pays for who does not profile

        before, self._recording = self._recording, None
        if not steps:
            return before and before.trace()
        self._recording = before or record(self._engine, self._facts, steps)
        return before is None

    def _add(self, client: bytes, add: messages.Add) -> None:
        """Queue a prompt's requests. Each that cannot be gets its end at once; a full queue takes none of them.

        A full queue is given a step to become shorter before that is said: else a burst would be refused that an
        idle engine has slots for. Once nothing has changed since a step, refusals cost no further one.
        """
        waiting = len(self._requests) - self._engine.stats().running
        if waiting and waiting + len(add.keys) > self._max_queued:
            if self._changed:
                self._held = client, add
                return
            self._metrics.rejected += len(add.keys)
            self._send(client, messages.Refused(add.keys, waiting))
            return
        try:
            requests = self._make_requests(client, add)
        except (ValueError, TypeError, OverflowError) as error:
            logger.error("a client's request is wrong: %s", error)
            ended = [messages.Ended(key, "error", 0, 0) for key in add.keys if key not in self._requests]
            self._send(client, messages.Step(b"", b"", ended))
            return
        self._requests.update((request.key, request) for request in requests)
        self._engine.add(requests[0])
        self._changed = True

    def _make_requests(self, client: bytes, add: messages.Add) -> list[Request]:
        """A prompt's requests, the first of which leads the others; ValueError for what the engine could not run."""
        prompt = np.frombuffer(add.prompt, dtype="<i4")
        sampling = SamplingParams(**{**NEUTRAL, **add.sampling})
        words = [token for word in add.bad_words for token in word]
        tokens = np.concatenate([prompt, add.stop_ids, words, list(sampling.logit_bias or ())])
        owns = all(messages.client_identity(key >> CLIENT_BITS) == client for key in add.keys)
        if not (
            0 < len(add.keys) == len({*add.keys} - self._requests.keys()) == len(add.seeds)
            and owns
            and max(sampling.min_tokens or 0, 1) <= add.max_tokens <= self._facts.context - len(prompt)
            and len(prompt)
            and 0 <= tokens.min() <= tokens.max() < self._facts.vocab_size
            and all(-(2**63) <= seed < 2**63 for seed in add.seeds)
        ):
            raise ValueError(f"it does not fit the engine, or has another's key: {add!r:.500}")
        now_s = time.monotonic()
        requests = [
            Request(
                key=key,
                prompt=prompt,
                max_tokens=add.max_tokens,
                sampling=sampling,
                stop_ids=tuple(add.stop_ids),
                bad_words=tuple(map(tuple, add.bad_words)),
                seed=seed,
                arrival_s=now_s,
            )
            for key, seed in zip(add.keys, add.seeds, strict=True)
        ]
        requests[0].followers = requests[1:]
        return requests

    # Steps

    def _step(self) -> None:
        """A step that raises has ended every request with `error`; if the device still works, the next reports it."""
        self._changed = False
        try:
            committed = self._engine.step()
        except Exception as error:
            logger.exception("a step failed, and with it every request that was waiting or running")
            if isinstance(error, ChildProcessError) or self._device_lost():  # the former: another rank has ended
                raise
            return
        self._metrics.generation_tokens += len(committed.tokens)
        for number, step in steps_by_client(committed):
            self._send(messages.client_identity(number), step)
        for request in committed.ended:
            del self._requests[request.key]
            self._metrics.aborted += request.finish_reason == "abort"
            if request.admitted_s is not None:
                self._metrics.queue_s.observe(request.admitted_s - request.arrival_s)

    def _send(self, client: bytes, message: messages.ToClient) -> None:
        """Never waits; what is for a client that has gone is dropped."""
        self._socket.send_multipart([client, self._encode(message)], zmq.NOBLOCK)


def steps_by_client(committed: Committed) -> Iterator[tuple[int, messages.Step]]:
    """What a step brought, for each client that it brought anything."""
    of_tokens, of_logprobs = committed.keys >> CLIENT_BITS, committed.logprob_keys >> CLIENT_BITS
    singly = [request.key for request in committed.ended] + [key for key, _ in committed.prompt_logprobs]
    for number in {*np.unique(of_tokens).tolist(), *(key >> CLIENT_BITS for key in singly)}:
        mine, scored = of_tokens == number, of_logprobs == number
        step = messages.Step(_bytes(committed.keys[mine], "<i8"), _bytes(committed.tokens[mine], "<i4"))
        step.ended = [_ended(request) for request in committed.ended if request.key >> CLIENT_BITS == number]
        if committed.logprobs is not None and scored.any():
            step.logprobs = _packed(committed.logprob_keys[scored], committed.logprobs.take(scored))
        step.prompt_logprobs = [
            messages.StepPromptLogprobs(key, prompt.first, _packed(NO_KEYS, prompt.logprobs))
            for key, prompt in committed.prompt_logprobs
            if key >> CLIENT_BITS == number
        ]
        yield number, step


def _ended(request: Request) -> messages.Ended:
    assert request.finish_reason is not None
    return messages.Ended(request.key, request.finish_reason, request.cached_tokens or 0, len(request.output))


def _packed(keys: NDArray[np.int64], logprobs: Logprobs) -> messages.StepLogprobs:
    chosen, top = _bytes(logprobs.chosen, "<f4"), _bytes(logprobs.top, "<f4")
    return messages.StepLogprobs(_bytes(keys, "<i8"), chosen, _bytes(logprobs.top_ids, "<i4"), top)


def _bytes(values: NDArray[Any], dtype: str) -> bytes:
    return values.astype(dtype, copy=False).tobytes()


# --- the process


def main() -> None:
    """Load the model, say so, and serve until the owner ends this process or the device is lost."""
    owner = Owner()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that a download ends with it
    settings = owner.settings(messages.EngineSettings)
    owner.listen(lambda control: None, lambda: os._exit(1))
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s engine: %(message)s")
    logging.getLogger("minisgl").setLevel(settings.log_level.upper())

    def report(what: str, done: float, total: float | None) -> None:
        owner.tell(messages.Report(kind="progress", text=what, done=int(done), total=int(total or 0)))

    try:
        engine, facts = _load(settings, report)
        socket = zmq.Context(io_threads=1).socket(zmq.ROUTER)
        for option, value in ((zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.LINGER, 0)):
            socket.setsockopt(option, value)
        socket.bind(settings.address)
    except ValueError as error:
        owner.tell(messages.Report(kind="fatal", text=str(error)))
        sys.exit(1)
    except Exception as error:
        _tell_fault(owner, error)
        raise
    worker = Worker(engine, socket, facts, settings, _device_lost)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    owner.tell(messages.Report(kind="ready", facts=facts))
    _serve(worker, owner)


def _serve(worker: Worker, owner: Owner) -> None:
    beat_s = 0.0
    try:
        while True:
            if time.monotonic() - beat_s >= BEAT_S:
                beat_s = time.monotonic()
                owner.tell(messages.Report(kind="beat"))
            worker.turn()
    except Exception as error:
        _tell_fault(owner, error)
        raise


def _tell_fault(owner: Owner, error: Exception) -> None:
    owner.tell(messages.Report(kind="fatal", text=f"{type(error).__name__}: {error}".splitlines()[0]))


def _load(
    settings: messages.EngineSettings, report: Callable[[str, float, float | None], None]
) -> tuple[Engine, messages.EngineFacts]:
    from minisgl.build import build_engine, resolve, resolve_kernels  # brings torch, which takes seconds
    from minisgl.source.hub import locate
    from minisgl.source.model_config import read_model_config

    config = resolve(EngineConfig(**settings.config))
    folder = locate(config.model, config.revision, config.load_format, report)
    model = read_model_config(folder.path)
    config = resolve_kernels(config, model)
    engine = build_engine(config, folder, model, report)
    pages, page_size = engine.scheduler.num_pages, engine.scheduler.page_size
    facts = messages.EngineFacts(
        model_name=next(iter(settings.served_names), folder.name),
        folder=str(folder.path),
        context=engine.context,
        vocab_size=model.vocab_size,
        eos_ids=list(model.eos_token_ids),
        sampling_defaults=folder.sampling_defaults,
        config=asdict(replace(config, num_pages=pages, max_model_len=engine.context)),
        page_size=page_size,
        num_pages=pages,
    )
    return engine, facts


def _device_lost() -> bool:
    """Whether nothing can run on the GPU any more: an error on it, unlike one of the host, spoils all that follows."""
    import torch

    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


if __name__ == "__main__":
    main()
