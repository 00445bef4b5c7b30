"""Answer rows of a batch file with an LLM in this process."""

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from minisgl.config import SamplingParams
from minisgl.openai.answers import TokenBytes, build_response
from minisgl.openai.batch_file import error_row, read_row, result_row
from minisgl.openai.protocol import ApiRequest, RequestError, parse_request

if TYPE_CHECKING:
    from minisgl.llm import LLM
    from minisgl.results import RequestOutput


@dataclass
class Job:
    """A row while it is worked on."""

    custom_id: str
    request: ApiRequest
    prompts: Sequence[str | list[int]]
    outputs: "dict[int, RequestOutput]" = field(default_factory=dict)  # by place in `prompts`


def answer_rows(
    llm: "LLM",
    lines: Iterable[tuple[str, bytes]],
    defaults: SamplingParams,
    write: Callable[[dict[str, Any]], None],
    ended: "Callable[..., None]",
    stepped: Callable[[], None],
) -> int:
    """Write a result for every row as soon as it is there; returns how many are errors.

    `lines` are the rows' custom_ids and their text, and taken as there is room, so a long file needs no more memory
    than a short one. `defaults` is for the sampling fields that a row does not set. After each row `ended` is told its
    outputs; `stepped` is called after each step of the engine.
    """
    failed = 0
    token_bytes = _token_bytes(llm)
    work: dict[int, tuple[Job, int]] = {}  # by a prompt's number: whose it is, and its place there

    def fail(custom_id: str, error: ValueError) -> None:
        nonlocal failed
        failed += 1
        write(error_row(custom_id, error))
        ended()

    def prompts() -> Iterator[tuple[str | list[int], SamplingParams]]:
        count = 0
        for custom_id, line in lines:
            try:
                job = _prepare(llm, custom_id, line, defaults)
            except ValueError as error:
                fail(custom_id, error)
                continue
            for place, prompt in enumerate(job.prompts):
                work[count] = job, place
                count += 1
                yield prompt, job.request.sampling

    def finish(job: Job) -> None:
        outputs = [job.outputs[place] for place in range(len(job.prompts))]
        if any(answer.finish_reason == "error" for output in outputs for answer in output.outputs):
            fail(job.custom_id, RequestError("the model's scores were not finite numbers", status=500))
            return
        response = build_response(job.request, outputs, llm.model_name, int(time.time()), token_bytes)
        write(result_row(job.custom_id, response))
        ended(*outputs)

    for outputs in llm.feed(prompts()):
        for number, output in outputs:
            job, place = work.pop(number)
            job.outputs[place] = output
            if len(job.outputs) == len(job.prompts):
                finish(job)
        stepped()
    return failed


def _prepare(llm: "LLM", custom_id: str, line: bytes, defaults: SamplingParams) -> Job:
    """What a row asks for, found to be right; raises ValueError where it is not."""
    try:
        row = read_row(line)
        if row.custom_id != custom_id:
            raise ValueError("the file of requests was changed while it was read")
        route, body = row.route_and_body()
        request = parse_request(route, body, dict.fromkeys((llm.model_name, llm.config.model)), defaults)
        prompts = request.prompts
        if request.messages:
            prompts = [llm.chat_prompt(request.messages, **request.template_options)]
        for prompt in prompts:
            llm.check(prompt, request.sampling)
    except RecursionError:  # lists in lists in lists
        raise ValueError("the body is nested too deeply") from None
    return Job(custom_id, request, prompts)


def _token_bytes(llm: "LLM") -> TokenBytes:
    return functools.cache(llm.tokenizer.token_bytes) if llm.tokenizer else lambda token: b""
