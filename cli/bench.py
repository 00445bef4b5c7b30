"""`minisgl bench`: how fast a model runs on this machine."""

import dataclasses
import json
import os
import tomllib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from minisgl.bench.offline import measure
from minisgl.bench.workload import WorkloadConfig
from minisgl.config import EngineConfig, SamplingParams

from .terminal import LogConfig, progress, say, start_logging, table_console


def bench(
    context: typer.Context,
    workload: WorkloadConfig,
    sampling: SamplingParams,
    config: EngineConfig,
    logs: LogConfig,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write everything measured as JSON.")] = None,
) -> None:
    """Measure how fast a model runs here.

    Throughput of many requests at once, or with --latency TTFT and decode speed of one at a time. The table goes to
    stdout, all else to stderr. Answers go on after end-of-text tokens, unless --no-ignore-eos is given. A model that
    the --config file names as ./… lies relative to that file.
    """
    if output is not None and (output.is_dir() or not os.access(output.absolute().parent, os.W_OK)):
        raise ValueError(f"cannot write {output}: give --output a file in a folder that is there and can be written")
    console = Console(stderr=True)
    start_logging(console, logs)

    config = _beside_file(config, context.params["config"] or ())
    measurement = measure(config, workload, sampling, progress(console), partial(say, console))
    measurement.show(table_console())
    if output is not None:
        output.write_text(json.dumps(measurement.as_json(), indent=2) + "\n", encoding="utf-8")


def _beside_file(config: EngineConfig, files: Sequence[Path]) -> EngineConfig:
    """The same, with a relative model path that a file gives made one from here."""
    for file in map(Path, files):  # texts, in some versions of typer
        table = tomllib.loads(file.read_text(encoding="utf-8"))
        tables = [table, *(each for each in table.values() if isinstance(each, dict))]
        if config.model.startswith(("./", "../")) and config.model in [each.get("model") for each in tables]:
            return dataclasses.replace(config, model=str((file.parent / config.model).absolute()))
    return config
