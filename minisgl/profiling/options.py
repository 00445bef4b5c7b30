"""What a user of `minisgl profile` can set, beside the engine's own options."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_doc import Doc

from minisgl.bench.load import is_web_address
from minisgl.bench.output import can_be_written
from minisgl.bench.workload import check_unset
from minisgl.config import Flag, check_range, check_types

TRACE = "profile.json.gz"
MOST_STEPS, MOST_TOKENS = 990, 2**31 - 1
FILES = ("trace", "output", "html", "nsys", "memory")
OF_AN_ENGINE = ("nsys", "phase", "batch", "input_len", "output_len", "ops", "memory")
"""What only an engine of our own can do."""


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Profile

    Raises ValueError, naming the field, its value and what is allowed.
    """

    phase: Annotated[Literal["prefill", "decode", "serve"], Doc("What steps compute: prompts, answers, both.")] = (
        "decode"
    )
    batch: Annotated[int, Doc("Requests at once."), Flag(aliases=("--batch-size",))] = 1
    input_len: Annotated[int, Doc("Prompt length in tokens.")] = 128
    output_len: Annotated[int, Doc("With phase serve: answer length in tokens.")] = 128
    steps: Annotated[int, Doc("Steps to capture; 0: only time steps, and capture nothing.")] = 20
    ops: Annotated[bool, Doc("On a GPU: note torch's operators on the host, too, which makes small steps longer.")] = (
        False
    )
    trace: Annotated[str | None, Doc(f"Where the trace goes, one file for each phase; default: {TRACE}.")] = None
    output: Annotated[str | None, Doc("Write the report as JSON, for --compare.")] = None
    html: Annotated[str | None, Doc("Write the report as one HTML file.")] = None
    memory: Annotated[str | None, Doc("Write what CUDA's allocator did, for pytorch.org/memory_viz.")] = None
    nsys: Annotated[str | None, Doc("Capture with Nsight Systems instead, and write its report.")] = None
    read: Annotated[Sequence[str] | None, Doc("Report on an earlier trace; or on several, those of ranks.")] = None
    url: Annotated[str | None, Doc("Capture a running minisgl serve, at what it does anyway.")] = None
    api_key: Annotated[str | None, Doc("Key that the server at url asks for.")] = None
    seconds: Annotated[float, Doc("With url: how long to watch for steps.")] = 5.0

    def __post_init__(self) -> None:
        check_types(self)
        check_range("batch", self.batch, least=1, most=65_536)
        check_range("input_len", self.input_len, least=1, most=MOST_TOKENS)
        check_range("output_len", self.output_len, least=1, most=MOST_TOKENS)
        check_range("seconds", self.seconds, least=0.1, most=3600)
        for name in FILES:
            if (given := getattr(self, name)) is not None and not can_be_written(given):
                raise ValueError(f"{name} must be a file in a folder that is there and can be written, got {given!r}")
        if self.url is not None and not is_web_address(self.url):
            raise ValueError(f"url must be like http://127.0.0.1:8000, got {self.url!r}")
        own = self.read is None and self.url is None
        check_range("steps", self.steps, least=0 if own and self.nsys is None else 1, most=MOST_STEPS)
        for ignored, names, why in (
            (self.read is not None, ("url", "steps", *OF_AN_ENGINE), "beside read"),
            (self.url is not None, OF_AN_ENGINE, "beside url"),
            (self.url is None, ("api_key", "seconds"), "without url"),
            (self.nsys is not None, ("trace", "output", "html", "ops", "memory"), "beside nsys"),
            (not self.steps, ("trace", "output", "html", "ops"), "with steps 0, which capture nothing"),
            (self.phase != "serve", ("output_len",), f"with phase {self.phase}"),
        ):
            if ignored:
                check_unset(self, names, why)
