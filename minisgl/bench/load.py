"""What a user can say of a load on a server: how fast requests come, where they go, and what they are held to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal
from urllib.parse import urlsplit

from annotated_doc import Doc

from minisgl.bench.arrivals import Arrivals
from minisgl.bench.workload import check_unset
from minisgl.config import Flag, check_range, check_types

MOST_REQUESTS = 100_000
SLO = ("ttft", "tpot", "e2e")

Slo = Mapping[str, float]
"""Of `SLO`'s names, the most seconds."""

Endpoint = Literal["completions", "chat"]


def parse_slo(text: str) -> Slo:
    """`ttft=500,tpot=50`, in milliseconds, as seconds; raises ValueError."""
    slo: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = (word.strip() for word in part.partition("="))
        try:
            limit_s = float(value) / 1e3
        except ValueError:
            limit_s = 0.0
        if name not in SLO or name in slo or not 0 < limit_s < float("inf"):
            raise ValueError(f"slo must be like ttft=500,tpot=50, in ms, of {', '.join(SLO)}, got {text!r}")
        slo[name] = limit_s
    return slo


@dataclass(frozen=True, kw_only=True)
class LoadConfig:
    """Load on a server

    Raises ValueError, naming the field, its value and what is allowed.
    """

    qps: Annotated[
        Sequence[str] | Sequence[float] | str | float | None,
        Doc("Requests a second, or several rates like 1,2,4,8, measured one after the other."),
        Flag(aliases=("--request-rate",)),
    ] = None
    concurrency: Annotated[
        int | None,
        Doc("Requests, or conversations, at once: the next is sent when one has ended; with qps, the most."),
        Flag(aliases=("--max-concurrency",)),
    ] = None
    arrivals: Annotated[Arrivals, Doc("How requests come; ramp: the rate rises from nothing to qps.")] = "poisson"
    burstiness: Annotated[float, Doc("Of poisson: below 1 in bursts, above it more evenly (gamma).")] = 1.0
    trace_speed: Annotated[float | None, Doc("Send a trace at its own times, divided by this, without qps.")] = None
    url: Annotated[str | None, Doc("OpenAI-compatible server to measure; default: start one of this engine.")] = None
    endpoint: Annotated[Endpoint, Doc("Where prompts go; chat: as messages, a word for each token.")] = "completions"
    api_key: Annotated[str | None, Doc("Key that the server at url asks for.")] = None
    frontends: Annotated[int, Doc("Processes of the own server that share its port, for text and HTTP.")] = 1
    silence: Annotated[float, Doc("Seconds in which nothing comes of an answer, after which it has failed.")] = 600.0
    slo: Annotated[
        str | None,
        Doc("Limits in ms that a good request keeps, like ttft=500,tpot=50; also e2e."),
        Flag(aliases=("--goodput",)),
    ] = None
    find_max: Annotated[bool, Doc("Search the highest rate at which slo_share keep the slo, from qps on.")] = False
    slo_share: Annotated[float, Doc("With find_max: the share that has to keep it.")] = 0.9

    def __post_init__(self) -> None:
        check_types(self)
        for rate in self.rates:
            check_range("qps", rate, least=0.001, most=MOST_REQUESTS)
        check_range("concurrency", self.concurrency, least=1, most=MOST_REQUESTS)
        for name in ("burstiness", "trace_speed"):
            check_range(name, getattr(self, name), least=0.01, most=1000)
        check_range("frontends", self.frontends, least=1, most=64)
        check_range("silence", self.silence, least=0.1, most=86_400)
        check_range("slo_share", self.slo_share, least=0.01, most=1)
        if self.slo is not None:
            parse_slo(self.slo)
        if self.url is not None and not is_web_address(self.url):
            raise ValueError(f"url must be like http://127.0.0.1:8000, got {self.url!r}")
        if self.find_max and (self.slo is None or len(self.rates) != 1):
            raise ValueError("find_max needs a slo to keep, and one qps to start from")
        for ignored, names, why in (
            (not self.online, ("url", "endpoint", "slo"), "without a load: give qps, concurrency or trace_speed"),
            (self.trace_speed is not None, ("qps",), "with trace_speed: a trace has times of its own"),
            (self.qps is None, ("arrivals", "burstiness"), "without qps"),
            (self.arrivals != "poisson", ("burstiness",), f"with arrivals {self.arrivals}"),
            (self.url is not None, ("frontends",), "with url, where a server runs already"),
            (not self.find_max, ("slo_share",), "without find_max"),
        ):
            if ignored:
                check_unset(self, names, why)

    @property
    def online(self) -> bool:
        """Whether a server is to be measured at all."""
        return any(each is not None for each in (self.qps, self.concurrency, self.trace_speed))

    @property
    def rates(self) -> list[float]:
        """The rates of `qps`; raises ValueError."""
        if self.qps is None:
            return []
        given = [self.qps] if isinstance(self.qps, str | int | float) else self.qps
        try:
            return [float(word) for word in ",".join(map(str, given)).split(",")]
        except ValueError:
            raise ValueError(f"qps must be a rate, or several like 1,2,4, got {self.qps!r}") from None


def is_web_address(url: str) -> bool:
    """Whether a server's routes can follow it: no user, query or fragment stands in their way."""
    try:
        parts = urlsplit(url)
        more = parts.username or parts.query or parts.fragment  # a key has its own option, and is not recorded
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and not more
    except ValueError:  # of its port or brackets
        return False
