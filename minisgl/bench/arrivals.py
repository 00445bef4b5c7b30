"""When the requests of a load come: seconds after its begin, the first at 0; the same seed, the same times."""

import random
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

Arrivals = Literal["poisson", "constant", "ramp"]


def arrival_times(kind: Arrivals, count: int, rate: float, burstiness: float, seed: str) -> list[float]:
    """So many times at `rate` requests a second.

    Gaps are all the same (constant) or of a gamma distribution with shape `burstiness` (poisson): at 1 exponential, as
    of requests that know nothing of each other, below it in bursts, above it more even. They are stretched so that the
    rate is met exactly, as `vllm bench serve` does. With ramp, the rate rises evenly from nothing to `rate`, within
    2 · count / rate seconds.
    """
    rng = random.Random(f"{seed}/arrivals")
    if kind == "constant":
        return [n / rate for n in range(count)]
    if kind == "ramp":
        # A constant rate in warped time: the integral of the rate up to t is rate² t² / (4 count).
        warped = _from_zero([rng.expovariate(1.0) for _ in range(count)], count)
        return [2 * (count * at) ** 0.5 / rate for at in warped]
    return _from_zero([rng.gammavariate(burstiness, 1.0) for _ in range(count)], (count - 1) / rate)


def _from_zero(gaps: Sequence[float], span: float) -> list[float]:
    """The times that these gaps make, the first gap left out, stretched so that the last is at `span`."""
    times = list(accumulate(gaps[1:], initial=0.0))
    return [at * span / times[-1] if times[-1] else 0.0 for at in times]
