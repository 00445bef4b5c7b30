"""A worker on the fake device and its clients in one thread, over real sockets: a test says who has his turn."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import tokenizers
import zmq
from fake_device import VOCAB, make_engine
from tokenizers import decoders, models

from minisgl.engine import Engine
from minisgl.server import worker as worker_module
from minisgl.server.client import EngineClient, make_front
from minisgl.server.messages import CLIENT_BITS, EngineFacts, EngineSettings, ToClient, client_identity
from minisgl.server.worker import Worker
from minisgl.tokenizer.tokenizer import Tokenizer

worker_module.IDLE_MS = 1

WORDS = [chr(0x4E00 + token) for token in range(VOCAB)]
"""Each token is one character."""


def make_tokenizer() -> Tokenizer:
    backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token=WORDS[0]))
    backend.decoder = decoders.Fuse()
    return Tokenizer(backend)


def text_of(tokens: list[int]) -> str:
    return "".join(WORDS[token] for token in tokens)


def make_facts(engine: Engine) -> EngineFacts:
    return EngineFacts(
        model_name="fake",
        folder="",
        context=engine.context,
        vocab_size=VOCAB,
        eos_ids=[],
        sampling_defaults={},
        config={},
        page_size=engine.scheduler.page_size,
        num_pages=engine.scheduler.num_pages,
    )


class Place:
    """The engine, its worker, and the address that clients connect to."""

    def __init__(self, engine: Engine, worker: Worker, address: str) -> None:
        self.engine, self.worker, self.address = engine, worker, address
        self.clients: list[EngineClient] = []
        self._on_the_way: Counter[bytes] = Counter()  # messages, by the client that they are for
        self._worker_sends, worker._send = worker._send, self._send

    def _send(self, client: bytes, message: ToClient) -> None:
        self._on_the_way[client] += 1
        self._worker_sends(client, message)

    def client(self, number: int = 1) -> EngineClient:
        client = EngineClient(self.address, number, make_front(make_facts(self.engine), make_tokenizer()))
        decode, name = client._decode, client_identity(number)

        def arrived(frame: bytes) -> ToClient:
            self._on_the_way[name] -= 1
            return decode(frame)

        client._decode = arrived
        self.clients.append(client)
        return client

    async def until(self, condition: Callable[[], bool], most: int = 5000) -> None:
        """Give the worker and the clients their turns until something is so."""
        for _ in range(most):
            if condition():
                return
            self.worker.turn()
            self.engine.scheduler.check()
            await self.settle()
        raise AssertionError("it did not come to that")

    async def settle(self) -> None:
        """Let clients take in all that was sent to them."""
        alive = {client_identity(c._next_key >> CLIENT_BITS) for c in self.clients if c._dead is None}
        while any(self._on_the_way[name] for name in alive):
            await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def rest(self) -> None:
        """Until no client waits for anything, and the worker for no client."""
        await self.until(lambda: not any(c.num_open for c in self.clients) and not self.engine.has_work)


@asynccontextmanager
async def place(
    folder: Path, *, max_queued: int = 1000, device_lost: Callable[[], bool] = lambda: False, **options: Any
) -> AsyncIterator[Place]:
    engine = make_engine(**options)
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.linger = 0
    address = f"ipc://{folder}/engine"
    socket.bind(address)
    settings = EngineSettings(address=address, config={}, log_level="info", max_queued_requests=max_queued)
    worker = Worker(engine, socket, make_facts(engine), settings, device_lost)
    here = Place(engine, worker, address)
    try:
        async with asyncio.timeout(60):
            yield here
    finally:
        for client in here.clients:
            await client.close()
        socket.close()
        context.term()
