"""What a user can say of a load on a server: how fast requests come, where they go, and what they are held to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_doc import Doc

from minisgl.bench.arrivals import Arrivals
from minisgl.config import Flag, check_range, check_types

MOST_REQUESTS = 100_000
SLO = ("ttft", "tpot", "e2e")

Slo = Mapping[str, float]
"""Of `SLO`'s names, the most seconds."""


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
    arrivals: Annotated[Arrivals, Doc("How requests come at qps; ramp: the rate rises from nothing to qps.")] = (
        "poisson"
    )
    burstiness: Annotated[
        float, Doc("Of poisson: below 1 requests come in bursts, above it more evenly (gamma distribution).")
    ] = 1.0
    trace_speed: Annotated[
        float | None, Doc("Send a trace's requests at its own times, divided by this; in place of qps.")
    ] = None
    url: Annotated[str | None, Doc("An OpenAI-compatible server to measure; default: start one with this engine.")] = (
        None
    )
    api_key: Annotated[str | None, Doc("Key that the server at url asks for.")] = None
    frontends: Annotated[int, Doc("Processes of the own server that share its port, for text and HTTP.")] = 1
    slo: Annotated[
        str | None,
        Doc("Limits in ms that a good request keeps, like ttft=500,tpot=50; also e2e."),
        Flag(aliases=("--goodput",)),
    ] = None
    find_max: Annotated[
        bool, Doc("Search the highest rate at which slo_share of the requests keep the slo, from qps on.")
    ] = False
    slo_share: Annotated[float, Doc("With find_max: the share that has to keep it.")] = 0.9

    def __post_init__(self) -> None:
        check_types(self)
        for rate in self.rates:
            check_range("qps", rate, least=0.001, most=MOST_REQUESTS)
        check_range("concurrency", self.concurrency, least=1, most=MOST_REQUESTS)
        for name in ("burstiness", "trace_speed"):
            check_range(name, getattr(self, name), least=0.01, most=1000)
        check_range("frontends", self.frontends, least=1, most=64)
        check_range("slo_share", self.slo_share, least=0.01, most=1)
        if self.slo is not None:
            parse_slo(self.slo)
        if self.qps is not None and self.trace_speed is not None:
            raise ValueError(f"qps must be unset with trace_speed, got {self.qps}: a trace has times of its own")
        if self.burstiness != 1 and self.arrivals != "poisson":
            raise ValueError(f"burstiness must be unset with arrivals {self.arrivals}, got {self.burstiness}")
        if self.find_max and (self.slo is None or len(self.rates) != 1):
            raise ValueError("find_max needs a slo to keep, and one qps to start from")
        for name in ("url", "slo", "find_max"):
            if getattr(self, name) and not self.online:
                raise ValueError(f"{name} needs a load: give qps, concurrency or trace_speed")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url must begin with http:// or https://, got {self.url!r}")

    @property
    def online(self) -> bool:
        """Whether a server is to be measured at all."""
        return any(each is not None for each in (self.qps, self.concurrency, self.trace_speed))

    @property
    def rates(self) -> list[float]:
        """The rates of `qps`; raises ValueError."""
        given = [] if self.qps is None else [self.qps] if isinstance(self.qps, str | int | float) else self.qps
        words = [word.strip() for each in given for word in str(each).split(",")]
        try:
            return [float(word) for word in words]
        except ValueError:
            raise ValueError(f"qps must be a rate, or several like 1,2,4, got {self.qps!r}") from None
