"""How many requests a second the load client of `minisgl bench` can send, and whether it says when it can't keep up.

    python scripts/load_client.py [--rates 500,1000,2000] [--seconds 10] [--tokens 8] [--delay 0.05]

The server is a fake one in a process of its own: it answers every request with a stream of so many events, all at once
after `--delay` seconds. Prints, for each rate, what was reached, how late the client was, how far the times that it
noted are from the delay, and its doubts.
"""

import argparse
import asyncio
import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import uvloop

from minisgl.bench.arrivals import arrival_times
from minisgl.bench.client import Asking, Load, connect
from minisgl.bench.metrics import doubts, latencies, totals
from minisgl.bench.record import Pass
from minisgl.bench.workload import Job

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
TOKEN = b'data: {"choices":[{"index":0,"text":" word","finish_reason":null}]}\n\n'
LAST = b'data: {"choices":[],"usage":{"prompt_tokens":16,"completion_tokens":%d}}\n\ndata: [DONE]\n\n'


class Answers(asyncio.Protocol):
    """A connection of the fake server, which gets one request at a time."""

    def __init__(self, tokens: int, delay_s: float) -> None:
        self.delay_s, self.waits_for = delay_s, b""
        events = [*[TOKEN] * tokens, LAST % tokens]
        self.answer = HEAD + b"".join(b"%x\r\n%b\r\n" % (len(e), e) for e in events) + b"0\r\n\r\n"

    def connection_made(self, transport: Any) -> None:
        """Keep what to write to."""
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """The body is JSON and the last thing of a request, so its brace ends it."""
        if data.endswith(b"}"):
            asyncio.get_running_loop().call_later(self.delay_s, self.transport.write, self.answer)


async def serve(tokens: int, delay_s: float, told: Connection) -> None:
    """Serve until killed; tell the port."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Answers(tokens, delay_s), "127.0.0.1", 0, backlog=4096)
    told.send(server.sockets[0].getsockname()[1])
    await server.serve_forever()


def run_server(tokens: int, delay_s: float, told: Connection) -> None:
    """The server's process."""
    uvloop.run(serve(tokens, delay_s, told))


async def measure(port: int, rate: float, seconds: float) -> Pass:
    """Requests at a constant rate, for so long."""
    count = round(rate * seconds)
    measured = Pass(name=f"{rate:g}", load={"qps": rate}, seed=0, began_s=0.0)
    headers = {"Content-Type": "application/json"}
    async with connect(f"http://127.0.0.1:{port}", headers) as server:
        load = Load(server, Asking(model="fake", sampling={}, counts_on=False))
        jobs = [Job(list(range(16)), 8)] * count
        await load.run(measured, jobs, arrival_times("constant", count, rate, 1.0, ""), None)
    return measured


def main() -> None:
    """Start the server, measure each rate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="500,1000,2000")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--delay", type=float, default=0.05)
    asked = parser.parse_args()
    here, there = multiprocessing.Pipe()
    process = multiprocessing.Process(target=run_server, args=(asked.tokens, asked.delay, there), daemon=True)
    process.start()
    port = here.recv()
    for rate in map(float, asked.rates.split(",")):
        measured = uvloop.run(measure(port, rate, asked.seconds))
        figures, values = totals(measured), latencies(measured.requests)
        off_ms = [1e3 * (float(np.percentile(values["ttft_s"], p)) - asked.delay) for p in (50, 99)]
        lag_ms = 1e3 * float(np.percentile([lag.lag_s for lag in measured.lags], 99))
        print(
            f"{rate:g} req/s asked, {figures['requests_per_s']:,.0f} reached, {figures['failed']} failed, loop lag p99 "
            f"{lag_ms:.1f} ms, TTFT over the delay p50 {off_ms[0]:.1f} ms, p99 {off_ms[1]:.1f} ms",
            *(f"    {doubt}" for doubt in doubts(measured)),
            sep="\n",
        )
    process.terminate()


if __name__ == "__main__":
    main()
