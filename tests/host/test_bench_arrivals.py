"""When requests come, what a load may be, and the search for the highest rate."""

import re
from typing import Any

import numpy as np
import pytest

from minisgl.bench.arrivals import arrival_times
from minisgl.bench.load import LoadConfig
from minisgl.bench.online import of_trace, search
from minisgl.bench.workload import Job


@pytest.mark.parametrize("kind", ["poisson", "constant", "ramp"])
@pytest.mark.parametrize("burstiness", [0.2, 1.0, 50.0])
def test_times_rise_from_zero_and_meet_the_rate(kind: Any, burstiness: float):
    times = arrival_times(kind, 400, 8.0, burstiness, "0")
    assert times == sorted(times) and times[0] == 0.0 and len(times) == 400
    assert times[-1] == pytest.approx(100.0 if kind == "ramp" else 399 / 8)


@pytest.mark.parametrize("kind", ["poisson", "ramp"])
def test_the_same_seed_brings_the_same_times(kind: Any):
    assert arrival_times(kind, 9, 2.0, 1.0, "7") == arrival_times(kind, 9, 2.0, 1.0, "7")
    assert arrival_times(kind, 9, 2.0, 1.0, "7") != arrival_times(kind, 9, 2.0, 1.0, "8")


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0, 100.0])
def test_gaps_vary_as_a_gamma_distribution_does(burstiness: float):
    gaps = np.diff(arrival_times("poisson", 40_000, 5.0, burstiness, "0"))
    assert gaps.mean() == pytest.approx(0.2)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_constant_gaps_are_all_the_same():
    assert arrival_times("constant", 4, 4.0, 1.0, "0") == [0.0, 0.25, 0.5, 0.75]


def test_a_ramp_brings_a_quarter_of_the_requests_in_the_first_half_of_its_time():
    times = np.array(arrival_times("ramp", 10_000, 50.0, 1.0, "0"))
    assert (times < 200).mean() == pytest.approx(0.25, abs=0.02)
    assert ((times > 390) & (times <= 400)).sum() / 10 == pytest.approx(50, rel=0.1), "the rate at its end"


@pytest.mark.parametrize("kind", ["poisson", "constant", "ramp"])
def test_one_request_comes_at_once(kind: Any):
    assert arrival_times(kind, 1, 3.0, 1.0, "0") == [0.0]


def test_a_trace_is_sent_in_its_order_and_can_be_sped_up():
    jobs = [Job([n], 1, at_s=at_s) for n, at_s in enumerate((8.0, 7.0, 11.0))]
    assert of_trace(jobs, 2.0) == ([jobs[1], jobs[0], jobs[2]], [0.0, 0.5, 2.0])
    with pytest.raises(ValueError, match="trace_speed needs a dataset whose requests have times"):
        of_trace([*jobs, Job([9], 1)], 2.0)


# What a load may be


def test_rates_come_as_texts_or_numbers_one_or_many():
    for given in ("1, 2,4.5", ["1,2", "4.5"], [1, 2, 4.5]):
        assert LoadConfig(qps=given).rates == [1.0, 2.0, 4.5]
    assert LoadConfig(qps=2).rates == [2.0]
    assert LoadConfig().rates == []


def test_only_a_rate_a_trace_or_a_concurrency_is_a_load():
    assert not LoadConfig().online
    assert all(LoadConfig(**each).online for each in ({"qps": "1"}, {"concurrency": 1}, {"trace_speed": 1.0}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"qps": "fast"}, "qps must be a rate, or several like 1,2,4, got 'fast'"),
        ({"qps": "1,,2"}, "qps must be a rate, or several like 1,2,4, got '1,,2'"),
        ({"qps": 0}, "qps must be from 0.001 to 100000, got 0.0"),
        ({"qps": "nan"}, "qps must be from 0.001 to 100000, got nan"),
        ({"concurrency": 0}, "concurrency must be from 1 to 100000, got 0"),
        ({"qps": 1, "burstiness": 0}, "burstiness must be from 0.01 to 1000, got 0"),
        ({"qps": 1, "burstiness": 2.0, "arrivals": "ramp"}, "burstiness must be unset with arrivals ramp, got 2.0"),
        ({"qps": []}, "qps must be a rate, or several like 1,2,4, got []"),
        ({"qps": 1, "trace_speed": 2.0}, "qps must be unset with trace_speed: a trace has times of its own, got 1"),
        ({"qps": 1, "slo": "itl=3"}, "slo must be like ttft=500,tpot=50, in ms, of ttft, tpot, e2e, got 'itl=3'"),
        ({"slo": "ttft=3"}, "slo must be unset without a load: give qps, concurrency or trace_speed, got ttft=3"),
        ({"url": "http://x"}, "url must be unset without a load: give qps, concurrency or trace_speed, got http://x"),
        ({"endpoint": "chat"}, "endpoint must be unset without a load"),
        ({"concurrency": 1, "arrivals": "constant"}, "arrivals must be unset without qps, got constant"),
        ({"concurrency": 1, "burstiness": 2.0}, "burstiness must be unset without qps, got 2.0"),
        ({"qps": 1, "slo_share": 0.5}, "slo_share must be unset without find_max, got 0.5"),
        ({"qps": 1, "url": "http://x", "frontends": 2}, "frontends must be unset with url, where a server runs"),
        ({"qps": 1, "silence": 0}, "silence must be from 0.1 to 86400, got 0"),
        ({"url": "x:80", "qps": 1}, "url must be like http://127.0.0.1:8000, got 'x:80'"),
        ({"url": "ftp://x", "qps": 1}, "url must be like http://127.0.0.1:8000, got 'ftp://x'"),
        ({"url": "http://", "qps": 1}, "url must be like http://127.0.0.1:8000, got 'http://'"),
        ({"url": "http://[::1", "qps": 1}, "url must be like http://127.0.0.1:8000, got 'http://[::1'"),
        ({"url": "http://x:y", "qps": 1}, "url must be like http://127.0.0.1:8000, got 'http://x:y'"),
        ({"url": "http://x:99999", "qps": 1}, "url must be like http://127.0.0.1:8000, got 'http://x:99999'"),
        ({"url": "http://me:key@x", "qps": 1}, "url must be like http://127.0.0.1:8000, got 'http://me:key@x'"),
        ({"url": "http://x/?a=b", "qps": 1}, "url must be like http://127.0.0.1:8000, got 'http://x/?a=b'"),
        ({"find_max": True, "qps": 1}, "find_max needs a slo to keep, and one qps to start from"),
        ({"find_max": True, "qps": "1,2", "slo": "ttft=3"}, "find_max needs a slo to keep, and one qps to start from"),
        ({"find_max": True, "slo": "ttft=3"}, "find_max needs a slo to keep, and one qps to start from"),
        ({"frontends": 0, "qps": 1}, "frontends must be from 1 to 64, got 0"),
    ],
)
def test_a_load_that_makes_no_sense_is_refused(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        LoadConfig(**options)


# The search


def searched(limit: float, start: float, most: float) -> tuple[list[float], bool]:
    tried: list[float] = []

    def keeps(rate: float) -> bool:
        tried.append(rate)
        return rate <= limit

    return tried, search(keeps, start, most)


@pytest.mark.parametrize("limit", [0.2, 0.9, 1.0, 3.7, 50.0, 99.0])
def test_the_search_comes_within_a_tenth_of_the_limit_in_few_steps(limit: float):
    tried, ended = searched(limit, start=1.0, most=100.0)
    best = max(rate for rate in tried if rate <= limit)
    assert ended and best <= limit <= best * 1.1
    assert len(tried) <= 12 and len(set(tried)) == len(tried)


def test_the_search_ends_where_it_can_go_no_further():
    assert searched(1000.0, start=3.0, most=20.0) == ([3.0, 6.0, 12.0, 20.0], False)
    assert searched(1000.0, start=30.0, most=20.0) == ([20.0], False)
    tried, ended = searched(0.0, start=1.0, most=20.0)
    assert ended and tried[-1] == 1 / 16
