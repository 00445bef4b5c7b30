"""`minisgl run --input`: what becomes of each line, of a file of results that is there already, and on the way out."""

import fcntl
import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_llm import FakeLLM
from rich.console import Console

from cli.batch import answer_file
from minisgl.config import SamplingParams
from minisgl.openai.batch import answer_rows
from minisgl.openai.batch_file import read_lines, survey

ROOT = Path(__file__).parents[2]


class Batch:
    """A file of requests, its results, and the LLM that answers it."""

    def __init__(self, folder: Path, *lines: Any) -> None:
        self.source, self.target = folder / "in.jsonl", folder / "out.jsonl"
        self.ask(*lines)
        self.llm = FakeLLM()
        self.said = ""

    def ask(self, *lines: Any) -> None:
        texts = [line if isinstance(line, str | bytes) else json.dumps(line) for line in lines]
        self.source.write_bytes(b"".join((t if isinstance(t, bytes) else t.encode()) + b"\n" for t in texts))

    def run(self, **sampling: Any) -> bool:
        said = io.StringIO()
        console = Console(file=said)
        self.llm.asked.clear()
        try:
            return answer_file(self.source, self.target, SamplingParams(**sampling), console, lambda: self.llm)  # type: ignore[arg-type,return-value]
        finally:
            self.said = said.getvalue()

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.target.read_text().splitlines()]

    def texts(self) -> dict[str, str]:
        """What was answered, by custom_id."""
        return {row["custom_id"]: row["response"]["body"]["choices"][0]["text"] for row in self.rows()}


def prompt(custom_id: str, text: str = "a b", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "body": {"prompt": text, **body}}


def test_a_request_in_full_gets_a_result_in_full(tmp_path: Path):
    messages = [{"role": "user", "content": "hi"}]
    row = {"custom_id": "x", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": messages}}
    batch = Batch(tmp_path, row)
    assert batch.run()
    assert batch.llm.asked == ["<user> hi"]
    (result,) = batch.rows()
    assert result.keys() == {"id", "custom_id", "response", "error"}
    assert result["id"].startswith("batch_req_") and result["custom_id"] == "x" and result["error"] is None
    assert result["response"].keys() == {"status_code", "request_id", "body"}
    assert result["response"]["status_code"] == 200
    body = result["response"]["body"]
    assert (body["object"], body["model"]) == ("chat.completion", "fake")
    assert body["choices"][0]["message"]["content"] == "<USER> HI"


def test_flags_are_for_the_fields_that_a_row_does_not_set(tmp_path: Path):
    batch = Batch(tmp_path, prompt("x", temperature=1, max_tokens=None), prompt("y", logprobs=2, n=2))
    assert batch.run(temperature=0.5, max_tokens=7, logprobs=0)
    assert batch.llm.sampling == [
        SamplingParams(temperature=1, max_tokens=7, logprobs=0),
        SamplingParams(temperature=0.5, max_tokens=7, logprobs=2, n=2),
    ]


def test_several_prompts_of_a_row_are_one_result_in_their_order(tmp_path: Path):
    batch = Batch(tmp_path, {"custom_id": "x", "body": {"prompt": ["a", "b c", "d"], "n": 2}})
    assert batch.run()
    (result,) = batch.rows()
    body = result["response"]["body"]
    assert [(c["index"], c["text"]) for c in body["choices"]] == list(enumerate(["A", "A", "B C", "B C", "D", "D"]))
    assert body["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 18,
        "total_tokens": 22,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


def test_a_line_without_a_name_for_a_result_is_reported_and_the_others_are_answered(tmp_path: Path):
    batch = Batch(
        tmp_path,
        "\ufeff" + json.dumps(prompt("x")),
        "",
        "{not JSON}",
        b'{"custom_id": "\xff"}',
        "[" * 100_000,
        "[1]",
        {"body": {"prompt": "a"}},
        {"custom_id": 5, "body": {"prompt": "a"}},
        {"custom_id": "", "body": {"prompt": "a"}},
        prompt("x", "again"),
        prompt("y"),
    )
    assert not batch.run()
    assert batch.texts() == {"x": "A B", "y": "A B"}
    reports = [line.removeprefix(f"{batch.source}: ") for line in batch.said.splitlines()[:8]]
    assert [report.partition(":")[0] for report in reports] == [
        "line 3 is not JSON",
        "line 4 is not JSON",
        "line 5 is not JSON",
        "line 6 is not a JSON object but [1]",
        "line 7 has no custom_id",
        "line 8 has a custom_id that is not a text",
        "line 9 has a custom_id that is not a text",
        "line 10 has the custom_id 'x' of line 1",
    ]
    assert "2 answered, 8 lines have no row; tokens in 4 (cached 2), out 6, " in batch.said


@pytest.mark.parametrize(
    ("row", "status", "code", "part"),
    [
        ({"body": {"prompt": "a", "model": "gpt-5"}}, 404, "model_not_found", "'gpt-5' is not loaded, but fake or"),
        ({"body": {"prompt": "a", "model": []}}, 404, "model_not_found", "[] is not loaded, but fake or"),
        ({"body": {"prompt": "a", "model": {}}}, 404, "model_not_found", "{} is not loaded, but fake or"),
        ({"body": {"prompt": "a", "temperature": -1}}, 400, "invalid_request_error", "temperature must be from 0"),
        ({"body": {"prompt": "a", "stream": True}}, 400, "unsupported_parameter", "stream is not supported"),
        ({"body": {"prompt": "a", "temprature": 1}}, 400, "unknown_parameter", "did you mean temperature?"),
        ({"body": {"prompt": "a" * 1001}}, 400, "invalid_request_error", "1001 tokens; the context holds 1000"),
        ({"body": {"messages": [1]}}, 400, "invalid_request_error", "message 0 must be an object"),
        ({"body": {}}, 400, "invalid_request_error", "messages must be a list of at least one message"),
        ({"body": "a"}, 400, "invalid_request_error", "the body must be a JSON object, got 'a'"),
        ({}, 400, "invalid_request_error", "the body must be a JSON object, got None"),
        ({"url": "/v1/embeddings", "body": {}}, 400, "invalid_request_error", "url must be /v1/chat/completions or"),
        ({"url": ["x"], "body": {}}, 400, "invalid_request_error", "url must be"),
        ({"body": {"prompt": "a NaN"}}, 500, "server_error", "the model's scores were not finite numbers"),
        ({"body": {"prompt": ["a", "b NaN"]}}, 500, "server_error", "the model's scores were not finite numbers"),
        ({"method": "GET", "body": {"prompt": "a"}}, 400, "invalid_request_error", "method must be POST, got 'GET'"),
        ({"body": {"prompt": "a"}, "seed": 1}, 400, "invalid_request_error", "seed is not a field of a batch row"),
    ],
)
def test_a_request_that_cannot_run_gets_its_error_and_the_others_are_answered(
    row: dict[str, Any], status: int, code: str, part: str, tmp_path: Path
):
    batch = Batch(tmp_path, {"custom_id": "bad", **row}, prompt("good"))
    assert not batch.run()
    bad, good = sorted(batch.rows(), key=lambda result: result["custom_id"])
    assert good["custom_id"] == "good" and good["error"] is None
    assert bad["response"]["status_code"] == status
    assert (bad["error"]["code"], bad["error"]["message"]) == (code, bad["response"]["body"]["error"]["message"])
    assert part in bad["error"]["message"]
    assert "1 answered, 1 failed; " in batch.said


def test_a_body_that_is_nested_too_deeply_is_an_error_of_its_row_or_line_and_the_others_are_answered(tmp_path: Path):
    depths = range(sys.getrecursionlimit() - 150, sys.getrecursionlimit(), 5)
    deep = [f'{{"custom_id": "{n}", "body": {{"prompt": "a", "stop": {"[" * n + "]" * n}}}}}' for n in depths]
    batch = Batch(tmp_path, *deep, prompt("good"))
    assert not batch.run()
    assert batch.rows()[-1]["error"] is None
    assert len(batch.rows()) + batch.said.count("is not JSON: maximum recursion depth") == len(deep) + 1


def test_a_file_that_is_changed_while_it_is_read_gives_no_answer_under_a_wrong_name(tmp_path: Path):
    batch = Batch(tmp_path, prompt("x"), prompt("y", "old"))
    rows: list[dict[str, Any]] = []
    with open(batch.source, "rb") as file:
        found = survey(file)
        batch.ask(prompt("x"), prompt("z", "new"))
        lines = read_lines(file, found.offsets, ())
        failed = answer_rows(batch.llm, lines, SamplingParams(), rows.append, lambda *_: None, lambda: None)  # type: ignore[arg-type]
    assert failed == 1
    assert {row["custom_id"]: row["error"] and row["error"]["message"] for row in rows} == {
        "x": None,
        "y": "the file of requests was changed while it was read",
    }


@pytest.mark.parametrize("model", ["fake", "some/fake", None])
def test_the_loaded_model_may_be_named_as_the_user_named_it_or_not_at_all(model: str | None, tmp_path: Path):
    assert Batch(tmp_path, prompt("x", model=model)).run()


# The same command again


def test_what_is_there_already_is_not_done_again(tmp_path: Path):
    batch = Batch(tmp_path, prompt("x"))
    assert batch.run()
    before = batch.target.read_text()
    batch.ask(prompt("new", "c"), prompt("x"))
    assert batch.run()
    assert batch.llm.asked == ["c"]
    assert batch.target.read_text().startswith(before) and batch.texts() == {"x": "A B", "new": "C"}
    assert "1 answered, 1 were there already; " in batch.said


def test_where_nothing_is_missing_no_model_is_loaded(tmp_path: Path):
    batch = Batch(tmp_path, prompt("x"))
    assert batch.run()
    batch.llm = None  # type: ignore[assignment]
    assert answer_file(batch.source, batch.target, SamplingParams(), Console(file=io.StringIO()), lambda: 1 / 0)  # type: ignore[arg-type]


def test_an_error_is_tried_again_and_its_row_replaced(tmp_path: Path):
    batch = Batch(tmp_path, prompt("bad", top_k=-7), prompt("good"), prompt("worse", top_k=-7))
    assert not batch.run()
    batch.target.chmod(0o640)
    batch.ask(prompt("bad", "mended"), prompt("good"), prompt("worse", top_k=-8))
    assert not batch.run()
    assert batch.llm.asked == ["mended"]
    assert sorted(row["custom_id"] for row in batch.rows()) == ["bad", "good", "worse"]
    assert [row["error"]["message"][-2:] for row in batch.rows() if row["error"]] == ["-8"]
    assert batch.target.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_rows_of_requests_that_the_file_does_not_have_stay_as_they_are(tmp_path: Path):
    batch = Batch(tmp_path, prompt("bad", top_k=-7), prompt("good"))
    assert not batch.run()
    before = batch.rows()
    batch.ask(prompt("other"))
    assert batch.run()
    assert batch.rows()[:2] == before


@pytest.mark.parametrize("keep", [1, 5, 18, 60, -2])
def test_a_last_line_that_was_cut_off_is_done_again(keep: int, tmp_path: Path):
    batch = Batch(tmp_path, prompt("x"), prompt("y"))
    assert batch.run()
    first, last = batch.target.read_bytes().splitlines(keepends=True)
    batch.target.write_bytes(first + last[:keep])
    assert batch.run()
    assert len(batch.llm.asked) == 1
    assert batch.texts() == {"x": "A B", "y": "A B"} and len(batch.rows()) == 2


@pytest.mark.parametrize("custom_id", ["x", "of another file"])
def test_a_last_line_that_lacks_only_its_end_gets_that_and_is_not_done_again(custom_id: str, tmp_path: Path):
    batch = Batch(tmp_path, prompt(custom_id))
    assert batch.run()
    line = batch.target.read_text()
    batch.target.write_text(line.rstrip("\n"))
    batch.ask(prompt("x"))
    assert batch.run()
    assert batch.target.read_text().startswith(line)
    assert batch.texts() == dict.fromkeys((custom_id, "x"), "A B")
    assert batch.llm.asked == ["a b"] * (custom_id != "x")


def test_what_is_interrupted_in_mending_leaves_the_file_as_it_was_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    batch = Batch(tmp_path, prompt("bad", top_k=-7))
    assert not batch.run()
    before = batch.target.read_text()

    def interrupt(*_: Any) -> None:
        raise SystemExit(130)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", interrupt)
        with pytest.raises(SystemExit):
            batch.run()
    assert batch.target.read_text() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_a_link_to_the_results_stays_one(tmp_path: Path):
    batch = Batch(tmp_path, prompt("bad", top_k=-7))
    real = tmp_path / "elsewhere.jsonl"
    batch.target.symlink_to(real)
    assert not batch.run()
    assert not batch.run()
    assert batch.target.is_symlink() and len(real.read_text().splitlines()) == 1


# Files that will not do


RESULT = '"error": null, "response": {"status_code": 200}}\n'


@pytest.mark.parametrize(
    "text",
    [
        *("notes\n", '{"id": 5}\n', "no newline", '{"custom_id": "x"', "[]\n", "\n", "[" * 100_000 + "\n"),
        *('{"custom_id": [], ' + RESULT, '{"custom_id": 5, ' + RESULT, '{"custom_id": {}, ' + RESULT),
    ],
)
def test_a_file_that_holds_something_else_is_left_alone(text: str, tmp_path: Path):
    batch = Batch(tmp_path, prompt("x"))
    batch.target.write_text(text)
    with pytest.raises(ValueError, match=r"line 1 of \S*out.jsonl is not a result: name a new file"):
        batch.run()
    assert batch.target.read_text() == text


def test_the_requests_may_not_be_overwritten_by_their_results(tmp_path: Path):
    batch = Batch(tmp_path, prompt("x"))
    batch.target.hardlink_to(batch.source)
    before = batch.source.read_text()
    with pytest.raises(ValueError, match="is the file of requests itself"):
        batch.run()
    assert batch.source.read_text() == before


def test_a_file_that_another_process_writes_is_refused(tmp_path: Path):
    batch = Batch(tmp_path, prompt("x"))
    with open(batch.target, "ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another process is writing"):
            batch.run()
    assert batch.run()


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("none.jsonl", "out.jsonl", r"cannot read \S*none.jsonl: No such file"),
        (".", "out.jsonl", r"is not a file that can be read twice"),
        ("pipe", "out.jsonl", r"pipe is not a file that can be read twice"),
        ("in.jsonl", "none/out.jsonl", r"cannot write \S*none/out.jsonl: No such file or directory"),
        ("in.jsonl", ".", r"cannot write \S*: Is a directory"),
    ],
)
def test_paths_that_will_not_do_are_named(source: str, target: str, message: str, tmp_path: Path):
    batch = Batch(tmp_path, prompt("x"))
    os.mkfifo(tmp_path / "pipe")
    batch.source, batch.target = tmp_path / source, tmp_path / target
    with pytest.raises(ValueError, match=message):
        batch.run()


def test_a_reader_of_a_pipe_that_goes_away_ends_the_run(tmp_path: Path):
    batch = Batch(tmp_path, *(prompt(str(number), "word " * 100) for number in range(500)))  # more than a pipe holds
    os.mkfifo(batch.target)
    seen: list[bytes] = []

    def read_one() -> None:
        with open(batch.target, "rb") as pipe:
            seen.append(pipe.readline())

    reader = threading.Thread(target=read_one)
    reader.start()
    with pytest.raises(BrokenPipeError, match="cannot write to it"):
        batch.run()
    reader.join()
    assert json.loads(seen[0])["error"] is None


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path):
    batch = Batch(tmp_path, prompt("x"))
    batch.target = Path("/dev/full")
    with pytest.raises(OSError, match="cannot write to it: No space left on device: '/dev/full'"):
        batch.run()


# A long file


def test_a_row_is_read_when_there_is_room_for_it_and_written_when_it_ends():
    events: list[str] = []

    def lines() -> Iterator[tuple[str, bytes]]:
        for number in range(6):
            events.append(f"read {number}")
            yield str(number), json.dumps(prompt(str(number))).encode()

    def write(row: dict[str, Any]) -> None:
        events.append(f"write {row['custom_id']}")

    llm, steps = FakeLLM(), []
    assert answer_rows(llm, lines(), SamplingParams(), write, lambda *_: None, lambda: steps.append(1)) == 0  # type: ignore[arg-type]
    assert llm.at_once == 2
    assert events == [
        *("read 0", "read 1", "write 1", "read 2", "write 2", "read 3", "write 3"),
        *("read 4", "write 4", "read 5", "write 5", "write 0"),
    ]
    assert len(steps) == 12, "progress is shown after every step, not only where something ends"


def test_a_failure_of_the_engine_keeps_what_is_finished(tmp_path: Path):
    batch = Batch(tmp_path, prompt("x", "a"), prompt("w", "b"), prompt("y", "fail"), prompt("z", "c"))
    batch.llm = FakeLLM("failing")
    with pytest.raises(ValueError, match="the engine says no"):
        batch.run()
    assert batch.texts() == {"w": "B"}
    batch.llm = FakeLLM()
    assert batch.run()
    assert batch.llm.asked == ["a", "fail", "c"]


# As a process


def minisgl(*arguments: str | Path, mode: str = "text", stdout: Any = subprocess.PIPE) -> "subprocess.Popen[str]":
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MINISGL_")} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "tests/host/fake_llm.py"), mode, "run", *map(str, arguments)]
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE, text=True
    )


def ids(lines: Iterable[str]) -> list[str]:
    return [json.loads(line)["custom_id"] for line in lines]


def test_without_an_output_the_results_go_to_stdout_and_nothing_else_does(tmp_path: Path):
    batch = Batch(tmp_path, prompt("x"), "oops", prompt("y"))
    with minisgl("--input", batch.source) as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert ids(out.splitlines()) == ["y", "x"]
    assert "line 2 is not JSON" in err and "2 answered" in err


def test_ctrl_c_keeps_what_is_finished_and_the_same_command_does_the_rest(tmp_path: Path):
    batch = Batch(tmp_path, *(prompt(str(number)) for number in range(8)))
    arguments = ("--input", batch.source, "--output", batch.target)
    with minisgl(*arguments, mode="slow") as process:
        while not (batch.target.exists() and batch.target.read_text().count("\n") >= 2):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert "has what is finished, and the same command does the rest" in err and "Traceback" not in err
    finished = batch.target.read_text()
    assert 2 <= finished.count("\n") < 8
    with minisgl(*arguments) as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 0 and "were there already" in err
    assert batch.target.read_text().startswith(finished)
    assert sorted(ids(batch.target.read_text().splitlines())) == [str(number) for number in range(8)]


def test_a_full_disk_ends_with_1_and_one_line(tmp_path: Path):
    batch = Batch(tmp_path, prompt("x"))
    with minisgl("--input", batch.source, "--output", "/dev/full") as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.splitlines()[-1] == "Error: [Errno 28] cannot write to it: No space left on device: '/dev/full'"
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["hi", "--input", "x"], "input takes the place of prompts"),
        (["hi", "--output", "x"], "output is for the results of --input"),
        (["--input", "x", "--raw"], "raw is for prompts"),
        (["--input", "x", "--system", "s"], "system is for prompts"),
        (["--input", "x", "--lines"], "lines is for prompts"),
        (["--input", "x", "--json"], "json is for prompts"),
        (["--input", ""], "input must be a file's path"),
    ],
)
def test_options_that_contradict_each_other_are_wrong_usage(arguments: list[str], part: str):
    with minisgl(*arguments) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "")
    assert part in err.replace("│\n│ ", "") and "Traceback" not in err
