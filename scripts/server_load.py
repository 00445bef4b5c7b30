"""How much of the engine's throughput a server passes on, when all requests of a workload stream at once.

    python scripts/server_load.py CONFIG [--frontends 4] [--cpu]

CONFIG is a `minisgl bench` file of a throughput workload, such as bench_configs/offline-256-qwen3-0.6b.toml. Starts
`minisgl serve` with its engine options, on a copy of its model's folder that has a made-up tokenizer (every token is a
word, so that each makes an event), sends all requests over loopback as streams, and prints output tokens over the time
from the first request to the last answer, for each repetition; the first repetition warms up. Compare with `minisgl
bench --config CONFIG`. Every answer's length is checked.
"""

import argparse
import asyncio
import json
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

from minisgl.bench.own_server import own_server
from minisgl.bench.workload import DEFAULT_REPEAT, WARM_UP, Job, WorkloadConfig, throughput_jobs
from minisgl.config import EngineConfig


class Stream(asyncio.Protocol):
    """One streamed completion on a connection of its own."""

    def __init__(self, port: int, job: Job, sampling: dict[str, Any]) -> None:
        asked = {"prompt": job.prompt, "max_tokens": job.output_len, "stream_options": {"include_usage": True}}
        body = json.dumps({**asked, "stream": True, **sampling}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: {len(body)}\r\n\r\n"
        self.request, self.tail = head.encode() + body, b""
        self.done: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        """Ask."""
        self.transport = transport
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        """The last event but one says how many tokens there were."""
        self.tail = self.tail[-2000:] + data
        if b"data: [DONE]" in self.tail and not self.done.done():
            self.done.set_result(int(self.tail.rpartition(b'"completion_tokens":')[2].split(b",")[0]))
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """A stream that ends early is an error."""
        if not self.done.done():
            self.done.set_exception(exc or ConnectionError("the server closed the stream"))


async def run(port: int, jobs: list[Job], sampling: dict[str, Any]) -> tuple[float, int]:
    """Seconds that all requests took together, and their tokens."""
    loop, streams = asyncio.get_running_loop(), [Stream(port, job, sampling) for job in jobs]
    begin = time.perf_counter()
    await asyncio.gather(*(loop.create_connection(lambda s=s: s, "127.0.0.1", port) for s in streams))
    counts = await asyncio.gather(*(stream.done for stream in streams))
    seconds = time.perf_counter() - begin
    if short := [(got, job.output_len) for got, job in zip(counts, jobs, strict=True) if got != job.output_len]:
        sys.exit(f"{len(short)} answers have another length than was asked for: (got, asked) {short[:5]}")
    return seconds, sum(counts)


def main() -> None:
    """Start, measure, stop."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--frontends", type=int, default=4)
    parser.add_argument("--cpu", action="store_true", help="to try the script where there is no GPU")
    asked = parser.parse_args()
    table = tomllib.loads(asked.config.read_text())
    engine = table["engine"] | ({"device": "cpu"} if asked.cpu else {})
    workload = WorkloadConfig(**table["workload"])
    sampling = dict(table.get("sampling", {}))
    model = str(asked.config.parent / engine.pop("model"))
    with own_server(EngineConfig(model=model, **engine), asked.frontends, print) as url:
        port = int(url.rpartition(":")[2])
        for repetition in (WARM_UP, *range(workload.repeat or DEFAULT_REPEAT)):
            seconds, tokens = asyncio.run(run(port, throughput_jobs(workload, repetition), sampling))
            print(f"{'warm-up' if repetition == WARM_UP else repetition + 1}: {tokens} tokens, "
                  f"{seconds:.3f} s, {tokens / seconds:,.1f} output tok/s", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
