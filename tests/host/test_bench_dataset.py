"""What the requests of a benchmark are: drawn lengths and tokens, shared prefixes, conversations, files."""

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minisgl.bench.workload import WARM_UP, Job, WorkloadConfig, throughput_jobs


def letters(text: str) -> list[int]:
    """A tokenizer in which every character is a token."""
    return list(map(ord, text))


def jobs(repetition: int = 0, **options: Any) -> list[Job]:
    return throughput_jobs(WorkloadConfig(**options), repetition, letters)


def wrote(path: Path, rows: Sequence[Any], lines: bool = True) -> str:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n" if lines else json.dumps(rows))
    return str(path)


# Drawn


def test_normal_lengths_lie_around_the_middle_and_within_the_ends():
    lengths = np.array([len(job.prompt) for job in jobs(requests=3000, input_len=[100, 500], lengths="normal")])
    assert lengths.min() >= 100 and lengths.max() <= 500
    assert lengths.mean() == pytest.approx(300, abs=5)
    assert ((lengths > 200) & (lengths < 400)).mean() == pytest.approx(0.68 / 0.954, abs=0.03)
    assert {len(job.prompt) for job in jobs(requests=9, input_len=7, lengths="normal")} == {7}


def test_text_prompts_are_pieces_of_one_text():
    first, second = (jobs(n, requests=5, input_len=[50, 90], prompts="text") for n in (0, 1))
    assert all(50 <= len(job.prompt) <= 90 for job in first)
    texts = ["".join(map(chr, job.prompt)) for job in first + second]
    assert len(set(texts)) == 10 and all(" " in text for text in texts)
    with pytest.raises(ValueError, match="prompts must be random for a model without a tokenizer, got text"):
        throughput_jobs(WorkloadConfig(prompts="text"), 0)


def test_groups_share_a_prefix_and_nothing_else():
    drawn = jobs(requests=7, input_len=30, prefix_len=40, prefix_groups=3)
    beginnings = [tuple(job.prompt[:40]) for job in drawn]
    assert len(set(beginnings)) == 3
    assert [beginnings[n] == beginnings[0] for n in range(7)] == [n % 3 == 0 for n in range(7)]
    assert len({tuple(job.prompt[40:]) for job in drawn}) == 7
    again = jobs(1, requests=7, input_len=30, prefix_len=40, prefix_groups=3)
    assert not {tuple(job.prompt[:40]) for job in again} & set(beginnings)
    assert {len(job.prompt) for job in drawn + again} == {70}


def test_conversations_have_turns_of_their_own_lengths():
    for job in jobs(requests=4, input_len=[5, 50], output_len=[3, 9], turns=3):
        assert len(job.later) == 2
        for turn in job.later:
            assert 5 <= len(turn.prompt) <= 50 and 3 <= turn.output_len <= 9 and not turn.later


@pytest.mark.parametrize("options", [{}, {"prefix_len": 8}, {"turns": 2}, {"prompts": "text"}, {"lengths": "normal"}])
def test_prompts_are_new_in_every_repetition_unless_they_shall_not_be(options: dict[str, Any]):
    options |= {"requests": 3, "input_len": [20, 40]}
    assert jobs(1, **options) == jobs(1, **options)
    assert not {tuple(job.prompt) for job in jobs(0, **options)} & {tuple(job.prompt) for job in jobs(1, **options)}
    assert jobs(0, fresh=False, **options) == jobs(5, fresh=False, **options)
    warm_up = jobs(WARM_UP, fresh=False, **options)
    assert not {tuple(job.prompt) for job in warm_up} & {tuple(job.prompt) for job in jobs(0, **options)}
    assert all(not job.later and job.output_len <= 16 for job in warm_up)


# Files


SHARE = [
    {"conversations": [{"value": "why"}, {"value": "so"}, {"value": "and then"}, {"value": "over"}, {"value": "ah"}]},
    {"conversations": [{"value": "only a question"}]},
    {"conversations": []},
    {"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi there"}]},
    {"conversations": [{"from": "gpt", "value": "I begin"}, {"from": "human", "value": "do"}]},
    {"conversations": [{"from": "system", "value": "be"}, {"from": "user", "value": "go"}, {"value": "gone"}]},
]


@pytest.mark.parametrize("lines", [True, False])
def test_sharegpt_gives_questions_and_the_lengths_of_answers(lines: bool, tmp_path: Path):
    file = wrote(tmp_path / "share", SHARE, lines)
    found = {("".join(map(chr, job.prompt)), job.output_len, job.later) for job in jobs(dataset=file)}
    assert found == {("why", 2, ()), ("hello", 8, ()), ("go", 4, ())}
    (long,) = [job for job in jobs(dataset=file, turns=5) if job.later]
    assert long.later == (Job(letters("and then"), 4),)
    with pytest.raises(ValueError, match="needs a model with a tokenizer"):
        throughput_jobs(WorkloadConfig(dataset=file), 0)


def test_sharegpt_is_taken_in_an_order_that_the_seed_says(tmp_path: Path):
    rows = [{"conversations": [{"value": f"{n}"}, {"value": "x"}]} for n in range(50)]
    file = wrote(tmp_path / "share", rows)
    first, again, other = (jobs(dataset=file, requests=9, workload_seed=seed) for seed in (0, 0, 1))
    assert first == again != other


def test_a_batch_is_sent_as_it_is(tmp_path: Path):
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    rows = [{"custom_id": str(n), "method": "POST", "url": "/v1/chat/completions", "body": body} for n in range(3)]
    found = jobs(dataset=wrote(tmp_path / "batch", rows), requests=2)
    assert found == [Job([], 0, body=body, route="/v1/chat/completions")] * 2


def trace(path: Path, kind: str, *rows: tuple[float, int, list[int]]) -> str:
    more = {"chat_id": 1} if kind == "bailian" else {}
    return wrote(
        path, [{"timestamp": t, "input_length": n, "output_length": 4, "hash_ids": h, **more} for t, n, h in rows]
    )


@pytest.mark.parametrize(("kind", "block", "unit"), [("bailian", 16, 1.0), ("mooncake", 512, 1e-3)])
def test_a_trace_shares_blocks_where_it_shares_hash_ids(kind: str, block: int, unit: float, tmp_path: Path):
    rows = [(100, 2 * block + 3, [1, 2, 3]), (150, 3 * block, [1, 2, 4]), (300, 5, [9])]
    file = trace(tmp_path / "trace", kind, *rows)
    first, second, third = jobs(dataset=file)
    assert [len(each.prompt) for each in (first, second, third)] == [2 * block + 3, 3 * block, 5]
    assert first.prompt[: 2 * block] == second.prompt[: 2 * block]
    assert first.prompt[2 * block :] != second.prompt[2 * block : 2 * block + 3]
    assert first.prompt[:block] != first.prompt[block : 2 * block]
    assert [each.at_s for each in (first, second, third)] == pytest.approx([100 * unit, 150 * unit, 300 * unit])
    assert {each.output_len for each in (first, second, third)} == {4}
    assert jobs(1, dataset=file)[0].prompt[:block] != first.prompt[:block], "fresh"
    assert jobs(1, dataset=file, fresh=False) == [first, second, third]


def test_a_trace_without_hash_ids_shares_nothing(tmp_path: Path):
    row = {"timestamp": 0, "input_length": 600, "output_length": 4}
    first, second = jobs(dataset=wrote(tmp_path / "trace", [row, row]))
    assert len(first.prompt) == 600 and not set(first.prompt[:512]) <= set(second.prompt[:512])


def test_the_warm_up_of_a_dataset_is_drawn(tmp_path: Path):
    file = trace(tmp_path / "trace", "bailian", (0, 1000, [1]))
    assert {len(job.prompt) for job in jobs(WARM_UP, dataset=file, input_len=9, requests=2)} == {9}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read: No such file or directory"),
        ("{", "is neither a JSON list nor JSON lines of objects"),
        ("[1]", "is neither a JSON list nor JSON lines of objects"),
        ("[]", "has rows with nothing, which is no known dataset"),
        ('{"prompt": "x", "a": 1}', "has rows with a, prompt, which is no known dataset"),
        ('{"conversations": []}', "has no request in it"),
        ('{"conversations": [{"value": 3}, {"value": 4}]}', "has a row that is not like its first"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 1}', "Expected `int` >= 1 - at `$.input_length`"),
        ('{"timestamp": 1, "input_length": 1000000000000, "output_length": 1}', "Expected `int` <= 10000000 - at"),
        ('{"timestamp": "now", "input_length": 1, "output_length": 1}', "Expected `float`, got `str`"),
        ('{"url": "@elsewhere/v1", "body": {}}', "Expected `str` matching regex '^/' - at `$.url`"),
        ('{"url": "/v1/completions", "body": "x"}', "Expected `object`, got `str` - at `$.body`"),
        ('{"conversations": "\udcff"}', "is neither a JSON list nor JSON lines of objects"),
        ("[" * 100_000, "is neither a JSON list nor JSON lines of objects"),
        (
            '{"timestamp": 1, "input_length": 1, "output_length": 1}\n{"timestamp": 1}',
            "has a row that is not like its first: Object missing required field `input_length`",
        ),
    ],
)
def test_a_file_that_is_no_dataset_is_refused(text: str | None, message: str, tmp_path: Path):
    if text is not None:
        (tmp_path / "data").write_text(text, errors="surrogateescape")
    with pytest.raises(ValueError, match=re.escape(message)):
        jobs(dataset=str(tmp_path / "data"))


def test_only_conversations_have_turns(tmp_path: Path):
    file = trace(tmp_path / "trace", "bailian", (0, 10, [1]))
    with pytest.raises(ValueError, match=r"turns must be 1 with requests that are no conversations, in .*, got 2"):
        jobs(dataset=file, turns=2)


def test_drawing_a_prompt_does_not_touch_the_generator_that_everyone_shares():
    random.seed(3)
    before = random.getstate()
    jobs(requests=2)
    assert random.getstate() == before
