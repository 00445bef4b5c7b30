"""An engine process without a model: it speaks `messages` over ZeroMQ and answers a prompt with the prompt's tokens.

`python tests/host/fake_engine.py ADDRESS OPTIONS…`; an answer is the prompt again and again, up to `max_tokens` or a
stop token. Its process can be told to be slow, to refuse, to hang and to die.
"""

import argparse
import os
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec
import numpy as np
import zmq

from minisgl.scheduler import Stats
from minisgl.server.messages import (
    Add,
    Answer,
    Ask,
    Ended,
    Finish,
    Refused,
    Step,
    StepLogprobs,
    StepPromptLogprobs,
    ToEngine,
)


@dataclass
class Running:
    client: bytes
    key: int
    prompt: list[int]
    add: Add
    num_tokens: int = 0
    reason: str | None = None


@dataclass
class Reply:
    """What a step brings to one client."""

    keys: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    scored: list[tuple[int, int]] = field(default_factory=list)
    most: int = 0
    prompts: list[StepPromptLogprobs] = field(default_factory=list)


def scores(keys: list[int], tokens: list[int], most: int) -> StepLogprobs:
    """A token's log-probability is -1 - its id / 1000; the likeliest in its place are it and those after it."""
    ids = np.array([[token + place for place in range(most)] for token in tokens], "<i4").reshape(len(tokens), most)
    return StepLogprobs(
        keys=np.array(keys, "<i8").tobytes(),
        chosen=(-1 - np.array(tokens, "<f4") / 1000).astype("<f4").tobytes(),
        top_ids=ids.tobytes(),
        top=(-1 - ids / 1000).astype("<f4").tobytes(),
    )


class FakeEngine:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.socket = zmq.Context.instance().socket(zmq.ROUTER)
        for option, value in ((zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.LINGER, 0), (zmq.ROUTER_MANDATORY, 0)):
            self.socket.setsockopt(option, value)
        self.socket.bind(options.address)
        self.decode = msgspec.msgpack.Decoder(ToEngine).decode
        self.waiting: deque[Running] = deque()
        self.running: dict[int, Running] = {}
        self.steps = self.adds = self.flushes = self.finishes = self.profiled = 0

    def send(self, client: bytes, message: Any) -> None:
        self.socket.send_multipart([client, msgspec.msgpack.encode(message)])

    def turn(self) -> None:
        """Take in what has come, then make a step."""
        busy = bool(self.running or self.waiting)
        if not busy:
            self.socket.poll(500)
        while True:
            try:
                client, frame = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self.take(client, self.decode(frame))
        if self.options.hang_after is None or self.steps < self.options.hang_after:
            self.step()
        if self.options.die_after is not None and self.steps >= self.options.die_after:
            os._exit(3)
        time.sleep(self.options.step_s)

    def take(self, client: bytes, message: Any) -> None:
        match message:
            case Add():
                self.adds += 1
                if len(self.waiting) + len(message.keys) > self.options.max_queued:
                    self.send(client, Refused(message.keys, len(self.waiting)))
                    return
                prompt = np.frombuffer(message.prompt, "<i4").tolist()
                self.waiting += [Running(client, key, prompt, message) for key in message.keys]
            case Finish():
                self.finishes += 1
                for request in [*self.waiting, *self.running.values()]:
                    if request.key in message.keys:
                        request.reason = message.reason
            case Ask(what="stats"):
                self.send(client, Answer(message.number, asdict(self.stats())))
            case Ask(what="metrics"):
                self.send(client, Answer(message.number, f"minisgl:steps_total {self.steps}\n"))
            case Ask(what="profile"):
                before, self.profiled = self.profiled, message.steps
                answer = before == 0 if message.steps else (b"a trace" if before else None)
                self.send(client, Answer(message.number, answer))
            case Ask(what="flush_cache"):
                self.flushes += 1
                self.send(client, Answer(message.number, not self.running))

    def stats(self) -> Stats:
        return Stats(
            running=len(self.running),
            waiting=len(self.waiting),
            pages_free=100 - len(self.running),
            pages_cached=0,
            pages_locked=len(self.running),
            prompt_tokens=self.adds,
            prefix_hit_tokens=self.finishes,
            retractions=self.flushes,
            steps=self.steps,
        )

    def step(self) -> None:
        while self.waiting and len(self.running) < self.options.max_running:
            request = self.waiting.popleft()
            self.running[request.key] = request
        if not self.running:
            return
        self.steps += 1
        replies: dict[bytes, Reply] = {}
        for request in list(self.running.values()):
            reply = replies.setdefault(request.client, Reply())
            if request.reason is None:
                self.next_token(request, reply)
            if request.reason is not None:
                del self.running[request.key]
                cached = 1 if request.prompt[0] % 2 else 0
                reply.ended.append(Ended(request.key, request.reason, cached, request.num_tokens))
        for client, reply in replies.items():
            asked = dict(reply.scored)
            self.send(
                client,
                Step(
                    keys=np.array(reply.keys, "<i8").tobytes(),
                    tokens=np.array(reply.tokens, "<i4").tobytes(),
                    ended=reply.ended,
                    logprobs=scores(list(asked), list(asked.values()), reply.most) if asked else None,
                    prompt_logprobs=reply.prompts,
                ),
            )

    def next_token(self, request: Running, reply: Reply) -> None:
        sampling = request.add.sampling
        if (
            request.num_tokens == 0
            and sampling.get("prompt_logprobs") is not None
            and request.key == request.add.keys[0]
        ):
            rest = request.prompt[1:]
            part = scores([request.key] * len(rest), rest, sampling["prompt_logprobs"])
            reply.prompts.append(StepPromptLogprobs(request.key, 1, part))
        token = request.prompt[request.num_tokens % len(request.prompt)]
        request.num_tokens += 1
        reply.keys.append(request.key)
        reply.tokens.append(token)
        if sampling.get("logprobs") is not None:
            reply.scored.append((request.key, token))
            reply.most = max(reply.most, sampling["logprobs"])
        if token in request.add.stop_ids:
            request.reason = "stop"
        elif request.num_tokens >= request.add.max_tokens:
            request.reason = "length"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("--step-s", type=float, default=0.0, help="pause after each step")
    parser.add_argument("--max-queued", type=int, default=100_000)
    parser.add_argument("--max-running", type=int, default=256)
    parser.add_argument("--hang-after", type=int, help="make so many steps and no more")
    parser.add_argument("--die-after", type=int, help="make so many steps and end")
    engine = FakeEngine(parser.parse_args())
    owner = os.getppid()
    print("ready", flush=True)
    while os.getppid() == owner:
        engine.turn()


if __name__ == "__main__":
    main()
