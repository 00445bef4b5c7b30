"""How many tokens a second one frontend process streams, with an engine that makes them as fast as they are taken.

    python scripts/server_capacity.py [--streams 256] [--seconds 10] [--tokens 1000] [--frontends 1] [--profile]

Three kinds of processes on loopback: the frontend(s), the fake engine of the tests, which sends one message for every
step of all streams, and a client that reads from raw sockets. The frontend is as in service: HTTP, tokenizer,
detokenizing, JSON, one event a token. The client says how late its event loop is, its lag: if that is much, it was the
client that was measured. Where other processes share the cores, look at tokens for each second of processor time.
"""

import argparse
import asyncio
import cProfile
import json
import os
import pstats
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import uvloop

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests" / "host")]

from served import PROGRAM, Served, served, write_model  # noqa: E402  # pyright: ignore[reportMissingImports]

from minisgl.server import streaming  # noqa: E402
from minisgl.server.messages import Control  # noqa: E402

TEXT = "The capital of France is Paris. 日本語の文章と中文字符。 def main(argv):\n    return argv[0]  # 😀 "
TOKEN = b'"delta":{"content":'
TICK = os.sysconf("SC_CLK_TCK")


class Client(asyncio.Protocol):
    """One stream after the other on a connection, counting events."""

    tokens = answers = reads = 0

    def __init__(self, request: bytes) -> None:
        self.request = request

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        Client.reads += 1
        Client.tokens += data.count(TOKEN)
        if b"data: [DONE]" in data:
            Client.answers += 1
            self.transport.write(self.request)

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            print("a connection was lost:", exc, file=sys.stderr)


async def load(port: int, streams: int, tokens: int, seconds: float) -> None:
    """Stream for so long, and print what came as JSON."""
    body = json.dumps(
        {"messages": [{"role": "user", "content": TEXT}], "max_tokens": tokens, "stream": True, "ignore_eos": True}
    ).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    loop = asyncio.get_running_loop()
    connections = [await loop.create_connection(lambda: Client(head + body), "127.0.0.1", port) for _ in range(streams)]
    await asyncio.sleep(1)  # all of them have begun
    began_s, tokens_before, cpu_s = time.monotonic(), Client.tokens, time.process_time()
    lags = []
    while time.monotonic() - began_s < seconds:
        due_s = time.monotonic() + 0.01
        await asyncio.sleep(0.01)
        lags.append(time.monotonic() - due_s)
    took_s = time.monotonic() - began_s
    result = {
        "tokens_per_s": (Client.tokens - tokens_before) / took_s,
        "tokens": Client.tokens,
        "answers": Client.answers,
        "tokens_per_read": Client.tokens / Client.reads,
        "client_cpu": (time.process_time() - cpu_s) / took_s,
        "client_lag_ms": [1e3 * sorted(lags)[int(len(lags) * share)] for share in (0.5, 0.99)],
    }
    for transport, _ in connections:
        transport.abort()
    print(json.dumps(result))


def profiled(path: str) -> None:
    """Be a frontend, and leave a profile at its end."""
    from minisgl.server import app

    profile, end = cProfile.Profile(), os._exit

    def leave(code: int) -> None:
        profile.dump_stats(path)
        end(code)

    os._exit = leave
    profile.runcall(app.main)


def print_profile(path: str) -> None:
    """Where the frontend's main thread has spent its time, in shares of all of it."""
    parts: Counter[str] = Counter()
    for (file, _, name), (_, _, own_s, _, _) in pstats.Stats(path).stats.items():  # type: ignore[attr-defined]
        if (file, name) == (streaming.__file__, "_write"):  # the transport's write is no call of Python's
            parts["socket writes"] += own_s
        elif file == asyncio.runners.__file__:
            parts["event loop"] += own_s
        elif "minisgl/" in file:
            parts["minisgl/" + file.rpartition("minisgl/")[2]] += own_s
        else:
            parts[name if file == "~" else Path(file).parent.name] += own_s
    for part, own_s in parts.most_common(14):
        print(f"  {own_s / sum(parts.values()):6.1%}  {part}")


def cpu_s(pid: int) -> tuple[float, float]:
    """Processor time of a process and its threads so far, in its own code and in the system's."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) / TICK, int(fields[12]) / TICK


def measure(server: Served, options: argparse.Namespace) -> None:
    """Let a client load the server, and print what came of it and what it took."""
    processes = {f"frontend {n}": frontend.process.pid for n, frontend in enumerate(server.frontends)}
    processes["fake engine"] = server.engine.pid
    before, began_s = {name: cpu_s(pid) for name, pid in processes.items()}, time.monotonic()
    command = [sys.executable, __file__, "--client", str(server.port)]
    command += [f"--{name}={getattr(options, name)}" for name in ("streams", "tokens", "seconds")]
    result = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    took_s = time.monotonic() - began_s
    per_frontend = result["tokens_per_s"] / options.frontends
    print(
        f"{per_frontend:,.0f} tokens/s per frontend process, {options.streams} streams, {options.frontends} frontend(s)"
    )
    print(
        f"client: busy {result['client_cpu']:.0%}, lag p50 {result['client_lag_ms'][0]:.2f} ms, "
        f"p99 {result['client_lag_ms'][1]:.2f} ms, {result['tokens_per_read']:.2f} tokens a read, "
        f"{result['answers']} answers"
    )
    for name, pid in processes.items():
        user_s, system_s = (after - then for after, then in zip(cpu_s(pid), before[name], strict=True))
        if name == "frontend 0":
            per_s = result["tokens"] / options.frontends / (user_s + system_s)
            print(f"{per_s:,.0f} tokens for each second of a frontend's processor time")
        print(f"{name}: busy {user_s / took_s:.0%} in its own code, {system_s / took_s:.0%} in the system's")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--tokens", type=int, default=1000, help="tokens of each answer")
    parser.add_argument("--frontends", type=int, default=1)
    parser.add_argument("--profile", action="store_true", help="say where the frontend's time goes; slows it down")
    parser.add_argument("--client", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--frontend", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client is not None:
        uvloop.run(load(options.client, options.streams, options.tokens, options.seconds))
        return
    if options.frontend is not None:
        profiled(options.frontend)
        return
    with tempfile.TemporaryDirectory() as folder:
        model, path = write_model(Path(folder)), f"{folder}/profile"
        program = (__file__, "--frontend", path) if options.profile else PROGRAM
        running = ("--max-running", str(options.streams))
        with served(model, *running, program=program, frontends=options.frontends) as server:
            measure(server, options)
            if options.profile:
                server.tell(Control(do="drain"))
                server.frontends[0].process.wait(timeout=30)
                print("of the frontend's time:")
                print_profile(path)


if __name__ == "__main__":
    main()
