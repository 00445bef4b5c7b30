"""What was measured, as a table and as JSON.

The JSON object has

* `format`: 1; `date`: UTC, ISO 8601; `mode`: `throughput` or `latency`;
* `versions`: of python, minisgl, torch and the kernel libraries that are installed; `device`: what it calls itself;
* `model`: its name; `shape`: what its config.json says; `engine`, `workload`, `sampling`: every option, `engine` with
  all that was `auto` resolved;
* `repetitions`: a list of the figures below, one object each; `median`: the median of each figure;
* `no_bound`: why no figure has a bound, or null.

Figures of throughput: `time_s`, the wall time of `LLM.generate`; `tokens_in`, of these `tokens_cached` found in the
prefix cache, and `tokens_out`; `output_tokens_per_s` = tokens_out / time_s; `total_tokens_per_s` = (tokens_in +
tokens_out) / time_s; `steps` of the engine; `mean_batch` = tokens_out / steps, the requests that a step brought a
token; `retractions`; `bound_s`, the least time by `roofline`, and `bound_share` = bound_s / time_s.

Figures of latency: `ttft_s`, from asking for an answer to a prompt of `ttft_tokens_in` tokens until the host knows its
first token; `decode_s`, of another request with `tokens_in` and `tokens_out` tokens, from its first token to its last;
`output_tokens_per_s` = (tokens_out - 1) / decode_s; `bound_s` and `bound_share` of decode_s, `ttft_bound_s` and
`ttft_bound_share` of ttft_s.
"""

import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table

from minisgl import __version__
from minisgl.bench.machine import installed

FORMAT = 1
PACKAGES = ("torch", "triton", "flashinfer-python", "flash-attn-4")

Figures = Mapping[str, float]

COLUMNS: Mapping[str, tuple[str, float, str]] = MappingProxyType(
    {
        "output_tokens_per_s": ("output tok/s", 1, ",.1f"),
        "bound_share": ("of bound", 1, ".1%"),
        "total_tokens_per_s": ("total tok/s", 1, ",.1f"),
        "time_s": ("time s", 1, ".3f"),
        "steps": ("steps", 1, ",.0f"),
        "mean_batch": ("mean batch", 1, ".1f"),
        "tokens_in": ("in", 1, ",.0f"),
        "tokens_cached": ("cached", 1, ",.0f"),
        "tokens_out": ("out", 1, ",.0f"),
        "ttft_s": ("TTFT ms", 1e3, ".2f"),
        "ttft_bound_share": ("of bound", 1, ".1%"),
        "ttft_tokens_in": ("TTFT in", 1, ",.0f"),
    }
)
"""The figures of the table, where they are there: heading, factor to its unit, format."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A finished benchmark; the module's docstring says what each figure is."""

    mode: Literal["throughput", "latency"]
    model: str
    device: str
    engine: dict[str, Any]
    workload: dict[str, Any]
    sampling: dict[str, Any]
    shape: dict[str, Any]
    repetitions: Sequence[Figures]
    no_bound: str | None

    @property
    def median(self) -> Figures:
        """Of each figure, its median over the repetitions."""
        return {name: statistics.median(each[name] for each in self.repetitions) for name in self.repetitions[0]}

    def as_json(self) -> dict[str, Any]:
        """The JSON object that the module's docstring describes."""
        versions = {"python": platform.python_version(), "minisgl": __version__}
        versions |= {name: found for name in PACKAGES if (found := installed(name))}
        head = {"format": FORMAT, "date": datetime.now(UTC).isoformat(timespec="seconds"), "versions": versions}
        return {**head, **asdict(self), "median": self.median}

    def show(self, console: Console) -> None:
        """Print each repetition and the median as a table, and what the figures alone do not say."""
        shown = {name: column for name, column in COLUMNS.items() if name in self.median}
        table = Table("run", box=box.SIMPLE_HEAD, padding=0)  # fits 80 columns
        for heading, *_ in shown.values():
            table.add_column(heading, justify="right")
        rows = [*((str(n), each) for n, each in enumerate(self.repetitions, start=1)), ("median", self.median)]
        for name, figures in rows:
            values = (format(figures[key] * factor, layout) for key, (_, factor, layout) in shown.items())
            bold = "bold" if name == "median" else ""
            table.add_row(name, *values, style=bold, end_section=name == str(len(self.repetitions)))
        notes = [f"no bound: {self.no_bound}"] if self.no_bound else []
        if retractions := sum(each.get("retractions", 0) for each in self.repetitions):
            notes.append(f"{retractions:.0f} retractions: the KV pool is too small for these requests")
        title = f"{self.mode} of {self.model} in {self.engine['dtype']} on {self.device}"
        console.print(title, table, *notes, sep="\n", markup=False, highlight=False)
