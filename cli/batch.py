"""`minisgl run --input`: answer a file of requests in OpenAI's batch format."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console

from minisgl.config import SamplingParams
from minisgl.openai.batch import answer_rows
from minisgl.openai.batch_file import Results, open_results, read_lines, survey

from .terminal import Meter, say

if TYPE_CHECKING:
    from minisgl.llm import LLM


def answer_file(
    source: Path, target: Path | None, sampling: SamplingParams, console: Console, start: "Callable[[], LLM]"
) -> bool:
    """Do what is missing in the results file, or all of it to stdout; returns whether every line has its answer.

    `sampling` is for the fields that a row does not set. `start` loads the model, if there is anything to do.
    """
    with _open_requests(source, target) as file:
        found = survey(file)
        for fault in found.faults:
            say(console, f"{source}: {fault}")
        to_stdout = nullcontext(Results(sys.stdout.buffer, "stdout"))
        with open_results(target, found.offsets) if target else to_stdout as results:
            missing = len(found.offsets.keys() - results.done)
            answered, failed, cost = 0, 0, ""
            if missing:
                with start() as llm, Meter(console, missing, llm) as meter:

                    def write(row: dict[str, Any]) -> None:
                        with nullcontext() if target else meter.paused():
                            results.write(row)

                    try:
                        lines = read_lines(file, found.offsets, results.done)
                        failed = answer_rows(llm, lines, sampling, write, meter.advance, meter.show)
                    except SystemExit:
                        rest = f": {target} has what is finished, and the same command does the rest"
                        say(console, f"stopped{rest if target else ''}")
                        raise
                answered = missing - failed
                tokens = f"tokens in {meter.tokens_in} (cached {meter.tokens_cached}), out {meter.tokens_out}"
                cost = f"; {tokens}, {meter.rate:.1f} tok/s" if answered else ""
    before = len(found.offsets) - missing
    notes = [(failed, "failed"), (before, "were there already"), (len(found.faults), "lines have no row")]
    say(console, ", ".join([f"{answered} answered", *(f"{n} {what}" for n, what in notes if n)]) + cost)
    return not failed and not found.faults


@contextmanager
def _open_requests(source: Path, target: Path | None) -> Iterator[IO[bytes]]:
    if source.exists() and not source.is_file():
        raise ValueError(f"{source} is not a file that can be read twice: give --input a regular file")
    try:
        file = open(source, "rb")  # noqa: SIM115  closed below
    except OSError as error:
        raise ValueError(f"cannot read {source}: {error.strerror}") from error
    with file:
        if target is not None and target.exists() and target.samefile(source):
            raise ValueError(f"{target} is the file of requests itself: give --output another name")
        yield file
