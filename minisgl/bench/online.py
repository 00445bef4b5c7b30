"""Measure a server under load: our own, started for it, or any that speaks OpenAI's API."""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import cache
from itertools import count
from typing import Annotated, Any, TypeVar

import msgspec
import uvloop
from msgspec import Meta, Struct

from minisgl.bench.answer import ServerFault, understood
from minisgl.bench.arrivals import arrival_times
from minisgl.bench.asking import Asking, Words
from minisgl.bench.client import HttpServer, Load, connect
from minisgl.bench.load import LoadConfig, parse_slo
from minisgl.bench.metrics import keeps_slo
from minisgl.bench.nvml import Sampler, open_gpus
from minisgl.bench.offline import Say, complete
from minisgl.bench.own_server import own_server
from minisgl.bench.record import Pass, Run
from minisgl.bench.workload import WARM_UP, Job, Tokenize, WorkloadConfig, check_unset, throughput_jobs
from minisgl.config import EngineConfig, SamplingParams
from minisgl.doctor.machine import device_name
from minisgl.source.cache_folder import Report

T = TypeVar("T")

WARM_UP_REQUESTS = 8
COUNTING = ("minisgl", "vllm", "sglang")
"""Servers, by what they say owns their model, that count tokens in every event where asked to."""
FLUSH_ROUTES = ("/flush_cache", "/reset_prefix_cache")
CLOSE_ENOUGH = 1.1
"""`search` ends when a rate that is good and one that is not are so near."""
LEAST_SHARE = 1 / 16
"""Of the rate to start from: below, `search` gives up."""


class Model(Struct):
    id: str
    owned_by: str | None = None


class Models(Struct):
    data: Annotated[list[Model], Meta(min_length=1)]


class Tokens(Struct):
    tokens: list[int]


class Info(Struct):
    """What our own server says of itself."""

    engine: dict[str, Any]
    stats: dict[str, float]


def measure(
    config: EngineConfig,
    workload: WorkloadConfig,
    load: LoadConfig,
    sampling: SamplingParams,
    progress: AbstractContextManager[Report],
    say: Say,
    finish: Callable[[Run], None],
) -> None:
    """Measure each rate, or the one load, as often as asked, and give all to `finish`, also when it is stopped.

    `progress` shows how far each is, `say` gets lines meanwhile. Raises ValueError for what cannot be measured, and a
    server that does not start or answer.
    """
    if workload.latency:
        raise ValueError("latency must be unset with a load on a server: it is of an engine in this process")
    if load.trace_speed is not None and workload.dataset is None:
        raise ValueError("trace_speed needs a trace: give its file as dataset")
    if load.find_max:
        check_unset(workload, ("repeat",), "with find_max, which measures each rate once")
    sampling, run = complete(sampling), None
    try:
        with ExitStack() as stack:
            report = stack.enter_context(progress)
            report("starting a server" if load.url is None else "looking for the server", 0, None)
            url = load.url or stack.enter_context(own_server(config, load.frontends, say))
            server = OneAtATime(url, load.api_key if load.url else None, load.silence)
            run, asking = _describe(server, config, workload, load, sampling)
            gpus = open_gpus(run.engine["device"], run.devices) if run.engine else "the server is not ours"
            sampler = stack.enter_context(Sampler(gpus))
            run.no_nvml = sampler.missing
            online = _Online(server, asking, run, workload, load, _tokenizer(server, asking), sampler, report, say)
            online.warm_up()
            online.measure()
    except ServerFault as error:
        raise ValueError(f"the server does not answer as it should: {error}") from error
    finally:
        if run is not None and run.passes:
            finish(run)


class OneAtATime:
    """A server, from a program that does one thing at a time."""

    def __init__(self, url: str, api_key: str | None, silence_s: float | None) -> None:
        self._url, self._silence_s = url.rstrip("/").removesuffix("/v1"), silence_s
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def ask(self, route: str, body: Any = None) -> bytes:
        """The answer at a route, with a body by POST. Raises ServerFault."""
        data = None if body is None else msgspec.json.encode(body)
        try:
            return self.run(lambda server: server.ask(route, data))
        except ServerFault as fault:
            raise ServerFault(f"{self._url}{route}: {fault}") from fault

    def know(self, kind: type[T], route: str, body: Any = None) -> T:
        """The same as what it should be."""
        return understood(self.ask(route, body), kind, f"{self._url}{route}")

    def run(self, work: Callable[[HttpServer], Awaitable[T]]) -> T:
        """Work in an event loop of its own, which SIGINT and SIGTERM end orderly, and then in SystemExit.

        An exception out of a signal handler could come up anywhere in the loop, and be taken for a transport's.
        """
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        came: list[int] = []

        async def connected() -> T:
            task = asyncio.current_task()
            assert task is not None
            for number in before:
                asyncio.get_running_loop().add_signal_handler(number, lambda n=number: (came.append(n), task.cancel()))
            async with connect(self._url, self._headers, self._silence_s) as server:
                return await work(server)

        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(connected())
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            if came:  # however far it had got
                raise SystemExit(128 + came[0])


def _describe(
    server: OneAtATime, config: EngineConfig, workload: WorkloadConfig, load: LoadConfig, sampling: SamplingParams
) -> tuple[Run, Asking]:
    """A run on this server, whose model is the one that is named, or the first that it has; and how to ask it."""
    engine = None if load.url else server.know(Info, "/server_info").engine
    models = server.know(Models, "/v1/models").data
    names = [model.id for model in models]
    named = config.model if load.url and config.model != EngineConfig.model else names[0]
    if named not in names:
        raise ValueError(f"model must be one of the server's, {', '.join(names)}, got {named!r}")
    run = Run(
        mode="online",
        model=named,
        device=device_name(engine["device"]) if engine else "unknown",
        devices=engine["tp"] if engine else 1,
        engine=engine and engine | {"model": config.model},
        workload=asdict(workload),
        load={name: value for name, value in asdict(load).items() if name != "api_key"} | {"qps": load.rates},
        sampling=asdict(sampling),
        no_ceilings="a server does not tell its phases",
    )
    # What is off is left out, for servers that do not know an ignore_eos.
    fields = {name: value for name, value in run.sampling.items() if value is not None and value is not False}
    words = Words() if load.endpoint == "chat" else None
    return run, Asking(run.model, fields, counts_on=models[0].owned_by in COUNTING, words=words)


@dataclass
class _Online:
    """A run as it goes on."""

    server: OneAtATime
    asking: Asking
    run: Run
    workload: WorkloadConfig
    load: LoadConfig
    tokenize: Tokenize
    sampler: Sampler
    report: Report
    say: Say

    def warm_up(self) -> None:
        """A few requests with prompts of their own; raises ServerFault if one fails."""
        self.say("warming up …")
        warm_up = Pass(name="warm-up", seed=WARM_UP, began_s=0.0)
        jobs = self._jobs(WARM_UP)[:WARM_UP_REQUESTS]
        self.server.run(lambda server: Load(server, self.asking).run(warm_up, jobs, None, None))
        if errors := [request.error for request in warm_up.requests if request.error is not None]:
            raise ServerFault(errors[0])

    def measure(self) -> None:
        """Every pass."""
        load = self.load
        limit = {} if load.concurrency is None else {"concurrency": float(load.concurrency)}
        loads = [(f"{rate:g} req/s", {"qps": rate} | limit) for rate in load.rates]
        if load.trace_speed is not None:
            loads = [(f"trace × {load.trace_speed:g}", {"trace_speed": load.trace_speed} | limit)]
        if load.find_max and load.slo is not None:
            slo = parse_slo(load.slo)

            def good(rate: float) -> bool:
                return keeps_slo(self._pass(f"{rate:.3g} req/s", {"qps": rate} | limit), slo, load.slo_share)

            if not search(good, load.rates[0], most=len(self._jobs(0))):
                self.say("even the highest rate keeps the slo, at which all requests come within a second: give more")
            return
        for name, what in loads or [(f"{load.concurrency} at once", limit)]:
            for _ in range(self.workload.repeat or 1):
                self._pass(name, what)

    def _jobs(self, repetition: int) -> list[Job]:
        return throughput_jobs(self.workload, repetition, self.tokenize)

    def _pass(self, name: str, what: dict[str, float]) -> Pass:
        """Measure once, with prompts that the server does not know unless that is wanted."""
        number, load = len(self.run.passes), self.load
        jobs, times_s, seed = self._jobs(number), None, f"{self.workload.workload_seed}/{number}"
        if self.workload.dataset is not None and self.workload.fresh:
            self._flush_cache()
        if "qps" in what:
            times_s = arrival_times(load.arrivals, len(jobs), what["qps"], load.burstiness, seed)
        elif load.trace_speed is not None:
            jobs, times_s = of_trace(jobs, load.trace_speed)
        measured = Pass(name=name, load=what, seed=seed, began_s=0.0, interrupted=True)
        before, total, done = self._counters(), sum(1 + len(job.later) for job in jobs), count(1)
        self.run.passes.append(measured)
        self.report(f"{number + 1}: {name}", 0, total)

        def told() -> None:
            self.report(f"{number + 1}: {name}", next(done), total)

        try:
            self.server.run(
                lambda server: Load(server, self.asking, told=told).run(measured, jobs, times_s, load.concurrency)
            )
            measured.interrupted = False
        finally:
            measured.samples = self.sampler.between(measured.began_s, measured.ended_s or measured.began_s)
        measured.counters = {name: value - before[name] for name, value in self._counters().items()}
        return measured

    def _counters(self) -> dict[str, float]:
        stats = self.server.know(Info, "/server_info").stats if self.run.engine else {}
        return {name: stats[name] for name in ("steps", "retractions") if name in stats}

    def _flush_cache(self) -> None:
        for route in FLUSH_ROUTES:
            with suppress(ServerFault):
                self.server.ask(route, {})
                return
        self.say("the server's prefix cache cannot be emptied: prompts that it has seen are found there")


def _tokenizer(server: OneAtATime, asking: Asking) -> Tokenize:
    """The server's own, asked once for each text; or words, where these are sent."""
    if asking.words is not None:
        return asking.words.tokenize

    @cache
    def tokenize(text: str) -> list[int]:
        asked = {"model": asking.model, "prompt": text, "add_special_tokens": False}
        return server.know(Tokens, "/tokenize", asked).tokens

    return tokenize


def search(good: Callable[[float], bool], start: float, most: float) -> bool:
    """Try rates, doubling or halving and then between good and bad ones, until these are close.

    False if `most`, the highest that is tried, is good.
    """
    low, high, rate = 0.0, float("inf"), min(start, most)
    while low < most and high > max(low * CLOSE_ENOUGH, start * LEAST_SHARE):
        if good(rate):
            low = rate
        else:
            high = rate
        rate = high / 2 if not low else min(low * 2, most) if high > most else (low * high) ** 0.5
    return low < most


def of_trace(jobs: Sequence[Job], speed: float) -> tuple[list[Job], list[float]]:
    """A trace's requests in the order of their times, and these from the first on; ValueError where they have none."""
    timed = sorted(((job.at_s, job) for job in jobs if job.at_s is not None), key=lambda each: each[0])
    if len(timed) < len(jobs):
        raise ValueError("trace_speed needs a dataset whose requests have times")
    return [job for _, job in timed], [(at_s - timed[0][0]) / speed for at_s, _ in timed]
