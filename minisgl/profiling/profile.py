"""`minisgl profile`: a trace of an engine of our own, of a server, or of earlier, and the report on it."""

import asyncio
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, suppress
from pathlib import Path
from typing import NoReturn

import msgspec
from rich.console import Console

from minisgl.bench.answer import ServerFault
from minisgl.bench.client import HttpServer
from minisgl.bench.online import OneAtATime
from minisgl.bench.record import write_whole
from minisgl.config import EngineConfig
from minisgl.profiling import report, trace
from minisgl.profiling.facts import SETTLING, engine_facts
from minisgl.profiling.figures import figures
from minisgl.profiling.options import TRACE, ProfileConfig
from minisgl.source.cache_folder import Report

Say = Callable[[str], None]

ANSWER_S = 300.0
"""How long a server may take to write its trace down."""
UNDER_NSYS = "_MINISGL_UNDER_NSYS"
"""Set in the environment of a process around which nsys is already."""


def profile(
    config: EngineConfig, options: ProfileConfig, loading: AbstractContextManager[Report], say: Say, console: Console
) -> None:
    """Do what the options say, print the report to `console` and write the files; raises ValueError.

    `loading` is entered while a model is loaded, and `say` gets a line of what goes on.
    """
    if options.read:
        found = trace.merge([trace.read(Path(file).read_bytes(), file) for file in options.read])
    elif options.url is not None:
        found = _of_server(options.url.rstrip("/").removesuffix("/v1"), options, say)
    else:
        found = _of_own(config, options, loading, say)
    if found is None:
        return
    understood = trace.understand(found)
    result = figures(understood)
    with ExitStack() as rest:  # what is pushed is done in reverse, also after one of them has failed
        if options.output is not None:
            rest.callback(write_whole, Path(options.output), msgspec.json.encode(result) + b"\n")
        if options.html is not None:
            rest.callback(report.write_html, result, Path(options.html))
        if options.trace or not options.read:
            phases = [step.phase for step in understood.facts.steps]
            rest.callback(_write, found, phases, Path(options.trace or TRACE), say)
        report.show(result, console)


def _write(found: trace.Raw, phases: Sequence[str], path: Path, say: Say) -> None:
    """Write the trace, or one for each phase, whose name then is in the file's."""
    parts = trace.split(found, phases)
    for phase, part in parts.items():
        stem, dot, ending = path.name.partition(".")
        file = path.with_name(f"{stem}-{phase}{dot}{ending}") if len(parts) > 1 else path
        write_whole(file, trace.packed(part))
        say(f"the trace is in {file}: see it at https://ui.perfetto.dev")


def _of_own(
    config: EngineConfig, options: ProfileConfig, loading: AbstractContextManager[Report], say: Say
) -> trace.Raw | None:
    """The trace of an engine in this process; None if its steps were only to be timed, or seen by nsys."""
    from minisgl.build import resolve
    from minisgl.profiling.capture import Recording, allocations, seen_by_nsys  # which bring torch
    from minisgl.profiling.load import TIMED, Load

    device = resolve(config).device
    if options.nsys is not None and UNDER_NSYS not in os.environ:
        _become_nsys(options.nsys, device)
    with allocations(options.memory, device):
        with loading as tell:
            load = Load(config, options, tell)
        with closing(load.engine):
            count = options.steps or TIMED
            plain_step_us = load.make_steps(count) / count * 1e6
            say(f"a step takes {plain_step_us / 1e3:,.3f} ms, the mean of {count}, while nothing is captured")
            if options.nsys is not None:
                with seen_by_nsys(load.engine, count):
                    load.make_steps(count)
            if options.nsys is not None or not options.steps:
                return None
            facts = engine_facts(load.folder.name, str(load.folder.path), load.config, say)
            facts.plain_step_us = None if options.phase == "serve" else plain_step_us  # else phases mix by chance
            recording = Recording(load.engine, facts, count + SETTLING, options.ops)
            try:
                load.make_steps(count + SETTLING)
            finally:
                recording.stop()
            return trace.read(recording.trace(), "the trace")


def _become_nsys(file: str, device: str) -> NoReturn:
    """Let this process be nsys, which runs the same command; raises ValueError where that cannot be."""
    if (nsys := shutil.which("nsys")) is None:
        raise ValueError("nsys is not installed, or not on PATH: it is part of Nsight Systems, developer.nvidia.com")
    if device != "cuda":
        raise ValueError("nsys needs a CUDA device: leave nsys unset, and torch's profiler sees the CPU")
    os.environ[UNDER_NSYS] = "1"
    command = ["nsys", "profile", f"--output={file}", "--force-overwrite=true", "--trace=cuda,nvtx"]
    command += ["--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--cuda-graph-trace=node"]
    os.execv(nsys, [*command, sys.executable, *sys.orig_argv[1:]])


def _of_server(url: str, options: ProfileConfig, say: Say) -> trace.Raw:
    """The trace of a server at what it does meanwhile; also when this is interrupted, it profiles no longer."""

    async def watch(server: HttpServer) -> bytes:
        try:
            await server.ask(f"/start_profile?steps={options.steps + SETTLING}", b"")
            say(f"watching {url} for {options.seconds:g} s …")
            await asyncio.sleep(options.seconds)
        except asyncio.CancelledError:
            with suppress(ServerFault):  # it may not have begun
                await server.ask("/stop_profile", b"")
            raise
        return b"".join([part async for part in server.answer("/stop_profile", b"")])

    try:
        return trace.read(OneAtATime(url, options.api_key, ANSWER_S).run(watch), url)
    except ServerFault as error:
        raise ValueError(f"{url} does not answer as it should: {error}") from error
