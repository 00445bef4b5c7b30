"""Measure an engine in this process: many requests at once (throughput), or shape by shape (latency).

The engine is started and warm before the clock starts: it warms its kernels up itself, and then answers a repetition
that is not counted. Every repetition has prompts that the prefix cache does not know.

The host knows when each step's tokens came, so it knows where phases end: prefill with the last request's first token,
decode with the last token. A prefill beside which other requests decoded already is called mixed.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from minisgl.bench.ceilings import ceilings
from minisgl.bench.nvml import Sampler, open_gpus
from minisgl.bench.record import Event, Pass, Phase, RequestRecord, Run
from minisgl.bench.workload import DEFAULT_REPEAT, WARM_UP, Job, Tokenize, WorkloadConfig, latency_jobs, throughput_jobs
from minisgl.config import EngineConfig, SamplingParams
from minisgl.doctor.machine import device_name
from minisgl.source.cache_folder import Report

if TYPE_CHECKING:
    from minisgl.llm import LLM
    from minisgl.results import RequestOutput

Say = Callable[[str], None]

PROGRESS_EVERY_S = 0.2
"""So seldom that it costs a run nothing."""


def measure(
    config: EngineConfig,
    workload: WorkloadConfig,
    sampling: SamplingParams,
    progress: AbstractContextManager[Report],
    say: Say,
    finish: Callable[[Run], None],
) -> None:
    """Start an engine, measure as often as `workload.repeat` says, and give all to `finish`, also when it is stopped.

    `progress` shows how far each is, `say` gets a line before the warm-up and after each repetition.
    ValueError, before anything is measured, for a workload that the engine cannot do as it stands.
    """
    sampling = complete(sampling)
    from minisgl.llm import LLM  # not before the options are known to be right: it brings torch

    run = None
    try:
        with ExitStack() as stack:
            report = stack.enter_context(progress)
            llm = stack.enter_context(LLM.from_config(config, report))
            _check_fits(workload, llm)
            run = _describe(llm, workload, sampling, say)
            sampler = stack.enter_context(Sampler(open_gpus(llm.config.device, llm.config.tp)))
            run.no_nvml = sampler.missing
            _all(llm, workload, sampling, sampler, run, report, say)
    finally:
        if run is not None and run.passes:
            finish(run)


def complete(sampling: SamplingParams) -> SamplingParams:
    """Answers have the length that the workload says, unless end-of-text tokens are to count."""
    if sampling.max_tokens is not None:
        raise ValueError(f"max_tokens must be unset, got {sampling.max_tokens}: output_len says how long answers are")
    if sampling.n not in (None, 1):
        raise ValueError(f"n must be 1, got {sampling.n}: raise requests instead")
    return sampling.with_defaults({"ignore_eos": True})


def _check_fits(workload: WorkloadConfig, llm: "LLM") -> None:
    vocab_size, context = llm.model_config.vocab_size, llm.max_model_len
    if workload.prompts == "random" and workload.max_token_id >= vocab_size:
        raise ValueError(f"max_token_id must be at most {vocab_size - 1} for this model, got {workload.max_token_id}")
    if workload.turns > 1:
        raise ValueError(f"turns must be 1 without a server to talk to, got {workload.turns}: give qps or concurrency")
    if workload.latency:
        longest = max(input_len for _, input_len in workload.shapes) + workload.output_range[0]
    else:
        jobs = throughput_jobs(workload, 0, _tokenize(llm))
        if any(job.body is not None for job in jobs):
            raise ValueError(f"dataset has requests for a server, in {workload.dataset}: give qps or concurrency")
        longest = max(len(job.prompt) + job.output_len for job in jobs)
    if longest > context:
        raise ValueError(
            f"input_len and output_len ask for {longest} tokens in one request, and the context holds {context}: "
            "shorten them, or raise max_model_len or num_pages where they are what limits it"
        )


def _tokenize(llm: "LLM") -> Tokenize | None:
    return partial(llm.tokenize, add_special_tokens=False) if llm.tokenizer else None


def _describe(llm: "LLM", workload: WorkloadConfig, sampling: SamplingParams, say: Say) -> Run:
    config, device = llm.config, device_name(llm.config.device)
    run = Run(
        mode="latency" if workload.latency else "throughput",
        model=llm.model_name,
        device=device,
        devices=config.tp,
        engine=asdict(config),
        shape=asdict(llm.model_config),
        workload=asdict(workload),
        sampling=asdict(sampling),
    )
    try:
        run.ceilings = ceilings(device, config.device, config.dtype, say)
    except (ValueError, OSError) as error:
        run.no_ceilings = str(error)
    return run


def _plan(workload: WorkloadConfig, tokenize: Tokenize | None) -> Iterator[tuple[Pass, list[Job], Iterable[list[Job]]]]:
    """Each pass, the requests that warm up for it, where there are any, and those of its repetitions."""
    repeat = workload.repeat or DEFAULT_REPEAT
    if not workload.latency:
        for number in range(repeat):
            warm_up = [] if number else throughput_jobs(workload, WARM_UP, tokenize)
            yield _new_pass(f"{number + 1}", workload, number), warm_up, [throughput_jobs(workload, number, tokenize)]
        return
    for batch, input_len in workload.shapes:
        part = _new_pass(f"{batch} × {input_len}", workload, 0)
        part.load = {"batch": batch, "input_len": input_len, "output_len": workload.output_range[0]}
        jobs = partial(latency_jobs, workload, batch, input_len)
        yield part, jobs(WARM_UP), map(jobs, range(repeat))


def _all(
    llm: "LLM",
    workload: WorkloadConfig,
    sampling: SamplingParams,
    sampler: Sampler,
    run: Run,
    report: Report,
    say: Say,
) -> None:
    for part, warm_up, repetitions in _plan(workload, _tokenize(llm)):
        if warm_up:
            say(f"{part.name}: warming up …")
            unmeasured = _new_pass("warm-up", workload, WARM_UP)
            _answer(llm, warm_up, sampling, unmeasured, report)
            if workload.latency and len(unmeasured.phases) < 2:
                raise ValueError("answers ended with their first token: leave ignore_eos on, and stop tokens unset")
        run.passes.append(part)
        try:
            for jobs in repetitions:
                _answer(llm, jobs, sampling, part, report)
            part.interrupted = False
        finally:
            part.samples = sampler.between(part.began_s, part.ended_s or time.monotonic())
        tokens, busy_s = (sum(p.tokens_out for p in part.phases), sum(p.ended_s - p.began_s for p in part.phases))
        say(f"{part.name}: {tokens / busy_s:,.1f} output tok/s" if tokens else f"{part.name}: failed")


def _new_pass(name: str, workload: WorkloadConfig, repetition: int) -> Pass:
    return Pass(name=name, seed=f"{workload.workload_seed}/{repetition}", began_s=time.monotonic(), interrupted=True)


def _answer(llm: "LLM", jobs: Sequence[Job], sampling: SamplingParams, part: Pass, report: Report) -> None:
    """Give all requests at once, wait for their answers, and add what happened to the pass."""
    inputs = [(job.prompt, replace(sampling, max_tokens=job.output_len)) for job in jobs]
    before, tokens_before = llm.stats(), llm.generated_tokens
    steps: list[Event] = []  # when the host knew a step's tokens, and how many there had been by then
    done: list[RequestRecord] = []
    begin_s = shown_s = time.monotonic()
    if not part.requests:
        part.began_s = begin_s
    total = sum(job.output_len for job in jobs)
    try:
        for ended in llm.feed(inputs):
            now_s = time.monotonic()
            steps.append(Event(now_s, llm.generated_tokens - tokens_before))
            done += [_record(output, jobs[number].output_len, begin_s, now_s) for number, output in ended]
            if now_s - shown_s > PROGRESS_EVERY_S:
                report(part.name, steps[-1].tokens or 0, total)
                shown_s = now_s
        part.ended_s = time.monotonic()
    finally:
        part.requests += done
    after = llm.stats()
    for name in ("steps", "retractions"):
        part.counters[name] = part.counters.get(name, 0) + getattr(after, name) - getattr(before, name)
    part.phases += _phases(done, steps, begin_s)
    part.steps += [Event(b.time_s, (b.tokens or 0) - (a.tokens or 0)) for a, b in pairwise([Event(begin_s, 0), *steps])]


def _record(output: "RequestOutput", asked_tokens: int, begin_s: float, now_s: float) -> RequestRecord:
    """Of an answer, its first token and the rest are two events: no client reads it token by token."""
    answer, timing = output.outputs[0], output.timing
    count = len(answer.token_ids)
    events = [] if timing.ttft_s is None else [Event(now_s - timing.total_s + timing.ttft_s, 1)]
    return RequestRecord(
        intended_s=begin_s,
        sent_s=now_s - timing.total_s,
        events=events + [Event(now_s, count - 1)] * (count > 1),
        ended_s=now_s,
        asked_tokens=asked_tokens,
        prompt_tokens=len(output.prompt_token_ids),
        completion_tokens=count,
        cached_tokens=output.cached_tokens,
        finish_reason=answer.finish_reason,
        error="the model's scores were not finite numbers" if answer.finish_reason == "error" else None,
    )


def _phases(requests: Sequence[RequestRecord], steps: Sequence[Event], begin_s: float) -> list[Phase]:
    """Up to the step that brought the last first token, and what came after it."""
    if not all(request.events for request in requests):
        return []
    last_first_s = max(request.events[0].time_s for request in requests)
    border = min(steps, key=lambda step: abs(step.time_s - last_first_s))
    tokens, more = border.tokens or 0, (steps[-1].tokens or 0) - (border.tokens or 0)
    tokens_in, cached = (sum(getattr(r, name) or 0 for r in requests) for name in ("prompt_tokens", "cached_tokens"))
    count, middle_s = len(requests), border.time_s
    prefill = Phase("prefill" if tokens <= count else "mixed", begin_s, middle_s, count, tokens_in, cached, tokens)
    return [prefill] + [Phase("decode", middle_s, steps[-1].time_s, count, 0, 0, more)] * (more > 0)
