"""What the engine counts, as Prometheus reads it."""

import asyncio
import logging

import numpy as np
import pytest
from in_one_thread import place, text_of
from prometheus_client.parser import text_string_to_metric_families

from minisgl.config import SamplingParams
from minisgl.scheduler import Stats
from minisgl.server.messages import Observation
from minisgl.server.metrics import Histogram, LoadLog, Metrics

STATS = Stats(
    running=2,
    waiting=3,
    pages_free=5,
    pages_cached=3,
    pages_locked=2,
    prompt_tokens=80,
    prefix_hit_tokens=20,
    retractions=4,
    steps=7,
)


def observation(**fields):
    usual = {"prompt_tokens": 10, "cached_tokens": 0, "completion_tokens": 3, "finish_reasons": ["stop"]}
    times = {"ttft_s": 0.5, "total_s": 2.0, "gaps_s": np.array([0.004, 0.02], "<f4").tobytes()}
    return Observation(**{**usual, **times, **fields})


def read(text):
    """Sample name and its labels but the model's → value."""
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "model_name"}
            assert sample.labels["model_name"] == "fake"
            samples[sample.name, *labels.values()] = sample.value
    return samples


@pytest.fixture
def metrics():
    return Metrics("fake")


def test_a_moment_of_the_engine_is_told_under_the_names_that_dashboards_know(metrics):
    metrics.generation_tokens, metrics.rejected, metrics.aborted = 11, 12, 13
    seen = read(metrics.text(STATS))
    want = {
        "num_requests_running": 2,
        "num_requests_waiting": 3,
        "kv_cache_usage_perc": 0.2,
        "prompt_tokens_total": 80,
        "generation_tokens_total": 11,
        "prefix_cache_queries_total": 80,
        "prefix_cache_hits_total": 20,
        "num_preemptions_total": 4,
        "admission_rejections_total": 12,
        "num_aborted_requests_total": 13,
        "scheduler_steps_total": 7,
    }
    assert {name: seen[f"minisgl:{name}",] for name in want} == want
    assert [seen["minisgl:kv_pages", state] for state in ("free", "cached", "locked")] == [5, 3, 2]


def test_what_clients_saw_is_added_up(metrics):
    metrics.observe(observation())
    metrics.observe(observation(ttft_s=0.03, finish_reasons=["length", "stop"], total_s=3.0))
    metrics.observe(observation(ttft_s=None, finish_reasons=["abort"], total_s=9.0, gaps_s=b"", completion_tokens=0))
    metrics.queue_s.observe(0.2)
    seen = read(metrics.text(STATS))
    reasons = {reason: seen["minisgl:request_success_total", reason] for reason in ("stop", "length", "abort", "error")}
    assert reasons == {"stop": 2, "length": 1, "abort": 1, "error": 0}
    assert seen["minisgl:time_to_first_token_seconds_count",] == 2
    assert seen["minisgl:time_to_first_token_seconds_sum",] == pytest.approx(0.53)
    assert seen["minisgl:time_to_first_token_seconds_bucket", "0.04"] == 1
    assert seen["minisgl:time_to_first_token_seconds_bucket", "0.5"] == 2
    assert seen["minisgl:inter_token_latency_seconds_count",] == 4
    assert seen["minisgl:inter_token_latency_seconds_bucket", "0.005"] == 2
    assert seen["minisgl:e2e_request_latency_seconds_count",] == 2, "how long an aborted one took says nothing"
    assert seen["minisgl:e2e_request_latency_seconds_sum",] == 5
    assert seen["minisgl:request_queue_time_seconds_bucket", "0.3"] == 1
    assert seen["minisgl:request_generation_tokens_sum",] == 6
    assert seen["minisgl:request_prompt_tokens_bucket", "10.0"] == 3


def test_a_bound_belongs_to_its_bucket_and_counts_add_up_to_the_last():
    histogram = Histogram("h", "", (1, 2))
    histogram.observe([0.5, 1.0, 1.5, 2.0, 99.0])
    histogram.observe(1)
    samples = histogram.family({"model_name": "fake"}).samples
    assert [(s.labels.get("le"), s.value) for s in samples] == [
        ("1.0", 3),
        ("2.0", 5),
        ("+Inf", 6),
        (None, 6),
        (None, 105.0),
    ]


def test_metrics_are_exact_across_clients(tmp_path):
    async def serve():
        async with place(tmp_path, num_slots=2, max_queued=2) as here:
            clients = [here.client(1), here.client(2), here.client(3)]
            tickets = []
            for number in range(60):
                client = clients[number % 3]
                stop = text_of([7]) if number % 4 == 0 else None
                params = SamplingParams(max_tokens=1 + number % 9, n=1 + number % 2, stop=stop)
                tickets.append(client.submit(client.prepare([number % 5] * 9, params, stream=False)))
                here.worker.turn()
                await here.settle()
                if number % 7 == 0:
                    client.abort(tickets[-1].generation)
            await here.rest()
            for client in clients:  # an answer comes after all that its client has sent before
                asking = asyncio.create_task(client.metrics())
                await here.until(asking.done)
            outputs = [ticket.done.result() for ticket in tickets if not ticket.done.exception()]
            refused = [ticket for ticket in tickets if ticket.done.exception()]
            return read(asking.result()), outputs, sum(len(ticket.generation.requests) for ticket in refused)

    seen, outputs, refused = asyncio.run(serve())
    answers = [answer for output in outputs for answer in output.outputs]
    for reason in ("stop", "length", "abort", "error"):
        count = sum(answer.finish_reason == reason for answer in answers)
        assert seen["minisgl:request_success_total", reason] == count
    assert seen["minisgl:admission_rejections_total",] == refused > 0
    assert seen["minisgl:request_prompt_tokens_count",] == len(outputs)
    assert seen["minisgl:request_generation_tokens_sum",] == sum(len(answer.token_ids) for answer in answers)
    assert seen["minisgl:generation_tokens_total",] >= seen["minisgl:request_generation_tokens_sum",]
    assert seen["minisgl:time_to_first_token_seconds_count",] == sum(o.timing.ttft_s is not None for o in outputs)
    assert seen["minisgl:prefix_cache_hits_total",] >= sum(o.cached_tokens for o in outputs) > 0
    gaps = sum(len(answer.token_ids) - 1 for answer in answers if answer.token_ids)
    assert seen["minisgl:inter_token_latency_seconds_count",] == gaps
    assert seen["minisgl:num_requests_running",] == seen["minisgl:num_requests_waiting",] == 0


def test_a_line_about_the_load_comes_when_it_is_due_and_only_with_traffic(metrics, monkeypatch, caplog):
    clock = [100.0]
    monkeypatch.setattr("minisgl.server.metrics.time.monotonic", lambda: clock[0])
    before = Stats(**{**dict.fromkeys(STATS.__dataclass_fields__, 0), "steps": 2})
    log = LoadLog(metrics, before, interval_s=5.0)
    with caplog.at_level(logging.INFO, logger="minisgl"):
        assert not log.is_due
        clock[0] += 5
        assert log.is_due
        metrics.generation_tokens = 1000
        log.write(STATS)
        assert not log.is_due
        clock[0] += 5
        log.write(STATS)
    assert [record.getMessage() for record in caplog.records] == [
        "2 running, 3 waiting, 200 tok/s out, 16 in, KV 20% locked and 30% cached, prefix hits 25%"
    ]
    clock[0] += 1000
    assert not LoadLog(metrics, before, interval_s=0).is_due
