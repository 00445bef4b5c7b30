"""Measure an engine in this process: many requests at once (throughput), or one at a time (latency).

The engine is started and warm before the clock starts: it warms its kernels up itself, and then answers a repetition
that is not counted. Every repetition has prompts that the prefix cache does not know.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from minisgl.bench import machine
from minisgl.bench.report import Figures, Measurement
from minisgl.bench.roofline import Roofline, roofline
from minisgl.bench.workload import WARM_UP, Job, WorkloadConfig, latency_jobs, throughput_jobs
from minisgl.config import EngineConfig, SamplingParams
from minisgl.source.cache_folder import Report

if TYPE_CHECKING:
    from minisgl.llm import LLM


def measure(
    config: EngineConfig,
    workload: WorkloadConfig,
    sampling: SamplingParams,
    loading: AbstractContextManager[Report],
    say: Callable[[str], None],
) -> Measurement:
    """Start an engine, measure as often as `workload.repeat` says, and return all of it.

    `loading` is entered while the model is loaded; `say` gets a line before the warm-up and after each repetition.
    ValueError, before anything is measured, for a workload that the engine cannot do as it stands.
    """
    sampling = _complete(sampling)
    from minisgl.llm import LLM  # not before the options are known to be right: it brings torch

    with loading as report:
        llm = LLM.from_config(config, report)
    with llm:
        model = llm.model_config
        _check_fits(workload, model.vocab_size, llm.max_model_len)
        device = device_name(llm.config.device)
        bound = roofline(model, llm.config.dtype, device, llm.config.tp)
        limit = bound if isinstance(bound, Roofline) else None

        def once(repetition: int) -> Figures:
            if workload.latency:
                return _latency(llm, *latency_jobs(workload, repetition), sampling, limit)
            return _throughput(llm, throughput_jobs(workload, repetition), sampling, limit)

        say("warming up …")
        once(WARM_UP)
        repetitions = []
        for number in range(workload.repeat):
            repetitions.append(once(number))
            rate = repetitions[-1]["output_tokens_per_s"]
            say(f"{number + 1} of {workload.repeat}: {rate:,.1f} output tok/s")
        return Measurement(
            mode="latency" if workload.latency else "throughput",
            model=llm.model_name,
            device=device,
            engine=asdict(llm.config),
            workload=asdict(workload),
            sampling=asdict(sampling),
            shape=asdict(model),
            repetitions=repetitions,
            no_bound=bound if isinstance(bound, str) else None,
        )


def device_name(device: str) -> str:
    """What the processor or the GPU calls itself; GPUs that NVML cannot tell apart from others are not guessed at."""
    if device == "cpu":
        return machine.cpu_model()
    try:
        nvidia = machine.ask_nvidia()
    except (ImportError, ValueError):
        nvidia = None
    names = {gpu.name for gpu in nvidia.gpus} if nvidia else set()
    return names.pop() if len(names) == 1 else "a GPU of unknown name"


def _complete(sampling: SamplingParams) -> SamplingParams:
    """Answers have the length that the workload says, unless end-of-text tokens are to count."""
    if sampling.max_tokens is not None:
        raise ValueError(f"max_tokens must be unset, got {sampling.max_tokens}: output_len says how long answers are")
    if sampling.n not in (None, 1):
        raise ValueError(f"n must be 1, got {sampling.n}: raise requests instead")
    return sampling.with_defaults({"ignore_eos": True})


def _check_fits(workload: WorkloadConfig, vocab_size: int, context: int) -> None:
    if workload.max_token_id >= vocab_size:
        raise ValueError(f"max_token_id must be at most {vocab_size - 1} for this model, got {workload.max_token_id}")
    jobs = latency_jobs(workload, 0) if workload.latency else throughput_jobs(workload, 0)
    longest = max(len(job.prompt) + job.output_len for job in jobs)
    if longest > context:
        raise ValueError(
            f"input_len and output_len ask for {longest} tokens in one request, and the context holds {context}: "
            "shorten them, or raise max_model_len or num_pages where they are what limits it"
        )


def _throughput(llm: "LLM", jobs: Sequence[Job], sampling: SamplingParams, limit: Roofline | None) -> Figures:
    prompts = [job.prompt for job in jobs]
    params = [replace(sampling, max_tokens=job.output_len) for job in jobs]
    before = llm.stats()
    begin_s = time.perf_counter()
    outputs = llm.generate(prompts, params)
    time_s = time.perf_counter() - begin_s
    after = llm.stats()
    answers = [output.outputs[0] for output in outputs]
    if failed := sum(answer.finish_reason == "error" for answer in answers):
        raise ValueError(f"{failed} of {len(answers)} answers ended early: the model's scores were not finite numbers")
    lengths = [(len(job.prompt), len(answer.token_ids)) for job, answer in zip(jobs, answers, strict=True)]
    tokens_in, tokens_out = (sum(each) for each in zip(*lengths, strict=True))
    steps = after.steps - before.steps
    bound_s = limit and limit.prefill_s([prompt for prompt, _ in lengths]) + limit.decode_s(lengths)
    return {
        "output_tokens_per_s": tokens_out / time_s,
        "total_tokens_per_s": (tokens_in + tokens_out) / time_s,
        "time_s": time_s,
        "tokens_in": tokens_in,
        "tokens_cached": sum(output.cached_tokens for output in outputs),
        "tokens_out": tokens_out,
        "steps": steps,
        "mean_batch": tokens_out / steps,
        "retractions": after.retractions - before.retractions,
        **_against("", bound_s, time_s),
    }


def _latency(llm: "LLM", first: Job, stream: Job, sampling: SamplingParams, limit: Roofline | None) -> Figures:
    ttft_s = _token_times(llm, first, sampling)[0]
    times_s = _token_times(llm, stream, sampling)
    decode_s = times_s[-1] - times_s[0]
    bound_s = limit and limit.decode_s([(len(stream.prompt), len(times_s))])
    return {
        "output_tokens_per_s": (len(times_s) - 1) / decode_s,
        "decode_s": decode_s,
        "tokens_in": len(stream.prompt),
        "tokens_out": len(times_s),
        **_against("", bound_s, decode_s),
        "ttft_s": ttft_s,
        "ttft_tokens_in": len(first.prompt),
        **_against("ttft_", limit and limit.prefill_s([len(first.prompt)]), ttft_s),
    }


def _token_times(llm: "LLM", job: Job, sampling: SamplingParams) -> list[float]:
    """Seconds from asking for an answer until the host knows each of its tokens."""
    params = replace(sampling, max_tokens=job.output_len)
    times_s: list[float] = []
    begin_s = time.perf_counter()
    for piece in llm.stream(job.prompt, params):
        times_s += [time.perf_counter() - begin_s] * len(piece.token_ids)
    if len(times_s) < 2:
        raise ValueError("an answer ended with its first token: leave ignore_eos on, stop and stop_token_ids unset")
    return times_s


def _against(what: str, bound_s: float | None, time_s: float) -> Mapping[str, float]:
    return {} if bound_s is None else {f"{what}bound_s": bound_s, f"{what}bound_share": bound_s / time_s}
