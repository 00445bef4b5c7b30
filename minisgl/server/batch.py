"""Answer rows of a batch file with an LLM in this process."""

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from minisgl.config import SamplingParams
from minisgl.server.batch_file import Row, error_row, result_row
from minisgl.server.protocol import ApiRequest, TokenText, build_response, parse_request

if TYPE_CHECKING:
    from minisgl.llm import LLM
    from minisgl.results import RequestOutput

WINDOW = 4
"""Rows that are in memory together, for each that may run: what bounds the memory that a long file takes."""


@dataclass
class Job:
    """A row while it is worked on."""

    custom_id: str
    request: ApiRequest
    prompts: list[list[int]]
    outputs: "dict[int, RequestOutput]" = field(default_factory=dict)  # by place in `prompts`


def answer_rows(
    llm: "LLM",
    rows: Iterator[Row],
    defaults: SamplingParams,
    write: Callable[[dict[str, Any]], None],
    ended: "Callable[..., None]",
) -> int:
    """Write a result for every row as soon as it is there; returns how many are errors.

    `defaults` is for the sampling fields that a row does not set. After each row `ended` is told its outputs.
    """
    failed = 0
    token_text = _token_text(llm)
    while window := list(islice(rows, WINDOW * llm.config.max_running_requests)):
        work: list[tuple[Job, int]] = []  # each prompt: of which job, and which of its prompts
        for row in window:
            try:
                job = _prepare(llm, row, defaults)
            except ValueError as error:
                failed += 1
                write(error_row(row.custom_id, error))
                ended()
            else:
                work += [(job, index) for index in range(len(job.prompts))]

        def finished(number: int, output: "RequestOutput", work: list[tuple[Job, int]] = work) -> None:
            job, index = work[number]
            job.outputs[index] = output
            if len(job.outputs) == len(job.prompts):
                outputs = [job.outputs.pop(place) for place in range(len(job.prompts))]
                response = build_response(job.request, outputs, llm.model_name, int(time.time()), token_text)
                write(result_row(job.custom_id, response))
                ended(*outputs)

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
