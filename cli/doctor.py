"""`minisgl doctor`: whether this machine has what minisgl needs, and what is amiss."""

import dataclasses
import json
from typing import Annotated

import typer
from rich.console import Console

from minisgl.doctor.checks import examine

COLORS = {"ok": "green", "warn": "yellow", "broken": "red"}


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False) -> None:
    """Check this machine: packages, CPU, memory, GPUs, CUDA, attention backends, cache, disk, port.

    One line each: ok; warn, where it works but not as well as it might; broken, and then the exit code is 1.
    """
    findings = list(examine())
    broken = any(finding.status == "broken" for finding in findings)
    if as_json:
        print(json.dumps({"ok": not broken, "findings": [dataclasses.asdict(finding) for finding in findings]}))
    else:
        console = Console()
        for status, name, text in map(dataclasses.astuple, findings):
            console.print(f"[{COLORS[status]}]{status:<6}[/] {name:<18}", end=" ", highlight=False)
            console.print(text, markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(broken)
