"""What a user can set. Plain frozen dataclasses: no torch, no Typer. Every option is written once, here."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin

from annotated_doc import Doc

DType = Literal["auto", "float16", "bfloat16", "float32"]
LoadFormat = Literal["auto", "dummy"]
SchedulePolicy = Literal["fcfs", "lpm", "priority"]
CacheKind = Literal["radix", "none"]
Device = Literal["auto", "cpu", "cuda"]

MOST_LOGPROBS = 20
"""Alternatives to a token whose log-probabilities can be asked for, as in OpenAI's API."""


@dataclass(frozen=True, kw_only=True)
class Flag:
    """How the command line spells a field, where the field's own name does not say it all."""

    aliases: tuple[str, ...] = ()
    """Other flags that mean the same, e.g. `--max-num-seqs`."""
    shorthands: Mapping[str, str | bool] = field(default_factory=lambda: MappingProxyType({}))
    """Flags without a value that stand for one: `--disable-radix-cache` is `--cache none`."""
    env: str | None = None
    """The environment variable, where `MINISGL_` and the field's name in capitals means something else."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Engine

    Raises ValueError, naming the field, its value and what is allowed.
    """

    model: Annotated[str, Doc("Local folder, .gguf file, Hugging Face repo id or alias.")] = "smollm2"
    revision: Annotated[str | None, Doc("Branch, tag or commit of a Hugging Face repo.")] = None
    dtype: Annotated[
        DType, Doc("Type of weights, activations and KV; auto: bfloat16 where the device multiplies it, else float32.")
    ] = "auto"
    load_format: Annotated[LoadFormat, Doc("dummy: random weights, needs only config.json.")] = "auto"
    device: Annotated[Device, Doc("Where the model runs; auto: cuda if there is one.")] = "auto"
    max_model_len: Annotated[
        int | None,
        Doc("Longest request, prompt and answer together, in tokens; default: the model's."),
        Flag(aliases=("--context-length",)),
    ] = None
    page_size: Annotated[int | None, Doc("Tokens per KV page; default: what the attention backend likes best.")] = None
    num_pages: Annotated[int | None, Doc("KV pages; default: fill the memory.")] = None
    gpu_memory_utilization: Annotated[
        float, Doc("Share of GPU memory to use, above 0 and at most 1."), Flag(aliases=("--mem-fraction-static",))
    ] = 0.9
    max_running_requests: Annotated[int, Doc("Most requests that run together."), Flag(aliases=("--max-num-seqs",))] = (
        256
    )
    chunked_prefill_size: Annotated[int, Doc("Most prompt tokens computed in one step.")] = 8192
    mixed_batch: Annotated[bool, Doc("Let prompts and decoding requests share a step.")] = True
    schedule_policy: Annotated[
        SchedulePolicy, Doc("Who runs next: first come, longest cached prefix, or highest priority.")
    ] = "fcfs"
    cache: Annotated[
        CacheKind,
        Doc("Keep finished requests' KV for prompts with the same prefix."),
        # $MINISGL_CACHE is the folder that models are kept in
        Flag(shorthands={"--disable-radix-cache": "none"}, env="MINISGL_KV_CACHE"),
    ] = "radix"
    overlap: Annotated[
        bool | None,
        Doc("Prepare the next step while the device works on this one; default: on CUDA, where the two can overlap."),
        Flag(shorthands={"--disable-overlap-schedule": False}),
    ] = None
    cuda_graph: Annotated[
        bool | None,
        Doc("Replay decode steps as CUDA graphs; default: where they exist."),
        Flag(shorthands={"--disable-cuda-graph": False, "--enforce-eager": False}),
    ] = None
    cuda_graph_max_bs: Annotated[
        int | None, Doc("Largest decode batch kept as a CUDA graph; default: max_running_requests, at most 512.")
    ] = None
    cuda_graph_bs: Annotated[
        Sequence[int] | None,
        Doc("A decode batch size to keep as a CUDA graph; may be given several times; default: a list."),
    ] = None
    attention_backend: Annotated[
        str, Doc("auto, flashinfer, flash, triton or reference, or PREFILL,DECODE to name one for each phase.")
    ] = "auto"
    tp: Annotated[
        int,
        Doc("GPUs, or processes on a CPU, to shard the model over."),
        Flag(aliases=("--tensor-parallel-size", "--tp-size")),
    ] = 1
    nnodes: Annotated[int, Doc("Hosts that these are on, as many on each.")] = 1
    node_rank: Annotated[int, Doc("Which of the hosts this is, from 0 on; the engine is on the first.")] = 0
    dist_init_addr: Annotated[
        str | None, Doc("HOST:PORT of the first host, where all meet; needed where there are several.")
    ] = None
    step_timeout: Annotated[
        float, Doc("Seconds that a step may take on several GPUs before their processes are ended.")
    ] = 300.0

    def __post_init__(self) -> None:
        check_types(self)
        if not self.model.strip():
            raise ValueError("model must be a folder, a .gguf file, a repo id or an alias, got an empty text")
        for name in ("page_size", "num_pages", "chunked_prefill_size", "tp", "nnodes"):
            check_range(name, getattr(self, name), least=1, most=2**31 - 1)
        check_range("max_running_requests", self.max_running_requests, least=1, most=65_536)
        check_range("max_model_len", self.max_model_len, least=2, most=2**31 - 1)
        check_range("cuda_graph_max_bs", self.cuda_graph_max_bs, least=0)
        for size in self.cuda_graph_bs or ():
            check_range("cuda_graph_bs", size, least=1, most=65_536)
        check_range("node_rank", self.node_rank, least=0)
        check_range("step_timeout", self.step_timeout, least=1)
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must be above 0 and at most 1, got {self.gpu_memory_utilization}")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling (unset: the model's own default)

    A field that is None was not set by the user: `with_defaults` fills it from the model.
    Raises ValueError, naming the field, its value and what is allowed.
    """

    n: Annotated[int | None, Doc("Answers to each prompt."), Flag(aliases=("-n",))] = None
    max_tokens: Annotated[
        int | None,
        Doc("Most tokens to generate; default: the rest of the context."),
        Flag(aliases=("--max-new-tokens",)),
    ] = None
    min_tokens: Annotated[int | None, Doc("Tokens to generate before the answer may end by itself.")] = None
    temperature: Annotated[
        float | None, Doc("Flattens (above 1) or sharpens (below 1) the choice; 0 takes the likeliest.")
    ] = None
    top_k: Annotated[int | None, Doc("Choose among the k likeliest tokens; 0 or -1: all.")] = None
    top_p: Annotated[
        float | None, Doc("Choose among the fewest likeliest tokens that together have this probability.")
    ] = None
    min_p: Annotated[
        float | None, Doc("Leave out tokens less likely than this share of the likeliest one's probability.")
    ] = None
    seed: Annotated[int | None, Doc("Same seed, same draws; default: a fresh one.")] = None
    presence_penalty: Annotated[float | None, Doc("Subtracted from the score of tokens in the answer so far.")] = None
    frequency_penalty: Annotated[
        float | None, Doc("Subtracted from a token's score for each time that the answer has it.")
    ] = None
    repetition_penalty: Annotated[
        float | None,
        Doc("Divides positive scores of tokens in prompt and answer, and multiplies negative ones."),
    ] = None
    logit_bias: Annotated[Mapping[int, float] | None, Doc("Added to the scores of these token ids.")] = None
    bad_words: Annotated[Sequence[str] | None, Doc("Texts that the answer must not have.")] = None
    stop: Annotated[str | Sequence[str] | None, Doc("End before this text; may be given several times.")] = None
    stop_token_ids: Annotated[Sequence[int] | None, Doc("End at this token id; may be given several times.")] = None
    include_stop_str_in_output: Annotated[bool | None, Doc("Show the stop text that ended the answer.")] = None
    ignore_eos: Annotated[bool | None, Doc("Go on after the model's own end-of-text tokens.")] = None
    skip_special_tokens: Annotated[bool | None, Doc("Leave special tokens out of the text; default: on.")] = None
    logprobs: Annotated[
        int | None, Doc("Log-probabilities of each token and of the so many likeliest in its place.")
    ] = None
    prompt_logprobs: Annotated[int | None, Doc("The same for the prompt's tokens.")] = None
    priority: Annotated[int | None, Doc("For the priority policy: a higher number runs earlier.")] = None

    def __post_init__(self) -> None:
        check_types(self)
        check_range("n", self.n, least=1, most=1024)
        check_range("max_tokens", self.max_tokens, least=1)
        check_range("min_tokens", self.min_tokens, least=0, most=self.max_tokens)
        check_range("temperature", self.temperature, least=0, most=100)
        check_range("top_k", self.top_k, least=-1, most=2**31 - 1)
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        check_range("min_p", self.min_p, least=0, most=1)
        check_range("seed", self.seed, least=-(2**63), most=2**63 - 1)
        check_range("presence_penalty", self.presence_penalty, least=-2, most=2)
        check_range("frequency_penalty", self.frequency_penalty, least=-2, most=2)
        check_range("repetition_penalty", self.repetition_penalty, least=0.01, most=100)
        for token, bias in (self.logit_bias or {}).items():
            check_range("logit_bias", token, least=0, most=2**31 - 1)
            check_range("logit_bias", bias, least=-100, most=100)
        check_range("logprobs", self.logprobs, least=0, most=MOST_LOGPROBS)
        check_range("prompt_logprobs", self.prompt_logprobs, least=0, most=MOST_LOGPROBS)
        check_range("priority", self.priority, least=-1000, most=1000)
        for name in ("stop", "bad_words"):
            if "" in self.texts(name):
                raise ValueError(f"{name} must not be an empty text: every answer has it")
        for token in self.stop_token_ids or ():
            check_range("stop_token_ids", token, least=0, most=2**31 - 1)
        for name in ("stop", "bad_words", "stop_token_ids"):  # the caller may change a list later
            if not isinstance(value := getattr(self, name), str | None):
                object.__setattr__(self, name, tuple(value))
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", dict(self.logit_bias))

    def texts(self, name: Literal["stop", "bad_words"]) -> tuple[str, ...]:
        """A field that holds texts as a tuple, empty when unset."""
        value: str | Sequence[str] | None = getattr(self, name)
        if value is None:
            return ()
        return (value,) if isinstance(value, str) else tuple(value)

    def with_defaults(self, defaults: Mapping[str, Any]) -> Self:
        """Fill fields that are None from `defaults` (field name to value); unknown names are a ValueError."""
        if unknown := defaults.keys() - {f.name for f in fields(self)}:
            raise ValueError(f"unknown sampling defaults: {', '.join(sorted(unknown))}")
        return replace(self, **{k: v for k, v in defaults.items() if getattr(self, k) is None})


def check_types(config: Any) -> None:
    """Raise ValueError at the first field of a dataclass whose value does not fit its `Annotated` type.

    A whole number passes for a float; true and false are no numbers; numbers are finite.
    """
    for name, kinds in _kinds(type(config)):
        value = getattr(config, name)
        if not (value is None and NoneType in kinds) and not any(_fits(value, kind) for kind in kinds):
            *others, last = (name for kind in kinds for name in _allowed(kind))
            allowed = f"{', '.join(others)} or {last}" if others else last
            raise ValueError(f"{name} must be {allowed}, got {value!r:.200}")


@cache
def _kinds(config: type) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    """Every field of a dataclass and the types that it allows: a request's cost is mostly its checks."""
    return tuple((each.name, alternatives(get_args(each.type)[0])) for each in fields(config))


def check_range(name: str, value: float | None, least: float, most: float | None = None) -> None:
    """Raise ValueError unless `value` is unset or lies in `[least, most]`."""
    if value is None or least <= value <= (math.inf if most is None else most):
        return
    limits = f"at least {least}" if most is None else f"from {least} to {most}"
    raise ValueError(f"{name} must be {limits}, got {value}")


def alternatives(hint: Any) -> tuple[Any, ...]:
    """The types that a union allows; of any other type, itself."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _fits(value: object, kind: Any) -> bool:
    if kind is float:
        return type(value) is int or (isinstance(value, float) and math.isfinite(value))
    if isinstance(kind, type):
        return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is Mapping:
        of_key, of_value = get_args(kind)
        return isinstance(value, Mapping) and all(_fits(k, of_key) and _fits(v, of_value) for k, v in value.items())
    (element,) = get_args(kind)  # of a Sequence
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str | bytes)
        and all(_fits(each, element) for each in value)
    )


def _allowed(kind: Any) -> tuple[str, ...]:
    if get_origin(kind) is Sequence:
        return (f"a list of {'whole numbers' if get_args(kind) == (int,) else 'texts'}",)
    if get_origin(kind) is Mapping:
        return ("a map from token ids to numbers",)
    if get_origin(kind) is Literal:
        return get_args(kind)
    names = {bool: ("true", "false"), int: ("a whole number",), float: ("a finite number",), str: ("a text",)}
    return ("unset",) if kind is NoneType else names[kind]
