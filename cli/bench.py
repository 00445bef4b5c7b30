"""`minisgl bench`: how fast a model runs on this machine."""

import dataclasses
import tomllib
from functools import partial
from pathlib import Path

import typer

from minisgl.bench.load import LoadConfig
from minisgl.bench.output import OutputConfig
from minisgl.bench.workload import WorkloadConfig
from minisgl.config import EngineConfig, SamplingParams

from .terminal import LogConfig, progress, say, start_logging, table_console


def bench(
    context: typer.Context,
    workload: WorkloadConfig,
    load: LoadConfig,
    results: OutputConfig,
    sampling: SamplingParams,
    config: EngineConfig,
    logs: LogConfig,
) -> None:
    """Measure how fast a model runs here, or how a server fares under load.

    Without --qps or --concurrency: throughput of many requests at once, or with --latency prefill and decode apart.
    With one of them a server is started and measured, or with --url any that speaks OpenAI's protocol. The tables go
    to stdout, all else to stderr; the exit code is 1 if a request failed. Answers go on after end-of-text tokens,
    unless --no-ignore-eos is given. A model that the --config file names as ./… lies relative to that file.
    """
    from minisgl.bench import offline, online  # not before the options are known to be right: they bring numpy

    console = start_logging(logs)
    config = _beside_file(config, context.params["config"] or [])
    finish = partial(results.keep, table_console())
    if load.online:
        online.measure(config, workload, load, sampling, progress(console), partial(say, console), finish)
    else:
        offline.measure(config, workload, sampling, progress(console), partial(say, console), finish)


def _beside_file(config: EngineConfig, files: list[Path]) -> EngineConfig:
    """The same, with a relative model path that a file gives made one from here."""
    for file in map(Path, files):  # texts, in some versions of typer
        table = tomllib.loads(file.read_text(encoding="utf-8"))
        tables = [table, *(each for each in table.values() if isinstance(each, dict))]
        if config.model.startswith(("./", "../")) and config.model in [each.get("model") for each in tables]:
            return dataclasses.replace(config, model=str((file.parent / config.model).absolute()))
    return config
