"""What the server's processes say to each other: msgpack between frontends and engine, JSON lines with the supervisor.

Arrays travel as the bytes of numpy arrays, little-endian, of the dtype that is named beside each.
"""

from typing import Any, Literal

import msgspec

CLIENT_BITS = 40
"""A request's key is `client << CLIENT_BITS | count`: who asked, and which of its requests it is."""


def client_identity(number: int) -> bytes:
    """The ZeroMQ identity of a client; ZeroMQ keeps those that begin with a zero byte to itself."""
    return (1 << 31 | number).to_bytes(4, "big")


# --- between the supervisor and its children: JSON lines


class EngineSettings(msgspec.Struct, kw_only=True):
    """The first line that the engine process reads."""

    address: str  # of the socket that it binds
    config: dict[str, Any]  # EngineConfig's fields
    log_level: str
    max_queued_requests: int = 1 << 40
    served_names: list[str] = []
    log_interval_s: float = 0.0


class FrontendSettings(msgspec.Struct, kw_only=True):
    """The first line that a frontend process reads."""

    number: int  # of this client of the engine
    address: str
    host: str
    port: int
    server: dict[str, Any]  # ServerConfig's fields
    log_level: str


class EngineFacts(msgspec.Struct, kw_only=True):
    """What a client must know about the model that an engine has loaded."""

    model_name: str
    folder: str  # with config and tokenizer
    context: int  # tokens, prompt and answer together
    vocab_size: int
    eos_ids: list[int]
    sampling_defaults: dict[str, Any]
    config: dict[str, Any]  # EngineConfig's fields, with nothing left at auto
    page_size: int
    num_pages: int


class Control(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A further line from the supervisor."""

    do: Literal["ready", "stalled", "drain", "fail"]
    reason: str = ""  # of a failure; why no requests are taken while the engine stalls, empty once it goes on
    facts: EngineFacts | None = None  # with `ready`


class Report(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A line to the supervisor."""

    kind: Literal["progress", "ready", "beat", "fatal"]
    text: str = ""  # what is being done, or what went wrong
    done: int = 0
    total: int = 0
    facts: EngineFacts | None = None  # with the engine's `ready`


# --- from a client to the engine: msgpack


class Add(msgspec.Struct, tag=True):
    """Queue a prompt's requests: the first, and those that share its prompt."""

    keys: list[int]
    seeds: list[int]
    prompt: bytes  # int32
    max_tokens: int
    sampling: dict[str, Any]  # SamplingParams' fields that are set
    stop_ids: list[int]
    bad_words: list[list[int]]


class Finish(msgspec.Struct, tag=True):
    """End requests now; without effect on those that have ended."""

    keys: list[int]
    reason: Literal["stop", "abort"]


class Ask(msgspec.Struct, tag=True):
    """A question, or something to be done, that is answered by an `Answer` with the same number."""

    number: int
    what: Literal["stats", "metrics", "flush_cache", "profile"]
    steps: int = 0  # to profile, at most; 0: no more


class Observation(msgspec.Struct, tag=True):
    """What a client saw of a prompt's answers, once they have ended; times in seconds from their arrival."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    finish_reasons: list[str]  # one for each answer
    ttft_s: float | None
    total_s: float
    gaps_s: bytes  # float32: the time between one step's tokens and the next, for each token after the first


# --- from the engine to a client: msgpack


class Ended(msgspec.Struct, array_like=True):
    """A request that has ended; all its tokens have been sent."""

    key: int
    reason: Literal["stop", "length", "abort", "error"]
    cached_tokens: int
    num_tokens: int  # of its output: a client that counts otherwise has lost some


class StepLogprobs(msgspec.Struct, array_like=True):
    """Log-probabilities of n tokens, and of the K likeliest in the place of each."""

    keys: bytes  # int64 [n]
    chosen: bytes  # float32 [n]
    top_ids: bytes  # int32 [n, K]
    top: bytes  # float32 [n, K]


class StepPromptLogprobs(msgspec.Struct, array_like=True):
    """The same for the prompt tokens of one request, from `first` on."""

    key: int
    first: int
    logprobs: StepLogprobs


class Step(msgspec.Struct, tag=True, omit_defaults=True):
    """All that one step of the engine brought to one client."""

    keys: bytes  # int64 [n]
    tokens: bytes  # int32 [n]
    ended: list[Ended] = []
    logprobs: StepLogprobs | None = None
    prompt_logprobs: list[StepPromptLogprobs] = []


class Refused(msgspec.Struct, tag=True):
    """The queue is full: these requests were not taken."""

    keys: list[int]
    waiting: int


class Answer(msgspec.Struct, tag=True):
    """What an `Ask` was for; without a value, the engine process has failed at it."""

    number: int
    value: Any = msgspec.UNSET


ToEngine = Add | Finish | Ask | Observation
ToClient = Step | Refused | Answer
