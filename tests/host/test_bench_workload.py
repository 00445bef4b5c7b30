"""What `minisgl bench` asks of an engine: prompts and lengths."""

import random
import re
from typing import Any

import pytest

from minisgl.bench.workload import WARM_UP, WorkloadConfig, latency_jobs, throughput_jobs

STANDING = WorkloadConfig(requests=256, input_len=[100, 1024], output_len=[100, 1024], max_token_id=10000)


def test_the_standing_workload_is_the_one_that_others_publish():
    random.seed(0)
    prompts = [[random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in range(256)]
    answers = [random.randint(100, 1024) for _ in range(256)]
    jobs = throughput_jobs(STANDING, 0)
    assert [job.prompt for job in jobs] == prompts
    assert [job.output_len for job in jobs] == answers
    assert (sum(map(len, prompts)), sum(answers)) == (142_827, 133_966)


def test_every_repetition_and_the_warm_up_have_prompts_of_their_own():
    first, second, warm_up = (throughput_jobs(STANDING, n) for n in (0, 1, WARM_UP))
    assert [(len(j.prompt), j.output_len) for j in second] == [(len(j.prompt), j.output_len) for j in first]
    assert [len(job.prompt) for job in warm_up] == [len(job.prompt) for job in first]
    assert max(job.output_len for job in warm_up) == 16
    beginnings = [tuple(job.prompt[:16]) for jobs in (first, second, warm_up) for job in jobs]
    assert len(set(beginnings)) == 3 * 256, "a page of 16 tokens comes twice"
    assert second == throughput_jobs(STANDING, 1)


def test_latency_has_every_batch_size_with_every_length_and_new_prompts_each_time():
    workload = WorkloadConfig(latency=True, batch_size=[1, 2], input_len=[128, 16, 512], output_len=256)
    assert workload.shapes == [(1, 128), (1, 16), (1, 512), (2, 128), (2, 16), (2, 512)]
    repetitions = [latency_jobs(workload, 2, 128, n) for n in (WARM_UP, 0, 1)]
    assert {(len(job.prompt), job.output_len) for jobs in repetitions for job in jobs} == {(128, 256)}
    assert len({tuple(job.prompt[:16]) for jobs in repetitions for job in jobs}) == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_len": [3, 2]}, "input_len must have the least length first, got [3, 2]"),
        ({"input_len": [1, 2, 3]}, "input_len must be one length, or the least and the most, got [1, 2, 3]"),
        ({"output_len": 0}, "output_len must be from 1 to 10000000, got 0"),
        ({"input_len": "long"}, "input_len must be a whole number or a list of whole numbers, got 'long'"),
        ({"requests": 0}, "requests must be from 1 to 10000000, got 0"),
        ({"repeat": 0}, "repeat must be from 1 to 10000000, got 0"),
        ({"latency": True, "requests": 3}, "requests must be unset with latency, of equal batches, got 3"),
        (
            {"latency": True, "output_len": [2, 3]},
            "output_len must be one length of 2 or more with latency, got [2",
        ),
        ({"latency": True, "input_len": [1, 0]}, "input_len must be from 1 to 10000000, got 0"),
        ({"latency": True, "input_len": []}, "batch_size and input_len must have a value each with latency, got none"),
        ({"latency": True, "batch_size": []}, "batch_size and input_len must have a value each with latency, got none"),
        ({"input_len": []}, "input_len must be one length, or the least and the most, got []"),
        ({"batch_size": 0}, "batch_size must be from 1 to 10000000, got 0"),
        ({"latency": True, "output_len": 1}, "output_len must be one length of 2 or more with latency, got 1"),
        ({"requests": 10**6, "input_len": 10**6}, "1,000,000 prompts of 1,000,000 tokens are more than 100,000,000"),
        ({"requests": 10**4, "turns": 10**4}, "10,000 prompts of 1,280,000 tokens are more than 100,000,000"),
        ({"prefix_len": 10**7}, "16 prompts of 10,000,128 tokens are more than 100,000,000"),
        ({"latency": True, "batch_size": [1, 10**6]}, "1,000,000 prompts of 128 tokens are more than 100,000,000"),
        ({"batch_size": 5}, "batch_size must be unset without latency, got 5"),
    ],
)
def test_a_workload_that_makes_no_sense_is_refused(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        WorkloadConfig(**options)


OTHER: dict[str, Any] = {
    "requests": 3,
    "input_len": 9,
    "output_len": 9,
    "lengths": "normal",
    "prompts": "text",
    "max_token_id": 9,
    "prefix_len": 9,
    "prefix_groups": 2,
    "turns": 2,
    "dataset": "file",
    "fresh": False,
}
"""Of each option a value that is not its default."""


@pytest.mark.parametrize(
    ("options", "without_effect"),
    [
        (
            {"latency": True},
            ["requests", "lengths", "prompts", "prefix_len", "prefix_groups", "turns", "dataset", "fresh"],
        ),
        ({"dataset": "file"}, ["lengths", "prompts", "prefix_len", "prefix_groups"]),
        ({}, ["prefix_groups"]),
        ({"prompts": "text"}, ["prefix_groups", "prompts"]),  # the last with a dataset
        ({"prefix_len": 3}, ["prefix_len"]),
    ],
)
def test_what_would_have_no_effect_is_refused(options: dict[str, Any], without_effect: list[str]):
    refused = []
    for name in OTHER.keys() - options.keys():
        try:
            WorkloadConfig(**options, **{name: OTHER[name]})
        except ValueError as error:
            refused.append(str(error).partition(" must be unset with")[0])
    assert sorted(refused) == sorted(without_effect)


def test_a_few_numbers_do_not_fill_the_memory():
    jobs = throughput_jobs(WorkloadConfig(requests=2, input_len=3, prefix_len=4, prefix_groups=10_000_000), 0)
    assert [len(job.prompt) for job in jobs] == [7, 7]
