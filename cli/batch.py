"""`minisgl run --input`: answer a file of requests in OpenAI's batch format."""

import functools
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console

from minisgl.config import SamplingParams
from minisgl.server.batch_file import Results, Row, error_row, open_results, read_rows, result_row, survey
from minisgl.server.protocol import ApiRequest, TokenText, build_response, parse_request

from .terminal import Meter

if TYPE_CHECKING:
    from minisgl.llm import LLM
    from minisgl.results import RequestOutput

WINDOW = 4
"""Rows that are in memory together, for each that may run: what bounds the memory that a long file takes."""


def answer_file(
    source: Path, target: Path | None, sampling: SamplingParams, console: Console, start: "Callable[[], LLM]"
) -> bool:
    """Do what is missing in the results file, or all of it to stdout; returns whether every line has its answer.

    `sampling` is for the fields that a row does not set. `start` loads the model, if there is anything to do.
    """
    with _open_requests(source, target) as file:
        found = survey(file)
        for fault in found.faults:
            _say(console, f"{source}: {fault}")
        to_stdout = nullcontext(Results(sys.stdout.buffer, "stdout"))
        with open_results(target, found.offsets) if target else to_stdout as results:
            missing = [offset for custom_id, offset in found.offsets.items() if custom_id not in results.done]
            answered, failed, cost = 0, 0, ""
            if missing:
                with start() as llm, Meter(console, len(missing), llm.stats) as meter:

                    def write(row: dict[str, Any]) -> None:
                        with nullcontext() if target else meter.paused():
                            results.write(row)

                    try:
                        failed = _answer_rows(llm, read_rows(file, missing), write, sampling, meter)
                    except SystemExit:
                        rest = f": {target} has what is finished, and the same command does the rest"
                        _say(console, f"stopped{rest if target else ''}")
                        raise
                answered = len(missing) - failed
                tokens = f"tokens in {meter.tokens_in} (cached {meter.tokens_cached}), out {meter.tokens_out}"
                cost = f"; {tokens}, {meter.rate:.1f} tok/s"
    before = len(found.offsets) - len(missing)
    notes = [(failed, "failed"), (before, "were there already"), (len(found.faults), "lines have no row")]
    _say(console, ", ".join([f"{answered} answered", *(f"{n} {what}" for n, what in notes if n)]) + cost)
    return not failed and not found.faults


@contextmanager
def _open_requests(source: Path, target: Path | None) -> Iterator[IO[bytes]]:
    try:
        file = open(source, "rb")  # noqa: SIM115  closed below
    except OSError as error:
        raise ValueError(f"cannot read {source}: {error.strerror}") from error
    with file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError(f"{source} is not a file that can be read twice: give --input a regular file")
        if target is not None and target.exists() and target.samefile(source):
            raise ValueError(f"{target} is the file of requests itself: give --output another name")
        yield file


@dataclass
class Job:
    """A row while it is worked on."""

    custom_id: str
    request: ApiRequest
    prompts: list[list[int]]
    outputs: "dict[int, RequestOutput]" = field(default_factory=dict)  # by place in `prompts`


def _answer_rows(
    llm: "LLM", rows: Iterator[Row], write: Callable[[dict[str, Any]], None], sampling: SamplingParams, meter: Meter
) -> int:
    """Write a result for every row as soon as it is there; returns how many are errors."""
    failed = 0
    token_text = _token_text(llm)
    while window := list(islice(rows, WINDOW * llm.config.max_running_requests)):
        work: list[tuple[Job, int]] = []  # each prompt: of which job, and which of its prompts
        for row in window:
            try:
                job = _prepare(llm, row, sampling)
            except ValueError as error:
                failed += 1
                write(error_row(row.custom_id, error))
                meter.advance()
            else:
                work += [(job, index) for index in range(len(job.prompts))]

        def finished(number: int, output: "RequestOutput", work: list[tuple[Job, int]] = work) -> None:
            job, index = work[number]
            job.outputs[index] = output
            if len(job.outputs) == len(job.prompts):
                outputs = [job.outputs.pop(place) for place in range(len(job.prompts))]
                response = build_response(job.request, outputs, llm.model_name, int(time.time()), token_text)
                write(result_row(job.custom_id, response))
                meter.advance(*outputs)

        params = [job.request.sampling for job, _ in work]
        llm.generate([job.prompts[index] for job, index in work], params, on_finished=finished)
    return failed


def _prepare(llm: "LLM", row: Row, defaults: SamplingParams) -> Job:
    """What a row asks for, as token ids, found to be right; raises ValueError where it is not."""
    route, body = row.route_and_body()
    request = parse_request(route, body, dict.fromkeys((llm.model_name, llm.config.model)), defaults)
    if request.messages:
        prompts = [llm.chat_prompt(request.messages, **request.template_options)]
    else:
        prompts = [llm.tokenize(prompt) if isinstance(prompt, str) else prompt for prompt in request.prompts]
    for prompt in prompts:
        llm.check(prompt, request.sampling)
    return Job(row.custom_id, request, prompts)


def _token_text(llm: "LLM") -> TokenText:
    @functools.cache
    def text_of(token: int) -> tuple[str, bytes | None]:
        # Not `detokenize`, which refuses ids that a padded vocabulary has and the tokenizer has not.
        text = llm.tokenizer.detokenizer.decode([token], False) if llm.tokenizer else ""
        return text, None if "\ufffd" in text else text.encode()

    return text_of


def _say(console: Console, line: str) -> None:
    console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)
